"""How the bytes and the time per token of every sketch grow with the length of the stream.

    python -m benchmarks.growth --json

The streams have 1k to 1M tokens whose keys fall into sqrt(n) clusters, and one KV head, and come in
chunks of 512. Bytes are those of all tensors of a sketch, including allocated but unused memory.
Exponents are least-squares slopes in log-log. BalanceKV's bytes grow as a + b log2(n), so this fit
is given as well. ``million`` is the time in which SubGen reads 10^6 tokens of 8 heads. The times
depend on the machine, but their exponents should not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.figures import subplots, write
from benchmarks.page import save
from kvsketch import Slots, attend
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.methods.sketches import (
    BalanceKVStreaming,
    MergeReduce,
    OneDimensional,
    Sketch,
    SlidingWindow,
    SlidingWindowSampled,
    SubGen,
    SubGenCoupled,
)

DIM = 64
CHUNK = 512
SPREAD = 0.02  # standard deviation of the keys around their cluster's center, per coordinate
DELTA = 1.0  # about 5 times a cluster's radius and 1/50 of the distance between clusters

#: The head_dim for each sketch, and how the sketch is built for a stream of n tokens.
SKETCHES: dict[str, tuple[int, Callable[[int], Sketch]]] = {
    "subgen": (DIM, lambda n: SubGen(DELTA, s=256, t=4)),
    "subgen_coupled": (DIM, lambda n: SubGenCoupled(DELTA, t=4)),
    "balancekv_streaming": (DIM, lambda n: BalanceKVStreaming(batch_size=256, max_tokens=n)),
    "merge_reduce": (DIM, lambda n: MergeReduce("greedy_halving", batch_size=256)),
    "sliding_window": (DIM, lambda n: SlidingWindow(window=256)),
    "sliding_window_sampled": (DIM, lambda n: SlidingWindowSampled(window=256, samples=64)),
    "one_dimensional": (1, lambda n: OneDimensional(max_tokens=n)),
}


def stream(n: int, clusters: int, dim: int, heads: int, seed: int) -> Iterator[Slots]:
    """Yield n tokens in chunks, with keys around ``clusters`` centers per head."""
    generator = torch.Generator().manual_seed(seed)
    centers = 3 * torch.randn(heads, clusters, dim, generator=generator)
    for start in range(0, n, CHUNK):
        count = min(CHUNK, n - start)
        choice = torch.randint(0, clusters, (heads, count, 1), generator=generator)
        keys = centers.gather(1, choice.expand(-1, -1, dim))
        keys = keys + SPREAD * torch.randn(heads, count, dim, generator=generator)
        yield Slots(keys[None], torch.randn(1, heads, count, dim, generator=generator))


def measure(
    sketch: Sketch, n: int, dim: int, seed: int, heads: int = 1, clusters: int | None = None
) -> dict[str, Any]:
    """Time one stream through a sketch, without the time to generate the data."""
    seconds = 0.0
    clusters = math.isqrt(n - 1) + 1 if clusters is None else clusters
    for chunk in stream(n, clusters, dim, heads, seed):
        start = time.perf_counter()
        sketch.extend(chunk)
        seconds += time.perf_counter() - start
    queries = torch.randn(1, heads, 1, dim, generator=torch.Generator().manual_seed(seed + 1))
    answers = []
    for _ in range(7):
        start = time.perf_counter()
        attend(queries, sketch.slots)
        answers.append(time.perf_counter() - start)
    return {
        "sketch": sketch.name,
        "n": n,
        "bytes": sketch.nbytes(),
        "slots": sketch.slots.count,
        "update_us_per_token": round(1e6 * seconds / n, 3),
        "query_us": round(1e6 * sorted(answers)[3], 1),
    }


def slope(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Least-squares slope and intercept of y over x, and R^2."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    across = sum((x - mean_x) ** 2 for x, _ in points)
    both = sum((x - mean_x) * (y - mean_y) for x, y in points)
    up = sum((y - mean_y) ** 2 for _, y in points)
    b = both / across
    return b, mean_y - b * mean_x, both**2 / (across * up) if up else 1.0


def exponents(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found = {}
    for name in dict.fromkeys(r["sketch"] for r in results):
        rows = [r for r in results if r["sketch"] == name]
        found[name] = {
            key: round(slope([(math.log(r["n"]), math.log(r[key])) for r in rows])[0], 3)
            for key in ("bytes", "update_us_per_token", "query_us")
        }
        per_doubling, _, fit = slope([(math.log2(r["n"]), r["bytes"]) for r in rows])
        found[name]["bytes_per_doubling"] = round(per_doubling)
        found[name]["log2_fit_r2"] = round(fit, 4)
        steps = [(b["bytes"] - a["bytes"]) / math.log2(b["n"] / a["n"]) for a, b in pairwise(rows)]
        found[name]["largest_step_per_doubling"] = round(max(steps, default=0.0))
    return found


def figure(results: list[dict[str, Any]], path: Path) -> None:
    """Draw bytes and time against n, log-log."""
    fig, (left, right) = subplots(2, 9.5, 4)
    names = dict.fromkeys(r["sketch"] for r in results)
    for name, marker in zip(names, "os^Dv<>Px", strict=False):
        rows = [r for r in results if r["sketch"] == name]
        n = [r["n"] for r in rows]
        left.loglog(n, [r["bytes"] for r in rows], marker=marker, label=name)
        right.loglog(n, [r["update_us_per_token"] for r in rows], marker=marker, label=name)
    n = sorted({r["n"] for r in results})
    exact = [2 * 4 * DIM * x for x in n]
    left.loglog(n, exact, "k--", label=f"exact cache, head_dim {DIM}")
    left.set(title="bytes of one KV head", xlabel="tokens", ylabel="bytes")
    right.set(title="time to take in a token", xlabel="tokens", ylabel="microseconds")
    for axes in (left, right):
        axes.grid(True, which="major", alpha=0.3)
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    write(fig, path)


def main(
    sketches: Annotated[str, typer.Option(help="Comma-separated sketches.")] = ",".join(SKETCHES),
    smallest: Annotated[int, typer.Option(help="Tokens of the shortest stream.")] = 1024,
    largest: Annotated[int, typer.Option(help="Tokens of the longest stream.")] = 1 << 20,
    million: Annotated[bool, typer.Option(help="Also time 10^6 tokens x 8 heads.")] = True,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure (.svg or .png).")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.growth --largest 65536 --json"""
    console = Console(stderr=True)
    names = sketches.split(",")
    for name in names:
        if name not in SKETCHES:
            raise typer.BadParameter(f"--sketches {name!r} must be one of {', '.join(SKETCHES)}")
    if not 1 <= smallest <= largest:
        raise typer.BadParameter(f"--smallest {smallest} must be from 1 to --largest {largest}")
    lengths = []
    while smallest <= largest:
        lengths.append(smallest)
        smallest *= 4
    results = []
    jobs = [(name, n) for n in lengths for name in names]
    for name, n in track(jobs, "streams", console=console):
        dim, make = SKETCHES[name]
        results.append(measure(make(n), n, dim, seed))
    result: dict[str, Any] = {"command": "growth", "results": results}
    result["exponents"] = exponents(results) if len(lengths) > 1 else {}
    if million:
        with console.status("SubGen, 10^6 tokens, 8 heads"):
            sketch = SubGen(DELTA, s=512, t=8)
            row = measure(sketch, 1_000_000, DIM, seed, heads=8, clusters=1000)
        row["seconds"] = round(row["update_us_per_token"] * row["n"] / 1e6, 1)
        result["million"] = row
    for name, found in result["exponents"].items():
        console.print(name, found)
    settings = {"seed": seed, "chunk": CHUNK, "head_dim": DIM, "threads": torch.get_num_threads()}
    result |= {**settings, **environment()}
    save(result, out)
    if plot is not None:
        figure(results, plot)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
