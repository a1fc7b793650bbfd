"""`kvsketch merge`: join two documents that were compressed separately."""

from __future__ import annotations

from dataclasses import replace
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
    report_saved,
    save,
)
from kvsketch.cli.printing import JsonOption

EPILOG = "Example: kvsketch merge part1.kvs part2.kvs -o both.kvs"


def merge_command(
    first: FileArgument,
    second: FileArgument,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DOC.kvs", help="File to write.")],
    model: ModelOfFile = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Join two compressed documents, one after the other, without reading them again."""
    check_out(out)
    header_of(second)  # raises before a model is loaded
    document = open_document(first, model, device)
    from kvsketch.documents.document import Document
    from kvsketch.hf.joining import join

    other = Document.load(second, document.model, document.tokenizer)
    cache = join(document.cache, other.cache, document.model)
    sources = [one.about.get("source") for one in (document, other)]
    about = {**document.about, "source": " + ".join(map(str, sources))}
    about.pop("tokens", None)  # of the first part
    both = replace(document, cache=cache, about=about, answered=other.answered)
    save(both, out)
    said = (
        f"{cache.get_seq_length():,} tokens, {{cache}}. {{file}}. The error of the merged document "
        "was not measured."
    )
    more = {"tokens": cache.get_seq_length(), "sources": sources}
    report_saved("merge", cache, out, said, more, as_json)
