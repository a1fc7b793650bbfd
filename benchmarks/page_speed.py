"""The section of docs/benchmarks.md on the results of ``benchmarks.speed``."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import made_with, table

_TITLES = {
    "decode": "## Attention of one decoded token",
    "compress": "## Compressing a prompt",
    "prefill": "## Measuring and compressing, compared with a prefill",
    "end_to_end": "## The default method from end to end",
}
_TEXTS = {
    "decode": (
        "32 query heads, 8 KV heads of 128. `slots`: with masses, the same number in every head. "
        "`ragged`: the same total, with heads from 0.25 to 2.25 of the mean. `plain`: torch's "
        "attention over the same number of plain tokens, called as models call it. `packed`: the "
        "same, called with the queries of a group as queries of one head, which is faster. "
        "`full`: torch's attention over all n tokens. `floor`: the bytes that must be read over "
        "the bandwidth of a copy, measured in the same run. Numbers are ratios of times, medians "
        "of pairs."
    ),
    "compress": (
        "8 KV heads of 128, float32, 64 queries, compressed to an eighth of the tokens (k-center, "
        "which takes one step per centre, to 1,024). The exponent is that of time against tokens. "
        "SnapKV and KeyDiff are also compared with kvpress's code, and one round of block halving "
        "with the code of BalanceKV's authors, on the same tensors."
    ),
    "prefill": (
        "One layer of Llama 3 8B's size in bfloat16: seconds to measure errors for the budgets of "
        "its heads, and to compress, over those of its prefill. Peak: the peak bytes of the cache "
        "in a default prefill (`budget=0.25`), over an uncompressed cache."
    ),
    "end_to_end": (
        "Tokens per second of `generate` over those with `DynamicCache`, medians of pairs: the "
        "default at 1/8 of the tokens against the exact cache, and decoding with as many slots as "
        "`DynamicCache` has tokens at the start, over at least two compressions."
    ),
}


def speed(result: dict[str, Any]) -> str:
    """The section, with a table for every kind of row."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in result["results"]:
        kinds.setdefault(tuple(row), []).append(row)
    tables = [
        table(
            [name.replace("_", " ") for name in kind],
            [[_cell(row[n]) for n in kind] for row in rows],
        )
        for kind, rows in kinds.items()
    ]
    preset = result["preset"]
    made = made_with(result) + f" {result['threads']} threads, {result['repeats']} pairs."
    return "\n\n".join([_TITLES[preset], _TEXTS[preset], *tables, made]) + "\n"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    return str(value)
