"""Functions with which all benchmarks set up and write their figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def subplots(
    columns: int, width: float, height: float, stacked: bool = False
) -> tuple[Any, list[Any]]:
    """A figure and its axes, side by side or stacked with a common x axis. It needs no display, and
    the same data give the same file."""
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
    """Save the figure as .svg or .png."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
