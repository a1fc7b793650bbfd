"""What a prompt that is compressed while it is read costs in accuracy.

    python -m benchmarks.streaming_accuracy --json

LongEval prompts with their question are read with ``prefill="exact"``, which compresses afterwards,
and with ``prefill="streaming"``, all at once and in chunks. The bytes are those of the slots after
the answer and the largest that the cache ever held, over those of an exact cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.longeval import cases
from benchmarks.page import save
from kvsketch import SketchCache
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.evaluation.runner.loading import resolve_model

MODEL = "spread"
#: the cache's arguments and the size of a chunk, 0: the whole prompt
SETTINGS: list[tuple[str, dict[str, Any], int]] = [
    ("heavy_merge", {"prefill": "exact"}, 0),
    ("heavy_merge", {"prefill": "streaming"}, 0),
    ("heavy_merge", {"prefill": "streaming"}, 1024),
    ("heavy_merge", {"prefill": "streaming"}, 512),
    ("heavy_merge", {"prefill": "streaming", "allocation": "global"}, 1024),
    ("heavy_merge", {"prefill": "streaming", "bits": 4}, 1024),
    ("heavy_merge", {"prefill": "streaming", "bits": 16}, 1024),
    ("snapkv", {"prefill": "streaming"}, 1024),
    ("h2o", {"prefill": "streaming"}, 1024),
    ("streaming_llm", {"prefill": "streaming"}, 1024),
]
ANSWER = 12


def answered(model: Any, tokenizer: Any, rows: list[Any], cache_of: Any, chunk: int) -> Any:
    """Right answers, and shares of the exact cache's bytes."""
    right, bytes_, peak = 0, 0.0, 0.0
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        cache = cache_of()
        more = {"prefill_chunk_size": chunk} if chunk else {}
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=ANSWER, do_sample=False, **more
        )
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        right += str(row["expected_number"]) in text
        if isinstance(cache, SketchCache):
            bytes_ += cache.nbytes() / cache.exact_nbytes()
            peak += cache.peak_nbytes / cache.exact_nbytes()
    return {"right": right, "bytes": bytes_ / len(rows), "peak": peak / len(rows)}


def main(
    count: Annotated[int, typer.Option(help="LongEval cases.")] = 30,
    lines: Annotated[int, typer.Option(help="Lines of a prompt.")] = 400,
    budgets: Annotated[str, typer.Option(help="Comma-separated budgets.")] = "0.25,0.1,0.05",
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.streaming_accuracy --count 2 --budgets 0.1 --json"""
    torch.set_num_threads(1)
    path = resolve_model(MODEL)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    source, rows = cases(lines, count, 0)
    kept, found = [float(text) for text in budgets.split(",")], []
    with Progress(disable=json) as bar:
        task = bar.add_task("answers", total=1 + len(SETTINGS) * len(kept))
        exact = answered(model, tokenizer, rows, lambda: DynamicCache(config=model.config), 0)
        bar.advance(task)
        for method, settings, chunk in SETTINGS:
            for budget in kept:

                def made(
                    method: str = method, given: Any = settings, budget: float = budget
                ) -> Any:
                    return SketchCache(model.config, method, budget=budget, **given)

                row = answered(model, tokenizer, rows, made, chunk)
                found.append(
                    {"method": method, **settings, "chunk": chunk, "budget": budget, **row}
                )
                bar.advance(task)
    result = {
        "command": "streaming_accuracy",
        "model": MODEL,
        "source": source,
        "lines": lines,
        "cases": len(rows),
        "exact_right": exact["right"],
        "results": found,
        "seed": 0,
        **environment(),
    }
    save(result, out)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
