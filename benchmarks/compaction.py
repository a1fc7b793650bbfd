"""What compressions cost while a model decodes: its time with them over its time without.

    python -m benchmarks.compaction --json

A cache is filled with a prompt of several times its budget, so that every compression has to
reduce, and goes on one token at a time. With the longest prompt heads have budgets that differ
much: some keep nothing but the first and the last tokens.

``time`` is the mean time of the processor for a token over the median token, at which nothing is
compressed and no query becomes a score: the same slots, the same kernel. ``scores`` and
``compressions`` are the two parts of what exceeds 1. Times are of whole tokens, the model's own
layers included, in one thread.

The packaged models are so small that a token takes a few milliseconds; the other has two layers of
Llama 3 8B's shape, random, in bfloat16.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.long_stream import tokens
from benchmarks.options import positive
from benchmarks.results import Results, ResumeOption, Row, show
from benchmarks.speed import prompt as prompt_of
from benchmarks.speed import wide_model
from kvsketch import SketchCache
from kvsketch.evaluation.report.report import dumps
from kvsketch.evaluation.runner import loading

#: Budgets, and tokens of the prompt: more than are held in 4 bits.
_BOTH: list[tuple[int | float, int]] = [(512, 2560), (2048, 10240)]
_WIDE = "two layers of Llama 3 8B's shape, bfloat16"
MODELS = {"spread": _BOTH, "longeval-one-head": [(0.125, 15_000)], _WIDE: _BOTH}


def measured(
    model: Any, ids: list[int], method: str, budget: int | float, prompt: int, count: int
) -> Row:
    """A row of the results: ``ids`` begin with the prompt, and ``count`` tokens are decoded."""
    cache = SketchCache(model.config, method, budget=budget)
    rest = iter(ids[prompt:])
    seconds: list[float] = []
    kinds: list[str] = []
    with torch.inference_mode():
        read = torch.tensor([ids[:prompt]])
        model(read, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for number in range(count):
            before = _state(cache)
            start = time.process_time()
            model(torch.tensor([[next(rest)]]), past_key_values=cache, use_cache=True)
            took = time.process_time() - start
            if number >= count // 8:  # the first ones are slower
                seconds.append(took)
                kinds.append(_kind(before, _state(cache)))
    plain = statistics.median(s for s, kind in zip(seconds, kinds, strict=True) if not kind)
    row: Row = {"method": method, "budget": budget, "prompt": prompt, "tokens": len(seconds)}
    row["milliseconds"] = round(1000 * plain, 3)
    row["time"] = round(statistics.fmean(seconds) / plain, 4)
    for kind in ("scores", "compressions"):
        more = sum(s - plain for s, k in zip(seconds, kinds, strict=True) if k == kind)
        row[kind] = round(more / plain / len(seconds), 4)
        row[f"tokens_with_{kind}"] = kinds.count(kind)
    return row


def _state(cache: SketchCache) -> tuple[list[Any], int]:
    """What a compression replaces, and the number of waiting queries of the first layer."""
    streams = [layer.stream for layer in cache._sketches()]
    return [stream.page for stream in streams], streams[0].scores.queries.count


def _kind(before: tuple[list[Any], int], now: tuple[list[Any], int]) -> str:
    if any(a is not b for a, b in zip(before[0], now[0], strict=True)):
        return "compressions"
    return "scores" if now[1] <= before[1] else ""


def main(
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = "heavy_merge",
    count: Annotated[int, typer.Option(help="Decoded tokens.")] = 800,
    seed: int = 0,
    out: ResumeOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.compaction --count 200 --json"""
    torch.set_num_threads(1)
    positive(count=count)
    names = methods.split(",")
    results = Results(out, command="compaction", methods=names, count=count, seed=seed)
    parts = [(m, *one, name) for m, budgets in MODELS.items() for one in budgets for name in names]
    with Progress(console=Console(stderr=True)) as progress:
        for of, budget, prompt, name in progress.track(parts, description="budgets"):
            if results.has(model=of, budget=budget, method=name):
                continue
            needed = prompt + count
            if of == _WIDE:
                model = wide_model(seed)
            else:
                path = loading.resolve_model(of)
                model = loading.load_model(path, "cpu", "float32")
                model.config.max_position_embeddings = 1 << 20
            if of == "spread":
                source = tokens(loading.load_tokenizer(path), seed)
                ids = [next(source) for _ in range(needed)]
            else:
                ids = prompt_of(model, needed, seed)[0].tolist()
            results.add([{"model": of, **measured(model, ids, name, budget, prompt, count)}])
    result = results.finish()
    columns = ("model", "method", "budget", "prompt", "time", "scores", "compressions")
    show("decoding with compressions over decoding without", columns, results.rows)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
