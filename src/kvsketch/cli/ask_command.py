"""`kvsketch ask`: questions about a compressed document, each from the same state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kvsketch.cli.document_options import (
    DeviceOption,
    FileArgument,
    ModelOfFile,
    check_temperature,
    open_document,
    text_of,
)
from kvsketch.cli.printing import JsonOption, console_for, print_json
from kvsketch.errors import InputError, at_least

EPILOG = 'Example: kvsketch ask report.kvs "Who signed it?" "When?" --json'


def ask_command(
    file: FileArgument,
    questions: Annotated[
        list[str] | None, typer.Argument(metavar="QUESTION...", help="One or more questions.")
    ] = None,
    questions_from: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            metavar="FILE",
            help="File with one question per line; - for standard input.",
        ),
    ] = None,
    model: ModelOfFile = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Largest number of tokens of an answer.")
    ] = 64,
    batch: Annotated[
        int, typer.Option(help="Largest number of questions of equal length in one batch.")
    ] = 8,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling, for temperatures above 0.")] = 0,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Ask questions about a compressed document. The file is not changed."""
    asked = list(questions or [])
    if questions_from is not None:
        lines = text_of(questions_from, "--questions").splitlines()
        asked += [line for line in lines if line.strip()]
    if not asked:
        raise InputError("QUESTION... is missing: give one or more, or a file of them, --questions")
    if not all(question.strip() for question in asked):
        raise InputError(f"QUESTION {min(asked, key=len)!r} is empty")
    at_least("--max-new-tokens", max_new_tokens, 1)
    at_least("--batch", batch, 1)
    check_temperature(temperature)
    document = open_document(file, model, device)
    from kvsketch.documents.answering import Sampling, answers

    start = time.perf_counter()
    ids = answers(document, asked, max_new_tokens, batch, Sampling(temperature, seed))
    seconds = time.perf_counter() - start
    found = [document.tokenizer.decode(one, skip_special_tokens=True).strip() for one in ids]
    console = console_for(as_json)
    for question, answer in zip(asked, found, strict=True):
        if len(asked) > 1:
            console.print(f"[dim]{escape(question)}[/dim]", highlight=False, soft_wrap=True)
        console.print(escape(answer), highlight=False, soft_wrap=True)
    if as_json:
        rows = [
            {"question": question, "answer": answer, "tokens": len(one)}
            for question, answer, one in zip(asked, found, ids, strict=True)
        ]
        settings = {"temperature": temperature, "seed": seed, "seconds": seconds}
        print_json("ask", file=str(file), answers=rows, **settings)
