"""Setting up and writing of all figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def subplots(
    columns: int, width: float, height: float, stacked: bool = False
) -> tuple[Any, list[Any]]:
    """A figure and its axes side by side (or above each other, sharing x), without a display; the
    same bytes every time."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "kvsketch"
    import matplotlib.pyplot as plt

    rows, columns = (columns, 1) if stacked else (1, columns)
    fig, axes = plt.subplots(
        rows,
        columns,
        figsize=(width, height),
        layout="constrained",
        squeeze=False,
        sharex=stacked,
    )
    return fig, list(axes.flat)


def write(fig: Any, path: Path) -> None:
    """Save as .svg or .png."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
