"""The section on the same methods on two models: one whose answers a single head reads, and one
whose retrieval is spread over heads and layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.markdown import details, made_with, table

#: the models, and their columns
BEDS = {"longeval-one-head": "one head", "spread": "spread"}
QUESTIONS = ("unseen", "seen")
#: the methods compared, and what they are in words
NAMED = {
    "heavy_merge": "kvsketch, its default",
    "heavy_merge@calibrated+16bit": "kvsketch, allocated beforehand, 16 bits",
    "heavy_merge@calibrated+int4": "kvsketch, allocated beforehand, 4 bits",
    "heavy_merge@global+int4/sample": "kvsketch, 4 bits, a sixth of the context read again",
    "kvzip/reread": "KVzip",
    "kvgrad/reread": "KVgrad",
    "snapkv": "SnapKV",
    "snapkv@layer": "AdaKV (SnapKV's scores)",
    "h2o": "H2O",
}


#: the results with the rows of a model
FILES = {
    ("longeval-one-head", "unseen"): ("longeval_one_head_unseen",),
    ("longeval-one-head", "seen"): ("longeval_one_head_seen",),
    ("spread", "unseen"): ("longeval_unseen", "longeval_reread"),
    ("spread", "seen"): ("longeval_seen",),
}


def section(loaded: Callable[[str], dict[str, Any] | None]) -> str:
    """A table for each question of ``QUESTIONS``. ``loaded``: gives the complete result of a name,
    or None."""
    parts = []
    for question in QUESTIONS:
        found = {model: [loaded(name) for name in FILES[model, question]] for model in BEDS}
        there = {model: [r for r in results if r] for model, results in found.items()}
        if there == found and all(r["model"] == m for m, rs in there.items() for r in rs):
            parts.append(_table(question, there))
    if not parts:
        return ""
    return (
        "## The same methods on both models\n\n"
        "Accuracy on LongEval, at equal bytes. AdaKV allocates by SnapKV's scores over the heads "
        "of a layer. Allocated beforehand: by errors measured on three other records.\n\n"
        + "\n\n".join(parts)
        + "\n"
    )


def _table(question: str, found: dict[str, list[dict[str, Any]]]) -> str:
    scores = {
        model: {(r["method"], r["budget"]): r["accuracy"] for one in some for r in one["results"]}
        for model, some in found.items()
    }
    budgets = sorted({b for rows in scores.values() for _, b in rows if b < 1}, reverse=True)
    header = [f"question {question}"]
    header += [f"{budget:.0%}, {BEDS[model]}" for budget in budgets for model in found]
    rows = []
    for name, words in NAMED.items():
        cells = [scores[model].get((name, budget)) for budget in budgets for model in found]
        if any(cell is not None for cell in cells):
            shown = ["-" if cell is None else f"{cell:.2f}" for cell in cells]
            rows.append([f"{words} (`{name}`)", *shown])
    exact = ", ".join(
        f"{rows[('exact', 1.0)]:.2f} ({BEDS[model]})" for model, rows in scores.items()
    )
    result = next(iter(found.values()))[0]
    return (
        f"{details(f'All numbers, question {question}', table(header, rows))}\n\n"
        f"{result['count']} {result['source']} cases of {result['lines']} lines, the question "
        f"{question} at compression. The exact cache: {exact}. {made_with(result)}"
    )
