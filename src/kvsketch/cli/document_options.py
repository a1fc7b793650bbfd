"""Shared by the commands for compressed documents: texts, files, models, progress.

torch and transformers are imported inside, after every check that does not need them.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kvsketch.cli.printing import console_for, print_json
from kvsketch.errors import InputError, KVSketchError
from kvsketch.evaluation.runner.files import check_folder, read_text, try_folder
from kvsketch.files import container
from kvsketch.writing import check_replaced

if TYPE_CHECKING:
    from kvsketch.documents.document import Advance, Document

KIND = "cache"  # the same as in ``hf.saving``, which needs torch
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

FileArgument = Annotated[
    Path, typer.Argument(metavar="DOC.kvs", help="File written by `kvsketch compress`.")
]
ModelOfFile = Annotated[
    str | None,
    typer.Option("--model", help="Model folder or Hugging Face id. [default: the file's own]"),
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")]


def text_of(path: Path, what: str) -> str:
    """The text of a file, or of standard input for "-".

    Raises:
        InputError: it cannot be read, is not text, or is empty.
    """
    name = f"{what} {path}"
    if str(path) == "-":
        if sys.stdin is None:
            raise InputError(f"{what} - (standard input) is closed")
        try:
            text = sys.stdin.buffer.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"{what} - (standard input) is not UTF-8 text") from error
    elif path.is_file():
        text = read_text(path, what)
    else:
        raise InputError(f"{name} is not a file")
    if "\0" in text:
        raise InputError(f"{name} is not text: it contains zero bytes")
    if not text.strip():
        raise InputError(f"{name} is empty")
    return text


def check_out(path: Path, option: str = "--out") -> None:
    """Raise InputError, before any work, where a file cannot be written, or would replace one that
    is not a compressed document; nothing is made yet."""
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder; name a file in it")
    check_replaced(path, option, container.BEGINS, "a compressed document")
    try_folder(path.parent, f"{option} {path}: the folder")


def save(document: Document, path: Path, option: str = "--out") -> None:
    """Write a document; a folder that is missing is made, as by `kvsketch eval`."""
    check_folder(path.parent, f"{option} {path}: the folder")
    document.save(path)


def report_saved(
    command: str, cache: Any, out: Path, text: str, more: dict[str, Any], as_json: bool
) -> None:
    """Print the sizes of a document that was just saved, around ``text``; with ``as_json`` one JSON
    object with them and ``more``.

    Args:
        text: with ``{cache}``, the bytes of the cache, and ``{file}``, the file and its size.
    """
    size = out.stat().st_size
    said = text.format(cache=mb(cache.nbytes()), file=f"{out}: {mb(size)}")
    console_for(as_json).print(said, highlight=False, markup=False, soft_wrap=True)
    if as_json:
        print_json(command, out=str(out), **more, kv_bytes=cache.nbytes(), file_bytes=size)


def check_temperature(temperature: float) -> None:
    """Raise InputError, before a model is loaded, for one that ``Sampling`` refuses."""
    if not 0 <= temperature < 100:
        raise InputError(f"--temperature {temperature} must be a number from 0 to 100")


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, container.Table]]:
    """As ``container.opened``; a file that is not there is named as the argument it is."""
    if not path.is_file():
        raise InputError(f"DOC.kvs {path} is not a file")
    with container.opened(path, KIND) as found:
        yield found


def header_of(path: Path) -> dict[str, Any]:
    """The header of a file, without its data.

    Raises:
        InputError: it is not a file of a cache.
    """
    with opened(path) as (_, table):
        return table.header


def model_of(path: Path, header: dict[str, Any], given: str | None) -> str:
    """The model to load: the given one, or the file's own.

    Raises:
        InputError: the file names no model, or the name is neither a folder nor a Hugging Face id.
    """
    from kvsketch.evaluation.runner.loading import resolve_model
    from kvsketch.models import PACKAGED_MODELS

    if given is not None:
        return resolve_model(given)
    named = named_model(header)
    if not isinstance(named, str):
        raise InputError(f"{path} does not name its model; give it with --model")
    known = named in PACKAGED_MODELS or _HUB_ID.fullmatch(named)
    if not known and not (Path(named).is_absolute() and ".." not in Path(named).parts):
        raise InputError(f"{path} names the model {named!r:.60}, which is not a folder or an id; "
                         "give it with --model")  # fmt: skip
    try:
        return resolve_model(named)
    except KVSketchError as error:
        reason = "" if Path(named).is_absolute() else str(error).removeprefix("--model ")
        raise InputError(
            f"{path} was made with the model {named}, which is not there{reason and ': '}{reason}; "
            "give its folder or Hugging Face id with --model"
        ) from error


def named_model(header: dict[str, Any]) -> object:
    """The model that a file says it was made with."""
    about = header.get("about")
    return about.get("model") if isinstance(about, dict) else None


def open_document(path: Path, model: str | None, device: str) -> Document:
    """A document with its model, which is loaded in the dtype with which the file was made.

    Raises:
        InputError: as ``header_of`` and ``Document.load``.
    """
    header = header_of(path)
    folder = model_of(path, header, model)
    from kvsketch.documents.document import Document
    from kvsketch.evaluation.runner import loading
    from kvsketch.hf.identity import check_model_config

    told = header.get("model")
    loading.check_device(device)
    try:
        check_model_config(told, loading.load_config(folder))
    except InputError as error:
        raise InputError(f"{path}: {error}; it was made with {named_model(header)}") from error
    loaded = loading.load_model(folder, device, dtype_of(header))
    return Document.load(path, loaded, loading.load_tokenizer(folder))


def dtype_of(header: dict[str, Any]) -> str:
    """The dtype of the file's model."""
    told = header.get("model")
    dtype = told.get("dtype") if isinstance(told, dict) else None
    return dtype if dtype in ("float32", "bfloat16", "float16") else "float32"


@contextmanager
def reading(cache: Any) -> Iterator[Advance]:
    """A progress bar on standard error, with tokens per second and the bytes of a cache."""
    console = Console(stderr=True)
    columns = (
        TextColumn("Reading"),
        BarColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task, start = bar.add_task("", total=None), time.perf_counter()

        def advance(done: int, total: int) -> None:
            seconds = max(1e-9, time.perf_counter() - start)
            held = mb(cache.nbytes())
            said = f"{done:,}/{total:,} tokens, {done / seconds:,.0f} tokens/s, {held}"
            bar.update(task, completed=done, total=total, description=said)

        yield advance


def mb(size: float) -> str:
    """Bytes as readable text."""
    return f"{size / 1e6:,.2f} MB"


def error_of(error: dict[str, Any] | None, measured: object, tokens: int) -> str:
    """A measured error as readable text, and of which part of a document it is.

    Args:
        error: its mean, its largest value, and whether it is that of ``now``; None: not measured.
        measured: tokens that had been read when it was measured; None: not known.
        tokens: tokens that have been read.
    """
    if error is None:
        return "not measured"
    said = f"{percent(error['mean'])} on average, {percent(error['largest'])} in the worst head"
    if error.get("now") or measured == tokens:
        return said
    part = f"{measured:,} of {tokens:,} tokens" if isinstance(measured, int) else "part"
    return f"{said}, of the first {part}"


def kept_of(summary: dict[str, Any]) -> str:
    """Budget and bytes side by side, from ``hf.saving.summary_of``."""
    amount = summary["budget"]
    if amount is None:
        given = f"Tolerance {summary['tolerance']}"
    elif isinstance(amount, int):
        given = f"Budget {amount:,} tokens' bytes per KV head"
    else:
        given = f"Budget {amount:g} of the exact cache's bytes"
    size, exact = summary["kv_bytes"], summary["exact_kv_bytes"]
    stored = sorted({f"{x['keys']}/{x['values']}" for x in summary["layer_bits"] if x})
    own = f"keys/values in {', '.join(stored)} bits" if stored != ["16/16"] else summary["dtype"]
    return (
        f"{given}: {mb(size)} of {mb(exact)} kept ({size / exact:.1%}), as {summary['slots']:,.0f} "
        f"slots per KV head ({own})"
    )


def percent(error: float | None) -> str:
    """An error as readable text."""
    return "not measured" if error is None else f"{error:.1%}"
