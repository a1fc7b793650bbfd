"""`kvsketch ask`: questions about a compressed document, each from the same state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from kvsketch.cli.document_options import (
    DeviceOption,
    FileArgument,
    ModelOfFile,
    check_temperature,
    header_of,
    open_document,
    text_of,
)
from kvsketch.cli.printing import JsonOption, console_for, print_json
from kvsketch.errors import InputError, at_least

if TYPE_CHECKING:
    from kvsketch.documents.document import Document

EPILOG = """Example: kvsketch ask report.kvs "Who signed it?" "When?" --json

Example: kvsketch ask report.kvs "When?" --server http://localhost:8000 --text report.txt"""


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
        int,
        typer.Option(
            help="Largest number of questions of equal length in one batch; with --server, of "
            "questions that are sent at a time."
        ),
    ] = 8,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling, for temperatures above 0.")] = 0,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask a vLLM server that has the file (docs/vllm.md) instead of a model here.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --server: the document's text; - for standard input."
        ),
    ] = None,
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
    if server is None:
        if text is not None:
            raise InputError(f"--text {text} has no effect without --server")
        document = open_document(file, model, device)
        start = time.perf_counter()
        rows = _answers_here(document, asked, max_new_tokens, batch, temperature, seed)
    elif model is not None or device != "cpu":
        raise InputError("--model and --device have no effect with --server, which has its own")
    elif text is None:
        raise InputError(f"--text is missing: a server finds {file} by the tokens of its text")
    else:
        from kvsketch.documents.server import Server, answers

        asking, header, read = Server(server), header_of(file), text_of(text, "--text")
        start = time.perf_counter()
        found = answers(asking, header, read, asked, max_new_tokens, batch, temperature, seed)
        rows = [{"question": q, "answer": answer} for q, answer in zip(asked, found, strict=True)]
    seconds = time.perf_counter() - start
    console = console_for(as_json)
    for row in rows:
        if len(asked) > 1:
            console.print(f"[dim]{escape(row['question'])}[/dim]", highlight=False, soft_wrap=True)
        console.print(escape(row["answer"]), highlight=False, soft_wrap=True)
    if as_json:
        settings = {"temperature": temperature, "seed": seed, "seconds": seconds}
        print_json("ask", file=str(file), server=server, answers=rows, **settings)


def _answers_here(
    document: Document,
    asked: list[str],
    max_new_tokens: int,
    batch: int,
    temperature: float,
    seed: int,
) -> list[dict[str, Any]]:
    """Answers of the document's own model."""
    from kvsketch.documents.answering import Sampling, answers

    ids = answers(document, asked, max_new_tokens, batch, Sampling(temperature, seed))
    return [
        {
            "question": question,
            "answer": document.tokenizer.decode(one, skip_special_tokens=True).strip(),
            "tokens": len(one),
        }
        for question, one in zip(asked, ids, strict=True)
    ]
