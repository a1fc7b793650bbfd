"""The sections on a second reading: what it brings, and what it costs."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import made_with, table

#: rows of the README's table: the peer, the peer with what we add, ours, ours without a second
#: reading
SHOWN = (
    "kvzip/reread",
    "kvzip+int4/reread",
    "heavy_merge@global/reread",
    "heavy_merge@global+int4/reread",
    "heavy_merge@measured+int4",
)


def accuracies(result: dict[str, Any], names: list[str], interval: bool) -> str:
    """Methods by the share of the bytes that is kept."""
    budgets = sorted({r["budget"] for r in result["results"]}, reverse=True)
    rows = []
    for name in names:
        cells = []
        for budget in budgets:
            found = [r for r in result["results"] if (r["method"], r["budget"]) == (name, budget)]
            text = ""
            if found:
                low, high = found[0]["ci95"]
                text = f"{found[0]['accuracy']:.2f}" + (f" ({low:.2f}-{high:.2f})" * interval)
            cells.append(text)
        rows.append([name, *cells])
    return table(["kept", *map(str, budgets)], rows)


def what(result: dict[str, Any]) -> str:
    count = result["results"][0]["cases"]
    return (
        f"LongEval, {result['lines']} lines, the question not seen when the record was compressed; "
        f"accuracy of the packaged model on {count} {result['source']} cases, at equal bytes. "
        "`/reread`: by the queries of a second reading (`kvsketch.prefill`). `kvzip` has KVzip's "
        "scores and budgets, and keeps the tokens that kvpress's own code keeps "
        "(`tests/benchmarks/test_peers_of_models.py`); but here it has the 32 recent tokens that "
        "every method has. As published it has none, and loses most answers at 0.1 (`kvsketch eval "
        "longeval --methods kvzip --recent 0 --queries reread --question unseen`). `@global`: "
        "heads share the budget by scores; `+int4`, `+int8`: slots in 4 or 8 bits, more of them."
    )


def longeval_reread(result: dict[str, Any]) -> str:
    names = list(dict.fromkeys(r["method"] for r in result["results"]))
    return (
        f"## A second reading: LongEval, {result['lines']} lines, question unseen\n\n"
        f"{what(result)} With 95% intervals.\n\n{accuracies(result, names, True)}\n\n"
        f"{made_with(result)}\n"
    )


def reading(result: dict[str, Any]) -> str:
    rows = [
        [
            r["model"],
            f"{r['tokens']:,}",
            f"{r['prompt_over_first']:.2f}",
            f"{r['reread_over_first']:.2f}",
            f"{r['second_over_first']:.2f}",
        ]
        for r in result["results"]
    ]
    columns = ["model", "tokens", "by the prompt", "by a second reading", "the second alone"]
    return (
        "## What a second reading costs\n\n"
        'Time of `kvsketch.prefill` with `heavy_merge`, `budget=0.1, allocation="global"`, over '
        "that of reading the context once with an uncompressed cache; and what the second reading "
        "adds. Medians of paired runs on "
        f"{result['threads']} threads.\n\n{table(columns, rows)}\n\n{made_with(result)}\n"
    )


def readme_block(result: dict[str, Any]) -> str:
    have = {r["method"] for r in result["results"]}
    names = [name for name in SHOWN if name in have]
    return f"{accuracies(result, names, False)}\n\n{what(result)}"
