"""A stream of many decoded tokens in a cache of fixed size: bytes, time and error as it goes.

    python -m benchmarks.long_stream --json

The packaged model, told that it has positions enough, is fed the text of sessions
(``kvsketch eval sessions --form documents``), one token at a time, again and again with other
records. ``bytes`` is the largest size of the slots in a block of tokens over that of the budget,
scores and masses included; ``held`` that of all tensors, waiting queries included. ``time`` is the
mean time of the processor for a token in a block over that in the first block; the median is that
of a token without a compression.
``error`` is the relative error of 32 queries of the first tokens over all tokens so far, as
``SketchCache.error`` measures it: what the model would be told if it asked for the beginning again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.options import positive
from benchmarks.results import Results, ResumeOption, Row
from kvsketch import SketchCache
from kvsketch.evaluation.report.report import dumps
from kvsketch.evaluation.runner import loading
from kvsketch.evaluation.tasks.sessions import Sessions

MODEL = "spread"


def tokens(tokenizer: Any, seed: int) -> Iterator[int]:
    """The ids of sessions without end."""
    number = 0
    while True:
        for case in Sessions("documents", [330], 4, seed + number).cases():
            yield from tokenizer(case.context, add_special_tokens=False)["input_ids"]
        number += 1


def streamed(model: Any, tokenizer: Any, method: str, budget: int, length: int, blocks: int) -> Row:
    """The row of a method."""
    cache = SketchCache(model.config, method, budget=budget, keep=["errors"])
    source, prompt = tokens(tokenizer, 0), []
    for _ in range(2 * budget):
        prompt.append(next(source))
    allowed = budget * cache_token_bytes(model.config)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        model(torch.tensor([prompt]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        for block in range(blocks):
            seconds: list[float] = []
            slots, held = 0, 0
            for i in range(length // blocks):
                ids = torch.tensor([[next(source)]])
                start = time.thread_time()
                model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                seconds.append(time.thread_time() - start)
                if i % 7 == 0:
                    slots = max(slots, slot_bytes(cache))
                    held = max(held, cache.nbytes())
            errors = [x for row in cache.error() for x in row["now"] or []]
            found.append(
                {
                    "tokens": len(prompt) + (block + 1) * (length // blocks),
                    "bytes": round(slots / allowed, 4),
                    "held": round(held / allowed, 4),
                    "milliseconds": round(1000 * statistics.median(seconds), 4),
                    "mean_milliseconds": round(1000 * statistics.fmean(seconds), 4),
                    "error": round(statistics.fmean(errors), 4) if errors else None,
                }
            )
    first = found[0]["mean_milliseconds"]
    for row in found:
        row["time"] = round(row["mean_milliseconds"] / first, 4)
    return {"method": method, "budget": budget, "blocks": found}


def slot_bytes(cache: SketchCache) -> int:
    """Bytes of the slots, their masses and scores."""
    return sum(tensor.nbytes for layer in cache.layers for tensor in layer.stream.page.tensors())


def cache_token_bytes(config: Any) -> int:
    """Bytes of a token in all layers, in the model's own float32."""
    heads = config.num_key_value_heads * config.num_hidden_layers
    return int(2 * config.head_dim * 4 * heads)


def main(
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = "heavy_merge",
    budget: Annotated[int, typer.Option(help="Tokens.")] = 512,
    length: Annotated[int, typer.Option(help="Decoded tokens.")] = 200_000,
    blocks: Annotated[int, typer.Option(help="Rows of the result.")] = 40,
    out: ResumeOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.long_stream --length 4000 --blocks 4 --json"""
    torch.set_num_threads(1)
    positive(budget=budget, length=length, blocks=blocks)
    console = Console(stderr=True)
    path: Path = loading.resolve_model(MODEL)
    tokenizer = loading.load_tokenizer(path)
    model = loading.load_model(path, "cpu", "float32")
    model.config.max_position_embeddings = 1 << 20
    settings = {"budget": budget, "length": length, "blocks": blocks, "seed": 0}
    names = methods.split(",")
    results = Results(out, command="long_stream", model=MODEL, methods=names, **settings)
    with Progress(console=console) as progress:
        for name in progress.track(names, description="methods"):
            if not results.has(method=name):
                results.add([streamed(model, tokenizer, name, budget, length, blocks)])
    result = results.finish()
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
