"""The best methods of a run: the first table of a report and its sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsketch.evaluation.report.parts import Grid
from kvsketch.evaluation.runner.runs import Run, goals, grouped, is_exact, pooled
from kvsketch.evaluation.runner.scales import Scale, scale_of

Row = Mapping[str, Any]

#: The largest ratio of bytes kept that counts as equal.
_EQUAL = 1.05


def summary(run: Run) -> Grid:
    """For each task, the exact cache and the best method at each budget."""
    lines = []
    for task, rows in grouped(pooled(run.records, by_family=True), lambda row: row["task"]).items():
        scale = scale_of(task)
        exact = next((row for row in rows if is_exact(row)), None)
        beside = score_text(exact, scale) if exact else "not run"
        for goal in goals(rows) or ["exact only"]:
            ranked = _ranked([row for row in rows if row["goal"] == goal])
            if _hopeless(exact):
                nothing = ["none: exact scores 0", *["-"] * 6]
                lines.append([task, goal, *nothing, beside, _cases(ranked or rows)])
                continue
            lines.append([task, goal, *_best(ranked, scale), beside, _cases(ranked or rows)])
    return Grid(
        "Best method by task and budget",
        (
            *("task", "budget", "best method", "score [95%]", "bytes kept", "peak kB"),
            *("prefill/s", "decode/s", "next", "exact", "cases"),
        ),
        lines,
    )


def headline(run: Run) -> str:
    """The summary in a sentence. A method is called the best of a task only if another was run and
    its interval does not overlap those of the others."""
    rows = pooled(run.records, by_family=True)
    tasks = grouped(rows, lambda row: row["task"])
    hopeless = [task for task, x in tasks.items() if any(is_exact(r) and _hopeless(r) for r in x)]
    tasks = {task: x for task, x in tasks.items() if task not in hopeless}
    methods = list(dict.fromkeys(row["method"] for row in rows if not is_exact(row)))
    if len(methods) < 2:
        return f"Only {methods[0] if methods else 'the exact cache'} was run."
    parts = []
    for goal in goals(rows):
        found = [_ranked([row for row in x if row["goal"] == goal]) for x in tasks.values()]
        found = [ranked for ranked in found if len(ranked) > 1]
        if not found:
            continue
        wins: dict[str, int] = {}
        for ranked in found:
            if len(_leaders(ranked)) == 1 and not _larger(ranked):
                wins[ranked[0]["method"]] = wins.get(ranked[0]["method"], 0) + 1
        of = f"{len(found)} {'task' if len(found) == 1 else 'tasks'}"
        if not wins:
            apart = any(len(_leaders(ranked)) == 1 for ranked in found)
            said = "best at equal bytes" if apart else "better than the next beyond the interval"
            parts.append(f"At {goal}, no method is {said} ({of}).")
            continue
        most = max(wins.values())
        names = " and ".join(name for name, count in wins.items() if count == most)
        verb = "are" if " and " in names else "is"
        parts.append(f"At {goal}, {names} {verb} best beyond the 95% interval ({most} of {of}).")
    if hopeless:
        parts.append(
            f"The exact cache scores 0 in {', '.join(hopeless)}, where methods cannot be compared."
        )
    return " ".join(parts) or "No two methods were run at one budget."


def _hopeless(exact: Row | None) -> bool:
    """Whether the model answers nothing with all tokens, so that no method can be the best."""
    return exact is not None and not scale_of(exact["task"]).is_error and not exact["score"]


def _leaders(ranked: Sequence[Row]) -> list[Row]:
    """The first row, and the rows whose intervals overlap with its interval, so that they cannot be
    distinguished from it."""
    low, high = ranked[0]["ci95"]
    return [
        row
        for row in ranked
        if row is ranked[0]
        or row["score"] == ranked[0]["score"]
        or (row["ci95"][0] <= high and row["ci95"][1] >= low)
    ]


def _larger(ranked: Sequence[Row]) -> bool:
    """Whether the first row keeps more bytes than another one, so that the two are not compared at
    equal bytes."""
    return any(ranked[0]["kept"] > _EQUAL * row["kept"] for row in ranked[1:])


def _ranked(rows: Sequence[Row]) -> list[Row]:
    """The rows of one task, the best first."""
    return sorted(rows, key=lambda row: scale_of(row["task"]).best_first(row["score"]))


def _best(ranked: Sequence[Row], scale: Scale) -> list[str]:
    """The method, score, bytes kept and cost of the best rows, and the best row that can be
    distinguished from them."""
    if not ranked:
        return ["-"] * 7
    best = _leaders(ranked)
    others = [row for row in ranked if row not in best]
    names = ", ".join(row["method"] for row in best)
    if len(ranked) == 1:
        names += ": no other was run"
    elif len(best) > 1:
        names += ": intervals overlap"
    elif _larger(ranked):
        names += ": it keeps more bytes"
    return [
        names,
        score_text(best[0], scale),
        _range([row["kept"] for row in best], "{:.1%}"),
        _range([row["peak_kv_bytes"] / 1000 for row in best]),
        _range([row["prefill_tokens_per_s"] for row in best]),
        _range([row["decode_tokens_per_s"] for row in best]),
        _next(others[0], scale) if others else "-",
    ]


def _range(values: Sequence[float | None], form: str = "{:,.0f}") -> str:
    """The smallest and the largest of the numbers that were measured."""
    known = [value for value in values if value is not None]
    return (
        "-".join(dict.fromkeys(form.format(x) for x in (min(known), max(known)))) if known else "-"
    )


def _next(row: Row, scale: Scale) -> str:
    return f"{row['method']} {scale.shown(row['score'])} at {row['kept']:.1%}"


def score_text(row: Row, scale: Scale) -> str:
    """The score with its interval."""
    return f"{scale.shown(row['score'])} [{scale.interval(row['ci95'])}]"


def _cases(rows: Sequence[Row]) -> str:
    least, most = (bound(row["cases"] for row in rows) for bound in (min, max))
    return str(least) if least == most else f"{least}-{most}, not the same for all"
