"""`kvsketch info`: what a file says of itself, for which neither torch nor a model is loaded; or
what this installation runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvsketch.cli.document_options import error_of, kept_of, mb, opened
from kvsketch.cli.printing import JsonOption, console_for, print_json
from kvsketch.errors import InputError
from kvsketch.files import container

EPILOG = "Example: kvsketch info report.kvs --json"
#: what a header holds that is shown as it is
_HEADS = ("model", "tokenizer", "summary", "about")


def info_command(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="DOC.kvs", help="File written by `kvsketch compress`."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a compressed document holds, and check that it is whole; without one, the versions
    and the kernel that this installation uses."""
    if file is None:
        from kvsketch.evaluation.report.report import environment

        found = environment()
        every = {**found["versions"], **found["hardware"]}
        rows = [(name.replace("_", " "), str(value)) for name, value in every.items()]
    else:
        found, rows = info(file), None
    if as_json:
        print_json("info", **found)
        return
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # the path of a model may be longer than a line
    for name, value in rows or rows_of(found):
        table.add_row(name, value)
    console_for(False).print(table)


def info(path: Path) -> dict[str, Any]:
    """What a file says of itself, its checksum verified.

    Raises:
        InputError: it is no file of a cache, or damaged.
    """
    with opened(path) as (file, table):
        container.verify(file, table, path)
    header = table.header
    for name in _HEADS:
        if name not in header:
            raise InputError(f"{str(path)!r} was not written by kvsketch: it has no {name}")
    return {
        "file": str(path),
        "file_bytes": path.stat().st_size,
        "predicted_file_bytes": header.get("predicted_file_bytes"),
        "tensors": len(table.entries),
        "version": header["version"],
        "checksum": table.checksum,
        **{name: header[name] for name in _HEADS},
        "arguments": _arguments(header),
    }


def _arguments(header: dict[str, Any]) -> Any:
    state = header.get("state")
    return state.get("arguments") if isinstance(state, dict) else None


def rows_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What is shown, name by name.

    Raises:
        InputError: a header that does not say what it should.
    """
    try:
        said = _rows(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else f"{error}"
        raise InputError(f"{found['file']!r}: its header is damaged: {reason:.100}") from error
    return [(name, value.replace("[", r"\[")) for name, value in said]


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    summary, about, model = found["summary"], found["about"], found["model"]
    error = summary.get("error")
    kept = summary["tolerance"] if summary["budget"] is None else summary["budget"]
    what = "tolerance" if summary["budget"] is None else "budget"
    return [
        ("model", f"{about.get('model', '-')} ({model['type']}, {summary['dtype']})"),
        ("source", str(about.get("source", "-"))),
        ("method", f"{summary['method']}, {what} {kept}, bits {summary['bits']}"),
        ("tokens seen", f"{summary['tokens']:,}"),
        ("kept", kept_of(summary)),
        ("file", f"{mb(found['file_bytes'])}, whole (sha256 {found['checksum'][:12]}...)"),
        ("measured error", error_of(error, about.get("tokens"), summary["tokens"])),
        ("seed", str(summary["seed"])),
    ]
