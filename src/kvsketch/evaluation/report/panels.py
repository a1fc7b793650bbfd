"""The figures and tables of a run in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsketch.evaluation.report.figures import Figure, Series, Sketchbook
from kvsketch.evaluation.report.parts import Grid, Section
from kvsketch.evaluation.report.published_panel import beside
from kvsketch.evaluation.runner.runs import Run, goals, grouped, is_exact, pooled
from kvsketch.evaluation.runner.scales import Scale, scale_of

Row = Mapping[str, Any]

#: The most points that a figure's text lists one by one.
_TOLD = 60

#: The largest ratio of bytes kept that counts as equal.
_EQUAL = 1.05


def sections(run: Run, book: Sketchbook) -> list[Section]:
    """All sections except the summary. Sections without content are left out."""
    found = [
        _by_bytes(run, book),
        _errors(run, book),
        _needles(run, book),
        _by_lines(run, book),
        _by_data_set(run, book),
        _beside(run),
        _cost(run, book),
    ]
    return [section for section in found if section.figures or section.grids]


def summary(run: Run) -> Grid:
    """For each task, the exact cache and the best method at each budget."""
    lines = []
    for task, rows in grouped(pooled(run.records, by_family=True), lambda row: row["task"]).items():
        scale = scale_of(task)
        exact = next((row for row in rows if is_exact(row)), None)
        beside = _score(exact, scale) if exact else "not run"
        for goal in goals(rows) or ["exact only"]:
            ranked = _ranked([row for row in rows if row["goal"] == goal])
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
    return " ".join(parts) or "No two methods were run at one budget."


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
        _score(best[0], scale),
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


def _score(row: Row, scale: Scale) -> str:
    return f"{scale.shown(row['score'])} [{scale.interval(row['ci95'])}]"


def _cases(rows: Sequence[Row]) -> str:
    least, most = (bound(row["cases"] for row in rows) for bound in (min, max))
    return str(least) if least == most else f"{least}-{most}, not the same for all"


def _tip(row: Row) -> str:
    name = "exact" if is_exact(row) else f"{row['series']}, {row['goal']}"
    return (
        f"{name}: {_score(row, scale_of(row['task']))}, {row['kept']:.1%} of the bytes, "
        f"{row['cases']} cases"
    )


def _told(rows: Sequence[Row]) -> str:
    """A description of rows in words."""
    return _sentence([_tip(row) for row in rows])


def _sentence(tips: Sequence[str]) -> str:
    if len(tips) > _TOLD:
        return f"{len(tips)} points; all numbers are in the table of all rows."
    return "; ".join(tips) + "."


def _by_bytes(run: Run, book: Sketchbook) -> Section:
    """One panel for each task and group. The depths of a needle share a panel."""
    return Section(
        "Score against bytes kept",
        "Bars are 95% intervals, drawn side by side where methods keep the same; the dashed line "
        "and its band are the exact cache. Bytes are counted after the prompt. Axes fit the "
        "scores, and need not start at 0.",
        [_kept(title, rows, book) for title, rows in _panels(run, errors=False)],
    )


def _errors(run: Run, book: Sketchbook) -> Section:
    """Error curves, as in BalanceKV's Figure 2 for the attention of one layer."""
    return Section(
        "Error against bytes kept",
        "Less is better, on a logarithmic scale; bars are 95% intervals. Measured on the "
        "teacher-forced continuation of a compressed prompt: KL divergence of the next token from "
        "the exact cache's, perplexity of the text's own tokens, and the relative error of single "
        "layers' attention (BalanceKV's Figure 2).",
        [_kept(title, rows, book) for title, rows in _panels(run, errors=True)],
    )


def _panels(run: Run, errors: bool) -> list[tuple[str, list[Row]]]:
    """The titles and rows of the tasks that measure errors, or of those that measure scores."""
    found = grouped(_without_depth(run), lambda row: row["title"])
    return [x for x in found.items() if scale_of(x[1][0]["task"]).is_error == errors]


def _kept(title: str, rows: Sequence[Row], book: Sketchbook) -> Figure:
    task = rows[0]["task"]
    scale = scale_of(task)
    if scale.is_error:
        # An error of 0 cannot be drawn on a logarithmic axis.
        rows = [
            row for row in rows if row["score"] > 0 and (scale.exponential or not is_exact(row))
        ]
    series = []
    for name, points in grouped(rows, lambda row: row["series"]).items():
        points = sorted(points, key=lambda row: row["kept"])
        series.append(_scored(name, points, [100 * row["kept"] for row in points], scale))
    kind = "error" if scale.is_error else "score"
    return book.lines(
        f"{kind}: {title}",
        f"{kind.title()} by method, with 95% intervals. {_told(rows)}",
        series,
        xlabel="KV bytes kept, % of the exact cache",
        ylabel=scale.label,
        top=None if scale.top is None else scale.factor * scale.top,
        log=scale.is_error,
        task=task,
    )


def _scored(name: str, rows: Sequence[Row], x: Sequence[float], scale: Scale) -> Series:
    return Series(
        name,
        rows[0]["method"],
        x,
        [scale.factor * row["score"] for row in rows],
        [_tip(row) for row in rows],
        [scale.factor * row["ci95"][0] for row in rows],
        [scale.factor * row["ci95"][1] for row in rows],
        level=is_exact(rows[0]),
    )


def _without_depth(run: Run) -> list[dict[str, Any]]:
    return pooled(run.records, without=("depth",))


def _needles(run: Run, book: Sketchbook) -> Section:
    figures = []
    rows = [row for row in run.rows if {"length", "depth"} <= set(row["group"])]
    for task, found in grouped(rows, lambda row: row["task"]).items():
        lengths = sorted({row["group"]["length"] for row in found})
        depths = sorted({row["group"]["depth"] for row in found})
        order = ["exact", *goals(found)]
        for (goal, method), cells in sorted(
            grouped(found, lambda row: (row["goal"], row["method"])).items(),
            key=lambda item: order.index(item[0][0]),
        ):
            name = method if goal == "exact" else f"{method} at {goal}"
            values = {
                (depths.index(r["group"]["depth"]), lengths.index(r["group"]["length"])): (
                    r["score"],
                    f"length {r['group']['length']}, depth {r['group']['depth']:.3g}: "
                    f"{_score(r, scale_of(task))}, {r['cases']} cases",
                )
                for r in cells
            }
            figures.append(
                book.heat(
                    f"{task}: {name}",
                    "Score by length (columns) and depth (rows). "
                    + _sentence([tip for _, tip in values.values()]),
                    values,
                    rows=[f"{depth:g}" for depth in depths],
                    columns=[str(length) for length in lengths],
                    xlabel="length, tokens",
                    ylabel="depth",
                    method=method,
                    task=task,
                )
            )
    return Section(
        "Needle in a haystack",
        "Score by prompt length and by how deep the needle is: 0 is the start, 1 the end. Bright "
        "is found.",
        figures,
    )


def _by_lines(run: Run, book: Sketchbook) -> Section:
    rows = [r for r in run.rows if r["task"] == "longeval" and set(r["group"]) == {"lines"}]
    figures, scale = [], scale_of("longeval")
    if len({row["group"]["lines"] for row in rows}) > 1:
        for goal in goals(rows):
            found = [row for row in rows if row["goal"] in ("exact", goal)]
            series = []
            for name, points in grouped(found, lambda row: row["series"]).items():
                points = sorted(points, key=lambda row: row["group"]["lines"])
                s = _scored(name, points, [row["group"]["lines"] for row in points], scale)
                series.append(Series(s.name, s.method, s.x, s.y, s.tips, s.low, s.high))
            figures.append(
                book.lines(
                    f"longeval by lines, {goal} kept",
                    f"Accuracy by number of lines. {_told(found)}",
                    series,
                    xlabel="lines",
                    ylabel="accuracy",
                    top=1,
                    task="longeval",
                )
            )
    return Section(
        "LongEval by lines",
        "Accuracy of line retrieval; bars are 95% intervals.",
        figures,
    )


def _by_data_set(run: Run, book: Sketchbook) -> Section:
    """LongBench by data set. The lengths of a data set are taken together."""
    rows = [
        row
        for row in pooled(run.records, without=("length",))
        if row["task"].partition("/")[0] == "longbench"
    ]
    names = list(grouped(rows, lambda row: row["task"]))
    sets = [name.partition("/")[2] or name for name in names]
    exact = [row for row in rows if is_exact(row)]
    scale = scale_of("longbench")
    figures, grids = [], []
    for goal in goals(rows):
        series = []
        found = [row for row in rows if row["goal"] in ("exact", goal)]
        for name, points in grouped(found, lambda row: row["series"]).items():
            s = _scored(name, points, [names.index(row["task"]) for row in points], scale)
            series.append(Series(s.name, s.method, s.x, s.y, s.tips, s.low, s.high))
        figures.append(
            book.lines(
                f"longbench by data set, {goal} kept",
                f"Score times 100 by data set. {_told(found)}",
                series,
                xlabel="",
                ylabel=scale.label,
                top=scale.factor,
                labels=sets,
                task="longbench",
            )
        )
        columns = grouped([*exact, *(r for r in found if r["goal"] == goal)], lambda r: r["series"])
        scores = {m: {r["task"]: r["score"] for r in x} for m, x in columns.items()}
        lines = [
            [label, *(scale.shown(x[name]) if name in x else "-" for x in scores.values())]
            for label, name in zip(sets, names, strict=True)
        ]
        whole = [  # means over different data sets cannot be compared
            scale.shown(sum(x.values()) / len(x)) if len(x) == len(names) else "-"
            for x in scores.values()
        ]
        lines.append(["mean of data sets", *whole])
        grids.append(Grid(f"LongBench, {goal} kept", ("data set", *scores), lines))
    return Section(
        "LongBench by data set",
        "On the published scale: scores times 100, each data set by its own metric.",
        figures,
        grids,
    )


def _beside(run: Run) -> Section:
    return Section(
        "Beside the papers",
        "Published tables and, of each method in them that was run, our row that keeps most nearly "
        "as much. Models differ, and so may cases and prompts: compare the order.",
        grids=beside(run),
    )


def _cost(run: Run, book: Sketchbook) -> Section:
    """Memory and speed against prompt length, by budget, over all tasks."""
    rows = sorted(_without_depth(run), key=lambda row: row["prompt_tokens"])
    exact = {row["title"]: row for row in rows if is_exact(row)}
    figures = []
    for goal in goals(rows):
        mine = [row for row in rows if row["goal"] == goal]
        beside = [
            exact[title] for title in dict.fromkeys(r["title"] for r in mine) if title in exact
        ]
        memory = [_measured(x, "peak_kv_bytes", 1e-6, "MB") for x in _of_methods([*beside, *mine])]
        figures.append(
            book.lines(
                f"peak KV memory, {goal} kept",
                f"Peak bytes of the cache by prompt length. {_listed(memory)}",
                memory,
                xlabel="prompt, tokens",
                ylabel="peak KV memory, MB",
            )
        )
        for speed, label in (
            ("prefill_tokens_per_s", "prefill speed"),
            ("decode_tokens_per_s", "decode speed"),
        ):
            ratios = [
                {**row, "ratio": row[speed] / exact[row["title"]][speed]}
                for row in mine
                if row[speed] and row["title"] in exact and exact[row["title"]][speed]
            ]
            if ratios:
                series = [_measured(x, "ratio", 1, "x exact") for x in _of_methods(ratios)]
                figures.append(
                    book.lines(
                        f"{label}, {goal} kept",
                        f"Tokens per second relative to the exact cache. {_listed(series)}",
                        series,
                        xlabel="prompt, tokens",
                        ylabel=f"{label}, exact = 1",
                    )
                )
    return Section(
        "Memory and speed against prompt length",
        f"Peak bytes of the cache (MB are 1,000,000 bytes), and tokens per second relative to the "
        f"exact cache on the same cases, measured while answering on {run.common['device']}. "
        "Prefill includes compressing. A line joins points of one task only. Lines of methods that "
        "keep the same lie on each other.",
        figures,
    )


def _of_methods(rows: Sequence[Row]) -> list[list[Row]]:
    return list(grouped(rows, lambda row: row["series"]).values())


def _measured(rows: Sequence[Row], name: str, factor: float, unit: str) -> Series:
    tips = [
        f"{row['series']}, {row['title']}, {row['prompt_tokens']:,.0f} tokens: "
        f"{row[name] * factor:.3g} {unit}"
        for row in rows
    ]
    return Series(
        rows[0]["series"],
        rows[0]["method"],
        [row["prompt_tokens"] for row in rows],
        [row[name] * factor for row in rows],
        tips,
        joined=len({row["task"] for row in rows}) == 1,
    )


def _listed(series: Sequence[Series]) -> str:
    return _sentence([tip for s in series for tip in s.tips])
