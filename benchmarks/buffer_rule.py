"""How often a layer of a given size should be compressed while a prompt streams in.

    python -m benchmarks.buffer_rule --json

A layer that holds at most C slots per KV head can be compressed rarely to few slots, or often to
many. LongEval questions are answered after a streaming prefill, with the same C, by two rules:

often   the rule of ``page.schedule``: at 41/40 of a budget, to 37/40 of it
rarely  at 5/4 of a budget, to the budget, as pages of vLLM were compressed before

Results are right answers, the processor time of the prefill over that of ``often``, and the number
of compressions of each layer.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.longeval import cases
from benchmarks.page import save
from kvsketch import SketchCache
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.evaluation.runner.loading import resolve_model
from kvsketch.page.schedule import Rhythm

MODEL = "spread"
#: the share of a full layer by which a compression reduces it
RULES = {"often": 4 / 41, "rarely": 1 / 5}


def measure(model: Any, tokenizer: Any, rows: list[Any], slots: int, rule: str) -> dict[str, Any]:
    """The results of one rule with layers of ``slots`` slots."""
    every, right, took, times = round(RULES[rule] * slots), 0, 0.0, 0
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        cache = SketchCache(model.config, budget=slots, prefill="streaming")
        for layer in cache.layers:
            layer.stream.rhythm = Rhythm(slots, every)
            layer.stream._next = slots
        began = time.process_time()
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        took += time.process_time() - began
        times += max(0, (ids.shape[1] - 1 - slots) // every + 1)
        out = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        right += str(row["expected_number"]) in text
    return {
        "slots": slots,
        "rule": rule,
        "every": every,
        "right": right,
        "cases": len(rows),
        "compressions": times / len(rows),
        "seconds": took,
    }


def main(
    count: Annotated[int, typer.Option(help="LongEval cases of 200 lines.")] = 20,
    slots: Annotated[
        str, typer.Option(help="Comma-separated sizes of a full layer.")
    ] = "1800,1400,1000,500",
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.buffer_rule --count 2 --slots 1000 --json"""
    torch.set_num_threads(1)
    path = resolve_model(MODEL)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    source, rows = cases(200, count, 0)
    sizes, found = [int(text) for text in slots.split(",")], []
    with Progress(disable=json) as bar:
        task = bar.add_task("answers", total=len(sizes) * len(RULES))
        for size in sizes:
            for rule in RULES:
                found.append(measure(model, tokenizer, rows, size, rule))
                found[-1]["seconds_over_often"] = found[-1]["seconds"] / next(
                    r["seconds"] for r in found if r["slots"] == size
                )
                bar.advance(task)
    result = {"command": "buffer_rule", "model": MODEL, "source": source, "results": found}
    result |= {"seed": 0, **environment()}
    save(result, out)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
