"""Sessions of many turns at the same bytes for every method, by turn.

    python -m benchmarks.sessions --json

The sessions of ``kvsketch eval sessions``, with the question of a document unseen when it is
compressed. A budget is the bytes of a share of the tokens of the whole session in 16 bits
(``benchmarks.equal_bytes``), the same from the first turn to the last. ``accuracy`` is the mean
over sessions and turns, ``ci95`` its interval over sessions, ``curve`` the mean by turn, or by how
many documents ago the one that is asked about was read. ``kept`` is the share of the slots' bytes
at the end.

Methods are named as in ``kvsketch eval --methods``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.equal_bytes import ITEMSIZE, held_by
from benchmarks.options import fractions, positive
from benchmarks.results import Results, ResumeOption, Row
from kvsketch import SketchCache
from kvsketch.arguments import RECENT
from kvsketch.evaluation.report.report import dumps
from kvsketch.evaluation.runner import answering, loading
from kvsketch.evaluation.runner.encoding import EncodedCase, Encoder
from kvsketch.evaluation.runner.intervals import mean_interval
from kvsketch.evaluation.runner.replies import new_cache
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import EXACT, Setup, parse_method
from kvsketch.evaluation.tasks.base import Case
from kvsketch.evaluation.tasks.sessions import FORMS, Sessions

MODEL = "spread"
METHODS = (
    "exact,heavy_merge,heavy_merge@even,heavy_merge+16bit,h2o,h2o+int4,tova,snapkv,snapkv+int4,"
    "keydiff,streaming_llm,cluster_merge,merge_reduce,rkv+int4,triattention+int4"
)


class Bench:
    """A model that holds sessions in caches whose budgets count numbers of 16 bits."""

    def __init__(self, name: str) -> None:
        path = loading.resolve_model(name)
        self.tokenizer = loading.load_tokenizer(path)
        self.settings = Settings(question="unseen")
        self.answerer = answering.Answerer(
            loading.load_model(path, "cpu", "float32"), self.tokenizer, self.settings
        )
        self.config = self.answerer.model.config
        self.made: list[Any] = []

    def cache(self, *arguments: Any) -> Any:
        """As ``new_cache``."""
        cache = new_cache(*arguments)
        if isinstance(cache, SketchCache):
            cache.plan.itemsize = ITEMSIZE
        self.made = [cache]
        return cache

    def held(
        self, task: Sessions, cases: list[tuple[Case, EncodedCase]], setup: Setup, share: float
    ) -> Row:
        """A row of the results."""
        scores, kept, curves = [], 0.0, []
        for case, encoded in cases:
            tokens = sum(len(turn.text) + len(turn.question) for turn in encoded.turns)
            if task.form == "list":  # the answer is a good part of the session
                tokens += len(self.tokenizer.encode(case.answers[0]))
            mine = Setup(
                setup.method,
                math.ceil(share * tokens),
                allocation=setup.allocation,
                bits=setup.bits,
                window=setup.window,
            )
            with mock.patch.object(answering, "new_cache", self.cache):
                (reply,) = self.answerer.answer([encoded], mine)
            scores.append(task.graded(case, reply))
            curves.append(task.measured(case, reply))
            cache = self.made.pop()
            if isinstance(cache, SketchCache):
                whole = cache.get_seq_length() * _token_bytes(self.config)
                kept += held_by(cache, self.settings.sink, RECENT).bytes / whole
        count = len(cases)
        row: Row = {"accuracy": sum(scores) / count, "sessions": count}
        row["ci95"] = [round(end, 4) for end in mean_interval(scores)]
        row["curve"] = {
            point: round(sum(curve[point] for curve in curves) / count, 4) for point in curves[0]
        }
        if setup.method != EXACT:
            row["kept"] = round(kept / count, 4)
        return row


def _token_bytes(config: Any) -> int:
    """Of a token in 16 bits, in one KV head of one layer."""
    return 2 * int(config.head_dim) * ITEMSIZE


def main(
    forms: Annotated[str, typer.Option(help=f"Of {', '.join(FORMS)}.")] = "documents",
    lines: Annotated[int, typer.Option(help="Lines of all records of a session.")] = 330,
    count: Annotated[int, typer.Option(help="Sessions.")] = 12,
    budgets: Annotated[str, typer.Option(help="Kept fractions.")] = "0.25,0.125,0.0625",
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = METHODS,
    model_name: Annotated[str, typer.Option("--model", help="A packaged model.")] = MODEL,
    seed: int = 0,
    out: ResumeOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.sessions --count 2 --methods exact,heavy_merge --json"""
    torch.set_num_threads(1)
    console = Console(stderr=True)
    chosen = [parse_method(text) for text in methods.split(",")]
    shares = fractions("budgets", budgets)
    positive(lines=lines, count=count)
    bench = Bench(model_name)
    results = Results(
        out,
        command="sessions",
        model=model_name,
        methods=[setup.label for setup in chosen],
        forms=forms.split(","),
        lines=lines,
        count=count,
        budgets=shares,
        seed=seed,
    )
    encoder = Encoder(bench.tokenizer, bench.config, bench.settings)
    limit = bench.config.max_position_embeddings
    parts = [(form, setup) for form in forms.split(",") for setup in chosen]
    with Progress(console=console) as progress:
        for form, setup in progress.track(parts, description="methods"):
            if results.has(method=setup.label, form=form):
                continue
            task = Sessions(form, [lines], count, seed)
            cases = [
                (case, task.encoded(case, encoder, limit, case.max_new_tokens))
                for case in task.cases()
            ]
            rows = []
            for share in shares if setup.method != EXACT else [1.0]:
                row = bench.held(task, cases, setup, share)
                rows.append({"form": form, "method": setup.label, "budget": share, **row})
            results.add(rows)
            console.print(form, setup.label, [(r["budget"], r["accuracy"]) for r in rows])
    result = results.finish()
    console.print(table(results.rows))
    if json:
        print(dumps(result))


def table(rows: list[Row]) -> Table:
    shown = Table(title="sessions: accuracy")
    budgets = sorted({row["budget"] for row in rows}, reverse=True)
    for column in ("form", "method", *map(str, budgets)):
        shown.add_column(column)
    for form, name in dict.fromkeys((row["form"], row["method"]) for row in rows):
        by = {r["budget"]: r["accuracy"] for r in rows if (r["form"], r["method"]) == (form, name)}
        shown.add_row(form, name, *(f"{by[b]:.2f}" if b in by else "" for b in budgets))
    return shown


if __name__ == "__main__":
    typer.run(main)
