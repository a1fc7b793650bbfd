"""Answers per second of one and of two local Ray workers.

    python -m benchmarks.ray_throughput --json

The packaged model, LongEval cases, the sweep that ``kvsketch eval --ray local`` runs. A worker has
one core, whichever number of them there is. Timed from the first record to the last, so that the
start of Ray and of the models is left out (it is printed). In pairs, one after the other.
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
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.evaluation.runner.ray_runner import RayRunner
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import make_setups
from kvsketch.evaluation.runner.sweep import Sweep
from kvsketch.evaluation.tasks import Options, make_tasks


def rate(workers: int, cases: int, lines: int, seed: int) -> tuple[float, float]:
    """Answers per second after the first ones, and seconds until the first."""
    tasks = make_tasks(["longeval"], Options(lines=[lines], num_cases=cases, seed=seed))
    setups = make_setups(["exact", "snapkv"], [0.5])
    times: list[float] = []
    with Sweep.open("packaged", tasks, setups, Settings(), None) as sweep:
        runner = RayRunner("local", sweep.model, sweep.settings, workers, threads=1)
        start = time.perf_counter()
        sweep.run(sweep.jobs(), runner, lambda _: times.append(time.perf_counter()))
    # the first answer of every worker pays for its start
    return (len(times) - workers) / (times[-1] - times[workers - 1]), times[0] - start


def main(
    cases: Annotated[int, typer.Option(help="Cases per run.")] = 30,
    lines: Annotated[int, typer.Option(help="Lines per record.")] = 100,
    pairs: Annotated[int, typer.Option(help="Runs of each.")] = 3,
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
