"""The points of figures in words."""

from __future__ import annotations

from collections.abc import Sequence

from kvsketch.evaluation.report.figures import Series
from kvsketch.evaluation.report.summary import Row, score_text
from kvsketch.evaluation.runner.runs import is_exact
from kvsketch.evaluation.runner.scales import scale_of

#: The most points that a figure's text lists one by one.
_TOLD = 60


def tip(row: Row) -> str:
    """The title of the point of a row."""
    name = "exact" if is_exact(row) else f"{row['series']}, {row['goal']}"
    return (
        f"{name}: {score_text(row, scale_of(row['task']))}, {row['kept']:.1%} of the bytes, "
        f"{row['cases']} cases"
    )


def told(rows: Sequence[Row]) -> str:
    """A description of rows in words."""
    return sentence([tip(row) for row in rows])


def sentence(tips: Sequence[str]) -> str:
    """All titles, or how many there are."""
    if len(tips) > _TOLD:
        return f"{len(tips)} points; all numbers are in the table of all rows."
    return "; ".join(tips) + "."


def listed(series: Sequence[Series]) -> str:
    """A description of series in words."""
    return sentence([tip for s in series for tip in s.tips])
