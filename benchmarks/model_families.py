"""Every causal language model of the installed transformers, with a SketchCache.

    python -m benchmarks.model_families --json

For each model type of transformers' own mapping, a tiny random model (``tests/tiny_models.py``) in
float32 reads a prompt of 40 tokens, 12 decoded tokens and a chunk of 8, with and without padding.
Its logits are compared:

- without loss (budget >= tokens): with ``DynamicCache``, which runs the same kernel;
- evicting: with ``DynamicCache`` and the evicted tokens masked in the model's own kernel, layer
  by layer and head by head, with even budgets and with uneven ones.

In addition, ``summary()`` and ``error()`` are called with the default method.

A family is *right* if all of these checks pass, *refused* if ``SketchCache(config)`` raises an
error that states the reason, and *not constructible* if no tiny model can be made. Any other
outcome is an error: the command reports it, writes nothing and fails.
``tests/hf/test_model_sweep.py`` compares the lists with the code.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from transformers.utils import logging

from benchmarks.page import save
from kvsketch.evaluation.report.report import dumps, environment

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results/model_families.json"
PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"


def family(model_type: str) -> dict[str, Any]:
    """The list to which one model type belongs, with the results of its checks or the reason."""
    sys.path[:0] = [p for p in [str(ROOT / "tests")] if p not in sys.path]
    import model_sweep
    import tiny_models
    from kvsketch import SketchCache, UnsupportedError

    row: dict[str, Any] = {"model_type": model_type}
    try:
        model = tiny_models.build(model_type)
    except tiny_models.NotConstructible as error:
        return {**row, "list": "not constructible", "why": str(error)}
    row["class"] = type(model).__name__
    try:
        cache = SketchCache(model.config)
    except UnsupportedError as error:
        return {
            **row,
            "list": "refused",
            "why": str(error).removesuffix("; use DynamicCache for it"),
        }
    row["layers"] = [type(layer).__name__ for layer in cache.layers]
    row |= model_sweep.everything(model)
    close = max(row["lossless"], row["evicting"], row["uneven"] or 0.0) <= model_sweep.CLOSE
    return {**row, "list": "right" if close else "WRONG"}


def markdown(results: Sequence[dict[str, Any]], versions: dict[str, Any]) -> str:
    """The three lists as Markdown, for docs/models.md."""
    lists = {name: [] for name in ("right", "refused", "not constructible")}
    for row in results:
        lists[row["list"]].append(row)
    right = lists["right"]
    worst = max(max(row["evicting"], row["uneven"] or 0.0) for row in right)
    hybrid = [row for row in right if any("Linear" in x or "Hybrid" in x for x in row["layers"])]
    names = ", ".join(f"`{row['model_type']}`" for row in right)
    lines = [
        f"transformers {versions['transformers']} has {len(results)} causal language models: "
        f"{len(right)} are right, {len(lists['refused'])} are refused by name when the cache is "
        f"made, {len(lists['not constructible'])} cannot be made here without another model. None "
        "is silently wrong.",
        "",
        f"**Right ({len(right)}).** Without loss the logits equal `DynamicCache`'s bit for bit. "
        "With tokens evicted they equal those of the full cache with the same tokens masked, to "
        f"within {worst:.1e} of the largest logit (float32).",
        "",
        names + ".",
        "",
        f"**Hybrids among them ({len(hybrid)}).** Full-attention layers are compressed; "
        "linear-attention, convolution and sliding-window layers keep the cache that transformers "
        "gives them: " + ", ".join(f"`{row['model_type']}`" for row in hybrid) + ".",
        "",
        f"**Refused ({len(lists['refused'])}).** `SketchCache(model.config)` raises "
        "`UnsupportedError` with this reason, before any token is read:",
        "",
        "| reason | families |",
        "| --- | --- |",
    ]
    reasons: dict[str, list[str]] = {}
    for row in lists["refused"]:
        reasons.setdefault(row["why"].partition(" ")[2], []).append(row["model_type"])
    for why, families in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {why} | {', '.join(f'`{name}`' for name in families)} |")
    lines += ["", "**Not constructible here.**"]
    for row in lists["not constructible"]:
        lines.append(f"`{row['model_type']}`: {row['why']}")
    return "\n".join(lines)


def write_page(results: Sequence[dict[str, Any]], versions: dict[str, Any]) -> None:
    """Put the lists between the marks in docs/models.md."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    part = markdown(results, versions)
    PAGE.write_text(f"{before}{BEGIN}\n{part}\n{END}{after}", encoding="utf-8")


def main(
    families: Annotated[
        str, typer.Option(help="Comma-separated model types. [default: all, and write the page]")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.model_families --families llama,gemma3 --json"""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny_models import MODEL_TYPES

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    chosen = families.split(",") if families else MODEL_TYPES
    unknown = [name for name in chosen if name not in MODEL_TYPES]
    if unknown:
        raise typer.BadParameter(
            f"--families {unknown[0]!r} is not the model type of a causal language model"
        )
    results = []
    for name in track(chosen, "families", console=console):
        results.append(family(name))
        if results[-1]["list"] == "WRONG":
            console.print(results[-1])
    result = {"command": "model_families", "results": results, **environment()}
    wrong = [row["model_type"] for row in results if row["list"] == "WRONG"]
    if json:
        print(dumps(result))
    if wrong:
        console.print(f"families that are wrong: {', '.join(wrong)}")
        raise typer.Exit(1)
    save(result, out)
    if not families:
        save(result, RESULTS)
        write_page(results, result["versions"])


def lists() -> dict[str, dict[str, Any]]:
    """The rows of the last full run, by model type."""
    content = json_module.loads(RESULTS.read_text(encoding="utf-8"))
    return {row["model_type"]: row for row in content["results"]}


if __name__ == "__main__":
    typer.run(main)
