"""LongEval lines with the question unseen at compression, the same bytes for every method.

    python -m benchmarks.longeval_unseen --json

The record is prefilled and compressed, then question and answer are read and written with the
compressed cache. ``@measured`` spends the same total over heads and layers by errors measured on
three other generated cases (``measure_schedule``); ``int4`` stores slots in 4 bits, at a kept share
that takes the same bytes as the budget would in bfloat16. Official cases where
../shared/data/longeval is there, else generated ones. Intervals are Wilson's, 95%.
"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache

from benchmarks.page import save
from benchmarks.prompts import load
from kvsketch import ALL_METHODS, SketchCache
from kvsketch.evaluation.allocation import measure_curves
from kvsketch.evaluation.loading import PACKAGED
from kvsketch.evaluation.longeval_cases import generate_cases
from kvsketch.evaluation.report import dumps, environment
from kvsketch.evaluation.results import wilson_interval
from kvsketch.quantized import slot_bytes

OFFICIAL = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "longeval"
MARK = "\nNow the record is over."
NEW = 18  # "The <REGISTER_CONTENT> in line aloof-infarction is <45834>" and one to spare
METHODS = (
    "exact,uniform,streaming_llm,h2o,kcenter,snapkv,pyramidkv,tova,expected_attention,knorm,keydiff,"
    "cluster_merge,heavy_merge,snapkv@measured,keydiff@measured,heavy_merge@measured,"
    "heavy_merge@measured+int4"
)


def cases(lines: int, count: int, seed: int) -> tuple[str, list[dict[str, Any]]]:
    path = OFFICIAL / f"{lines}_lines.jsonl"
    if path.is_file():
        rows = [jsonlib.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return "official", rows[:count]
    return "generated", generate_cases(lines, count, seed)


def ids_of(tokenizer: Any, prompt: str) -> tuple[Tensor, int]:
    """Token ids of the whole prompt, and how many belong to the record."""
    cut = prompt.rfind(MARK)
    record = tokenizer(prompt[:cut], return_tensors="pt").input_ids
    rest = tokenizer(prompt[cut:], return_tensors="pt", add_special_tokens=False).input_ids
    return torch.cat([record, rest], dim=1), record.shape[1]


def correct(model: Any, tokenizer: Any, case: dict[str, Any], cache: Any) -> tuple[bool, float]:
    """Whether the number is in the answer, and the bytes kept of the record's."""
    ids, record = ids_of(tokenizer, case["prompt"])
    with torch.no_grad():
        model(ids[:, :record], past_key_values=cache, use_cache=True, logits_to_keep=1)
    kept = cache.nbytes() / cache.exact_nbytes() if isinstance(cache, SketchCache) else 1.0
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=NEW,
        do_sample=False,
    )
    answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return str(case["expected_number"]) in answer, kept


def calibration(model: Any, tokenizer: Any, lines: int, seed: int) -> tuple[list[Tensor], int]:
    """Three other cases with the exact cache's own answers, and how many tokens came after the
    record."""
    texts, after = [], 0
    for case in generate_cases(lines, 3, seed + 1000):
        ids, record = ids_of(tokenizer, case["prompt"])
        mask = torch.ones_like(ids)
        text = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        after = max(after, text.shape[1] - record)
        texts.append(text)
    return texts, after


def main(
    lines: Annotated[int, typer.Option(help="Lines per record.")] = 200,
    count: Annotated[int, typer.Option(help="Cases.")] = 50,
    budgets: Annotated[str, typer.Option(help="Kept fractions.")] = "0.5,0.25,0.1",
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = METHODS,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.longeval_unseen --count 10 --methods exact,snapkv --json"""
    console = Console(stderr=True)
    chosen = methods.split(",")
    for name in chosen:
        plain = name.removesuffix("+int4").removesuffix("@measured")
        if plain != "exact" and plain not in ALL_METHODS:
            raise typer.BadParameter(f"--methods: {plain!r} is not one of {', '.join(ALL_METHODS)}")
    shares = [float(x) for x in budgets.split(",")]
    if not all(0 < share <= 1 for share in shares) or count < 1:
        raise typer.BadParameter("--budgets must lie in (0, 1] and --count be at least 1")
    model, tokenizer = load(PACKAGED)
    source, found = cases(lines, count, seed)
    texts, follow = calibration(model, tokenizer, lines, seed)
    width = model.config.head_dim
    results: list[dict[str, Any]] = []
    with Progress(console=console) as progress:
        task = progress.add_task("cases", total=len(chosen) * len(shares) * len(found))
        for name in chosen:
            plain = name.removesuffix("+int4").removesuffix("@measured")
            bits = 4 if name.endswith("+int4") else 16
            curves = None
            if "@measured" in name:
                curves = measure_curves(model, texts, plain, follow=follow)
            for share in shares if plain != "exact" else [1.0]:
                # A slot in bfloat16, and in 4 bits; mass and score are float32 in both.
                slot = 4 * width + 8
                packed = 2 * slot_bytes(width, 4) + 8
                kept = min(1.0, share if bits == 16 else share * slot / packed)
                schedule = None if curves is None else curves.allocate(kept)
                right, held = 0, 0.0
                for case in found:
                    if plain == "exact":
                        cache: Any = DynamicCache(config=model.config)
                    else:
                        cache = SketchCache(
                            model.config,
                            plain,
                            budget=kept,
                            one_shot=True,
                            bits=bits,
                            schedule=schedule,
                            seed=seed,
                        )
                    good, size = correct(model, tokenizer, case, cache)
                    right += good
                    held += size
                    progress.advance(task)
                low, high = wilson_interval(right, len(found))
                results.append(
                    {
                        "method": name,
                        "budget": share,
                        "kept": round(kept, 4),
                        "accuracy": right / len(found),
                        "ci95": [round(low, 4), round(high, 4)],
                        "cases": len(found),
                        "float32_bytes_kept": round(held / len(found), 4),
                    }
                )
            console.print(
                name, [(r["budget"], r["accuracy"]) for r in results if r["method"] == name]
            )
    result = {"command": "longeval_unseen", "lines": lines, "source": source, "results": results}
    result |= {"seed": seed, **environment()}
    console.print(table(results))
    save(result, out)
    if json:
        print(dumps(result))


def table(results: list[dict[str, Any]]) -> Table:
    shown = Table(title="accuracy, question unseen at compression")
    budgets = sorted({r["budget"] for r in results}, reverse=True)
    for column in ("method", *map(str, budgets)):
        shown.add_column(column)
    for name in dict.fromkeys(r["method"] for r in results):
        by = {r["budget"]: r["accuracy"] for r in results if r["method"] == name}
        shown.add_row(name, *(f"{by[b]:.2f}" if b in by else "" for b in budgets))
    return shown


if __name__ == "__main__":
    typer.run(main)
