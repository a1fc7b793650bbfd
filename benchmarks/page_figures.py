"""Draws the figures with which the README and the results pages open, from docs/results/. Other
results give another picture:

    python -m benchmarks.page_figures
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.svg_figures import HEIGHT, Line, bars, lines, picture

DOCS = Path(__file__).resolve().parent.parent / "docs"
Result = dict[str, Any]
Scores = dict[str, dict[float, float]]
#: The results of each panel of the README's figure. A later one adds methods and budgets.
PANELS = (("longeval_unseen", "longeval_reread"), ("ruler_unseen",))
SECOND_READINGS = {
    "sample": "a sixth read again",
    "local": "read again in parts",
    "reread": "read again",
}
#: The methods beside ours, if they were measured: name, label, class of the line.
PEERS = (
    ("kvzip/reread", "KVzip", "zip"),
    ("kvzip+int4/reread", "KVzip in our 4 bits", "zip4"),
    ("kvgrad/reread", "KVgrad", "grad"),
    ("snapkv@layer", "AdaKV with SnapKV", "layer"),
    ("streaming_llm", "StreamingLLM", "gray"),
    ("snapkv", "SnapKV", "brown"),
)
AXIS = "bytes of the exact cache that are kept"


def accuracies(results: Sequence[Result]) -> Scores:
    """The mean accuracy over subtasks, by method and budget."""
    found: Scores = {}
    for result in results:
        here: dict[tuple[str, float], list[float]] = {}
        for row in result["results"]:
            here.setdefault((row["method"], row["budget"]), []).append(row["accuracy"])
        for (method, budget), scores in here.items():
            found.setdefault(method, {})[budget] = sum(scores) / len(scores)
    return found


def best_reading(panels: Sequence[Scores], ending: str = "") -> str | None:
    """Our method after a second reading that has the highest mean, of those in all panels."""
    common = set.intersection(*(set(found) for found in panels))
    ours = sorted(name for name in common if name.startswith("heavy_merge") and "/" in name)
    return max(
        (name for name in ours if name.endswith(ending)),
        key=lambda name: sum(sum(x[name].values()) / len(x[name]) for x in panels),
        default=None,
    )


def accuracy(panels: Sequence[Sequence[Result]]) -> str:
    """Accuracy against bytes with the question unseen: ours and the strongest of others."""
    found = [accuracies(results) for results in panels]
    again = best_reading(found)
    names = [("heavy_merge", "kvsketch, its default", "ours")]
    if again is not None:
        words = SECOND_READINGS[again.partition("/")[2]]
        names.append((again, f"kvsketch, {words}", "again"))
    names += PEERS
    drawn = []
    for results, scores in zip(panels, found, strict=True):
        shown = [
            Line(label, style, _falling(scores[name]))
            for name, label, style in names
            if name in scores
        ]
        exact = scores.get("exact", {}).get(1.0, 1.0)
        drawn.append((lines(_title(results), shown, exact), HEIGHT))
    what = "Accuracy against the share of the exact cache's bytes, question unseen at compression"
    return picture(what, drawn, AXIS)


def _falling(scores: dict[float, float]) -> list[tuple[float, float]]:
    return sorted(((b, a) for b, a in scores.items() if b < 1), reverse=True)


def _title(results: Sequence[Result]) -> str:
    """What a panel shows, from its first result."""
    first = results[0]
    if first["command"] == "ruler":
        counts = " or ".join(str(r["count"]) for r in results)
        tasks = f"{len(first['subtasks'])} tasks of {first['length']:,} tokens"
        return f"RULER: {tasks}, {counts} cases of each"
    count = first["results"][0]["cases"]
    return f"LongEval: one line of {first['lines']}, {count} cases"


def longeval(result: Result) -> str:
    """SubGen's Table 1, the shortest and the longest records: accuracy against the share of the
    bytes, question seen."""
    names = (
        ("heavy_merge", "kvsketch, its default", "ours"),
        ("heavy_merge+16bit", "kvsketch in 16 bits", "zip4"),
        ("streaming_llm", "Sink", "gray"),
        ("h2o", "H2O", "brown"),
        ("kcenter", "k-center (SubGen)", "grad"),
    )
    rows = [row for row in result["results"] if row["question"] == "seen"]
    drawn = []
    lengths = sorted({row["lines"] for row in rows})
    for length in dict.fromkeys((lengths[0], lengths[-1])):
        scores: Scores = {}
        for row in rows:
            if row["lines"] == length:
                share = row["kv_bytes"] / row["exact_kv_bytes"]
                scores.setdefault(row["method"], {})[share] = row["accuracy"]
        shown = [
            Line(label, style, _falling(scores[name]))
            for name, label, style in names
            if name in scores
        ]
        drawn.append((lines(f"{length} lines", shown), HEIGHT))
    what = "LongEval accuracy by length of the record and share of the bytes, question seen"
    return picture(what, drawn, AXIS)


def served(result: Result) -> str:
    """Right answers by the bytes of a request in vLLM."""
    found = result["results"]["sizes"]
    stock, cases = found["stock"], found["cases"]
    whole = stock["auto"]["bytes"]
    drawn = []
    for allocation, words in (("curves", "by curves"), ("even", "the same for every head")):
        for bits, style in ((8, "ours"), (4, "grad"), (16, "brown")):
            points = [
                (row["page_bytes"] / whole, row["right"] / cases)
                for row in found["rows"]
                if (row["allocation"], row["bits"]) == (allocation, bits)
            ]
            shown = sorted(points, reverse=True)
            drawn.append((allocation, Line(f"{bits} bits", style, shown, start=False), words))
    fp8 = Line(
        "vLLM's FP8", "gray", [(stock["fp8"]["bytes"] / whole, stock["fp8"]["right"] / cases)]
    )
    panels = []
    for allocation in ("curves", "even"):
        here = [line for name, line, _ in drawn if name == allocation]
        words = next(words for name, _, words in drawn if name == allocation)
        panel = lines(f"Budgets {words}", [*here, fp8], stock["auto"]["right"] / cases)
        panels.append((panel, HEIGHT))
    what = "Right answers of vLLM with kvsketch by the bytes of a request"
    return picture(what, panels, "bytes of a request over those of vLLM's own cache")


def decoding(result: Result) -> str:
    """Decoding speed over DynamicCache, by method."""
    found = sorted(result["results"], key=lambda row: -float(row["ratio"]))
    drawn = [
        (
            "heavy_merge, the default" if row["method"] == "heavy_merge" else row["method"],
            "ours" if row["method"].startswith("heavy_merge") else "gray",
            float(row["ratio"]),
        )
        for row in found
    ]
    title = "Tokens per second over DynamicCache's from the same bytes, tiny model"
    return picture(title, [bars(title, drawn)])


def drawings(results: Path) -> dict[str, str]:
    """The SVG files by name."""

    def loaded(name: str) -> Result:
        found: Result = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
        return found

    return {
        "accuracy": accuracy([[loaded(name) for name in names] for names in PANELS]),
        "longeval": longeval(loaded("longeval")),
        "served": served(loaded("vllm")),
        "decoding": decoding(loaded("decode_speed")),
    }


def main() -> None:
    for name, svg in drawings(DOCS / "results").items():
        path = DOCS / "figures" / f"{name}.svg"
        path.write_text(svg, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
