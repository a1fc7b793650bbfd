"""Line and bar charts as SVG, written by hand: text stays text, and the colours follow the reader's
light or dark scheme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

#: Classes of lines and bars with their colours on white and on black.
COLORS = {
    "ours": ("#0550ae", "#79b8ff"),
    "again": ("#b3261e", "#ff8a80"),
    "zip": ("#116329", "#56d364"),
    "zip4": ("#116329", "#56d364"),
    "grad": ("#8250df", "#d2a8ff"),
    "layer": ("#7d4e00", "#e3b341"),
    "gray": ("#59636e", "#9aa4af"),
    "brown": ("#7d4e00", "#e3b341"),
}
DASHED = ("zip4", "layer")
BOLD = ("ours", "again")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, ROW = 664, 236, 48, 290, 40, 17


@dataclass(frozen=True)
class Line:
    """A method's accuracies by the share of the bytes that it keeps, most bytes first. Without
    ``start`` the line does not begin at the exact cache."""

    label: str
    style: str
    points: Sequence[tuple[float, float]]
    start: bool = True


def lines(title: str, drawn: Sequence[Line], exact: float = 1.0) -> str:
    """A panel of lines, its corner at (0, 0). Fewer bytes are on the right; every line has its
    label and its last accuracy at its end."""
    right, bottom = WIDTH - RIGHT, HEIGHT - 34
    shares = sorted({share for line in drawn for share, _ in line.points}, reverse=True)
    last = math.log(min(shares))

    def x(share: float) -> float:
        return LEFT + (right - LEFT) * math.log(share) / last

    def y(accuracy: float) -> float:
        return bottom - (bottom - TOP) * accuracy

    parts = [f'<text class="title" x="{LEFT - 32}" y="18">{escape(title)}</text>']
    for tick in (0, 0.5, 1):
        parts.append(
            f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{right}"/>'
            f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.0%}</text>'
        )
    for share in _ticks(shares, x):
        parts.append(
            f'<path class="grid" d="M{x(share):.1f} {bottom}v5"/>'
            f'<text x="{x(share):.1f}" y="{bottom + 18}" text-anchor="middle">{share:.0%}</text>'
        )
    parts.append(f'<circle class="exact" cx="{x(1):.1f}" cy="{y(exact):.1f}" r="4"/>')
    for line in reversed(drawn):
        whole = [(1.0, exact)] if line.start else []
        path = "L".join(f"{x(b):.1f} {y(a):.1f}" for b, a in (*whole, *line.points))
        dots = "".join(
            f'<circle cx="{x(b):.1f}" cy="{y(a):.1f}" r="3"><title>{escape(line.label)}, '
            f"{b:.0%} of the bytes: {a:.0%}</title></circle>"
            for b, a in line.points
        )
        parts.append(f'<g class="{line.style}"><path d="M{path}"/>{dots}</g>')
    ends = sorted(drawn, key=lambda line: -line.points[-1][1])
    places = apart([y(line.points[-1][1]) for line in ends], TOP, bottom)
    for line, place in zip(ends, places, strict=True):
        share, score = line.points[-1]
        at = "" if share == shares[-1] else f" at {share:.0%}"
        parts.append(
            f'<path class="lead" d="M{x(share) + 5:.1f} {y(score):.1f}L{right + 18} {place:.1f}"/>'
            f'<text class="label {line.style}" x="{right + 22}" y="{place + 4:.1f}">'
            f"{escape(line.label)} {score:.0%}{at}</text>"
        )
    return "\n".join(parts)


def _ticks(shares: Sequence[float], x: object) -> list[float]:
    """The whole cache and the shares that leave room for each other's labels."""
    assert callable(x)
    kept = [1.0]
    for share in [s for s in reversed(shares) if s < 1]:
        if all(abs(x(share) - x(other)) > 38 for other in kept):
            kept.append(share)
    return kept


def apart(places: Sequence[float], least: float, most: float) -> list[float]:
    """The places of labels near the ends of their lines, ``ROW`` apart, in the given order."""
    moved = list(places)
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + ROW)
    over = max(0.0, moved[-1] - most) if moved else 0.0
    moved = [place - over for place in moved]
    for i in range(len(moved) - 2, -1, -1):
        moved[i] = min(moved[i], moved[i + 1] - ROW)
    return [max(place, least + i * ROW) for i, place in enumerate(moved)]


def bars(title: str, drawn: Sequence[tuple[str, str, float]]) -> tuple[str, int]:
    """A panel of bars with a label, a class and a value each, and its height. A line marks 1."""
    left, width = 274, WIDTH - 274 - 30
    highest = max(1.0, *(value for _, _, value in drawn))
    bottom = TOP + 24 * len(drawn)
    one = left + width / highest
    parts = [
        f'<text class="title" x="16" y="18">{escape(title)}</text>',
        f'<path class="grid" d="M{one:.1f} {TOP - 8}V{bottom}"/>',
        f'<text x="{one:.1f}" y="{bottom + 16}" text-anchor="middle">1</text>',
    ]
    for i, (label, style, value) in enumerate(drawn):
        top = TOP + 24 * i
        parts.append(
            f'<text class="label {style}" x="{left - 10}" y="{top + 13}" text-anchor="end">'
            f'{escape(label)} {value:.2f}</text><rect class="{style}" x="{left}" y="{top}" '
            f'width="{width * value / highest:.1f}" height="17"/>'
        )
    return "\n".join(parts), bottom + 26


def picture(described: str, panels: Sequence[tuple[str, int]], axis: str = "") -> str:
    """An SVG file of panels with their heights, one below the other, and the name of the x axis."""
    body, top = [], 0
    for drawn, height in panels:
        body.append(f'<g transform="translate(0 {top})">\n{drawn}\n</g>')
        top += height
    if axis:
        middle = (LEFT + WIDTH - RIGHT) / 2
        body.append(f'<text x="{middle}" y="{top + 10}" text-anchor="middle">{escape(axis)}</text>')
        top += 22
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" '
        f'height="{top}" role="img" aria-labelledby="t">\n<title id="t">{escape(described)}</title>'
        f'\n<style>\n{_style()}\n</style>\n<rect width="{WIDTH}" height="{top}" class="back"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _style() -> str:
    """The style sheet, for a light and a dark page."""

    def colors(side: int, back: str, ink: str, soft: str, grid: str) -> str:
        return "\n".join(
            [
                f".back {{ fill: {back}; }} text {{ fill: {soft}; }} .title {{ fill: {ink}; }}",
                f".grid, .lead {{ stroke: {grid}; }} .exact {{ fill: {ink}; }}",
                *(
                    f".{name} path {{ stroke: {pair[side]}; }} "
                    f".{name} circle, .label.{name}, rect.{name} {{ fill: {pair[side]}; }}"
                    for name, pair in COLORS.items()
                ),
            ]
        )

    def each(form: str, names: Sequence[str]) -> str:
        return ", ".join(form.format(name) for name in names)

    light = colors(0, "#ffffff", "#1f2328", "#59636e", "#d8dee4")
    dark = colors(1, "#0d1117", "#e6edf3", "#9aa4af", "#343b44")
    return (
        "text { font: 14px system-ui, sans-serif; } .title { font-weight: 600; }\n"
        "path { fill: none; stroke-width: 1.6; } .grid, .lead { stroke-width: 1; }\n"
        f"{each('.{} path', BOLD)} {{ stroke-width: 3; }}\n"
        f"{each('.label.{}', BOLD)} {{ font-weight: 700; }}\n"
        f"{each('.{} path', DASHED)} {{ stroke-dasharray: 5 4; }}\n"
        f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"
    )
