"""Peak KV bytes of a prompt read at once (``prefill="exact"``), relative to the exact cache.

    python -m benchmarks.prefill_peak --json

``SketchCache`` counts the bytes of all its tensors after every layer. ``peak_over_exact`` is the
largest of these numbers over the bytes of the uncompressed cache. A layer whose budgets are known
beforehand is compressed as soon as its attention was computed. Measured budgets depend on the
errors of all layers. Until the last layer is measured, each layer is compressed to the largest
budget that its heads may get.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM

from benchmarks.page import save
from benchmarks.prompts import ONE_HEAD
from kvsketch import SketchCache
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.evaluation.runner.loading import resolve_model

WAYS = ("even", "measured")


def main(
    model: Annotated[str, typer.Option(help="Model folder or hub id.")] = ONE_HEAD,
    methods: Annotated[str, typer.Option(help="Comma-separated methods.")] = "heavy_merge,snapkv",
    budgets: Annotated[str, typer.Option(help="Comma-separated kept fractions.")] = "0.5,0.25,0.1",
    tokens: Annotated[int, typer.Option(help="Prompt tokens.")] = 4000,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.prefill_peak --tokens 4000 --json"""
    console = Console(stderr=True)
    loaded = AutoModelForCausalLM.from_pretrained(resolve_model(model)).eval()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, loaded.config.vocab_size, (1, tokens), generator=generator)
    runs = [
        (method, way, float(budget))
        for method in methods.split(",")
        for way in WAYS
        for budget in budgets.split(",")
    ]
    results = []
    for method, way, budget in track(runs, "prefill", console=console):
        cache = SketchCache(loaded.config, method, budget=budget, allocation=way, seed=seed)
        with torch.inference_mode():
            loaded(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        summary = cache.summary()
        results.append(
            {
                "method": method,
                "allocation": way,
                "budget": budget,
                "peak_kv_bytes": summary["peak_kv_bytes"],
                "kv_bytes": summary["kv_bytes"],
                "exact_kv_bytes": summary["exact_kv_bytes"],
                "peak_over_exact": round(summary["peak_kv_bytes"] / summary["exact_kv_bytes"], 4),
            }
        )
    settings = {"model": model, "tokens": tokens, "seed": seed}
    result = {"command": "prefill_peak", "results": results, **settings, **environment()}
    save(result, out)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
