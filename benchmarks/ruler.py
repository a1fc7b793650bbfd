"""RULER's synthetic tasks at the same bytes for every method, with the question unseen or seen.

    python -m benchmarks.ruler --json

As in ``benchmarks.longeval``, the context is read and compressed, then the question is fed one
token at a time, and the answer is generated with the compressed cache; with ``--question seen``,
the whole question is read before compression. ``accuracy`` is the mean score over the cases of a
subtask. The model is the packaged one, and the subtasks are those in which it answers at least four
of five questions with the exact cache.
The essays are those of ../shared/data/essays if they exist, else the filler text of the task.
Methods are named as in ``benchmarks.longeval``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.longeval import QUESTION_HELP, as_read, measure_shares, protocol
from benchmarks.options import METHODS_HELP, among, at_hand, fractions, methods, positive
from benchmarks.page_ruler import averages
from benchmarks.prompts import Asked, load
from benchmarks.results import Results, ResumeOption, Row
from kvsketch.evaluation.report.report import dumps
from kvsketch.evaluation.tasks.ruler import SUBTASKS, Ruler

MODEL = "spread"
ESSAYS = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "essays"
METHODS = (
    "exact,streaming_llm,snapkv,kvzip/reread,kvzip+int4/reread,heavy_merge,"
    "heavy_merge@global+int4/reread,heavy_merge@global+int4/sample"
)
#: The subtasks in which the packaged model answers at least four of five questions.
ANSWERED = "niah_single_1,niah_single_2,niah_multikey_1,niah_multikey_2,niah_multiquery,vt"


def questions(tokenizer: Any, task: Ruler, limit: int) -> dict[str, list[Asked]]:
    """The questions of every subtask."""
    found: dict[str, list[Asked]] = {}
    for drawn in task.cases():
        case = task.fitted(drawn, tokenizer, limit)
        parts = [
            tokenizer(text, return_tensors="pt", add_special_tokens=first).input_ids
            for text, first in ((case.context, True), (case.question, False))
        ]

        def score(text: str, case: Any = case) -> float:
            return task.score(case, text)

        asked = Asked(torch.cat(parts, 1), parts[0].shape[1], score, case.max_new_tokens)
        found.setdefault(str(case.group["subtask"]), []).append(asked)
    return found


def main(
    subtasks: Annotated[str, typer.Option(help="Comma-separated subtasks.")] = ANSWERED,
    length: Annotated[int, typer.Option(help="Tokens of context, question and answer.")] = 4000,
    count: Annotated[int, typer.Option(help="Cases per subtask.")] = 10,
    budgets: Annotated[str, typer.Option(help="Kept fractions of the bytes.")] = "0.25,0.1",
    methods_: Annotated[str, typer.Option("--methods", help=f"exact; {METHODS_HELP}")] = METHODS,
    model: Annotated[str, typer.Option(help="Folder, hub id, or a packaged model.")] = MODEL,
    question: Annotated[str, typer.Option(help=QUESTION_HELP)] = "unseen",
    seed: int = 0,
    out: ResumeOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.ruler --count 2 --methods exact,snapkv --json"""
    console = Console(stderr=True)
    chosen = at_hand(methods(methods_, others=["exact"]), console)
    shares = fractions("budgets", budgets)
    names = among("subtasks", subtasks, SUBTASKS)
    positive(length=length, count=count)
    queries = protocol(question)
    loaded, tokenizer = load(model)
    task = Ruler(names, [length], count, ESSAYS if ESSAYS.is_dir() else None, seed)
    asked = questions(tokenizer, task, int(loaded.config.max_position_embeddings))
    results = Results(
        out,
        command="ruler",
        question=question,
        model=model,
        methods=[method.label for method in chosen],
        subtasks=names,
        length=length,
        count=count,
        budgets=shares,
        source="essays" if ESSAYS.is_dir() else "filler",
        seed=seed,
    )
    with Progress(console=console) as progress:
        steps = [(method, name) for method in chosen for name in names]
        for method, name in progress.track(steps, description="methods and subtasks"):
            if results.has(method=method.label, subtask=name):
                continue
            read = [as_read(loaded, one, question) for one in asked[name]]
            found = measure_shares(
                loaded, tokenizer, read, method, shares, None, seed, console, queries
            )
            rows = [{"subtask": name, **row} for row in found]
            results.add(rows)
            console.print(method.label, name, [(row["budget"], row["accuracy"]) for row in rows])
    result = results.finish()
    console.print(table(results.rows, question))
    if json:
        print(dumps(result))


def table(rows: list[Row], question: str) -> Table:
    shown = Table(title=f"score, question {question} at compression: mean over subtasks")
    budgets = sorted({r["budget"] for r in rows}, reverse=True)
    for column in ("method", *map(str, budgets)):
        shown.add_column(column)
    means = averages(rows)
    for name in dict.fromkeys(r["method"] for r in rows):
        shown.add_row(
            name, *(f"{means[name, b]:.2f}" if (name, b) in means else "" for b in budgets)
        )
    return shown


if __name__ == "__main__":
    typer.run(main)
