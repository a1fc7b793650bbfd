"""How the charts of the report look: colours, marks and the settings of matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvsketch.errors import UnsupportedError
from kvsketch.evaluation.report.svg import GRID, INK

#: Colours that can be distinguished, and seen, on white and on black.
COLORS = (
    "#1f77b4",
    "#d2691e",
    "#2a9d5c",
    "#c2413b",
    "#9467bd",
    "#1a9aa8",
    "#d6519b",
    "#8c7330",
    "#5b6ee1",
    "#6b7a8f",
    "#7a8b00",
)
#: Marks of points, as matplotlib names them.
MARKS = "osv^DP*X<>"
_STYLE: Any = {
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": GRID,
    "legend.frameon": False,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "kvsketch",
    "text.color": INK,
    "text.parse_math": False,  # a name may hold dollars
    "xtick.color": INK,
    "ytick.color": INK,
}


def require_matplotlib() -> None:
    """Raise UnsupportedError unless matplotlib can be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"kvsketch report needs matplotlib ({error}): pip install 'kvsketch[report]'"
        ) from error


@contextmanager
def style(changes: Any = None) -> Iterator[Callable[..., Any]]:
    """Set the style of the figures. Yields a function that makes a figure in it without pyplot."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    with rc_context({**_STYLE, **(changes or {})}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # browsers have more fonts
        yield lambda **size: Canvas(layout="constrained", **size)
