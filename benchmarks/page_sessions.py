"""The page on sessions: what is forgotten over many turns, and when."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import made_with, table

Result = dict[str, Any]
TITLES = {
    "documents": "## Documents one after the other, and questions about old ones",
    "turns": "## Fifty questions about one record",
    "list": "## One long answer",
    "system": "## What a system message says must be known in the end",
}
#: The names of the results, in the order of the page: of some forms there are longer sessions, too.
RESULTS = (
    "sessions_documents",
    "sessions_documents_long",
    "sessions_turns",
    "sessions_turns_long",
    "sessions_list",
    "sessions_system",
    "sessions_system_long",
)
_LINES = 330  # of all others
#: of longer sessions, with their questions
_TOKENS = {"documents": "4,100", "turns": "4,300", "system": "4,100"}
WHAT = {
    "documents": "Eleven records are read one after the other. A question about the newest follows "
    "each, and one about a record that was read some records before. In the end there are four "
    "questions about the first record.",
    "list": "A text of needles, and then a fifth of them is asked for at once, in another order. "
    "The answer of several hundred tokens is compressed while it is told, and every part of it "
    "needs those before it to know what comes next. The curve is by quarters of the answer. The "
    "default keeps the question while it is answered, if it takes at most half of the slots "
    "([Limits](limits.md)).",
    "turns": "A record, and fifty questions about it, one after the other. Questions and answers "
    "stay in the cache.",
    "system": "As above, but the session begins with a message that says one thing more, which is "
    "asked for in the end. With `:16:32` the first 16 tokens, which hold it, are never compressed "
    "(`SketchCache(sink=16)`, `cache.pin`, `kvsketch chat --system`).",
}


def opening(results: list[Result], streamed: Result | None) -> str:
    """How the page begins."""
    parts = [
        "The same cache serves a whole session: it is compressed as the session goes on, and holds "
        "the bytes of a fixed number of tokens from the first turn to the last. Which of them are "
        "kept decides what can still be answered later. The sessions are those of "
        "`kvsketch eval sessions`, which anyone can run with a model of their own."
    ]
    for result in results:
        form = result["forms"][0]
        parts.append(f"- {_summary(form, result)}")
    if streamed is not None:
        first = next(row for row in streamed["results"] if row["method"] == "heavy_merge")
        blocks = first["blocks"]
        low, high = (f(row["bytes"] for row in blocks) for f in (min, max))
        parts.append(
            f"- {streamed['length']:,} decoded tokens in the bytes of {streamed['budget']}: the "
            f"slots take at most {high:.3f} of them, and {low:.3f} in the smallest of "
            f"{streamed['blocks']} blocks."
        )
    return "\n".join(parts) + f"\n\n{_choice(results)}\n"


def _choice(results: list[Result]) -> str:
    """Which method for which kind of session: the best at each budget, and the default beside it
    where it is another."""
    shares = sorted({r["budget"] for x in results for r in x["results"]} - {1.0}, reverse=True)
    rows = []
    for result in results:
        longer = ", longer sessions" if result["lines"] != _LINES else ""
        row = [_NAMES[result["forms"][0]] + longer]
        for share in shares:
            # What pins has been told beforehand what will be asked for.
            found = [
                r for r in result["results"] if r["budget"] == share and ":" not in r["method"]
            ]
            best = max(found, key=lambda r: float(r["accuracy"]))
            ours = next(r for r in found if r["method"] == "heavy_merge")
            if ours["accuracy"] >= best["accuracy"]:
                row.append(f"the default ({ours['accuracy']:.2f})")
                continue
            row.append(
                f"`{best['method']}` ({best['accuracy']:.2f}; the default {ours['accuracy']:.2f}"
                f"{', within its interval' if ours['ci95'][1] >= best['accuracy'] else ''})"
            )
        rows.append(row)
    header = ["best, of the methods below", *(f"{share:g} of the bytes" for share in shares)]
    return table(header, rows)


def _summary(form: str, result: Result) -> str:
    rows = {(row["method"], row["budget"]): row for row in result["results"]}
    exact = rows["exact", 1.0]
    share = 0.125
    ours = rows["heavy_merge", share]
    others = [
        row
        for (name, budget), row in rows.items()
        if budget == share and not name.startswith("heavy_merge") and ":" not in name
    ]
    best = max(others, key=lambda row: float(row["accuracy"]))
    longer = f" ({result['count']} longer sessions)" if result["lines"] != _LINES else ""
    told = (
        f"{_NAMES[form]}{longer}: with an eighth of the bytes the default answers "
        f"{ours['accuracy']:.2f} (the exact cache {exact['accuracy']:.2f}, the best of the others, "
        f"`{best['method']}`, {best['accuracy']:.2f})"
    )
    old = "documents ago 10"
    if form == "documents":
        told += (
            f"; of the questions about the first record after ten others {ours['curve'][old]:.2f} "
            f"(exact {exact['curve'][old]:.2f})"
        )
    if ("heavy_merge:16:32", share) in rows:
        pinned = rows["heavy_merge:16:32", share]["accuracy"]
        told += f"; {pinned:.2f} if the message is never compressed"
    return told + "."


_NAMES = {
    "documents": "Eleven documents",
    "turns": "Fifty questions about one record",
    "list": "One long answer",
    "system": "A system message",
}


def sessions(result: Result) -> str:
    """The accuracies of one form, and its curve."""
    form = result["forms"][0]
    budgets = sorted({row["budget"] for row in result["results"]} - {1.0}, reverse=True)
    names = list(dict.fromkeys(row["method"] for row in result["results"]))
    by = {(row["method"], row["budget"]): row for row in result["results"]}
    rows = []
    for name in names:
        if name == "exact":
            row = by[name, 1.0]
            rows.append([f"`{name}`", *[_score(row)] * len(budgets)])
            continue
        found = [by.get((name, budget)) for budget in budgets]
        rows.append([f"`{name}`", *("" if row is None else _score(row) for row in found)])
    shares = [f"{budget:g} of the bytes" for budget in budgets]
    scores = table(["kept", *shares], rows)
    points = list(by["exact", 1.0]["curve"])
    share = 0.125
    curves = [
        [f"`{name}`", *(f"{row['curve'][point]:.2f}" for point in points)]
        for name in names
        if (row := by.get((name, 1.0 if name == "exact" else share)))
    ]
    curve = table([f"kept {share:g}", *points], curves)
    opening = f"{TITLES[form]}\n\n{WHAT[form]}"
    if result["lines"] != _LINES:
        why = _why(result) if form == "system" else ""
        opening = (
            f"### The same with {result['count']} longer sessions\n\nRecords of {result['lines']} "
            f"instead of {_LINES} lines, about {_TOKENS[form]} tokens in all, on "
            f"`{result['model']}`; the methods that decide.{why}"
        )
    return (
        f"{opening}\n\n{scores}\n\n{curve}\n\n"
        f"`python -m benchmarks.sessions --forms {form}`: {result['count']} sessions of "
        f"{result['lines']} lines on `{result['model']}`, the questions unseen when a record is "
        "compressed. A budget is the bytes of a share of the tokens of the whole session in 16 "
        "bits, the same from the first turn on. In brackets: the 95% interval over sessions. The "
        f"second table is the mean by turn with {share:g} of the bytes. {made_with(result)}\n"
    )


def _why(result: Result) -> str:
    """Why the default forgets what is only said at the beginning."""
    newest, share = "documents ago 00", 0.125
    by = {(row["method"], row["budget"]): row["curve"] for row in result["results"]}
    ours, h2o = by["heavy_merge", share], by["h2o+int4", share]
    return (
        " The default loses here where nothing is pinned. H2O sums attention over all queries, so "
        "that what was read first has the highest sums and stays, and what was read last goes: "
        f"with {share:g} of the bytes it answers {h2o['system']:.2f} of the questions about the "
        f"message, the default {ours['system']:.2f}, and {h2o[newest]:.2f} of those about the "
        f"newest record, the default {ours[newest]:.2f}."
    )


def _score(row: Result) -> str:
    low, high = row["ci95"]
    return f"{row['accuracy']:.2f} ({low:.2f}-{high:.2f})"


def compaction(result: Result) -> str:
    """The time of a token with compressions over one without."""
    rows = [
        [
            row["model"],
            f"{row['prompt']:,}",
            str(row["budget"]),
            f"{row['time']:.2f}",
            f"{row['scores']:.2f}",
            f"{row['compressions']:.2f}",
            f"{row['tokens'] / max(1, row['tokens_with_compressions']):.0f}",
        ]
        for row in result["results"]
    ]
    header = [
        "model",
        "tokens of the prompt",
        "budget",
        "time / without",
        "of it scores",
        "of it compressions",
        "tokens from one to the next",
    ]
    return (
        "## What compressions cost while a model decodes\n\n"
        f"{table(header, rows)}\n\n"
        "`python -m benchmarks.compaction`: the mean time of a decoded token over that of a token "
        "at which nothing is compressed and no query becomes a score, in the same cache, whole "
        "layers included. Every compression has to reduce. With the longest prompt some heads of "
        "a layer keep nothing but the first and the last tokens. Time is that of one processor. "
        f"{made_with(result)}\n"
    )


def long_stream(result: Result) -> str:
    """Bytes, time and error over a long stream, in ten rows."""
    parts = ["## Two hundred thousand decoded tokens\n"]
    if result["length"] != 200_000:
        parts = [f"## {result['length']:,} decoded tokens\n"]
    for row in result["results"]:
        blocks = row["blocks"]
        step = max(1, len(blocks) // 8)
        shown = [*blocks[::step][:-1], blocks[-1]] if len(blocks) > 1 else blocks
        rows = [
            [
                f"{block['tokens']:,}",
                f"{block['bytes']:.3f}",
                f"{block['held']:.3f}",
                f"{block['time']:.2f}",
                f"{block['mean_milliseconds'] / block['milliseconds']:.2f}",
                "" if block["error"] is None else f"{block['error']:.2f}",
            ]
            for block in shown
        ]
        header = [
            f"`{row['method']}`, tokens",
            "bytes of the slots / budget",
            "of all tensors",
            "time of a token / first block",
            "time / without compressions",
            "error of the first queries",
        ]
        parts.append(table(header, rows) + "\n")
    parts.append(
        f"`python -m benchmarks.long_stream`: text of sessions, one token at a time, on "
        f"`{result['model']}` with budget={result['budget']}, in blocks of "
        f"{result['length'] // result['blocks']:,} tokens. The slots' bytes are the largest in a "
        "block: a layer grows to a buffer above its budget before it is compressed. Time is that "
        "of one processor. The error is that of 32 queries of the first tokens over all tokens so "
        f"far. {made_with(result)}\n"
    )
    return "\n".join(parts)
