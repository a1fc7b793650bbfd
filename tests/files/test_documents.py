"""Documents on the command line: compress, info, ask, append and merge."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mutations import with_header
from typer.testing import CliRunner

from forked import result_of
from kvsketch import SketchCache
from kvsketch.cli.app import app
from kvsketch.documents.wording import Wording
from kvsketch.errors import InputError
from kvsketch.evaluation.runner import loading
from kvsketch.evaluation.runner.longeval_cases import QUESTION, generate_cases
from kvsketch.hf.saving import summary_of
from tiny_model import POSITIONS, save_tiny_model, tiny_case, tiny_tokenizer

REAL = Path(__file__).parents[3] / "shared" / "data" / "longeval" / "400_lines.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "doc.txt"
    path.write_text(tiny_case(30).prompt)
    return path


def kvsketch(*words: Any, code: int = 0, input: Any = None) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words], input=input)
    assert result.exit_code == code, result.output
    return result


def told(*words: Any, **more: Any) -> dict[str, Any]:
    """The JSON object that a command prints."""
    found: dict[str, Any] = json.loads(kvsketch(*words, "--json", **more).stdout.splitlines()[-1])
    return found


def refused(*words: Any, input: Any = None) -> str:
    """The line of the error with which a command is refused."""
    result = kvsketch(*words, code=2, input=input)
    assert result.stdout == ""
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    return str(line)


def test_a_document_is_compressed_shown_asked_and_continued(
    model: str, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "doc.kvs"
    made = told("compress", text, "-o", path, "--model", model, "--budget", "0.5")
    assert made["tokens"] > 300
    assert made["kv_bytes"] < 0.8 * made["exact_kv_bytes"]
    assert 0 < made["error"]["mean"] <= made["error"]["largest"]
    assert made["file_bytes"] == path.stat().st_size
    shown = told("info", path)
    assert shown["summary"]["tokens"] == made["tokens"]
    assert shown["arguments"]["budget"] == 0.5
    assert shown["about"]["source"] == "doc.txt"
    assert "heavy_merge, budget 0.5" in kvsketch("info", path).stdout
    assert "in the worst head " in kvsketch("info", path).stdout
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert "is damaged" in refused("info", path)
    path.write_bytes(before)
    asked = ["Tell me what?", "I need the number", "brave", "calm"]
    many = told("ask", path, *asked, "--max-new-tokens", 6)
    for question, row in zip(asked, many["answers"], strict=True):
        (alone,) = told("ask", path, question, "--max-new-tokens", 6)["answers"]
        assert alone == row
        assert row["question"] == question
        assert row["tokens"] <= 6
    assert max(row["tokens"] for row in many["answers"]) == 6
    listed = tmp_path / "questions.txt"
    listed.write_text("\n".join(asked) + "\n\n")
    again = told("ask", path, "--questions", listed, "--max-new-tokens", 6, "--batch", 1)
    assert again["answers"] == many["answers"]
    assert path.read_bytes() == before
    drawn = [
        told("ask", path, "brave", "--temperature", 2, "--seed", seed)["answers"][0]["answer"]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    more = told("append", path, "-", input="line brave-calm: REGISTER_CONTENT is <7>\n")
    assert more["tokens"] == made["tokens"] + more["appended"]
    assert told("info", path)["summary"]["tokens"] == more["tokens"]
    words = " ".join(kvsketch("info", path).stdout.replace("│", " ").split())
    first = f"of the first {made['tokens']:,} of {more['tokens']:,} tokens"
    assert f"in the worst head, {first}" in words


def test_standard_input_and_reread(model: str, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "doc.kvs"
    words = ["-o", path, "--model", model, "--max-tokens", 200]
    made = told("compress", "-", *words, "--queries", "reread", input=text.read_text())
    assert made["tokens"] == 200
    kvzip = ["--method", "kvzip", "--queries", "local", "--budget", "64"]
    assert told("compress", text, *words, *kvzip)["slots"] <= 70
    streamed = told(
        "compress", text, *words, "--prefill", "streaming", "--budget", "100", "--bits", 16
    )
    assert streamed["slots"] <= 110
    tolerant = told("compress", text, *words, "--tolerance", "0.2", "--bits", "16")
    assert tolerant["tolerance"] == 0.2


def test_bad_input_is_refused_in_one_line(model: str, text: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "doc.kvs", tmp_path / "out.kvs"
    compress = ["--model", model, "-o", out]
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\x00\x01\xff\xfe" * 10)
    assert "is empty" in refused("compress", empty, *compress)
    assert "is not UTF-8 text" in refused("compress", binary, *compress)
    binary.write_bytes(b"text\0with zeros")
    assert "is not text: it contains zero bytes" in refused("compress", binary, *compress)
    assert "FILE - is empty" in refused("compress", "-", *compress, input="")
    assert "is not a file" in refused("compress", tmp_path / "none.txt", *compress)
    assert "exclude each other" in refused(
        "compress", text, *compress, "--budget", "0.5", "--tolerance", "0.1"
    )
    assert "did you mean 'snapkv'" in refused("compress", text, *compress, "--method", "snapvk")
    assert "--queries 'again'" in refused("compress", text, *compress, "--queries", "again")
    assert "--queries reread" in refused("compress", text, *compress, "--method", "kvzip")
    said = refused("compress", text, "--model", model, "-o", "/proc/no/out.kvs")
    assert "--out /proc/no/out.kvs: the folder /proc/no cannot be written" in said
    said = refused("chat", "--model", model, "--save", "/proc/no/out.kvs")
    assert "--save /proc/no/out.kvs: the folder" in said
    assert "is a folder" in refused("compress", text, "--model", model, "-o", tmp_path)
    long = tmp_path / "long.txt"
    long.write_text("brave calm dark " * 400)
    said = refused("compress", long, *compress)
    assert f"the model {POSITIONS} positions; --max-tokens {POSITIONS - 256}" in said
    assert not out.exists()
    said = refused("compress", long, *compress, "--max-tokens", POSITIONS)
    assert f"the model {POSITIONS} positions, which leaves 0 for questions; --max-tokens" in said
    assert not out.exists()
    told("compress", long, "-o", path, "--model", model, "--max-tokens", POSITIONS - 8)
    again = ("compress", long, "-o", path, "--model", model, "--max-tokens", POSITIONS - 8)
    assert "note: only 8 of the model's 1,024 positions are left" in kvsketch(*again).stderr
    assert "8 of the model's 1024 positions are left" in refused("ask", path, "brave " * 30)
    (answer,) = told("ask", path, "brave", "--max-new-tokens", 64)["answers"]
    assert answer["tokens"] == 8 - len(tiny_tokenizer()("\nbrave")["input_ids"])
    assert "positions are left; append less of it" in refused("append", path, text)
    assert "QUESTION ' ' is empty" in refused("ask", path, "brave", " ")
    assert "QUESTION... is missing" in refused("ask", path)
    assert "--temperature -1.0 must be a number" in refused("ask", path, "x", "--temperature", -1)
    said = refused("ask", path, "x", "--seed", "1.5")
    assert "'--seed'" in said
    assert "'1.5'" in said
    assert "there must be" not in refused("ask", path, "x", "--max-new-tokens", "0")
    assert "is not a kvsketch file" in refused("info", text)
    none = tmp_path / "none.kvs"
    for words in (("ask", none, "x"), ("info", none), ("merge", path, none, "-o", out)):
        assert f"DOC.kvs {none} is not a file" in refused(*words)
    said = refused("ask", path, "x", "--model", "longeval-one-head")
    assert "of another model" in said
    assert f"it was made with {model}" in said
    assert "exclude each other" in refused("chat", "--context", path, "--budget", "9")


def test_a_document_is_one_row_and_keeps_its_wording(tmp_path: Path) -> None:
    import torch

    from kvsketch import InputError
    from kvsketch.documents.document import Document
    from tiny_model import tiny_model

    tokenizer, path = tiny_tokenizer(), tmp_path / "doc.kvs"
    model = tiny_model(len(tokenizer))
    wording = Wording(asking=" ? ", answering=" ! ")
    for rows in (1, 2):
        cache = SketchCache(model.config, "snapkv", budget=40)
        with torch.no_grad():
            model(torch.full((rows, 90), 7), past_key_values=cache)
        Document(model, tokenizer, cache, wording, {}).save(path)
        if rows == 1:
            assert Document.load(path, model, tokenizer).wording == wording
    with pytest.raises(InputError, match="has 2 rows; a document has one"):
        Document.load(path, model, tokenizer)


def test_a_folder_that_is_missing_is_made_as_by_eval(
    model: str, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "folder" / "doc.kvs"
    refused("compress", text, "-o", path, "--model", model, "--method", "snapvk")
    assert not path.parent.parent.exists()
    told("compress", text, "-o", path, "--model", model)
    again = tmp_path / "other" / "doc.kvs"
    told("append", path, "-", "-o", again, input="line brave-calm\n")
    assert told("info", again)["summary"]["tokens"] > told("info", path)["summary"]["tokens"]


def test_a_document_ends_where_an_answer_begins(model: str, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.kvs"
    told("compress", text, "-o", path, "--model", model)
    words = ("chat", "--context", path, "--save", path, "--max-new-tokens", "3")
    kvsketch(*words, input="brave calm\n")
    before = path.read_bytes()
    assert "append to the document before" in refused("append", path, text)
    assert path.read_bytes() == before


def test_another_tokenizer_is_refused(text: Path, tmp_path: Path) -> None:
    folder, path = save_tiny_model(tmp_path / "model"), tmp_path / "doc.kvs"
    told("compress", text, "-o", path, "--model", folder)
    changed = json.loads((folder / "tokenizer.json").read_text())
    words = changed["model"]["vocab"]
    words["brave"], words["calm"] = words["calm"], words["brave"]
    (folder / "tokenizer.json").write_text(json.dumps(changed))
    assert "by another tokenizer" in refused("ask", path, "brave")


def test_a_file_does_not_choose_just_any_model(model: str, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "doc.kvs"
    told("compress", text, "-o", path, "--model", model)
    raw = path.read_bytes()
    for named in ("../../etc", "/tmp/../etc", "https://x.y/z", 7, None, "a/b/c"):
        path.write_bytes(with_header(raw, lambda h, n=named: h["about"].update(model=n)))
        assert "give it with --model" in refused("ask", path, "x")
    told("ask", path, "brave", "--model", model)  # which the user may give


def test_two_documents_become_one(model: str, tmp_path: Path) -> None:
    halves = [tiny_case(14, seed).prompt for seed in (1, 2)]
    paths = [tmp_path / f"{number}.kvs" for number in range(2)]
    for path, half in zip(paths, halves, strict=True):
        told("compress", "-", "-o", path, "--model", model, "--budget", "0.4", input=half)
    both = tmp_path / "both.kvs"
    made = told("merge", *paths, "-o", both)
    parts = [told("info", path)["summary"] for path in paths]
    summary = told("info", both)["summary"]
    assert made["tokens"] == summary["tokens"] == sum(part["tokens"] for part in parts)
    assert summary["slots"] == pytest.approx(sum(part["slots"] for part in parts), rel=0.03)
    assert summary["error"] is None
    assert kvsketch("info", both).stdout.count("not measured") == 1
    assert told("ask", both, "brave")["answers"]
    third = tmp_path / "third.kvs"
    told("compress", "-", "-o", third, "--model", model, "--budget", "0.3", input=halves[0])
    assert "budget=0.4 and 0.3" in refused("merge", paths[0], third, "-o", both)
    told("compress", "-", "-o", third, "--model", model, "--method", "subgen", input=halves[0])
    assert "cannot be rotated" in refused("merge", third, third, "-o", tmp_path / "x.kvs")


def test_a_chat_template_goes_around_document_and_question() -> None:
    tokenizer = tiny_tokenizer()
    assert Wording.of(tokenizer) == Wording()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    wording = Wording.of(tokenizer)
    assert wording == Wording(
        True, "<|user|>", "\n\n", "<|end|>\n<|assistant|>", "<|end|>\n<|user|>"
    )
    assert Wording.read(wording.values()) == wording
    assert Wording.of(tokenizer, plain=True) == Wording()
    told = Wording.of(tokenizer, system="Be brief.")
    assert told == replace(wording, before="<|system|>Be brief.<|end|>\n<|user|>")
    assert Wording.of(tokenizer, plain=True, system="Be brief.").before == "Be brief.\n"
    tokenizer.chat_template = tokenizer.chat_template.replace("messages %}", "messages[-3:] %}")
    with pytest.raises(InputError, match=r"'Be brief\.': the model's chat template has no place"):
        Wording.of(tokenizer, system="Be brief.")
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert Wording.of(tokenizer) == Wording()
    with pytest.raises(InputError, match="has no place for it"):
        Wording.of(tokenizer, system="Be brief.")


def _asked(path: Path, questions: list[str]) -> list[list[int]]:
    from kvsketch.cli.document_options import open_document
    from kvsketch.documents.answering import answers

    return answers(open_document(path, None, "cpu"), questions)


def _record(lines: int) -> tuple[str, list[str], list[str]]:
    """A record, 20 questions about it, and their answers."""
    if lines == 400 and REAL.is_file():
        prompt = json.loads(REAL.read_text().splitlines()[0])["prompt"]
    else:
        prompt = generate_cases(lines, 1, 0)[0]["prompt"]
    record = prompt[: prompt.index("\nNow the record is over")]
    found = re.findall(r"line (\S+): REGISTER_CONTENT is <(\d+)>", record)[:: max(1, lines // 20)]
    asked = [QUESTION.format(key=key)[1:] for key, _ in found][:20]
    return record, asked, [number for _, number in found][:20]


@pytest.mark.parametrize(
    ("lines", "least"), [(100, 19), pytest.param(400, 18, marks=pytest.mark.slow)]
)
def test_a_new_process_answers_as_the_first(lines: int, least: int, tmp_path: Path) -> None:
    """A new process gives the same answers to 20 questions about a LongEval record with a quarter
    of its slots, each from the saved state."""
    from kvsketch.documents.answering import answers
    from kvsketch.documents.document import Document, encoded, read
    from kvsketch.hf.size import predicted_size

    folder = loading.resolve_model("longeval-one-head")
    model, tokenizer = loading.load_model(folder, "cpu", "float32"), loading.load_tokenizer(folder)
    record, asked, right = _record(lines)
    cache = SketchCache(model.config, budget=0.25)
    document = Document(model, tokenizer, cache, Wording(), {"model": "longeval-one-head"})
    read(model, tokenizer, encoded(model, tokenizer, record, special=True), cache)
    path = tmp_path / "record.kvs"
    document.save(path)
    first = answers(document, asked)
    assert result_of(_asked, path, asked) == first
    texts = tokenizer.batch_decode(first, skip_special_tokens=True)
    assert sum(f"<{n}>" in text for n, text in zip(right, texts, strict=True)) >= least
    size = path.stat().st_size
    assert abs(predicted_size(cache) - size) < 0.03 * size
    assert told("info", path)["predicted_file_bytes"] == predicted_size(cache)


def test_what_is_appended_is_compressed_at_once(tmp_path: Path) -> None:
    """It is no question, whose tokens would wait in full precision for the next forward."""
    from kvsketch.documents.document import Document, encoded, read

    folder = loading.resolve_model("longeval-one-head")
    model, tokenizer = loading.load_model(folder, "cpu", "float32"), loading.load_tokenizer(folder)
    record, _, _ = _record(100)
    lines = record.splitlines(keepends=True)
    cache = SketchCache(model.config, budget=0.25)
    read(model, tokenizer, encoded(model, tokenizer, "".join(lines[:70]), special=True), cache)
    document = Document(model, tokenizer, cache, Wording(), {})
    document.append("".join(lines[70:]))
    held = cache.nbytes()
    assert held < 0.3 * cache.exact_nbytes()
    document.save(tmp_path / "record.kvs")
    assert cache.nbytes() == held


@pytest.mark.parametrize("settings", [
    {"budget": 0.25}, {"budget": 0.25, "bits": 16}, {"method": "snapkv", "bits": 8, "budget": 0.5},
    {"method": "subgen", "budget": 0.25}, {"budget": 1.0, "bits": 16}, {"method": "kcenter"},
    {"budget": 0.3, "bits": 4, "allocation": "even"},
])  # fmt: skip
def test_the_size_of_a_file_is_predicted(settings: dict[str, Any], tmp_path: Path) -> None:
    import torch

    from kvsketch.hf.size import predicted_size

    model = loading.load_model(loading.resolve_model("longeval-one-head"), "cpu", "float32")
    cache = SketchCache(model.config, **settings)
    ids = torch.randint(5, 7000, (1, 1500), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    cache.save(tmp_path / "cache.kvs")
    size = (tmp_path / "cache.kvs").stat().st_size
    assert abs(predicted_size(cache) - size) < 0.03 * size


def test_the_model_of_a_file_that_is_missing_is_the_files(text: Path, tmp_path: Path) -> None:
    """No --model was given, so the message does not speak as if one were wrong."""
    folder, path = save_tiny_model(tmp_path / "model"), tmp_path / "doc.kvs"
    told("compress", text, "-o", path, "--model", folder)
    folder.rename(tmp_path / "moved")
    for words in (("ask", path, "x"), ("chat", "--context", path), ("append", path, text)):
        assert refused(*words) == (
            f"error: {path} was made with the model {folder}, which is not there; give its folder "
            "or Hugging Face id with --model"
        )
    assert f"--model '{folder}' is not a folder" in refused("ask", path, "x", "--model", folder)
    assert told("ask", path, "x", "--model", tmp_path / "moved")["answers"]


def test_the_error_of_a_saved_chat_is_the_present_one(model: str, text: Path) -> None:
    """It is tracked there; of a document that was appended to, it is that of the first part."""
    from kvsketch.cli.document_options import error_of

    error = {"mean": 0.034, "largest": 0.05, "now": False}
    assert error_of(None, None, 9) == "not measured"
    assert error_of(error, 9, 9) == "3.4% on average, 5.0% in the worst head"
    assert error_of(error, 5, 9).endswith("in the worst head, of the first 5 of 9 tokens")
    assert error_of(error, None, 9).endswith("in the worst head, of the first part")
    assert error_of({**error, "now": True}, None, 9).endswith("in the worst head")
    for tracked in (False, True):
        loaded, tokenizer = loading.load_model(model, "cpu", "float32"), tiny_tokenizer()
        cache = SketchCache(loaded.config, budget=64, keep=["errors"] if tracked else [])
        ids = tokenizer(text.read_text(), return_tensors="pt").input_ids
        for part in (ids[:, :200], ids[:, 200:300]):
            loaded(part, past_key_values=cache)
        found = summary_of(cache)["error"]
        name = "now" if tracked else "prompt"
        flat = [error for row in cache.error() for error in row[name]]
        assert found["now"] is tracked
        assert found["mean"] == pytest.approx(sum(flat) / len(flat))
