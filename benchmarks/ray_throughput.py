"""Answers per second of two local Ray workers relative to one.

    python -m benchmarks.ray_throughput --json

The sweep is that of ``kvsketch eval --ray local`` with ``longeval-one-head`` on LongEval cases.
Every worker has one thread, whatever their number. The first answer of every worker is left out,
because it includes the start of Ray and the loading of the model (``seconds_to_start``). Runs with
one and with two workers alternate. ``ratio`` is the median of the paired ratios.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from benchmarks import options
from benchmarks.page import save
from benchmarks.prompts import ONE_HEAD
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.evaluation.runner.ray_runner import RayRunner
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import make_setups
from kvsketch.evaluation.runner.sweep import Sweep
from kvsketch.evaluation.tasks import Options, make_tasks


def rate(workers: int, cases: int, lines: int, seed: int) -> tuple[float, float]:
    """Answers per second after each worker's first one, and seconds until the first answer."""
    tasks = make_tasks(["longeval"], Options(lines=[lines], num_cases=cases, seed=seed))
    setups = make_setups(["exact", "snapkv"], [0.5])
    times: list[float] = []
    with Sweep.open(ONE_HEAD, tasks, setups, Settings(), None) as sweep:
        runner = RayRunner("local", sweep.model, sweep.settings, workers, threads=1)
        start = time.perf_counter()
        sweep.run(sweep.jobs(), runner, lambda _: times.append(time.perf_counter()))
    # The first answer of every worker includes its start.
    return (len(times) - workers) / (times[-1] - times[workers - 1]), times[0] - start


def main(
    cases: Annotated[int, typer.Option(help="Cases per run.")] = 30,
    lines: Annotated[int, typer.Option(help="Lines per record.")] = 100,
    pairs: Annotated[int, typer.Option(help="Runs of each number of workers.")] = 3,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.ray_throughput --cases 10 --pairs 1 --json"""
    console = Console(stderr=True)
    options.positive(cases=cases, lines=lines, pairs=pairs)
    results: list[dict[str, Any]] = []
    for pair in track(range(pairs), "pairs", console=console):
        found = {workers: rate(workers, cases, lines, seed) for workers in (1, 2)}
        results.append(
            {
                "pair": pair,
                "ratio": round(found[2][0] / found[1][0], 3),
                "seconds_to_start": {str(w): round(s, 1) for w, (_, s) in found.items()},
            }
        )
    ratios = sorted(r["ratio"] for r in results)
    result = {"command": "ray_throughput", "ratio": ratios[len(ratios) // 2], "results": results}
    result |= {"cases": cases, "lines": lines, "seed": seed, **environment()}
    console.print(f"two workers over one: {result['ratio']} ({ratios[0]} - {ratios[-1]})")
    save(result, out)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
