"""A progress bar on standard error, so that standard output stays for results."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvsketch.evaluation.runner.sweep import Runner, Sweep


def run_with_progress(sweep: Sweep, runner: Runner | None = None) -> None:
    """Runs what is left of `sweep`; the bar counts answers, resumed ones included."""
    jobs = sweep.jobs()  # its errors are to be read without a bar around them
    total, left = sweep.total(), sweep.remaining()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as progress:
        bar = progress.add_task("answers", total=total, completed=total - left)
        sweep.run(jobs, runner, lambda record: progress.advance(bar))
