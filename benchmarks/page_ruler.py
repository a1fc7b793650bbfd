"""The sections of a page on RULER's tasks."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import made_with, table


def averages(rows: list[dict[str, Any]]) -> dict[tuple[str, float], float]:
    """Mean accuracy over subtasks, by method and budget."""
    found: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        found.setdefault((row["method"], row["budget"]), []).append(row["accuracy"])
    return {name: sum(scores) / len(scores) for name, scores in found.items()}


def ruler(result: dict[str, Any]) -> str:
    """A table with a row for every method and budget: the mean over subtasks, then each subtask."""
    rows = result["results"]
    means = averages(rows)
    subtasks = list(dict.fromkeys(r["subtask"] for r in rows))
    lines = []
    for method, budget in sorted(means, key=lambda name: (-name[1], -means[name])):
        found = {r["subtask"]: r for r in rows if (r["method"], r["budget"]) == (method, budget)}
        cells = [f"{found[name]['accuracy']:.2f}" if name in found else "" for name in subtasks]
        mean = f"{means[method, budget]:.2f}" if len(found) == len(subtasks) else ""
        lines.append([method, f"{budget:g}", mean, *cells])
    short = (name.removeprefix("niah_").replace("_", " ") for name in subtasks)
    columns = ["method", "kept", "mean", *short]
    surely = next(row["ci95"][0] for row in rows if row["accuracy"] == 1)
    shares = ", ".join(f"{share:g}" for share in result["budgets"])
    named = [name for name in ("heavy_merge", "snapkv") if (name, min(result["budgets"])) in means]
    least = min(result["budgets"])
    best = max((name for name in means if name[1] == least), key=lambda name: means[name])
    others = [name for name in named if name != best[0]]
    beside = "".join(f"; `{name}` {means[name, least]:.2f}" for name in others)
    return (
        f"## RULER, {result['length']:,} tokens, question {result['question']} at compression, "
        f"{shares} kept, {result['count']} cases ({result['model']})\n\n"
        f"The highest mean at {least:g} of the bytes is {means[best]:.2f}, `{best[0]}`{beside}.\n\n"
        f"Score of the packaged `{result['model']}` on {result['count']} cases of each subtask "
        f"that it answers (texts between the needles: {result['source']}; "
        "all but `vt` are `niah_` tasks), by the "
        "share of the context's bytes that is kept, best first. Bytes are equal and methods are "
        "named as above. If all answers to a subtask are right, its 95% interval begins at "
        f"{surely:.2f}.\n\n"
        f"{table(columns, lines)}\n\n{made_with(result)}\n"
    )
