"""LongEval lines at the same bytes for every method, with the question unseen or seen.

    python -m benchmarks.longeval --json

The record is read and compressed. Then the question is fed one token at a time, and the answer is
generated with the compressed cache. With ``--question seen``, the whole question is read with the
record, before compression, as ``generate`` does with a prompt. Every method uses as many bytes for
what it compresses as one that keeps the budget's share of these tokens unchanged
(``benchmarks.equal_bytes``). ``accuracy`` is the share of answers that contain the right number,
with Wilson's 95% interval. The cases are the official ones if ../shared/data/longeval exists, else
generated ones.

Methods are named as in ``kvsketch eval --methods``. A bare name is the method as ``SketchCache(
model.config, name, budget=...)`` runs it by default: ``heavy_merge`` as ``@measured+measured``,
every other method as ``@even+16bit``. ``@even`` gives every head the same budget. ``@measured``
allocates the same bytes to heads and layers by errors measured on this record, ``@calibrated`` by
errors measured beforehand on three other cases (``kvsketch eval`` takes these as ``@FILE``).
``@layer`` and ``@global`` allocate them by the method's scores, over a layer or the model.
``+int4`` stores slots in 4 bits, so that more of them fit into the same bytes. With ``/reread``,
the record is read a second time before it is compressed, and the method uses the queries of the
second reading (``kvsketch.prefill``). With ``/local``, it is read again in separate parts, with
``/sample``, only a part of it is read again. ``kvzip``, ``kvzip_plus`` and ``kvgrad`` need a second
reading.
"""

from __future__ import annotations

import json as jsonlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import Cache, DynamicCache

from benchmarks.equal_bytes import Fit
from benchmarks.kl import compressed, curves_of, slots_of
from benchmarks.options import METHODS_HELP, Method, at_hand, fractions, methods, positive
from benchmarks.prompts import (
    ANSWER_TOKENS,
    Asked,
    answered,
    feed,
    load,
    prefill,
    question_apart,
)
from benchmarks.results import Results, ResumeOption, Row
from kvsketch.cache.curves import Curves
from kvsketch.evaluation.report.report import dumps
from kvsketch.evaluation.runner.intervals import wilson_interval
from kvsketch.evaluation.runner.longeval_cases import generate_cases

MODEL = "spread"
OFFICIAL = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "longeval"
METHODS = (
    "exact,uniform,streaming_llm,h2o,kcenter,snapkv,snapkv@layer,pyramidkv,tova,"
    "expected_attention,knorm,keydiff,cluster_merge,heavy_merge@even+16bit,heavy_merge+16bit,"
    "snapkv@calibrated,keydiff@calibrated,heavy_merge@calibrated+16bit,"
    "heavy_merge@calibrated+int4,heavy_merge"
)


def cases(lines: int, count: int, seed: int) -> tuple[str, list[dict[str, Any]]]:
    """The source of the cases, "official" or "generated", and the cases."""
    path = OFFICIAL / f"{lines}_lines.jsonl"
    if path.is_file():
        rows = [jsonlib.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return "official", rows[:count]
    return "generated", generate_cases(lines, count, seed)


def questions(tokenizer: Any, found: list[dict[str, Any]]) -> list[Asked]:
    """The questions of LongEval cases, with the score of an answer."""

    def question(case: dict[str, Any]) -> Asked:
        def score(text: str) -> float:
            return float(str(case["expected_number"]) in text)

        return Asked(*question_apart(tokenizer, case["prompt"]), score, ANSWER_TOKENS)

    return [question(case) for case in found]


#: The protocols of ``benchmarks.prompts`` by ``--question``.
QUESTIONS = {"unseen": "agnostic", "seen": "aware"}
QUESTION_HELP = "unseen: read after compression; seen: before it."


def protocol(question: str) -> str:
    """The name of the protocol.

    Raises:
        typer.BadParameter: another ``question``.
    """
    if question not in QUESTIONS:
        raise typer.BadParameter(f"--question {question!r} must be one of {', '.join(QUESTIONS)}")
    return QUESTIONS[question]


@torch.no_grad()
def as_read(model: Any, asked: Asked, question: str) -> Asked:
    """The question as it is, or, if seen, as the end of the record. Every method then begins its
    answer with the same token: the prompt is read before anything is compressed."""
    if question == "unseen":
        return asked
    first = model(asked.ids, use_cache=False, logits_to_keep=1).logits.argmax(-1)
    ids = torch.cat([asked.ids, first], 1)
    return replace(asked, ids=ids, record=asked.ids.shape[1], begun=1)


def answer(model: Any, tokenizer: Any, asked: Asked, cache: Cache) -> str:
    """The greedy answer of a cache that has read the first ``asked.record`` tokens."""
    ids = asked.ids
    if asked.begun and int(ids[0, -1]) == model.config.eos_token_id:
        return ""
    between = ids[:, asked.record : -1]
    if between.shape[1]:
        feed(model, between, cache)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=asked.new_tokens - asked.begun,
        do_sample=False,
    )
    return tokenizer.decode(out[0, ids.shape[1] - asked.begun :], skip_special_tokens=True)


def measure(
    model: Any,
    tokenizer: Any,
    found: list[Asked],
    method: Method,
    share: float,
    curves: Curves | None,
    seed: int,
) -> Row | None:
    """Accuracy, slots and bytes. None if the method does not fit into the bytes of a record."""
    scores, slots, size = [], 0.0, 0.0
    fit = Fit()
    for asked in found:
        ids, record = asked.ids, asked.record
        if method.name == "exact":
            cache: Cache = DynamicCache(config=model.config)
            prefill(model, ids[:, :record], cache)
        else:
            tokens = math.ceil(share * record)
            record_ids = ids[:, :record]
            one = compressed(
                model, record_ids, method, tokens, fit, curves, seed, tokenizer=tokenizer
            )
            if one is None:
                return None
            _, held = one
            cache = held.what
            slots += slots_of(held.what) / record
            size += held.bytes / record
        scores.append(asked.score(answer(model, tokenizer, asked, cache)))
    count = len(found)
    row: Row = {"accuracy": sum(scores) / count, "cases": count}
    if set(scores) <= {0.0, 1.0}:
        interval = wilson_interval(round(sum(scores)), count)
        row["ci95"] = [round(bound, 4) for bound in interval]
    if method.name != "exact":
        row["slots_per_token"] = round(slots / count, 4)
        row["bytes_per_token"] = round(size / count, 3)
    return row


def measure_shares(
    model: Any,
    tokenizer: Any,
    found: list[Asked],
    method: Method,
    shares: list[float],
    curves: Curves | None,
    seed: int,
    console: Console,
    queries: str,
) -> list[Row]:
    """A row of ``measure`` for every share. Shares too small for the method are reported."""
    rows: list[Row] = []
    for share in shares if method.name != "exact" else [1.0]:
        row = measure(model, tokenizer, found, method, share, curves, seed)
        if row is None:
            console.print(f"left out: {method.label} (kept share {share} is too small)")
            continue
        name = {"method": method.label, "queries": queries, "budget": share}
        rows.append({**name, **row})
    return rows


def main(
    lines: Annotated[int, typer.Option(help="Lines per record.")] = 200,
    count: Annotated[int, typer.Option(help="Cases.")] = 50,
    budgets: Annotated[str, typer.Option(help="Kept fractions of the bytes.")] = "0.5,0.25,0.1",
    methods_: Annotated[str, typer.Option("--methods", help=f"exact; {METHODS_HELP}")] = METHODS,
    model_name: Annotated[
        str, typer.Option("--model", help="Folder, hub id, or a packaged model.")
    ] = MODEL,
    question: Annotated[str, typer.Option(help=QUESTION_HELP)] = "unseen",
    seed: int = 0,
    out: ResumeOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.longeval --count 10 --methods exact,snapkv --json"""
    console = Console(stderr=True)
    chosen = at_hand(methods(methods_, others=["exact"]), console)
    shares = fractions("budgets", budgets)
    positive(lines=lines, count=count)
    queries = protocol(question)
    model, tokenizer = load(model_name)
    source, found = cases(lines, count, seed)
    results = Results(
        out,
        command="longeval",
        question=question,
        model=model_name,
        methods=[method.label for method in chosen],
        lines=lines,
        count=count,
        budgets=shares,
        source=source,
        seed=seed,
    )
    asked = [as_read(model, one, question) for one in questions(tokenizer, found)]
    other = answered(model, tokenizer, 3, lines, seed + 1000, queries)
    with Progress(console=console) as progress:
        for method in progress.track(chosen, description="methods"):
            if results.has(method=method.label):
                continue
            curves = curves_of(model, other, method)
            rows = measure_shares(
                model, tokenizer, asked, method, shares, curves, seed, console, queries
            )
            results.add(rows)
            console.print(method.label, [(row["budget"], row["accuracy"]) for row in rows])
    result = results.finish()
    console.print(table(results.rows, question))
    if json:
        print(dumps(result))


def table(results: list[Row], question: str) -> Table:
    shown = Table(title=f"accuracy, question {question} at compression")
    budgets = sorted({r["budget"] for r in results}, reverse=True)
    for column in ("method", *map(str, budgets)):
        shown.add_column(column)
    for name in dict.fromkeys(r["method"] for r in results):
        by = {r["budget"]: r["accuracy"] for r in results if r["method"] == name}
        shown.add_row(name, *(f"{by[b]:.2f}" if b in by else "" for b in budgets))
    return shown


if __name__ == "__main__":
    typer.run(main)
