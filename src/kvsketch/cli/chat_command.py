"""`kvsketch chat`: a conversation in one cache, which stays within its budget."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvsketch.arguments import check_arguments
from kvsketch.cli.document_options import (
    DeviceOption,
    check_out,
    check_temperature,
    mb,
    open_document,
    percent,
)
from kvsketch.cli.document_options import save as save_document
from kvsketch.errors import InputError, KVSketchError, at_least
from kvsketch.models import PACKAGED_MODELS

if TYPE_CHECKING:
    from kvsketch.documents.conversation import Conversation, Status
    from kvsketch.documents.document import Document

EPILOG = (
    "Example: kvsketch chat --context report.kvs --save talk.kvs\n\n"
    "Ctrl-C stops an answer but not the session; Ctrl-D or /exit ends the session."
)
# First tokens that are kept in any case, and slots that a budget must leave beside them.
_SINK, _ROOM = 4, 64
_LEAVE = ("/exit", "/quit")
_COMMANDS = (*_LEAVE, "/help")
_HELP = "/exit, /quit or Ctrl-D ends the session, Ctrl-C stops an answer, /help shows this."


def chat_command(
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or Hugging Face id. [default: that of --context]"),
    ] = None,
    context: Annotated[
        Path | None,
        typer.Option(metavar="DOC.kvs", help="A compressed document or a saved chat."),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(help="What the model is told first. It is never compressed."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="TALK.kvs", help="Save the cache here after every answer."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="As for `kvsketch compress`. [default: 1024 tokens, or the context's own]"
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="As for `kvsketch compress`. [default: heavy_merge]")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Largest number of tokens of an answer.")
    ] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Seed of random methods and of sampling at temperatures above 0.")
    ] = 0,
    device: DeviceOption = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. [default: float32]")
    ] = None,
) -> None:
    """Talk to a model with one cache for the whole conversation, and see its size."""
    at_least("--max-new-tokens", max_new_tokens, 1)
    if save is not None:
        check_out(save, "--save")
    check_temperature(temperature)
    if context is None:
        named = model or "packaged"
        document = _fresh(named, budget, method, seed, device, dtype or "float32", system)
    else:
        told = ("budget", budget), ("method", method), ("dtype", dtype), ("system", system)
        for name, given in told:
            if given is not None:
                raise InputError(f"--{name} {given} and --context {context} exclude each other: "
                                 "the file determines it")  # fmt: skip
        document = open_document(context, model, device)
    from kvsketch.documents.answering import Sampling
    from kvsketch.documents.conversation import Conversation

    conversation = Conversation(document, max_new_tokens, Sampling(temperature, seed))
    model = str(document.about.get("model", "the model"))
    named = Path(PACKAGED_MODELS.get(model, model)).name
    about = "" if context is None else f" about {context}"
    with _handled(_ENDS, _hang_up):
        print(f"chat with {named}{about}; {_HELP}", file=sys.stderr)
        try:
            _talk(conversation, Console(), save)
        except _HangUp:
            pass
        finally:  # keep the conversation in any case
            if save is not None and conversation.document.cache.get_seq_length():
                with _stopping(conversation):  # a second Ctrl-C would lose it
                    _save(conversation.settle(), save)


class _HangUp(Exception):
    """The terminal was closed, or the process asked to end."""


#: signals that end a session, which is saved then
_ENDS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def _hang_up(*_: object) -> None:
    raise _HangUp


def _save(document: Document, path: Path) -> None:
    """Save a conversation; where that fails, somebody at a terminal may name another file."""
    while True:
        try:
            check_out(path, "--save")
            save_document(document, path, "--save")
        except KVSketchError as error:
            if not sys.stdin.isatty():
                raise
            print("error:", error, file=sys.stderr)
            again = input("another file to save it to (nothing: it is lost)> ").strip()
            if not again:
                raise
            path = Path(again)
        else:
            print(f"saved to {path}: {mb(path.stat().st_size)}", file=sys.stderr)
            return


def _fresh(
    model: str,
    budget: str | None,
    method: str | None,
    seed: int,
    device: str,
    dtype: str,
    system: str | None,
) -> Document:
    """An empty document. What stands in front of the first thing said, the system message of a chat
    template, is kept unchanged within a budget of tokens."""
    from kvsketch.evaluation.runner import loading
    from kvsketch.evaluation.runner.settings import Settings
    from kvsketch.evaluation.runner.setups import parse_budget

    amount, method = 1024 if budget is None else parse_budget(budget), method or "heavy_merge"
    check_arguments(method, budget=amount)
    Settings(device=device, dtype=dtype)  # raises
    folder = loading.resolve_model(model)
    from kvsketch.documents.document import Document
    from kvsketch.documents.wording import Wording
    from kvsketch.hf import SketchCache

    loading.check_device(device)
    tokenizer = loading.load_tokenizer(folder)
    wording = Wording.of(tokenizer, system=system)
    first = len(tokenizer(wording.before, add_special_tokens=not wording.chat)["input_ids"])
    fits = isinstance(amount, int) and first + _ROOM <= amount
    if system is not None and not fits:
        raise InputError(
            f"--system has {first} tokens, which are never compressed: --budget "
            f"{budget or amount} must be a number of at least {first + _ROOM} tokens"
        )
    sink = max(_SINK, first if fits else 0)
    loaded = loading.load_model(folder, device, dtype)
    cache = SketchCache(loaded.config, method, budget=amount, sink=sink, seed=seed, keep=["errors"])
    named = model if model in PACKAGED_MODELS else folder
    named = str(Path(named).resolve()) if Path(named).is_dir() else named
    return Document(loaded, tokenizer, cache, wording, {"model": named})


def _keep(conversation: Conversation, path: Path) -> None:
    """Save a conversation that goes on. Where that fails, the file of the turn before stays whole,
    and the next turn tries again."""
    with _stopping(conversation) as stopping:
        try:
            check_out(path, "--save")
            save_document(conversation.settle(), path, "--save")
        except KVSketchError as error:
            print(f"error: this turn is not saved, the chat goes on: {error}", file=sys.stderr)
    if stopping.ends:
        raise _HangUp


def _talk(conversation: Conversation, console: Console, save: Path | None) -> None:
    """Turn after turn, until the end of the input; each is saved."""
    while True:
        try:
            said = input("you> ")
        except (EOFError, RuntimeError):  # RuntimeError: there is no standard input at all
            print()
            return
        except KeyboardInterrupt:
            print("\nCtrl-D or /exit ends the session", file=sys.stderr)
            continue
        word = said.strip()
        if word in _LEAVE:
            return
        if word == "/help":
            print(_HELP, file=sys.stderr)
            continue
        if not word:
            continue
        if re.fullmatch(r"/[^/\s]*", word.split()[0]):  # but not the path of a file
            known = ", ".join(_COMMANDS)
            print(f"error: {word.split()[0]} is not a command ({known}); nothing was sent to the "
                  "model", file=sys.stderr)  # fmt: skip
            continue
        try:
            _turn(conversation, said, console)
        except KVSketchError as error:
            print("error:", error, file=sys.stderr)
            continue
        if save is not None:
            _keep(conversation, save)


def _turn(conversation: Conversation, said: str, console: Console) -> None:
    with _stopping(conversation) as stopping, _Screen(console) as screen:
        for piece in conversation.say(said):
            screen.add(piece, conversation.status())
        if conversation.stopped:
            screen.add(" [stopped]", conversation.status())
    if stopping.ends:
        raise _HangUp


@contextmanager
def _handled(numbers: Sequence[int], handler: Callable[..., None]) -> Iterator[None]:
    """Signals with a handler, and afterwards with the ones they had."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@dataclass
class _Stopping:
    """Whether a signal has asked for more than the end of an answer."""

    ends: bool = False


@contextmanager
def _stopping(conversation: Conversation) -> Iterator[_Stopping]:
    """Ctrl-C asks the answer to stop, between two tokens: a forward that is torn in the middle
    would cost the session. So do the signals that end it."""
    found = _Stopping()

    def stop(number: int, _: object) -> None:
        conversation.stop = True
        found.ends = found.ends or number in _ENDS

    with _handled((signal.SIGINT, *_ENDS), stop):
        yield found


class _Screen:
    """Prints an answer while it is generated. On a terminal: complete lines, and below them the
    current line and a status line of the cache. Otherwise: the pieces, and the status line at the
    end."""

    def __init__(self, console: Console) -> None:
        self._console, self._line = console, ""
        self._status: Status | None = None
        self._live: Live | None = None

    def __enter__(self) -> _Screen:
        if self._console.is_terminal:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.__enter__()
        return self

    def add(self, piece: str, status: Status) -> None:
        """Show one more piece."""
        self._status = status
        if self._live is None:
            sys.stdout.write(piece)
            sys.stdout.flush()
            return
        *whole, self._line = (self._line + piece).split("\n")
        width = max(20, self._console.width - 1)
        while len(self._line) > width:
            cut = self._line.rfind(" ", 1, width) + 1 or width
            whole.append(self._line[:cut])
            self._line = self._line[cut:]
        for line in whole:
            self._console.print(Text(line), soft_wrap=True)
        said = Text(_said(status), style="dim", no_wrap=True, overflow="ellipsis")
        self._live.update(Group(Text(self._line), said), refresh=True)

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*error)
            self._console.print(Text(self._line), soft_wrap=True)
        elif self._status is not None:
            print()
        if self._status is not None:
            said = Text(_said(self._status), style="dim")
            (self._console if self._live else Console(stderr=True)).print(said, soft_wrap=True)


def _said(status: Status) -> str:
    part = "" if status.now or status.error is None else " of the first part"
    return (
        f"[{status.tokens:,} tokens seen, {status.slots:,.0f} slots, {mb(status.nbytes)}, "
        f"error {percent(status.error)}{part}]"
    )
