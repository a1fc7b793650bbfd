"""Runs a sweep, here or on a cluster, and prints its results.

torch and transformers are imported inside, as in ``kvsketch.cli``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from kvsketch.cli.exit_codes import INTERRUPTED
from kvsketch.cli.printing import console_for

if TYPE_CHECKING:
    from kvsketch.evaluation.runner.preset_run import PresetRun
    from kvsketch.evaluation.runner.settings import Settings
    from kvsketch.evaluation.runner.sweep import Runner, Sweep


def runner_on(ray: tuple[str, int, float] | None, model: str, settings: Settings) -> Runner | None:
    """The runner of the cases; None means this process."""
    if ray is None:
        return None
    from kvsketch.evaluation.runner.loading import resolve_model
    from kvsketch.evaluation.runner.ray_runner import RayRunner

    address, workers, gpus = ray
    return RayRunner(address, resolve_model(model), settings, workers, gpus)


def run_sweep(
    sweep: Sweep,
    command: str,
    as_json: bool,
    settings: Mapping[str, Any],
    seed: int,
    runner: Runner | None = None,
    plan: PresetRun | None = None,
) -> None:
    """Runs `sweep` with a progress bar, then prints table and JSON, also when interrupted; for a
    preset, also the paper's numbers."""
    from kvsketch.evaluation.report.report import dumps, report, results_tables
    from kvsketch.evaluation.runner.progress import run_with_progress

    interrupted = False
    with sweep.store:
        try:
            run_with_progress(sweep, runner)
        except KeyboardInterrupt:
            interrupted = True
    rows = sweep.rows()
    console = console_for(as_json)
    for table in results_tables(rows, console.width):
        console.print()
        console.print(table)
    console.print(
        "budget: the share of the exact cache's bytes, or the tokens' bytes per KV head, that a "
        "method may keep; kept: the bytes that it does, with masses and scores (8 bytes a slot "
        "where a method has them).",
        style="dim",
        highlight=False,
    )
    more: dict[str, Any] = {}
    if plan is not None:
        from kvsketch.evaluation.report.preset_report import show

        more = show(plan, sweep, console)
    if interrupted:
        _say_interrupted(sweep)
        more["interrupted"] = True
    if as_json:
        print(dumps(report(command, rows, settings=settings, seed=seed, **more)))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _say_interrupted(sweep: Sweep) -> None:
    done = sweep.total() - sweep.remaining()
    kept = (
        f"stored in {sweep.store.path}; the same command resumes from there"
        if sweep.store.path
        else "not stored: give --out FILE to be able to resume"
    )
    print(f"interrupted: {done} of {sweep.total()} answers are done, {kept}", file=sys.stderr)
