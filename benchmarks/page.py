"""Writes docs/benchmarks.md, docs/sessions.md, docs/guarantees.md, docs/errors.md and
docs/which-method.md from the JSON that benchmarks left in docs/results/.

    python -m benchmarks.page

``benchmarks.run_all`` has the command of every result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    page_balance,
    page_choice,
    page_errors,
    page_guarantees,
    page_readme,
    page_reread,
    page_ruler,
    page_sessions,
    page_speed,
    page_vllm,
)
from benchmarks.markdown import folded, written_by

DOCS = Path(__file__).resolve().parent.parent / "docs"


def save(result: dict[str, Any], out: Path | None) -> None:
    """Write a benchmark's JSON to the file of ``--out``, completely or not at all."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        new = out.with_name(out.name + ".new")
        new.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        new.replace(out)


def loaded(name: str) -> dict[str, Any] | None:
    """A complete result, or None."""
    path = DOCS / "results" / f"{name}.json"
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found if found.get("complete", True) else None


def reading_costs() -> dict[str, Any]:
    """The result of ``benchmarks.reading``, without rows if it is not there."""
    return loaded("reading") or {"results": [], "peers": []}


def second_reading(result: dict[str, Any]) -> str:
    """LongEval after a second reading, with its cost."""
    return page_reread.longeval_reread(result, reading_costs())


def lengths() -> list[dict[str, Any]]:
    """LongEval of several lengths after a second reading, with as many cases of each."""
    names = [f"longeval_unseen_{lines}_more" for lines in (200, 250, 300, 350)]
    names.append("longeval_unseen_400")
    return [one for one in map(loaded, names) if one]


def second_reading_of_all(result: dict[str, Any]) -> str:
    """The same, and all lengths with as many cases together."""
    return second_reading(result) + page_reread.all_lengths(lengths())


def of_errors() -> str:
    """How docs/errors.md opens."""
    unseen, reread = loaded("longeval_unseen"), loaded("longeval_reread")
    figures = page_readme.opening(unseen, reread, reading_costs()) if unseen and reread else ""
    return f"{figures}\n{page_errors.reading()}"


def of_speed() -> str:
    """How docs/benchmarks.md opens."""
    return page_speed.opening({name: loaded(name) for name in page_speed.SUMMARISED})


def of_guarantees() -> str:
    """How docs/guarantees.md opens."""
    growth, guarantee = loaded("growth"), loaded("guarantee")
    return page_guarantees.opening(growth, guarantee) if growth and guarantee else ""


def of_sessions() -> str:
    """How docs/sessions.md opens."""
    found = [loaded(name) for name in page_sessions.RESULTS]
    return page_sessions.opening([x for x in found if x], loaded("long_stream"))


PAGES: dict[str, tuple[str, Callable[[], str], dict[str, Callable[[dict[str, Any]], str]]]] = {
    "benchmarks.md": (
        "# Speed and memory",
        of_speed,
        {
            "decode_speed": page_speed.decode_speed,
            **{
                f"speed_{preset}": page_speed.speed
                for preset in ("decode", "bits", "compress", "prefill", "end_to_end", "layers")
            },
            "speed_gpu_token": page_speed.on_gpu,
            "speed_gpu_model": page_speed.model_on_gpu,
            "speed_gpu_requests": page_speed.model_on_gpu,
            "prefill_peak": page_speed.prefill_peak,
            "streaming_memory": page_speed.streaming_memory,
            "streaming_accuracy": page_speed.streaming_accuracy,
            "sketch_budget": page_balance.sketch_budget,
            "ray_throughput": page_speed.ray_throughput,
            "busy": page_speed.busy,
        },
    ),
    "sessions.md": (
        "# Sessions: what is forgotten over many turns",
        of_sessions,
        {
            **dict.fromkeys(page_sessions.RESULTS, page_sessions.sessions),
            "compaction": page_sessions.compaction,
            "long_stream": page_sessions.long_stream,
        },
    ),
    "guarantees.md": (
        "# What the papers promise, measured",
        of_guarantees,
        {"growth": page_guarantees.growth, "guarantee": page_guarantees.guarantee},
    ),
    "errors.md": (
        "# What compression costs, method by method",
        of_errors,
        {
            "attention_error": page_errors.attention_error,
            "attention_error_balancekv": page_errors.attention_error_balancekv,
            "figure2": page_balance.figure2,
            "kl": page_errors.kl,
            "kl_few": page_errors.kl_few,
            "longeval_unseen": page_errors.longeval,
            "longeval_seen": page_errors.longeval,
            "longeval_reread": second_reading,
            "longeval_reread_measured": page_reread.measured_after,
            "longeval_unseen_300": second_reading,
            "longeval_unseen_200_more": second_reading,
            "longeval_unseen_250_more": second_reading,
            "longeval_unseen_300_more": second_reading,
            "longeval_unseen_350_more": second_reading,
            "longeval_unseen_400": second_reading_of_all,
            "reading": page_reread.reading,
            "ruler_unseen": page_ruler.ruler,
            "ruler_unseen_more": page_ruler.ruler,
            "ruler_one_layer_unseen": page_ruler.ruler,
            "ruler_one_layer_unseen_more": page_ruler.ruler,
            "ruler_one_layer_seen": page_ruler.ruler,
            "tolerance": page_errors.tolerance,
            "ablation": page_errors.ablation,
            "compression_time": page_errors.compression_time,
        },
    ),
}


def write_block(name: str, text_between: str, page: Path) -> None:
    """Replace the block between the marks of that name in a file."""
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin in text and end in text:
        before, rest = text.split(begin, 1)
        after = rest.split(end, 1)[1]
        block = f"{begin}\n{text_between}\n{end}"
        page.write_text(f"{before}{block}{after}", encoding="utf-8")


def main() -> None:
    for page, (title, opening, sections) in PAGES.items():
        parts = [f"{title}\n\n{written_by('page')}\n", opening()]
        for name, section in sections.items():
            path = DOCS / "results" / f"{name}.json"
            result = loaded(name)
            if result is not None:
                parts.append(section(result))
            elif path.is_file():
                print(f"skipped: {path} is not complete; the same command continues it")
            else:
                print(f"skipped: {path} is not there; benchmarks/run_all.py measures it")
        (DOCS / page).write_text(folded("\n".join(parts)), encoding="utf-8")
        print(f"wrote {DOCS / page}")
    readme = DOCS.parent / "README.md"
    unseen, reread, served = (
        loaded(name) for name in ("longeval_unseen", "longeval_reread", "vllm")
    )
    if unseen and reread:
        write_block("unseen", page_readme.block(unseen, reread, reading_costs(), lengths()), readme)
    if served:
        write_block("vllm", page_vllm.block(served, loaded("vllm_soak")), DOCS / "vllm.md")
        write_block("vllm", page_vllm.lead(served), readme)
    page_choice.main()


if __name__ == "__main__":
    main()
