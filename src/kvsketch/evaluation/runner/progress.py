"""Progress on standard error, so that standard output stays for results: a bar on a terminal, lines
in a log."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvsketch.evaluation.runner.store import Record
from kvsketch.evaluation.runner.sweep import Runner, Sweep

#: seconds between two lines
EVERY = 15.0


def run_with_progress(sweep: Sweep, runner: Runner | None = None) -> None:
    """Runs what is left of `sweep`; the bar counts answers, resumed ones included. Where standard
    error is no terminal there are lines instead: one at the start, one after an answer whenever
    ``EVERY`` seconds have passed since the last."""
    jobs = sweep.jobs()  # its errors are to be read without a bar around them
    total, left = sweep.total(), sweep.remaining()
    console = Console(stderr=True)
    if not console.is_terminal:
        sweep.run(jobs, runner, _in_lines(console, total, total - left))
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        bar = progress.add_task("answers", total=total, completed=total - left)
        sweep.run(jobs, runner, lambda record: progress.advance(bar))


def _in_lines(console: Console, total: int, before: int) -> Callable[[Record], None]:
    """What counts answers and says now and then how many there are."""
    start = said = time.monotonic()
    done = before

    def say(rest: str = "") -> None:
        console.print(f"{done} of {total} answers{rest}", highlight=False, soft_wrap=True)

    def count(record: Record) -> None:
        nonlocal done, said
        done += 1
        now = time.monotonic()
        if done < total and now - said >= EVERY:
            said = now
            left = (now - start) / (done - before) * (total - done)
            say(f", {now - start:,.0f} s so far, about {left:,.0f} s left")

    if before < total:
        say()
    return count
