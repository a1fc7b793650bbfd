"""The section on the same methods on two models: one whose answers a single head reads, and one
whose retrieval is spread over heads and layers."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import made_with, table

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


def file_of(model: str, question: str) -> str:
    """The name of a result in docs/results."""
    return f"bed_{model.replace('longeval-', '').replace('-', '_')}_{question}"


def section(results: dict[str, dict[str, Any]]) -> str:
    """A table for each question of ``QUESTIONS``, from complete results by their names; empty
    without any."""
    parts = []
    for question in QUESTIONS:
        found = {model: results.get(file_of(model, question)) for model in BEDS}
        if all(found.values()):
            parts.append(_table(question, {m: r for m, r in found.items() if r is not None}))
    if not parts:
        return ""
    return (
        "## The same methods on both models\n\n"
        "Accuracy on LongEval, at equal bytes. AdaKV allocates by SnapKV's scores over the heads "
        "of a layer. Allocated beforehand: by errors measured on three other records.\n\n"
        + "\n\n".join(parts)
        + "\n"
    )


def _table(question: str, found: dict[str, dict[str, Any]]) -> str:
    scores = {
        model: {(row["method"], row["budget"]): row["accuracy"] for row in result["results"]}
        for model, result in found.items()
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
    result = next(iter(found.values()))
    return (
        f"{table(header, rows)}\n\n"
        f"{result['count']} {result['source']} cases of {result['lines']} lines, the question "
        f"{question} at compression. The exact cache: {exact}. {made_with(result)}"
    )
