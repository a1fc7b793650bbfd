"""A progress bar on standard error, so that standard output stays for results."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils import logging

from kvsketch.evaluation.session import Session


def run_with_progress(session: Session) -> None:
    """Runs what is left of `session`; the bar counts answers, resumed ones included."""
    logging.disable_progress_bar()  # a second bar, for the weights
    session.prepare()  # its errors are to be read without a bar around them
    total, left = session.total(), session.remaining()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as progress:
        bar = progress.add_task("answers", total=total, completed=total - left)
        session.run(lambda outcome: progress.advance(bar))
