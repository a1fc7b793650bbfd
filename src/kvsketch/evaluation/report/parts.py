"""The parts of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsketch.evaluation.report.figures import Figure


@dataclass(frozen=True)
class Grid:
    """A small table: the first column names its rows."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a page that is about one run."""

    title: str
    note: str
    figures: Sequence[Figure] = ()
    grids: Sequence[Grid] = ()
