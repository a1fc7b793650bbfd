"""The charts of the report: line charts and heat maps, as SVG that a page's style sheet can colour.

The charts are drawn by matplotlib, which belongs to the extra ``report`` and is imported when a
figure is drawn. ``svg`` turns its output into a part of a page. A library that draws in the browser
would replace that module, which is a hundred lines. This was tried with plotly 7.1 on one chart of
scores with intervals: a page with it is 4.8 MB, nearly all of it plotly's own script. A report of
15 figures is 0.3 MB, and one such chart 6 kB. The report needs no script, its text can be selected,
every point has a title for a screen reader, and its colours follow the reader's dark mode.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvsketch.evaluation.report.style import COLORS, MARKS, style
from kvsketch.evaluation.report.svg import GRID, INK, described, for_page
from kvsketch.writing import save_bytes

_DPI = 120


@dataclass(frozen=True)
class Series:
    """The points of one method. ``low`` and ``high`` are the ends of intervals, and ``tips`` the
    titles of the points. A ``level`` is drawn across the whole chart. Points that are not
    ``joined`` have no line between them."""

    name: str
    method: str
    x: Sequence[float]
    y: Sequence[float]
    tips: Sequence[str]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    level: bool = False
    joined: bool = True


@dataclass(frozen=True)
class Figure:
    """A figure and its description in words.

    Attributes:
        name: the name of its files, unique on a page and valid as an id.
        title: one line.
        text: a description of the whole figure.
        svg: the content of the SVG file.
        inline: the same SVG for a page: with unique ids, without colours (the page sets them), and
            with its styles in ``Sketchbook.rules``.
        png: the content of the PNG file, empty unless PNG was requested.
        method, task: by which the filters of the page hide the figure, if it shows only one.
        wide: whether it is too wide for a telephone and has to be scrolled.
    """

    name: str
    title: str
    text: str
    svg: str
    inline: str
    png: bytes = b""
    method: str = ""
    task: str = ""
    wide: bool = False


@dataclass
class Sketchbook:
    """Draws the figures of one page.

    Args:
        methods: all methods of the page, in order. Each keeps its colour and mark on the page.
        png: whether figures are also drawn as PNG.
    """

    methods: Sequence[str]
    png: bool = False
    _names: set[str] = field(default_factory=set)
    _styles: dict[str, str] = field(default_factory=dict)

    def color(self, method: str) -> str:
        """The colour of a method's lines. The exact cache has the colour of the axes."""
        if method == "exact" or method not in self.methods:
            return INK
        others = [name for name in self.methods if name != "exact"]
        return COLORS[others.index(method) % len(COLORS)]

    def lines(
        self,
        title: str,
        text: str,
        series: Sequence[Series],
        *,
        xlabel: str,
        ylabel: str,
        top: float | None = None,
        log: bool = False,
        labels: Sequence[str] = (),
        task: str = "",
    ) -> Figure:
        """Draw a line with intervals for each series. Series of one method look alike.

        Args:
            top: the highest possible score. The y axis then fits the scores and intervals below it
                (``_fitted``). None: the axis starts at 0 and ends above all points.
            log: whether the y axis is logarithmic. All points must then be above 0.
            labels: of the places 0, 1, ... on the x axis. If given, no lines are drawn between
                them.
        """
        with style() as new:
            width = max(4.4, 1.5 + 0.45 * len(labels))
            fig = new(figsize=(width, 3.0 + 0.2 * math.ceil(len(series) / 3)))
            ax = fig.subplots()
            handles = self._plot(ax, series, bool(labels))
            ax.set(xlabel=xlabel, ylabel=ylabel)
            highest = top or 1.1 * max((y for s in series for y in s.y), default=1.0) or 1.0
            ends = [y for s in series for y in (*s.y, *s.low, *s.high)] if top else []
            if log:
                least = min((y for s in series for y in s.y), default=0.1)
                ax.set_yscale("log")
                _plain_ticks(ax.yaxis, few=highest > 1000 * least)
                ax.set_ylim(0.6 * least, 1.6 * highest)  # an interval may be cut below and above
            elif ends and max(ends) > min(ends):
                ax.set_ylim(*_fitted(min(ends), max(ends), highest))
            else:
                ax.set_ylim(-0.03 * highest, 1.04 * highest)  # so that marks at 0 are not cut
            if labels:
                ax.set_xticks(range(len(labels)), labels, rotation=40, ha="right")
                ax.set_xlim(-0.6, len(labels) - 0.4)
            else:
                farthest = max((x for s in series for x in s.x if not s.level), default=100.0)
                ax.set_xlim(0, 1.15 * farthest or 1.0)
            named = [f" {s.name}" if s.name.startswith("_") else s.name for s in series]
            fig.legend(handles, named, loc="outside lower center", ncols=3, fontsize=8)
            tips = {f"series-{i}": (s.method, s.tips) for i, s in enumerate(series)}
            return self._finish(fig, title, text, tips, task=task, wide=len(labels) > 9)

    def _plot(self, ax: Any, series: Sequence[Series], apart: bool) -> list[Any]:
        handles = []
        # Intervals at the same place are drawn side by side.
        most = max((x for s in series for x in s.x if not s.level), default=1.0) or 1.0
        step = 0.6 / len(series) if apart else 0.012 * most
        places = [i for i, s in enumerate(series) if not s.level]
        for i, s in enumerate(series):
            rank = self.methods.index(s.method) if s.method in self.methods else 0
            look: dict[str, Any] = {"color": self.color(s.method), "gid": f"series-{i}"}
            look |= {"marker": MARKS[rank % len(MARKS)], "ms": 5, "lw": 1.6}
            if s.level:
                ax.axhspan(s.low[0], s.high[0], color=look["color"], alpha=0.08, lw=0)
                look |= {"marker": "", "ls": "--", "lw": 1.2}
                handles.append(ax.axhline(s.y[0], **look))
                continue
            shift = (places.index(i) - (len(places) - 1) / 2) * step if s.low or apart else 0.0
            x = [place + shift for place in s.x]
            dashed = "none" if apart or not s.joined else ":" if s.name != s.method else "-"
            handles += ax.plot(x, s.y, ls=dashed, zorder=3, **look)
            if s.low:
                bars = {"color": look["color"], "lw": 1, "alpha": 0.65}
                ax.vlines(x, s.low, s.high, gid=f"series-{i}-bars", **bars)
        return handles

    def heat(
        self,
        title: str,
        text: str,
        cells: Mapping[tuple[int, int], tuple[float, str]],
        *,
        rows: Sequence[str],
        columns: Sequence[str],
        xlabel: str,
        ylabel: str,
        method: str = "",
        task: str = "",
    ) -> Figure:
        """Draw scores in [0, 1] by row and column, each with a title."""
        from matplotlib import colormaps
        from matplotlib.patches import Rectangle

        with style() as new:
            fig = new(
                figsize=(max(2.6, 1.1 + 0.55 * len(columns)), max(1.8, 0.9 + 0.36 * len(rows)))
            )
            ax = fig.subplots()
            ax.grid(False)
            tips = {}
            for i in range(len(rows)):
                for j in range(len(columns)):
                    value, tip = cells.get((i, j), (None, "not answered"))
                    gid = f"cell-{i}-{j}"
                    tips[gid] = ("", [tip])
                    corner = (j - 0.5, i - 0.5)
                    if value is None:
                        ax.add_patch(Rectangle(corner, 1, 1, fc="none", ec=GRID, gid=gid))
                        continue
                    shade = colormaps["cividis"](value)
                    ax.add_patch(Rectangle(corner, 1, 1, fc=shade, ec="none", gid=gid))
                    dark = value < 0.55
                    ax.text(
                        *(j, i),
                        f"{value:g}" if value in (0, 1) else f"{value:.2f}".removeprefix("0"),
                        color="#ffffff" if dark else "#000000",
                        ha="center",
                        va="center",
                        fontsize=8,
                        gid=f"text-{i}-{j}",
                    )
            ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
            ax.set(xlabel=xlabel, ylabel=ylabel)
            ax.set_xticks(range(len(columns)), columns)
            ax.set_yticks(range(len(rows)), rows)
            ax.tick_params(length=0)
            ax.spines[:].set_visible(False)
            return self._finish(fig, title, text, tips, method=method, task=task)

    def take(self, title: str, text: str, draw: Callable[[], Any]) -> Figure:
        """Take a matplotlib figure that ``draw`` makes."""
        with style({"text.parse_math": True, "axes.grid": False}):  # powers of ten on log axes
            return self._finish(draw(), title, text, {}, wide=True)

    def _finish(
        self,
        fig: Any,
        title: str,
        text: str,
        tips: Mapping[str, tuple[str, Sequence[str]]],
        **rest: Any,
    ) -> Figure:
        name = self._name(title)
        file = io.StringIO()
        # Metadata is left out because it would contain the date.
        fig.savefig(
            file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
        root = described(file.getvalue(), f"f{len(self._names)}", title, text, tips)
        inline = ElementTree.tostring(for_page(root, self._styles), encoding="unicode")
        background = ElementTree.Element("rect", width="100%", height="100%", fill="#ffffff")
        root.insert(2, background)
        root.set("xmlns", "http://www.w3.org/2000/svg")
        svg = ElementTree.tostring(root, encoding="unicode") + "\n"
        png = io.BytesIO()
        if self.png:
            fig.set_layout_engine("none")  # which takes as long as drawing; all have their places
            fig.savefig(png, format="png", facecolor="white", dpi=_DPI, metadata={"Title": title})
        return Figure(name, title, text, svg, inline, png.getvalue(), **rest)

    @property
    def rules(self) -> str:
        """The CSS of the figures drawn so far."""
        return "\n".join(f".{name} {{ {style} }}" for style, name in self._styles.items())

    def _name(self, title: str) -> str:
        base = re.sub(r"[^a-z0-9]+", "-", title.lower().replace("%", "pct")).strip("-")[:80]
        name, number = base or "figure", 1
        while name in self._names:
            number += 1
            name = f"{base or 'figure'}-{number}"
        self._names.add(name)
        return name


def _fitted(least: float, most: float, top: float) -> tuple[float, float]:
    """The ends of an axis that fits scores and their intervals closely. It starts at 0 unless half
    of it would then be empty."""
    room = 0.06 * (most - least if least > most / 2 else most)
    bottom = least - room if least > most / 2 else -0.03 * most
    return bottom, min(most + room, 1.04 * top)


def _plain_ticks(axis: Any, few: bool) -> None:
    """Label an axis with 0.01, 0.02, 0.05, ... (``few``: 0.01, 0.1, ...) instead of powers of ten,
    which would be drawn as formulas."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1,) if few else (1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def write(figures: Sequence[Figure], folder: Path) -> list[str]:
    """Write every figure as .svg and .png, and return the names of the files.

    Raises:
        InputError: a file cannot be written.
    """
    names = []
    for figure in figures:
        for ending, data in (("svg", figure.svg.encode()), ("png", figure.png)):
            path = folder / f"{figure.name}.{ending}"
            save_bytes(path, data, str(path))
            names.append(path.name)
    return names
