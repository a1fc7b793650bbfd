"""Streaming sketches within a budget: bytes used, mass and error, and bytes inside ``generate``.

    python -m benchmarks.sketch_budget --out docs/results/sketch_budget.json \\
        --plot docs/figures/sketch_budget.svg
    python -m benchmarks.sketch_budget --tokens 512,2048 --prompts 1024 --json

The first part has the merge-and-reduce sketches at a quarter of the bytes of all tokens, for
streams of any length, which come in chunks of 500. It measures the share of the bytes allowed that
is used, the total mass over the number of tokens, and the attention error over that of BalanceKV's
one-shot form at the same bytes (whose slots have a mass, too). ``as_written`` is Algorithm 1 or 3
with the batch size t and the number of levels T that use most of the bytes allowed at that length.
t is a power of two.

The second part has every sketch in a ``SketchCache`` inside ``generate``. It measures the bytes of
the whole cache, including the sketch's state, over those of the budget's tokens: after the prompt,
after decoding, and at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, StoppingCriteria

from benchmarks.figures import subplots, write
from benchmarks.prompts import ONE_HEAD
from benchmarks.results import Results, ResumeOption
from kvsketch import SketchCache, Slots, attend
from kvsketch.evaluation.report.report import dumps
from kvsketch.evaluation.runner.loading import resolve_model
from kvsketch.methods import BalanceKV
from kvsketch.methods.registry import SKETCHES
from kvsketch.methods.sketches import BalanceKVStreaming, MergeReduce, Sketch
from kvsketch.methods.sketches.base import token_bytes

HEADS, DIM, QUERIES, CHUNK = 4, 32, 64, 500
BOUNDED = ("merge_reduce", "balancekv_streaming")
AS_WRITTEN: dict[str, type[MergeReduce] | type[BalanceKVStreaming]] = {
    "merge_reduce": MergeReduce,
    "balancekv_streaming": BalanceKVStreaming,
}
#: For longer streams, the schedules as written take minutes.
LONGEST_AS_WRITTEN = 16_384


def gaussian(n: int, seed: int) -> tuple[Slots, Tensor]:
    """Normally distributed keys, values with mean 1, and queries."""
    g = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1, HEADS, n, DIM, generator=g) for _ in range(2))
    return Slots(keys, 1 + values), torch.randn(1, HEADS, QUERIES, DIM, generator=g)


def clustered(n: int, seed: int) -> tuple[Slots, Tensor]:
    """Keys in 16 clusters, values of very different norms, and queries that attend to few keys."""
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(1, HEADS, 16, DIM, generator=g)
    own = torch.randint(16, (n,), generator=g)
    keys = centers[:, :, own] + 0.3 * torch.randn(1, HEADS, n, DIM, generator=g)
    scale = torch.exp(0.5 * torch.randn(1, HEADS, n, 1, generator=g))
    values = scale * (1 + torch.randn(1, HEADS, n, DIM, generator=g))
    return Slots(keys, values), 2 * torch.randn(1, HEADS, QUERIES, DIM, generator=g)


STREAMS = {"gaussian": gaussian, "clustered": clustered}


def fed(sketch: Sketch, slots: Slots) -> Sketch:
    for start in range(0, slots.count, CHUNK):
        sketch.extend(slots.narrow(start, min(CHUNK, slots.count - start)))
    return sketch


def within(name: str, slots: Slots, allowed: int, seed: int) -> Sketch:
    """The sketch with the most slots whose bytes never exceed those allowed, after the stream."""
    low, high = 2, slots.count
    while low < high:
        middle = (low + high + 1) // 2
        most = SKETCHES[name].for_budget(middle).most_bytes(slots)
        assert most is not None
        low, high = (middle, high) if most <= allowed else (low, middle - 1)
    return fed(SKETCHES[name].for_budget(low, seed=seed), slots)


def as_written(name: str, slots: Slots, allowed: int, seed: int) -> tuple[Sketch, str] | None:
    """The sketch whose schedule in the paper uses most of the bytes allowed, and that schedule."""
    best: tuple[int, Sketch, str] | None = None
    for levels in range(2, 6):
        # The last level alone has n / 2^T tokens of every instance, so one smaller size is enough.
        size = 2 ** int(math.log2(slots.count / 2 ** (levels + 2)))
        sketch = fed(AS_WRITTEN[name](batch_size=size, levels=levels, seed=seed), slots)
        used = sketch.nbytes() // HEADS
        if used <= allowed and (best is None or used > best[0]):
            best = used, sketch, f"t={size}, T={levels}"
        if used <= allowed:
            break
    return None if best is None else best[1:]


def by_length(lengths: list[int], seeds: int, seed: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """The rows of the first part: for each, its name and a function that measures it."""
    for stream in STREAMS:
        for n in lengths:
            for name in BOUNDED:
                yield (
                    {"part": "budget", "stream": stream, "tokens": n, "method": name},
                    lambda stream=stream, n=n, name=name: budget_row(stream, n, name, seeds, seed),
                )


def budget_row(stream: str, n: int, name: str, seeds: int, seed: int) -> dict[str, Any]:
    rows, written = [], []
    how = ""
    for s in range(seed, seed + seeds):
        slots, queries = STREAMS[stream](n, s)
        allowed = n // 4 * token_bytes(slots)
        exact = attend(queries, slots)
        other = BalanceKV(seed=s)(slots, allowed // (token_bytes(slots) + 4))

        def error(held: Slots, queries: Tensor = queries, exact: Tensor = exact) -> float:
            return float((attend(queries, held) - exact).norm() / exact.norm())

        def measured(sketch: Sketch, allowed: int = allowed, base: float = error(other)) -> Any:
            held = sketch.slots
            mass = held.masses().sum(-1) / n
            found = error(held)
            return {
                "bytes_used": sketch.nbytes() / HEADS / allowed,
                "least_mass": float(mass.min()),
                "most_mass": float(mass.max()),
                "error": found,
                "over_balancekv": found / base,
            }

        rows.append(measured(within(name, slots, allowed, s)))
        if n <= LONGEST_AS_WRITTEN:
            found = as_written(name, slots, allowed, s)
            if found is not None:
                how = found[1]
                written.append(measured(found[0]))
    row = _mean(rows)
    if written:
        row["as_written"] = {**_mean(written), "schedule": how}
    return row


def _mean(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Mean errors, the extremes of the masses, the least bytes, and the worst error ratio."""
    return {
        "bytes_used": min(r["bytes_used"] for r in rows),
        "least_mass": min(r["least_mass"] for r in rows),
        "most_mass": max(r["most_mass"] for r in rows),
        "error": sum(r["error"] for r in rows) / len(rows),
        "over_balancekv": sum(r["over_balancekv"] for r in rows) / len(rows),
        "most_over_balancekv": max(r["over_balancekv"] for r in rows),
    }


class Watch(StoppingCriteria):  # type: ignore[misc]
    """Notes the bytes of a cache after every token, in units of a token's bytes."""

    def __init__(self, cache: SketchCache) -> None:
        self.cache = cache
        self.shares: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        held, exact = self.cache.nbytes(), self.cache.exact_nbytes()
        self.shares.append(held / (exact / self.cache.get_seq_length()))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate_row(
    model: Any, method: str, prompt: int, new: int, budget: float, seed: int
) -> dict[str, Any]:
    """The bytes of a cache, in units of a token's bytes, over the tokens of the budget."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.config.vocab_size, (1, prompt), generator=g)
    cache = SketchCache(model.config, method, budget=budget, seed=seed)
    watch = Watch(cache)
    model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        stopping_criteria=[watch],
    )
    seen = [prompt + i for i in range(len(watch.shares))]
    allowed = [budget if isinstance(budget, int) else math.ceil(budget * n) for n in seen]
    shares = [held / most for held, most in zip(watch.shares, allowed, strict=True)]
    return {
        "after_prompt": shares[0],
        "after_decoding": shares[-1],
        "most": max(shares),
        "tokens_worth": watch.shares[-1],
    }


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    found = [row for row in rows if row["part"] == "generate"]
    budgets = list(dict.fromkeys(row["budget"] for row in found))
    fig, axes = subplots(len(budgets), 5.0 * len(budgets), 3.8)
    for axis, budget in zip(axes, budgets, strict=True):
        for method in dict.fromkeys(row["method"] for row in found):
            part = [r for r in found if r["method"] == method and r["budget"] == budget]
            axis.plot(
                [r["tokens"] for r in part],
                [r["tokens_worth"] for r in part],
                marker="o",
                markersize=3,
                label=method,
            )
        tokens = sorted({r["tokens"] for r in found})
        new = found[0]["new"]
        line = [budget if budget > 1 else budget * (n + new) for n in tokens]
        axis.plot(tokens, line, "k--", linewidth=1, label="budget")
        axis.set(xscale="log", yscale="log", xlabel="prompt tokens", title=f"budget {budget}")
    axes[0].set_ylabel("bytes held, in tokens")
    axes[-1].legend(fontsize=6)
    write(fig, path)


def main(
    tokens: Annotated[str, typer.Option(help="Tokens of the streams.")] = "512,2048,16384,131072",
    seeds: Annotated[int, typer.Option(help="Streams per length.")] = 3,
    model: Annotated[str, typer.Option(help="Model folder or hub id.")] = ONE_HEAD,
    prompts: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "512,1024,2048,4096",
    new: Annotated[int, typer.Option(help="Decoded tokens.")] = 500,
    seed: int = 0,
    out: ResumeOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure (.svg or .png).")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.sketch_budget --tokens 512,2048 --prompts 1024 --json"""
    console = Console(stderr=True)
    lengths, sizes = ([int(x) for x in text.split(",")] for text in (tokens, prompts))
    settings = {"command": "sketch_budget", "seeds": seeds, "model": model, "seed": seed}
    results = Results(out, **settings, lengths=lengths, prompts=sizes, new=new)
    loaded = AutoModelForCausalLM.from_pretrained(resolve_model(model)).eval()
    parts = list(by_length(lengths, seeds, seed))
    for budget in (256, 0.25):
        for method in SKETCHES:
            if method == "one_dimensional":  # The model's keys have more than one dimension.
                continue
            for n in sizes:
                name = {"part": "generate", "method": method, "tokens": n, "budget": budget}
                parts.append(
                    (
                        {**name, "new": new},
                        lambda method=method, n=n, budget=budget: generate_row(
                            loaded, method, n, new, budget, seed
                        ),
                    )
                )
    with torch.inference_mode():
        for name, measure in track(parts, "sketches", console=console):
            if not results.has(**name):
                results.add([{**name, **measure()}])
    result = results.finish()
    if plot is not None:
        figure(result["results"], plot)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
