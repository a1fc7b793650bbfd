"""Answers as rows: one for each task, group and setup."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvsketch.evaluation.runner.scales import scale_of
from kvsketch.evaluation.runner.setups import EXACT
from kvsketch.evaluation.runner.store import Record


def aggregate(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One row per task, group, protocol and setup (seeds together), in order of first appearance.

    ``score`` is the mean (of a perplexity: over all tokens), ``ci95`` its 95% interval: Wilson's
    where all scores are 0 or 1, else a normal one. Bytes are per case, speeds over all of them.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        i, r = record.identity, record.result
        key = repr((i["model"], i["task"], r["group"], i["question"], r["label"], r["kept"]))
        groups.setdefault(key, []).append(record)
    return [_row(group) for group in groups.values()]


def _row(group: Sequence[Record]) -> dict[str, Any]:
    first, results = group[0], [record.result for record in group]
    scores = [float(result["score"]) for result in results]
    scale = scale_of(str(first.identity["task"]))
    score, low, high = scale.summary(scores)

    def mean(name: str, of: Sequence[Mapping[str, Any]] = results) -> float:
        return math.fsum(float(result[name]) for result in of) / len(of)

    def rate(tokens: str, seconds: str) -> float | None:
        time = math.fsum(result[seconds] for result in results)
        made = sum(result[tokens] for result in results)
        return round(made / time, 2) if time > 0 and made > 0 else None

    exact = first.identity["method"] == EXACT
    binary = not scale.is_error and all(score in (0.0, 1.0) for score in scores)
    numbers = [result.get("measured", {}) for result in results]
    measured = {name: float(f"{mean(name, numbers):.6g}") for name in numbers[0]}
    return {
        "model": first.identity["model"],
        "task": first.identity["task"],
        **first.result["group"],
        "question": first.identity["question"],
        "method": first.result["label"],
        "budget": 1.0 if exact else first.identity["budget"],
        "tolerance": None if exact else first.identity["tolerance"],
        "score": float(f"{score:.6g}"),
        **({"accuracy": sum(scores) / len(scores)} if binary else {}),
        "ci95": [float(f"{end:.6g}") for end in (low, high)],
        **({"measured": measured} if measured else {}),
        "cases": len({record.identity["case"] for record in group}),
        "answers": len(group),
        "prompt_tokens": round(mean("prompt_tokens"), 1),
        "slots": round(mean("slots"), 2),
        "kv_bytes": round(mean("kv_bytes")),
        "exact_kv_bytes": round(mean("exact_kv_bytes")),
        "final_kv_bytes": round(mean("final_kv_bytes")),
        "final_exact_kv_bytes": round(mean("final_exact_kv_bytes")),
        "peak_kv_bytes": round(mean("peak_kv_bytes")),
        "prefill_tokens_per_s": rate("prompt_tokens", "prefill_seconds"),
        "decode_tokens_per_s": rate("decode_tokens", "decode_seconds"),
    }
