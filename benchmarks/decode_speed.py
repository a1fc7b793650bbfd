"""The decoding speed of SketchCache relative to DynamicCache with the same bytes.

    python -m benchmarks.decode_speed --json

The model runs in bfloat16. Both caches start to decode with the same bytes: SketchCache after a
prompt four times as long as its budget, DynamicCache after one of as many tokens as the budget. A
method that stores 16 bits then has as many slots, the default more of them in 8 or 4 bits. Runs
alternate, so that other load on the machine affects both. ``ratio`` is the median of the paired
ratios of tokens per second, SketchCache over DynamicCache, and ``ratios`` lists all of them.
"""

from __future__ import annotations

import statistics
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
from kvsketch import SketchCache
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.evaluation.runner.loading import resolve_model
from kvsketch.evaluation.runner.setups import parse_method

#: Without @even, heavy_merge allocates its budget by measured errors, so that heads differ in size.
DEFAULT = (
    "uniform,streaming_llm,h2o,kcenter,snapkv,keydiff,cluster_merge,heavy_merge@even,heavy_merge"
)


def decode_rate(model: Any, cache: Any, first: torch.Tensor, tokens: int) -> float:
    """Greedy tokens per second from a prefilled cache."""
    token = first
    start = time.perf_counter()
    for _ in range(tokens):
        logits = model(token, past_key_values=cache, use_cache=True).logits
        token = logits[:, -1:].argmax(-1)
    return tokens / (time.perf_counter() - start)


def measure(model: Any, method: str, slots: int, tokens: int, seed: int) -> tuple[float, float]:
    """Tokens per second of (SketchCache, DynamicCache), each with the bytes of ``slots`` tokens.
    ``method`` is named as in ``kvsketch eval --methods``."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.config.vocab_size, (1, 4 * slots), generator=generator)
    setup = parse_method(method)
    sketch = SketchCache(
        model.config,
        setup.method,
        budget=slots,
        allocation=setup.allocation,
        bits=setup.bits,
        seed=seed,
    )
    exact = DynamicCache(config=model.config)
    rates = []
    for cache, prompt in ((sketch, ids), (exact, ids[:, :slots])):
        model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        decode_rate(model, cache, ids[:, -1:], 8)  # The first steps also allocate memory.
        rates.append(decode_rate(model, cache, ids[:, -1:], tokens))
    return rates[0], rates[1]


def main(
    model: Annotated[str, typer.Option(help="Model folder or hub id.")] = ONE_HEAD,
    methods: Annotated[str, typer.Option(help="Comma-separated methods.")] = DEFAULT,
    slots: Annotated[int, typer.Option(help="Slots when decoding starts.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens decoded per run.")] = 200,
    repeats: Annotated[int, typer.Option(help="Paired runs per method.")] = 7,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.decode_speed --slots 1024 --repeats 7 --json"""
    loaded = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=torch.bfloat16).eval()
    names = methods.split(",")
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    console = Console(stderr=True)
    with torch.inference_mode():
        for repeat in track(range(repeats), "paired runs", console=console):
            for name in names:
                pairs[name].append(measure(loaded, name, slots, tokens, seed + repeat))
    results = []
    for name, rates in pairs.items():
        ratios = [ours / theirs for ours, theirs in rates]
        results.append(
            {
                "method": name,
                "slots": slots,
                "tokens": tokens,
                "ratio": round(statistics.median(ratios), 4),
                "ratios": [round(r, 4) for r in ratios],
                "sketch_tokens_per_s": round(statistics.median(r[0] for r in rates), 2),
                "dynamic_tokens_per_s": round(statistics.median(r[1] for r in rates), 2),
            }
        )
        console.print(f"{name:14s} {results[-1]['ratio']:.3f} of DynamicCache's tokens per second")
    settings = {"model": model, "dtype": "bfloat16", "repeats": repeats, "seed": seed}
    result = {"command": "decode_speed", "results": results, **settings, **environment()}
    save(result, out)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
