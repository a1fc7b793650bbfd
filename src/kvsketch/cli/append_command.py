"""`kvsketch append`: read more text after a compressed document."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kvsketch.cli.document_options import (
    DeviceOption,
    FileArgument,
    ModelOfFile,
    check_out,
    header_of,
    open_document,
    reading,
    report_saved,
    save,
    text_of,
)
from kvsketch.cli.printing import JsonOption

EPILOG = "Example: kvsketch append report.kvs appendix.txt"


def append_command(
    file: FileArgument,
    text: Annotated[Path, typer.Argument(metavar="FILE", help="UTF-8 text; - for standard input.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DOC.kvs", help="[default: the file itself]"),
    ] = None,
    model: ModelOfFile = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Read more text after a compressed document, with the same budget."""
    target = file if out is None else out
    option = "DOC.kvs" if out is None else "--out"
    header_of(file)
    check_out(target, option)
    added = text_of(text, "FILE")
    document = open_document(file, model, device)
    start = time.perf_counter()
    with reading(document.cache) as advance:
        tokens = document.append(added, advance)
    seconds = time.perf_counter() - start
    save(document, target, option)
    cache = document.cache
    said = (
        f"{tokens:,} tokens more ({tokens / seconds:,.0f} tokens/s), {cache.get_seq_length():,} in "
        "all: {cache}. {file}"
    )
    more = {"appended": tokens, "tokens": cache.get_seq_length(), "seconds": seconds}
    report_saved("append", cache, target, said, more, as_json)
