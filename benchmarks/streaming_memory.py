"""Peak KV bytes of a streaming prefill, measured from live tensors.

    python -m benchmarks.streaming_memory --json

The script prefills random tokens in chunks with ``prefill="streaming"`` and records, before and
after every layer's attention, the bytes of all tensors of the cache. ``peak_over_bound`` is the
largest of these numbers over the bound, which is budget + chunk slots in every layer.
``seconds_over_exact`` is the time of this prefill over that with ``DynamicCache``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.page import save
from benchmarks.prompts import ONE_HEAD
from kvsketch import METHODS, SketchCache
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.evaluation.runner.loading import resolve_model


def prefill(model: Any, cache: Any, ids: torch.Tensor, chunk: int) -> float:
    """The seconds of a prefill in chunks."""
    start = time.perf_counter()
    for part in ids.split(chunk, dim=1):
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start


def main(
    model: Annotated[str, typer.Option(help="Model folder or hub id.")] = ONE_HEAD,
    methods: Annotated[str, typer.Option(help="Comma-separated methods.")] = ",".join(METHODS),
    tokens: Annotated[int, typer.Option(help="Prompt tokens.")] = 16_000,
    budget: Annotated[int, typer.Option(help="Slots per KV head.")] = 1024,
    chunk: Annotated[int, typer.Option(help="Tokens per chunk.")] = 1024,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.streaming_memory --tokens 16000 --budget 1024 --json"""
    console = Console(stderr=True)
    loaded = AutoModelForCausalLM.from_pretrained(resolve_model(model)).eval()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, loaded.config.vocab_size, (1, tokens), generator=generator)
    results = []
    with torch.inference_mode():
        exact_seconds = prefill(loaded, DynamicCache(config=loaded.config), ids, chunk)
        for method in track(methods.split(","), "prefill", console=console):
            cache = SketchCache(
                loaded.config, method, budget=budget, prefill="streaming", seed=seed
            )
            seconds = prefill(loaded, cache, ids, chunk)
            per_slot = cache.exact_nbytes() / tokens
            results.append(
                {
                    "method": method,
                    "tokens": cache.get_seq_length(),
                    "budget": budget,
                    "chunk": chunk,
                    "kv_bytes": cache.nbytes(),
                    "peak_kv_bytes": cache.peak_nbytes,
                    "bound_bytes": round((budget + chunk) * per_slot),
                    "exact_kv_bytes": cache.exact_nbytes(),
                    "peak_over_bound": round(cache.peak_nbytes / ((budget + chunk) * per_slot), 4),
                    "seconds_over_exact": round(seconds / exact_seconds, 3),
                }
            )
            console.print(results[-1])
    settings = {"model": model, "seed": seed}
    result = {"command": "streaming_memory", "results": results, **settings, **environment()}
    save(result, out)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
