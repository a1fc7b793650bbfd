"""No command overwrites a file of another kind than it writes, such as its own input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import zeros
from typer.testing import CliRunner

from kvsketch.cli.app import app
from tiny_model import save_tiny_model, tiny_case


def kvsketch(*words: Any, code: int = 0, input: str | None = None) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words], input=input)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "x.txt"
    path.write_text(tiny_case(30).prompt)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A results store with one answer."""
    path = tmp_path / "run.jsonl"
    identity = {"task": "longeval", "method": "exact"}
    line = {"format": 1, "identity": identity, "result": {"score": 1.0}}
    path.write_text(json.dumps(line) + "\n")
    return path


def test_the_text_that_a_command_reads_is_never_replaced(
    model: str, text: Path, tmp_path: Path
) -> None:
    """By its own name, a hard link, a symbolic link, whatever the ending of the name."""
    hard, soft, doc = tmp_path / "hard.kvs", tmp_path / "soft.kvs", tmp_path / "doc.kvs"
    hard.hardlink_to(text)
    soft.symlink_to(text)
    before = text.read_bytes()
    kvsketch("compress", text, "-o", doc, "--model", model)
    for out in (text, hard, soft):
        for words in (
            ("compress", text, "-o", out, "--model", model),
            ("compress", "-", "-o", out, "--model", model),
            ("append", doc, text, "-o", out),
            ("merge", doc, doc, "-o", out),
            ("chat", "--model", model, "--save", out),
            ("calibrate", text, "--out", out, "--model", model),
            ("eval", "longeval", "--out", out, "--model", model),
            ("report", text, "--out", out),
        ):
            said = kvsketch(*words, code=2).stderr.splitlines()[0]
            assert str(out) in said
            assert "name another file" in said or "give another file" in said
            assert text.read_bytes() == before
    assert kvsketch("append", text, text, code=2).stderr.count("is not a kvsketch file") == 1
    assert text.read_bytes() == before


def test_other_files_are_refused_and_documents_replaced(
    model: str, text: Path, tmp_path: Path
) -> None:
    """Also a safetensors file of a model; a document, an empty file and a device are written to."""
    weights, doc, empty = tmp_path / "model.kvs", tmp_path / "doc.kvs", tmp_path / "empty.kvs"
    save_file({"a": zeros(2)}, weights, metadata={"format": "pt"})
    empty.touch()
    before = weights.read_bytes()
    compress = ("compress", text, "--model", model, "-o")
    assert "is not a compressed document" in kvsketch(*compress, weights, code=2).stderr
    assert weights.read_bytes() == before
    for out in (doc, empty, doc, Path("/dev/null")):
        kvsketch(*compress, out)
    kvsketch("info", doc)
    kvsketch("info", empty)


def test_a_saved_chat_replaces_no_text_at_the_end(model: str, text: Path, tmp_path: Path) -> None:
    """A file that appears at the path while the chat goes on is not lost either."""
    from kvsketch.cli.chat_command import _save
    from kvsketch.documents.document import Document
    from kvsketch.errors import InputError
    from kvsketch.evaluation.runner.loading import load_model, load_tokenizer

    doc = tmp_path / "doc.kvs"
    kvsketch("compress", text, "-o", doc, "--model", model)
    before = text.read_bytes()
    loaded = load_model(model, "cpu", "float32"), load_tokenizer(model)
    with pytest.raises(InputError, match="would be lost"):
        _save(Document.load(doc, *loaded), text)
    assert text.read_bytes() == before


def test_a_report_replaces_reports_only(store: Path, tmp_path: Path) -> None:
    from kvsketch.errors import InputError
    from kvsketch.evaluation.report.html import check_outputs

    before, page = store.read_bytes(), tmp_path / "page.html"
    said = kvsketch("report", store, "-o", store, code=2).stderr
    assert "is not a page of `kvsketch report`: it would be lost" in said
    assert store.read_bytes() == before
    page.write_text("<!DOCTYPE html>\n<title>mine</title>\n")
    with pytest.raises(InputError, match="would be lost"):
        check_outputs(page, None)


def test_curves_and_inspections_replace_their_own_kind(
    model: str, text: Path, tmp_path: Path
) -> None:
    curves = tmp_path / "curves.json"
    for _ in range(2):
        kvsketch("calibrate", text, "--out", curves, "--model", model, "--follow", 16)
    (tmp_path / "inspect.json").write_text('{"mine": 1}')
    said = kvsketch("inspect", model, "--out", tmp_path, code=2).stderr
    assert "inspect.json exists and is not a result of `kvsketch inspect`" in said
