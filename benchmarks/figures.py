"""How every figure is set up and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def subplots(columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure and its axes side by side, without a display; the same bytes every time."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "kvsketch"
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(
        1, columns, figsize=(width, height), layout="constrained", squeeze=False
    )
    return fig, list(axes[0])


def write(fig: Any, path: Path) -> None:
    """Save as .svg or .png."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
