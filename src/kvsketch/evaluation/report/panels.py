"""The figures and tables of a run in a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsketch.evaluation.report.figures import Figure, Series, Sketchbook
from kvsketch.evaluation.report.parts import Grid, Section
from kvsketch.evaluation.report.published_panel import beside, data_sets
from kvsketch.evaluation.report.summary import Row, score_text
from kvsketch.evaluation.report.words import listed, sentence, tip, told
from kvsketch.evaluation.runner.runs import Run, goals, grouped, is_exact, pooled
from kvsketch.evaluation.runner.scales import Scale, scale_of


def sections(run: Run, book: Sketchbook) -> list[Section]:
    """All sections except the summary. Sections without content are left out."""
    found = [
        _by_bytes(run, book),
        _errors(run, book),
        _needles(run, book),
        _by_lines(run, book),
        _by_turn(run, book),
        _by_data_set(run, book),
        _beside(run),
        _cost(run, book),
    ]
    return [section for section in found if section.figures or section.grids]


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
        f"{kind.title()} by method, with 95% intervals. {told(rows)}",
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
        [tip(row) for row in rows],
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
                    f"{score_text(r, scale_of(task))}, {r['cases']} cases",
                )
                for r in cells
            }
            figures.append(
                book.heat(
                    f"{task}: {name}",
                    "Score by length (columns) and depth (rows). "
                    + sentence([tip for _, tip in values.values()]),
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
                    f"Accuracy by number of lines. {told(found)}",
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


def _by_turn(run: Run, book: Sketchbook) -> Section:
    """The curves of sessions, of each form and budget."""
    rows, figures = [row for row in run.rows if row["task"] == "sessions"], []
    scale = scale_of("sessions")
    for title, found in grouped(rows, lambda row: row["title"]).items():
        points = sorted({point for row in found for point in row["measured"]})
        for goal in goals(found):
            series = [
                Series(
                    row["series"],
                    row["method"],
                    [points.index(point) for point in row["measured"]],
                    list(row["measured"].values()),
                    [
                        f"{'exact' if is_exact(row) else row['series']}, {point}: {score:.2f}"
                        for point, score in row["measured"].items()
                    ],
                )
                for row in found
                if row["goal"] in ("exact", goal)
            ]
            figures.append(
                book.lines(
                    f"{title} in its course, {goal} kept",
                    f"Score by turn, or by how long ago what is asked for was read. "
                    f"{listed(series)}",
                    series,
                    xlabel="",
                    ylabel=scale.label,
                    top=scale.top,
                    labels=points,
                    task="sessions",
                )
            )
    return Section(
        "Sessions in their course",
        "Mean score of the turns of a session, in order, or by how many documents ago the one that "
        "is asked about was read.",
        figures,
    )


def _by_data_set(run: Run, book: Sketchbook) -> Section:
    """LongBench by data set. The lengths of a data set are taken together."""
    rows = data_sets(run, "longbench")
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
                f"Score times 100 by data set. {told(found)}",
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
                f"Peak bytes of the cache by prompt length. {listed(memory)}",
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
                        f"Tokens per second relative to the exact cache. {listed(series)}",
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
