"""The findings of an inspection, one sentence per topic, from its numbers alone. Torch is not
imported here, so that code that only reads these numbers, or refuses an inspection, starts fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

#: The share of the tokens that methods keep.
KEPT = 0.25
#: The shortest prompt that leaves all methods a choice at ``KEPT``.
LEAST_TOKENS = 256
#: The number of queries at the end of a prompt whose attention is measured.
LAST = 64
#: Relative errors for which the number of slots is looked up, and the method that is used.
TOLERANCES = (0.02, 0.05, 0.1)
TOLERANCE_METHOD = "heavy_merge"
SINK, RECENT = 4, 32
#: The number of points of a t-SNE that are centers (SubGen, Figure 1).
CENTERS = 16
_THEOREMS = (("subgen", "SubGen's Theorem 1"), ("balancekv", "BalanceKV's Theorem 3.1"))


def readings(result: dict[str, Any]) -> dict[str, str]:
    """One sentence for each topic."""
    rows = result["layers"]
    sharpest, widest = _ends(rows, lambda row: row["attention"]["entropy"])
    _, loudest = _ends(rows, lambda row: row["norms"]["score"]["max"])
    cluster = [row["clusterability"] for row in rows]
    pairs = [
        (key, value)
        for c in cluster
        for key, value in zip(c["keys"]["heads"], c["values"]["heads"], strict=True)
    ]
    better = sum(key < value for key, value in pairs)
    key, value = (mean(c[what]["eighth"] for c in cluster) for what in ("keys", "values"))
    usual = (
        "keys cluster better, as SubGen and ClusterGen have it (Figure 1)"
        if 2 * better > len(pairs)
        else "values cluster at least as well, unlike Figure 1 of SubGen and ClusterGen"
    )
    share = {
        name: mean(row["attention"][name] for row in rows)
        for name in ("sink", "recent", "holding", "holding_share")
    }
    return {
        "norms": (
            f"Query norms reach {_most(rows, 'query')} and key norms {_most(rows, 'key')}; "
            f"|q| |k| times the scaling is {_top(loudest['norms']['score']['max'])} at most "
            f"(layer {loudest['layer']})."
        ),
        "clusterability": (
            f"n/8 balls cover the keys at {key:.2f} of their spread and the values at {value:.2f}: "
            f"in {better} of {len(pairs)} heads the keys need smaller balls, so {usual}."
        ),
        "tsne": _pictures(result["tsne"]),
        "entropy": (
            f"Attention of the last {result['queries']} queries is widest in layer "
            f"{widest['layer']} (entropy {widest['attention']['entropy']:.2f} of log n) and "
            f"sharpest in layer {sharpest['layer']} ({sharpest['attention']['entropy']:.2f}); "
            f"{share['sink']:.0%} of it is on the first {SINK} tokens, {share['recent']:.0%} on "
            f"the last {RECENT}, and 90% on {share['holding']:.0f} tokens "
            f"({share['holding_share']:.0%})."
        ),
        "errors": _verdict(result),
        "tolerance": _tolerance(rows),
        "theory": " ".join(_asks(rows, *theorem) for theorem in _THEOREMS),
    }


def _pictures(views: Sequence[dict[str, Any]]) -> str:
    """For each layer the mean over heads, then the number of heads whose keys need smaller balls
    than their values."""
    if not views:
        return ""
    found: dict[tuple[str, int], list[float]] = {}
    for view in views:
        found.setdefault((view["what"], view["layer"]), []).append(view["radius"])
    parts = [f"{mean(radii):.2f} ({what}, layer {layer})" for (what, layer), radii in found.items()]
    pairs = list(zip(views[::2], views[1::2], strict=True))
    better = sum(keys["radius"] < values["radius"] for keys, values in pairs)
    return (
        f"{CENTERS} balls cover at this many times the spread, the mean over KV heads: "
        f"{', '.join(parts)}; in {better} of {len(pairs)} heads the keys need smaller ones."
    )


def _verdict(result: dict[str, Any]) -> str:
    ranked = sorted(result["errors"], key=lambda name: result["errors"][name])
    best, least = ranked[0], result["errors"][ranked[0]]
    text = (
        f"At {result['kept']:.0%} of the tokens, the same for every head, {best} has the lowest "
        f"relative attention error, {least:.3f}"
    )
    if len(ranked) < 2:
        return text + "."
    after = result["errors"][ranked[1]]
    by_head = [row["errors_by_head"] for row in result["layers"]]
    heads = [
        min(ranked, key=lambda name: row[name][head])
        for row in by_head
        for head in range(len(row[best]))
    ]
    return text + (
        f", {1 - least / max(after, 1e-12):.0%} below {ranked[1]} ({after:.3f}); it is the best in "
        f"{heads.count(best)} of {len(heads)} KV heads."
    )


def _asks(rows: Sequence[dict[str, Any]], name: str, title: str) -> str:
    asked = [row["theory"][name]["slots"] for row in rows]
    useful = sum(
        x is not None and x < row["theory"]["n"] for x, row in zip(asked, rows, strict=True)
    )
    least, _ = _ends(rows, lambda row: row["theory"][name]["slots"] or math.inf)
    return (
        f"At these norms {title} asks for fewer slots than there are tokens in {useful} of "
        f"{len(rows)} layers; the nearest is layer {least['layer']}: "
        f"{least['theory'][name]['verdict']}."
    )


def _tolerance(rows: Sequence[dict[str, Any]]) -> str:
    parts = [f"{t}: {mean(row['within'][str(t)] for row in rows):.0%}" for t in TOLERANCES]
    middle = str(TOLERANCES[len(TOLERANCES) // 2])
    least, most = _ends(rows, lambda row: row["within"][middle])
    return (
        f"{TOLERANCE_METHOD} needs this share of the tokens for a tolerance of {', '.join(parts)}; "
        f"at {middle}, layer {least['layer']} needs least ({least['within'][middle]:.0%}) and "
        f"layer {most['layer']} most ({most['within'][middle]:.0%})."
    )


def _ends(
    rows: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], float]
) -> tuple[dict[str, Any], dict[str, Any]]:
    return min(rows, key=of), max(rows, key=of)


def _most(rows: Sequence[dict[str, Any]], kind: str) -> str:
    _, row = _ends(rows, lambda row: row["norms"][kind]["max"])
    return f"{_top(row['norms'][kind]['max'])} (layer {row['layer']})"


def _top(value: float) -> str:
    return f"{value:.1f}"


def mean(values: Any) -> float:
    """The mean of numbers."""
    found = [float(x) for x in values]
    return sum(found) / len(found)
