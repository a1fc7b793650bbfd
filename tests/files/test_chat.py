"""`kvsketch chat` on a pseudo-terminal, with input as a user types it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from forked import FORKED
from kvsketch import InputError
from kvsketch.cli.app import app
from kvsketch.documents.document import encoded
from kvsketch.files import container
from tiny_model import tiny_model, tiny_tokenizer

PROMPT = "you> "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that never ends an answer itself, with positions for long chats."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    made = tiny_model(len(tokenizer))
    made.config.max_position_embeddings = 1 << 15
    with torch.no_grad():
        made.lm_head.weight[:4] = 0
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class Terminal:
    """A command that runs on its own terminal."""

    def __init__(self, *words: str) -> None:
        master, slave = pty.openpty()
        self.process = FORKED.Process(target=_command, args=(os.ttyname(slave), words), daemon=True)
        self.process.start()
        ready, _, _ = select.select([master], [], [], 60)
        assert ready, "the command has written nothing in 60 s"
        os.close(slave)
        self._master, self.seen = master, ""

    def until(self, text: str, seconds: float = 60.0) -> str:
        """The output up to and with a text."""
        start, end = len(self.seen), time.monotonic() + seconds
        while text not in self.seen[start:]:
            ready, _, _ = select.select([self._master], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {text!r} in {seconds} s, but {self.seen[-1000:]!r}"
            try:
                self.seen += os.read(self._master, 1 << 16).decode(errors="replace")
            except OSError:  # the command has closed its end
                assert text in self.seen[start:], self.seen[-2000:]
        return self.seen[start:]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def end(self) -> int:
        self.type("\x04")
        try:
            while os.read(self._master, 1 << 16):
                pass
        except OSError:
            pass
        os.close(self._master)
        return self.wait()

    def wait(self) -> int:
        self.process.join(30)
        code = self.process.exitcode
        assert code is not None, "the command runs on after 30 s"
        return int(code)

    @property
    def rss(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]


def _command(terminal: str, words: tuple[str, ...]) -> None:
    """Run a command on a terminal, in a session of its own."""
    import fcntl
    import termios

    from kvsketch.cli import main

    os.setsid()
    slave = os.open(terminal, os.O_RDWR)
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(slave, number)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1, closefd=False)  # noqa: SIM115
        for number, mode in enumerate("rww")
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore it
    os.environ["TERM"] = "xterm"
    sys.argv = ["kvsketch", *words]
    main()


def chat(said: str, *words: str, code: int = 0) -> Any:
    """A chat without a terminal, in this process."""
    result = CliRunner().invoke(app, ["chat", *words], input=said)
    assert result.exit_code == code, result.output
    return result


def header(path: Path) -> dict[str, Any]:
    with container.opened(path, "cache") as (_, table):
        return table.header


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_fifty_turns_on_a_terminal(model: str, tmp_path: Path) -> None:
    """In fifty turns memory does not grow, Ctrl-C stops an answer but not the session, and the
    saved state can be continued."""
    path = tmp_path / "talk.kvs"
    words = ["chat", "--model", model, "--save", str(path), "--budget", "128"]
    terminal = Terminal(*words, "--max-new-tokens", "400")
    terminal.until(PROMPT)
    terminal.type("brave calm dark\n")
    terminal.until("tokens seen")
    time.sleep(0.3)
    terminal.type("\x03")  # Ctrl-C during the answer
    stopped = terminal.until(PROMPT)
    assert "[stopped]" in stopped
    assert terminal.process.is_alive()
    time.sleep(0.3)  # Python misses a signal between the prompt and its wait for a key
    terminal.type("\x03")  # Ctrl-C at the prompt
    terminal.until("Ctrl-D or /exit ends the session")
    terminal.type("\n")
    terminal.until(PROMPT)
    sizes: list[int] = []
    for turn in range(50):
        terminal.type("early fair glad\n")
        terminal.until("tokens seen")
        time.sleep(0.05)
        terminal.type("\x03")
        shown = terminal.until(PROMPT)
        if turn in (9, 49):
            sizes.append(terminal.rss)
        seen = [int(tokens) for tokens in re.findall(r"(\d+) tokens seen", shown)]
        if seen and seen[-1] > 340:  # how many there are depends on the speed of the machine
            assert re.search(r"(2[89]|3[0-6])[0-9] slots, 0.0[3-6] MB", shown), shown[-500:]
            assert re.search(r"error \d+\.\d%", shown)
    assert sizes[1] < 1.03 * sizes[0]
    assert terminal.end() == 0
    told = header(path)
    assert told["summary"]["tokens"] > 400
    assert told["about"]["answered"] is True
    before = told["summary"]["tokens"]
    again = Terminal("chat", "--context", str(path), "--save", str(path), "--max-new-tokens", "5")
    again.until(PROMPT)
    again.type("huge idle\n")
    again.until("tokens seen")
    again.until(PROMPT)
    again.type("/exit\n")
    assert again.end() == 0
    assert before < header(path)["summary"]["tokens"] < before + 40


def test_a_chat_without_a_terminal(model: str, tmp_path: Path) -> None:
    """Without a terminal answers go to standard output, and the state of the cache to standard
    error."""
    path = tmp_path / "talk.kvs"
    words = [sys.executable, "-m", "kvsketch", "chat", "--model", model, "--save", str(path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [*words, "--max-new-tokens", "12"],
        input="brave calm\n\n   \nglad huge\n/exit\nnot read",
        capture_output=True,
        text=True,
        env=env,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("you> ") == 5
    assert len(run.stdout.split()) > 20
    assert run.stderr.count("tokens seen") == 2
    assert "saved to" in run.stderr
    assert header(path)["summary"]["tokens"] > 24


def test_what_the_model_is_told_first_is_never_compressed(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvsketch import SketchCache

    path, told = tmp_path / "talk.kvs", "brave calm dark early fair glad huge idle " * 5
    words = ["--model", model, "--system", told, "--budget"]
    chat("glad huge\n", *words, "160", "--max-new-tokens", "200", "--save", str(path))
    loaded, tokenizer = (c.from_pretrained(model) for c in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer(told + "\n", return_tensors="pt").input_ids
    cache = SketchCache.load(path, loaded)
    assert cache.arguments["sink"] == ids.shape[1] > 40
    assert cache.get_seq_length() > 200
    with torch.no_grad():
        exact = loaded(ids, use_cache=True).past_key_values
    for ours, theirs in zip(cache.layers, exact.layers, strict=True):
        found = ours.stream.slots.narrow(0, ids.shape[1])
        torch.testing.assert_close(found.keys, theirs.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.values, theirs.values, rtol=1e-4, atol=1e-5)
    run = chat("glad huge\n", *words, "60", code=2)
    said_of = r"--system has \d+ tokens, which are never compressed: --budget 60 must be a number"
    assert re.search(said_of, run.stderr)


def test_a_templates_own_system_message_is_kept_if_the_budget_has_room(
    model: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvsketch.cli.chat_command import _fresh

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "brave calm dark early fair glad {% for m in messages %}{{ m.content }}\n{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path)
    own = len(tokenizer("brave calm dark early fair glad ", add_special_tokens=False).input_ids)
    for budget, sink in ((None, own), (str(own + 64), own), (str(own + 63), 4), ("0.5", 4)):
        document = _fresh(str(tmp_path), budget, None, 0, "cpu", "float32", None)
        assert document.wording.chat
        assert document.cache.arguments["sink"] == sink


def test_a_chat_says_how_to_leave_and_sends_no_commands_to_the_model(
    model: str, tmp_path: Path
) -> None:
    path = tmp_path / "talk.kvs"
    said = "/help\n/save now\n/\n /exit \nnot read"
    run = chat(said, "--model", model, "--save", str(path))
    banner, shown, *refused = run.stderr.splitlines()
    assert banner.startswith(f"chat with {Path(model).name}; /exit, /quit or Ctrl-D ends")
    assert shown == banner.partition("; ")[2]
    known = "is not a command (/exit, /quit, /help); nothing was sent to the model"
    assert refused == [f"error: /save {known}", f"error: / {known}"]
    assert not path.exists()  # nothing was said, so nothing is saved


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals of Unix")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("answering", [True, False])
def test_what_was_said_is_saved_when_the_terminal_is_closed(
    model: str, tmp_path: Path, number: int, answering: bool
) -> None:
    path = tmp_path / "talk.kvs"
    words = ("chat", "--model", model, "--save", str(path), "--max-new-tokens")
    terminal = Terminal(*words, "9000" if answering else "5")
    terminal.until(PROMPT)
    terminal.type("brave calm dark\n")
    terminal.until("tokens seen")
    if not answering:
        terminal.until(PROMPT)
        time.sleep(0.5)  # until the prompt waits for input
    os.kill(terminal.process.pid, number)
    terminal.until("saved to")
    assert terminal.wait() == 0
    assert header(path)["summary"]["tokens"] >= 4


def test_a_chat_that_cannot_be_saved_asks_for_another_file(model: str, tmp_path: Path) -> None:
    path, other = tmp_path / "folder" / "talk.kvs", tmp_path / "other.kvs"
    path.parent.mkdir()
    terminal = Terminal("chat", "--model", model, "--save", str(path), "--max-new-tokens", "5")
    terminal.until(PROMPT)
    path.mkdir()  # a folder takes the file's place
    terminal.type("brave calm dark\n")
    terminal.until(PROMPT)
    terminal.type("/exit\n")
    shown = terminal.until("another file to save it to")
    assert "error:" in shown
    terminal.type(f"{other}\n")
    terminal.until("saved to")
    assert terminal.wait() == 0
    assert header(other)["summary"]["tokens"] >= 4


def test_every_answer_is_saved_and_a_turn_that_cannot_be_leaves_the_file_before(
    model: str, tmp_path: Path
) -> None:
    path = tmp_path / "folder" / "talk.kvs"
    words = ["chat", "--model", model, "--save", str(path), "--max-new-tokens", "5"]
    terminal = Terminal(*words)
    terminal.until(PROMPT)
    sizes = []
    for _ in range(2):
        terminal.type("brave calm dark\n")
        assert "error:" not in terminal.until(PROMPT)
        sizes.append(header(path)["summary"]["tokens"])  # while the chat runs
    assert 4 <= sizes[0] < sizes[1]
    whole, hidden = path.read_bytes(), tmp_path / "hidden"
    path.parent.rename(hidden)
    path.parent.write_text("a file takes the folder's place")
    terminal.type("glad huge\n")
    assert "this turn is not saved, the chat goes on" in terminal.until(PROMPT)
    assert (hidden / "talk.kvs").read_bytes() == whole
    path.parent.unlink()
    hidden.rename(path.parent)
    terminal.type("glad huge\n")
    assert "error:" not in terminal.until(PROMPT)
    assert header(path)["summary"]["tokens"] > sizes[1] + 4
    terminal.process.kill()  # what was said is there, whatever happens then
    terminal.wait()
    assert header(path)["summary"]["tokens"] > sizes[1] + 4


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals of Unix")
def test_a_signal_while_an_answer_is_saved_ends_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvsketch.cli import chat_command

    saved = []

    def save(document: Any, path: Path, option: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        saved.append(path)  # to its end

    monkeypatch.setattr(chat_command, "save_document", save)
    conversation: Any = SimpleNamespace(stop=False, settle=lambda: None)
    with pytest.raises(chat_command._HangUp):
        chat_command._keep(conversation, tmp_path / "talk.kvs")
    assert saved == [tmp_path / "talk.kvs"]


def test_a_character_of_several_tokens_is_shown_once_it_is_whole() -> None:
    from kvsketch.documents.conversation import _Pieces

    class Bytes:
        def decode(self, ids: list[int], **_: Any) -> str:
            return bytes(ids).decode("utf-8", "replace")

    pieces, text = _Pieces(Bytes()), "é, 東京! " * 9
    shown = [pieces.add(byte) for byte in text.encode()]
    assert "".join(shown) + pieces.rest() == text
    assert shown[:2] == ["", "é"]


def test_a_signal_stops_the_answer_between_two_tokens(model: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvsketch import SketchCache
    from kvsketch.cli.chat_command import _stopping
    from kvsketch.documents.answering import Sampling
    from kvsketch.documents.conversation import Conversation
    from kvsketch.documents.document import Document
    from kvsketch.documents.wording import Wording

    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    cache = SketchCache(loaded.config, "snapkv", budget=64)
    document = Document(loaded, tokenizer, cache, Wording(), {})
    conversation = Conversation(document, 500, Sampling())
    pieces = []
    with _stopping(conversation):
        for piece in conversation.say("brave calm dark"):
            pieces.append(piece)
            if len(pieces) == 7:
                os.kill(os.getpid(), signal.SIGINT)
    assert conversation.stopped
    assert len(pieces) <= 10
    seen = cache.get_seq_length()
    assert conversation.settle().cache.get_seq_length() == seen + 1
    list(conversation.say("glad"))
    assert not conversation.stopped
    assert cache.get_seq_length() > seen + 400
    assert json.dumps(conversation.status().__dict__)


@pytest.mark.parametrize("wrong", ["\udcff\udcfe", "\ud800"])
def test_text_that_is_not_utf_8_is_refused(wrong: str) -> None:
    """As Python hands on what was typed in other bytes, and half of a pair."""
    with pytest.raises(InputError, match=re.escape(f"the text is not UTF-8: it has {wrong!a}")):
        encoded(None, None, f"brave {wrong}", False)
