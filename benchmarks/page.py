"""Writes docs/benchmarks.md from the JSON the benchmarks left in docs/results/.

python -m benchmarks.decode_speed --out docs/results/decode_speed.json
python -m benchmarks.streaming_memory --out docs/results/streaming_memory.json
python -m benchmarks.page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"


def save(result: dict[str, Any], out: Path | None) -> None:
    """Write a benchmark's JSON where ``--out`` says."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _where(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    hardware = ", ".join(f"{name} {value}" for name, value in result["hardware"].items())
    return f"Seed {result['seed']}; {versions}; {hardware}."


def decode_speed(result: dict[str, Any]) -> str:
    rows = [
        [
            r["method"],
            f"{r['ratio']:.2f}",
            f"{min(r['ratios']):.2f} - {max(r['ratios']):.2f}",
            str(len(r["ratios"])),
        ]
        for r in result["results"]
    ]
    first = result["results"][0]
    return (
        "## Decoding against DynamicCache at the same number of slots\n\n"
        f"{first['tokens']} greedy tokens from {first['slots']} slots; the ratio of tokens per "
        "second (above 1: faster than DynamicCache), median of paired runs. SketchCache "
        "recompresses as it goes and stays at its budget; DynamicCache grows.\n\n"
        + _table(["method", "ratio", "least - most", "pairs"], rows)
        + f"\n\n{_where(result)}\n"
    )


def streaming_memory(result: dict[str, Any]) -> str:
    rows = [
        [
            r["method"],
            f"{r['peak_kv_bytes']:,}",
            f"{r['bound_bytes']:,}",
            f"{r['exact_kv_bytes']:,}",
            f"{r['seconds_over_exact']:.2f}",
        ]
        for r in result["results"]
    ]
    first = result["results"][0]
    return (
        "## Peak of a streaming prefill\n\n"
        f"{first['tokens']:,} tokens in chunks of {first['chunk']} at a budget of "
        f"{first['budget']} slots; bytes of all tensors the cache holds, at their highest. The "
        "bound is budget + chunk slots in every layer. Time is relative to the same chunked "
        "prefill with DynamicCache.\n\n"
        + _table(["method", "peak KV bytes", "bound", "exact cache", "time / exact"], rows)
        + f"\n\n{_where(result)}\n"
    )


def main() -> None:
    parts = ["# Speed and memory\n\nWritten by `python -m benchmarks.page`; do not edit.\n"]
    for name, section in (("decode_speed", decode_speed), ("streaming_memory", streaming_memory)):
        path = DOCS / "results" / f"{name}.json"
        if not path.is_file():
            print(f"skipped: {path} is not there; run python -m benchmarks.{name} --out {path}")
            continue
        parts.append(section(json.loads(path.read_text(encoding="utf-8"))))
    (DOCS / "benchmarks.md").write_text("\n".join(parts), encoding="utf-8")
    print(f"wrote {DOCS / 'benchmarks.md'}")


if __name__ == "__main__":
    main()
