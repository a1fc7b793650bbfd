"""The speed part of docs/benchmarks.md."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import made_with, table

_TITLES = {
    "decode": "## Attention of one decoded token",
    "compress": "## Compressing a prompt",
    "prefill": "## Measuring and compressing beside a prefill",
    "end_to_end": "## The default from end to end",
}
_TEXTS = {
    "decode": (
        "32 query heads, 8 KV heads of 128. `slots`: with masses, the same number in every head; "
        "`ragged`: the same total, heads from 0.25 to 2.25 of the mean; `plain`: torch's own "
        "attention over as many plain tokens, called as models call it; `packed`: called with the "
        "queries of a group as queries of one head, which is faster; `full`: over all n. `floor`: "
        "what must be read over the bandwidth of a copy, measured in the same run. Ratios of "
        "times, medians of pairs."
    ),
    "compress": (
        "8 KV heads of 128, float32, 64 queries; to an eighth of the tokens (k-center, which takes "
        "one step per centre: to 1,024). The exponent is that of the time over the tokens. SnapKV "
        "and KeyDiff also against kvpress's own, on the same tensors. Block halving: one round, "
        "against the BalanceKV authors' own code on the same tensors."
    ),
    "prefill": (
        "One layer of Llama 3 8B's size in bfloat16: seconds of measuring errors for the budgets "
        "of its heads, and of compressing, over those of its prefill. Peak: everything the cache "
        "holds at any time of a default prefill (`budget=0.25`), over an uncompressed cache."
    ),
    "end_to_end": (
        "By `generate`, tokens per second over those of `DynamicCache`, medians of pairs: the "
        "default at 1/8 of the tokens against the exact cache; and decoding with as many slots as "
        "`DynamicCache` has tokens when it starts, over at least two compressions."
    ),
}


def speed(result: dict[str, Any]) -> str:
    """A section: every kind of row in a table of its own."""
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
