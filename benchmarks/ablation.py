"""The contribution of each part of ``heavy_merge``: attention error with one part changed.

    python -m benchmarks.ablation --json

One-shot rows are measured as in ``benchmarks.attention_error``: the slots before the held-back
queries are compressed at once, to the share ``kept`` of the slots between sinks and recent window.
Streamed rows end with the same budget and the same queries, but only the first half of the prompt
is read at once. The rest is read token by token or in chunks, through ``Stream``, whose page is
compressed again and again. The error is |z - exact|_F / |exact|_F, the mean over layers and
prompts.

Every row gives the same number of slots to every head. The complete method is therefore
``heavy_merge@even`` here, and not ``heavy_merge``, which would allocate its budget by measured
errors. A slot with a mass takes 4 bytes more than one without, so that the bytes of the rows are
not quite equal.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.attention_error import PRESETS, held_bytes, relative_error, split
from benchmarks.page import save
from benchmarks.prompts import default_models, load, prompts_for
from kvsketch import InputError, Slots
from kvsketch.budget import Budget
from kvsketch.cache import Stream, windowed
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.hf.activations import Activations, capture
from kvsketch.hf.measuring import answer_later
from kvsketch.methods import ClusterMerge, Compressor, HeavyMerge, SnapKV
from kvsketch.observed import Observed

#: The part that is changed, and the method with this change.
PARTS: dict[str, Callable[[], Compressor]] = {
    "heavy_merge@even": HeavyMerge,
    "no distinct keys": lambda: HeavyMerge(distinct=False),
    "no heavy tokens": lambda: HeavyMerge(share=0.0),
    "no attention (cluster_merge)": ClusterMerge,
    # The tokens that heavy_merge selects by attention, without the merging of the others.
    "only heavy tokens (snapkv, window 64, unpooled)": lambda: SnapKV(window=64, kernel_size=1),
    "share 0.1": lambda: HeavyMerge(share=0.1),
    "share 0.5": lambda: HeavyMerge(share=0.5),
    "rounds of 0.1": lambda: HeavyMerge(pairs=0.1),
    "rounds of 0.4": lambda: HeavyMerge(pairs=0.4),
    "k-means": lambda: HeavyMerge(pairs=0.0),
    "k-means, 1 step": lambda: HeavyMerge(pairs=0.0, steps=1),
    "k-means, no attention (cluster_merge)": lambda: ClusterMerge(pairs=0.0),
}
#: The number of tokens that are read at a time after the first half of the prompt.
CHUNKS = {"token by token": 1, "chunks of 64": 64}
STREAMED: dict[str, Callable[[], Compressor]] = {
    "heavy_merge@even": HeavyMerge,
    "heavy_merge@even, k-means": lambda: HeavyMerge(pairs=0.0),
    "cluster_merge": ClusterMerge,
    "cluster_merge, k-means": lambda: ClusterMerge(pairs=0.0),
}
STREAM = "streamed, "


def everything() -> list[str]:
    """The names of all rows."""
    return [*PARTS, *(f"{STREAM}{how}: {name}" for how in CHUNKS for name in STREAMED)]


def at_once(
    make: Callable[[], Compressor], slots: Slots, seen: Observed, kept: int, window: tuple[int, int]
) -> Slots:
    """Compress all tokens to ``kept`` slots at once."""
    return make()(slots, kept, seen, sink=window[0], recent=window[1])


def streamed(
    make: Callable[[], Compressor],
    slots: Slots,
    seen: Observed,
    kept: int,
    window: tuple[int, int],
    chunk: int,
) -> Slots:
    """Read the first half at once, then ``chunk`` tokens at a time, with ``kept`` slots."""
    stream = Stream(windowed(make(), *window), Budget(kept))
    n = slots.count
    edges = [0, *range(n // 2, n, chunk), n]
    for start, end in pairwise(edges):
        stream.extend(slots.narrow(start, end - start))
        queries = seen.queries[:, :, start:end]
        stream.settle(Observed(queries, seen.scaling), prefill=end - start > 1)
    return stream.slots


def measure(
    prompts: list[list[Activations]], part: str, kept: float, preset: str
) -> dict[str, float]:
    """Mean error and bytes of one row. The layers of a prompt are the rows of one batch."""
    sink, recent, follow, _ = PRESETS[preset]
    total = size = 0.0
    for layers in prompts:
        fields = ("queries", "keys", "values")
        together = [torch.cat([getattr(layer, name) for layer in layers]) for name in fields]
        slots, seen, later, queries = split(Activations(0, *together, layers[0].scaling), follow)
        budget = sink + recent + max(1, round(kept * (slots.count - sink - recent)))
        if part.startswith(STREAM):
            how, name = part.removeprefix(STREAM).split(": ")
            out = streamed(STREAMED[name], slots, seen, budget, (sink, recent), CHUNKS[how])
        else:
            out = at_once(PARTS[part], slots, seen, budget, (sink, recent))
        size += held_bytes(out) / slots.count / len(prompts)
        for row in range(len(layers)):
            mine = (s.map(lambda t, i=row: t[i : i + 1]) for s in (slots, later, out))
            exact_slots, held_back, compressed = mine
            asked = queries[row : row + 1]
            exact = answer_later(exact_slots, held_back, asked, seen.scaling)
            error = relative_error(compressed, held_back, asked, exact, seen.scaling)
            total += error / len(layers) / len(prompts)
    return {"relative_error": round(total, 5), "bytes_per_token": round(size, 3)}


def main(
    models: Annotated[str, typer.Option(help="Comma-separated folders or hub ids.")] = "",
    parts: Annotated[
        str, typer.Option(help="Semicolon-separated rows (see --list). Default: all.")
    ] = "",
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "default",
    prompts: Annotated[int, typer.Option(help="Prompts per model.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    list_: Annotated[bool, typer.Option("--list", help="Print the names of the rows.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.ablation --parts "heavy_merge@even;no heavy tokens" --json"""
    known = everything()
    if list_:
        print("\n".join(known))
        return
    chosen = parts.split(";") if parts else known
    for part in chosen:
        if part not in known:
            raise typer.BadParameter(f"--parts {part!r} is not a row; --list prints all rows")
    if preset not in PRESETS:
        raise typer.BadParameter(f"--preset {preset!r} must be one of {', '.join(PRESETS)}")
    if prompts < 1:
        raise typer.BadParameter(f"--prompts {prompts} must be at least 1")
    sink, recent, follow, shares = PRESETS[preset]
    console = Console(stderr=True)
    results: list[dict[str, Any]] = []
    for model_name in models.split(",") if models else default_models():
        model, tokenizer = load(model_name)
        source, texts = prompts_for(model_name, model, tokenizer, prompts, seed, [])
        label = f"{Path(model_name).name}:{source}"
        shortest = min(text.shape[1] for text in texts)
        least = 2 * (sink + recent) + follow
        if shortest < least:
            raise typer.BadParameter(
                f"{label}: a prompt has {shortest} tokens, but --preset {preset} needs {least}"
            )
        try:
            caught = [capture(model, text) for text in texts]
        except InputError as error:
            raise typer.BadParameter(str(error)) from error
        with Progress(console=console) as progress, torch.inference_mode():
            task = progress.add_task(label, total=len(chosen) * len(shares))
            for part in chosen:
                for kept in shares:
                    row = measure(caught, part, kept, preset)
                    results.append({"part": part, "source": label, "kept": kept, **row})
                    progress.advance(task)
        console.print(table(results, label))
    result = {"command": "ablation", "preset": preset, "results": results, "seed": seed}
    result |= {"sink": sink, "recent": recent, "follow": follow, "prompts": prompts}
    result |= environment()
    save(result, out)
    if json:
        print(dumps(result))


def table(results: list[dict[str, Any]], source: str) -> Table:
    """The errors of one source: a row for each part, a column for each kept share."""
    rows = [r for r in results if r["source"] == source]
    shares = sorted({r["kept"] for r in rows}, reverse=True)
    shown = Table(title=source)
    for column in ("part", *(f"1/{round(1 / share)}" for share in shares)):
        shown.add_column(column)
    for part in dict.fromkeys(r["part"] for r in rows):
        errors = {r["kept"]: r["relative_error"] for r in rows if r["part"] == part}
        shown.add_row(part, *(f"{errors[share]:.4f}" for share in shares))
    return shown


if __name__ == "__main__":
    typer.run(main)
