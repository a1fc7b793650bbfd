"""`kvsketch ask --server`: a stand-in for vLLM's interface, which `tests/engine` has in truth."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvsketch.cli.app import app
from kvsketch.evaluation.runner.loading import load_tokenizer
from tiny_model import save_tiny_model

TEXT = "line one: the code is 51\nline two: the code is 17\n" * 4


class _Server(http.server.ThreadingHTTPServer):
    """Answers with the last tokens of a prompt, and remembers what it was asked."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Interface)
        self.tokenizer, self.asked = tokenizer, []  # type: ignore[var-annotated]
        self.keys: set[str | None] = set()
        self.special: list[bool] = []


class _Interface(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._say({"data": [{"id": "served"}]} if self.path == "/v1/models" else {}, 200)

    def do_POST(self) -> None:
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.add(self.headers["Authorization"])
        if said["model"] != "served":
            self._say({"error": "no such model"}, 404)
        elif self.path == "/tokenize":
            self.server.special.append(said["add_special_tokens"])
            found = self.server.tokenizer(
                said["prompt"], add_special_tokens=said["add_special_tokens"]
            )
            self._say({"tokens": found["input_ids"]}, 200)
        elif said["max_tokens"] > 99:
            self._say({"error": "max_tokens is too large"}, 400)
        else:
            self.server.asked.append(said)
            text = self.server.tokenizer.decode(said["prompt"][-3:])
            self._say({"choices": [{"text": text}]}, 200)

    def _say(self, answer: Any, code: int) -> None:
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a text and its compressed document."""
    found: Path = save_tiny_model(tmp_path_factory.mktemp("model"))
    (found / "text.txt").write_text(TEXT)
    kvsketch("compress", found / "text.txt", "-o", found / "doc.kvs", "--model", found,
             "--budget", "0.5", "--recent", "8")  # fmt: skip
    return found


@pytest.fixture
def server(folder: Path) -> Iterator[_Server]:
    found = _Server(load_tokenizer(str(folder)))
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def kvsketch(*words: Any, code: int = 0) -> Any:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done


def ask(folder: Path, server: _Server, *words: Any, code: int = 0) -> Any:
    address = f"http://127.0.0.1:{server.server_port}/"
    given = ("--server", address, "--text", folder / "text.txt", *words)
    return kvsketch("ask", folder / "doc.kvs", "What is one?", "And two?", *given, code=code)


def test_questions_are_sent_as_the_tokens_of_the_file_and_their_own(
    folder: Path, server: _Server
) -> None:
    done = ask(folder, server, "--json", "--max-new-tokens", 5, "--seed", 3, "--batch", 1)
    said = json.loads(done.stdout.splitlines()[-1])
    begins = server.tokenizer(TEXT)["input_ids"]
    rests = [server.tokenizer(f"\n{q}", add_special_tokens=False)["input_ids"]
             for q in ("What is one?", "And two?")]  # fmt: skip
    assert [one["prompt"] for one in server.asked] == [begins + rest for rest in rests]
    assert {one["max_tokens"] for one in server.asked} == {5}
    assert {one["seed"] for one in server.asked} == {3}
    expected = [server.tokenizer.decode(rest[-3:]).strip() for rest in rests]
    assert [row["answer"] for row in said["answers"]] == expected
    assert server.keys == {None}
    assert server.special == [True, False, False]  # only the document begins a sequence


def test_a_key_is_sent(folder: Path, server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    ask(folder, server)
    assert server.keys == {"Bearer secret"}


def test_what_a_server_says_is_shown(folder: Path, server: _Server) -> None:
    said = ask(folder, server, "--max-new-tokens", 100, code=2).stderr
    assert "/v1/completions answers 400" in said
    assert "max_tokens is too large" in said


def test_another_text_is_refused(folder: Path, server: _Server, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    for text in (TEXT.replace("17", "18"), TEXT[:30]):
        other.write_text(text)
        said = ask(folder, server, "--text", other, code=2).stderr
        assert "has not the" in said
        assert "give the text that was compressed" in said
    assert not server.asked


def test_a_longer_text_is_cut_where_the_file_ends(
    folder: Path, server: _Server, tmp_path: Path
) -> None:
    """As with `compress --max-tokens`."""
    longer = tmp_path / "longer.txt"
    longer.write_text(TEXT + "line three: more")
    ask(folder, server, "--text", longer)
    begins = server.tokenizer(TEXT)["input_ids"]
    rest = server.tokenizer("\nAnd two?", add_special_tokens=False)["input_ids"]
    assert begins + rest in [one["prompt"] for one in server.asked]


def test_another_kind_of_server_is_named(
    folder: Path, server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for answer in ({"object": "list"}, [], None):
        monkeypatch.setattr(_Interface, "do_GET", lambda self, a=answer: self._say(a, 200))
        said = ask(folder, server, code=2).stderr
        assert "/v1/models answers no data; is it a vLLM server?" in said


def test_a_server_that_is_not_there_is_named(folder: Path) -> None:
    given = ("--server", "http://127.0.0.1:9", "--text", folder / "text.txt")
    said = kvsketch("ask", folder / "doc.kvs", "What?", *given, code=2).stderr
    assert "--server http://127.0.0.1:9: /v1/models gives no answer" in said
