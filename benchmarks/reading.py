"""What a second reading of the context costs, beside the first.

    python -m benchmarks.reading --json

Seconds of reading a context with an uncompressed cache, of ``kvsketch.prefill`` by the prompt's own
queries, and of the same by a second reading: with the packaged model, and with two layers of Llama
3 8B's shape and random weights. Runs are paired; medians count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig

import kvsketch
from benchmarks.page import save
from benchmarks.speed import prompt
from kvsketch import SketchCache
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.evaluation.runner.loading import PACKAGED, resolve_model


def models() -> dict[str, Any]:
    """By what they are called in the table."""
    wide = LlamaConfig(
        vocab_size=8000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
    )
    torch.manual_seed(0)
    return {
        "packaged": AutoModelForCausalLM.from_pretrained(resolve_model(PACKAGED)).eval(),
        "two layers of Llama 3 8B's shape": AutoModelForCausalLM.from_config(wide).eval(),
    }


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main(
    tokens: Annotated[int, typer.Option(help="Of the context.")] = 4000,
    repeats: Annotated[int, typer.Option(help="Paired runs; their median counts.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.reading --tokens 1000 --repeats 1 --json"""
    if tokens < 256 or repeats < 1 or threads < 1:
        raise typer.BadParameter("--tokens must be at least 256, --repeats and --threads 1")
    torch.set_num_threads(threads)
    console = Console(stderr=True)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(PACKAGED))
    rows = []
    with torch.inference_mode(), console.status("a few minutes"):
        for name, model in models().items():
            ids = prompt(model, tokens, seed)
            found: dict[str, list[float]] = {"first": [], "prompt": [], "reread": []}
            for _ in range(repeats):
                inner, plain = model.base_model, DynamicCache(config=model.config)
                found["first"].append(timed(partial(inner, ids, past_key_values=plain)))
                for queries in ("prompt", "reread"):
                    cache = SketchCache(model.config, budget=0.1, allocation="global", seed=seed)
                    read = partial(
                        kvsketch.prefill, model, ids, cache, queries=queries, tokenizer=tokenizer
                    )
                    found[queries].append(timed(read))
            pairs = list(zip(*found.values(), strict=True))
            rows.append(
                {
                    "model": name,
                    "tokens": tokens,
                    "pairs": repeats,
                    "prompt_over_first": statistics.median(p / f for f, p, _ in pairs),
                    "reread_over_first": statistics.median(r / f for f, _, r in pairs),
                    "second_over_first": statistics.median((r - p) / f for f, p, r in pairs),
                }
            )
    result: dict[str, Any] = {"command": "reading", "results": rows, "tokens": tokens}
    result |= {"repeats": repeats, "threads": threads, "seed": seed} | environment()
    save(result, out)
    for row in rows:
        console.print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
