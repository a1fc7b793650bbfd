"""Figures of the numbers from ``inspection``, each with a caption.

matplotlib belongs to the extra ``report`` and is imported when a figure is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from kvsketch.evaluation.inspection.readings import (
    CENTERS,
    KEPT,
    LAST,
    RECENT,
    SINK,
    TOLERANCES,
)
from kvsketch.writing import save_bytes

#: Dots per inch of .png, and of the parts of .svg that are images.
_DPI = 100
_KEYS, _VALUES = "tab:blue", "tab:orange"
#: Line styles that can be distinguished without colour.
_MARKS = "osv^DP*X"


def draw(result: Mapping[str, Any], folder: Path) -> dict[str, dict[str, str]]:
    """Write every figure as .svg and .png. The same result always gives the same bytes.

    Args:
        result: the return value of ``inspection.inspect_model``. The t-SNE is drawn if it has one.
        folder: an existing folder.

    Returns:
        For each name of a figure: "svg" and "png" (file names in the folder), and "caption" (the
        text alternative).

    Raises:
        InputError: a file cannot be written.
    """
    return {
        name: {**_write(figure(result), folder, name, text), "caption": text}
        for name, figure in FIGURES.items()
        if name != "tsne" or result["tsne"]
        for text in [caption(name, result)]
    }


def caption(name: str, result: Mapping[str, Any]) -> str:
    """A description of a figure and its interpretation."""
    more = result["readings"].get(name, "")
    if name == "errors":
        more = f"{more} {result['readings']['tolerance']}"
    return f"{_SHOWN[name]} {more}".strip()


_SHOWN = {
    "norms": (
        "Norms of queries, keys and values by layer: shade is the share of tokens, the line the "
        "mean, small crosses the means of the heads and dots the largest; last, norm of query "
        "times norm of key times the scaling."
    ),
    "clusterability": (
        "Left: balls of a radius that cover all keys (values) of a head, as a share of the tokens, "
        "against the radius over the spread; a thin line is a layer, the thick one their mean. "
        "Right: the radius at which n/8 balls suffice, by layer; a dot is a head."
    ),
    "tsne": (
        "t-SNE of keys (above) and values (below) of every KV head of some layers, shaded from the "
        f"first token (dark) to the last (bright); crosses are the first {CENTERS} points of the "
        "greedy k-center traversal."
    ),
    "entropy": (
        f"Attention of the last {LAST} queries. Left: entropy over log n by layer and query head. "
        f"Middle: its share on the first {SINK} tokens, the last {RECENT} and the others. Right: "
        "share of the tokens that hold 90% of it, by layer; a dot is a head."
    ),
    "errors": (
        f"Left: relative attention error by layer at {KEPT:.0%} of the tokens, mean over heads. "
        "Right: share of the tokens that a tolerance needs, by layer."
    ),
}


def _norms(result: Mapping[str, Any]) -> Any:
    fig, axes = _axes(4, 12, 3.2)
    rows = result["layers"]
    labels = [row["layer"] for row in rows]
    for ax, kind in zip(axes, ("query", "key", "value"), strict=False):
        shown = [row["norms"][kind] for row in rows]
        shade = [[count / sum(x["counts"]) for count in x["counts"]] for x in shown]
        edges = [place - 0.5 for place in range(len(rows) + 1)]
        columns = [list(column) for column in zip(*shade, strict=True)]
        ax.pcolormesh(edges, shown[0]["edges"], columns, cmap="Greys", rasterized=True)
        ax.plot([x["mean"] for x in shown], color="tab:blue", label="mean")
        for place, x in enumerate(shown):
            ax.plot([place] * len(x["heads"]), x["heads"], "x", color="tab:blue", ms=3)
        ax.plot([x["max"] for x in shown], "o", color="tab:red", ms=4, label="largest")
        ax.set(title=f"{kind} norm", ylim=(0, 1.05 * shown[0]["edges"][-1]))
    score = [row["norms"]["score"] for row in rows]
    axes[3].plot([x["mean"] for x in score], color="tab:blue", label="mean")
    axes[3].plot([x["max"] for x in score], "o", color="tab:red", ms=4, label="largest")
    axes[3].set(title="|q| |k| scaling", ylim=(0, None))
    for ax in axes:
        _layers(ax, labels)
    axes[3].legend(fontsize=8)
    return fig


def _clusterability(result: Mapping[str, Any]) -> Any:
    fig, (left, right) = _axes(2, 9, 3.6)
    rows = result["layers"]
    for what, color, mark, shift in (("keys", _KEYS, "o", -0.15), ("values", _VALUES, "s", 0.15)):
        found = [row["clusterability"][what] for row in rows]
        for x in found:
            left.plot(x["radius"], x["shares"], color=color, lw=0.5, alpha=0.5)
        columns = zip(*(x["radius"] for x in found), strict=True)
        mean = [sum(column) / len(found) for column in columns]
        left.plot(mean, found[0]["shares"], color=color, marker=mark, ms=4, lw=2, label=what)
        for place, x in enumerate(found):
            right.plot([place + shift] * len(x["heads"]), x["heads"], mark, color=color, ms=4)
    left.set(yscale="log", xlabel="radius / spread", ylabel="balls / tokens", xlim=(0, None))
    left.set(title="balls that cover all")
    left.legend()
    right.set(title="radius / spread of n/8 balls", ylim=(0, None))
    _layers(right, [row["layer"] for row in rows])
    return fig


def _tsne(result: Mapping[str, Any]) -> Any:
    """Bands of up to ``_ACROSS`` heads of one layer, keys above values."""
    from matplotlib.figure import Figure

    pairs: dict[int, list[list[Any]]] = {}
    for view in result["tsne"]:
        seen = pairs.setdefault(view["layer"], [])
        if view["what"] == "keys":
            seen.append([])
        seen[-1].append(view)
    bands = [
        heads[start : start + _ACROSS]
        for heads in pairs.values()
        for start in range(0, len(heads), _ACROSS)
    ]
    columns = max(map(len, bands))
    side = 3 if columns <= 3 else 2
    fig = Figure(figsize=(side * columns, 2 * side * len(bands)), layout="constrained", dpi=_DPI)
    grid = fig.subplots(2 * len(bands), columns, squeeze=False)
    for ax in grid.flat:
        ax.set(xticks=[], yticks=[])
        ax.axis("off")
    for number, band in enumerate(bands):
        for column, pair in enumerate(band):
            for below, view in enumerate(pair):
                _scattered(grid[2 * number + below][column], view)
    return fig


#: The number of heads next to each other in the t-SNE.
_ACROSS = 8


def _scattered(ax: Any, view: Mapping[str, Any]) -> None:
    ax.axis("on")
    x, y = zip(*view["points"], strict=True)
    # Squares without anti-aliasing take a third of the bytes.
    flat = {"marker": "s", "linewidths": 0, "antialiased": False, "rasterized": True}
    ax.scatter(x, y, c=view["positions"], s=4, cmap="viridis", **flat)
    picked = [view["points"][i] for i in view["centers"]]
    ax.plot(*zip(*picked, strict=True), "x", color="tab:red", ms=7, mew=1.5)
    ax.set_title(f"{view['what']}, layer {view['layer']}, head {view['head']}", fontsize=8)


def _entropy(result: Mapping[str, Any]) -> Any:
    fig, (left, middle, right) = _axes(3, 12, 3.4)
    rows = result["layers"]
    labels = [row["layer"] for row in rows]
    heads = [row["attention"]["heads"] for row in rows]
    widest = max(len(x["entropy"]) for x in heads)
    # The layers of a model may differ in the number of heads.
    cells = [x["entropy"] + [float("nan")] * (widest - len(x["entropy"])) for x in heads]
    columns = [list(column) for column in zip(*cells, strict=True)]
    edges = [place - 0.5 for place in range(len(rows) + 1)]
    image = left.pcolormesh(
        edges,
        [head - 0.5 for head in range(widest + 1)],
        columns,
        vmin=0,
        vmax=1,
        cmap="viridis",
        rasterized=True,
    )
    fig.colorbar(image, ax=left)
    left.set(title="entropy / log n", ylabel="query head")
    left.set_yticks(range(0, widest, max(1, widest // 8)))
    bottom = [0.0] * len(rows)
    for name, label, hatch in (
        ("sink", f"first {SINK}", "//"),
        ("recent", f"last {RECENT}", ".."),
        ("", "others", ""),
    ):
        share = [row["attention"][name] if name else 1 - bottom[i] for i, row in enumerate(rows)]
        middle.bar(range(len(rows)), share, bottom=bottom, label=label, hatch=hatch, ec="white")
        bottom = [a + b for a, b in zip(bottom, share, strict=True)]
    middle.set(title="share of attention")
    middle.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    for place, x in enumerate(heads):
        right.plot([place] * len(x["holding_share"]), x["holding_share"], "o", color=_KEYS, ms=4)
    right.plot([row["attention"]["holding_share"] for row in rows], color=_KEYS)
    right.set(title="tokens that hold 90% / n", ylim=(0, None))
    for ax in (left, middle, right):
        _layers(ax, labels)
    return fig


def _errors(result: Mapping[str, Any]) -> Any:
    fig, (left, right) = _axes(2, 10, 3.8)
    rows = result["layers"]
    ranked = sorted(result["errors"], key=lambda name: result["errors"][name])
    for i, name in enumerate(ranked):
        errors = [row["errors"][name] for row in rows]
        left.plot(errors, marker=_MARKS[i % len(_MARKS)], ms=5, label=name)
    left.set(title=f"relative error, {KEPT:.0%} kept", ylim=(0, None))
    left.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    for t, mark in zip(TOLERANCES, _MARKS, strict=False):
        share = [row["within"][str(t)] for row in rows]
        right.plot(share, marker=mark, ms=5, label=f"tolerance {t}")
    right.set(title="share of the tokens needed", ylim=(0, 1.05))
    right.legend(fontsize=8)
    for ax in (left, right):
        _layers(ax, [row["layer"] for row in rows])
    return fig


FIGURES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "norms": _norms,
    "clusterability": _clusterability,
    "tsne": _tsne,
    "entropy": _entropy,
    "errors": _errors,
}


def _axes(columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure made without pyplot, and its axes, which are next to each other."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width, height), layout="constrained", dpi=_DPI)
    return fig, list(fig.subplots(1, columns, squeeze=False)[0])


def _layers(ax: Any, labels: list[int]) -> None:
    """Label some of the places on the x axis with their layers."""
    step = max(1, len(labels) // 8)
    places = range(0, len(labels), step)
    ax.set_xticks(places, [str(labels[place]) for place in places])
    ax.set(xlabel="layer", xlim=(-0.6, len(labels) - 0.4))


def draw_retrieval(result: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Write retrieval.svg and retrieval.png of ``retrieval.measure_retrieval``'s result.

    Returns:
        "svg" and "png" (file names in the folder), and "caption" (the text alternative).

    Raises:
        InputError: a file cannot be written.
    """
    text = (
        "For each KV head: the largest share of attention that a token of the question, and of the "
        "answer, puts on the evidence; accuracy without its output; last, accuracy against the "
        "share of KV heads that see all tokens."
    )
    fig, axes = _axes(4, 12, 3.2)
    layers = sorted({row["layer"] for row in result["heads"]})
    width = 1 + max(row["head"] for row in result["heads"])
    for ax, name, title in zip(
        axes,
        ("question", "answer", "removed"),
        ("question on evidence", "answer on evidence", "accuracy without it"),
        strict=False,
    ):
        shades = [[float("nan")] * width for _ in layers]
        for row in result["heads"]:
            shades[layers.index(row["layer"])][row["head"]] = row[name]
        ax.imshow(shades, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        for row in result["heads"]:
            place, shade = layers.index(row["layer"]), row[name]
            color = "white" if shade > 0.5 else "black"
            ax.text(row["head"], place, f"{shade:.2f}", ha="center", va="center", color=color)
        ax.set(title=title, xlabel="KV head", xticks=range(width), yticks=range(len(layers)))
        ax.set(yticklabels=layers)
    axes[0].set(ylabel="layer")
    count = len(result["heads"])
    curve = result["whole"]["curve"]
    axes[3].plot([n / count for n, _ in curve], [found for _, found in curve], marker="o")
    axes[3].axhline(0.9 * result["accuracy"], color="grey", ls=":")
    axes[3].axvline(result["whole"]["share"], color="grey", ls=":")
    axes[3].set(title="accuracy", xlabel="KV heads that see all", xlim=(0, 1), ylim=(0, 1.05))
    return {**_write(fig, folder, "retrieval", text), "caption": text}


def _write(fig: Any, folder: Path, name: str, text: str) -> dict[str, str]:
    from matplotlib import rc_context

    files = {}
    for kind, metadata in (
        ("svg", {"Date": None, "Title": name, "Description": text}),
        ("png", {"Title": name, "Description": text}),
    ):
        path = folder / f"{name}.{kind}"
        drawn = BytesIO()
        with rc_context({"svg.hashsalt": "kvsketch"}):
            fig.savefig(drawn, format=kind, metadata=metadata)
        fig.set_layout_engine("none")  # which takes as long as drawing; all have their places
        save_bytes(path, drawn.getvalue(), str(path))
        files[kind] = path.name
    return files
