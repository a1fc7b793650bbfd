"""Whether errors on the following tokens stay within ``SketchCache(tolerance=...)``, and the cost.

    python -m benchmarks.tolerance --json

A prompt without its last ``follow`` tokens is read by a cache with a tolerance. The queries of the
held-back tokens, captured from the exact model, then attend to the slots of the cache and,
causally, to their own tokens. The method is ``SketchCache``'s default, ``heavy_merge``. The error
is |z - exact|_F / |exact|_F over those queries, one number per layer and KV head. ``within`` is the
share of layer-heads (over all prompts) whose error is at most 1.5 times the tolerance, and
``reported_median`` is the median of the errors in ``cache.error()`` right after the prompt. The
cost is ``kept``, the slots per token, and ``bytes_per_token``.

Rows of kind "running" state how accurately ``track_error`` estimates the error while a stream is
compressed again and again at a fixed budget, the same for every head (``heavy_merge@even``).
``probe`` is the ratio of this estimate to the error on the newest queries, for which the cache has
never had exact answers. ``reservoir`` is the same ratio for an estimate from a uniform sample of
exact tokens with as many bytes, whose own sampling error dominates. Both are quantiles: 5%, 50%
and 95%.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from benchmarks import options
from benchmarks.equal_bytes import held_by
from benchmarks.prompts import default_models, load, prompts_for
from benchmarks.results import Results
from kvsketch import Observed, SketchCache, Slots
from kvsketch.budget import Budget
from kvsketch.cache import Stream, windowed
from kvsketch.cache.error import QUERIES, relative_error
from kvsketch.cache.held_out import answers
from kvsketch.evaluation.report.report import dumps
from kvsketch.hf.activations import Activations, capture

SLACK = 1.5
WINDOW = {"sink": 4, "recent": 32}


def following(cache: SketchCache, caught: list[Activations], n: int) -> list[float]:
    """The relative errors of the queries from token ``n`` on, by layer and KV head."""
    errors = []
    sketches = [layer.stream for layer in cache.layers if hasattr(layer, "stream")]
    for layer, sketch in zip(caught, sketches, strict=True):
        heads = layer.keys.shape[1]
        whole = Slots(layer.keys, layer.values)
        tokens, later = whole.narrow(0, n), whole.narrow(n, whole.count - n)
        queries = Observed(layer.queries[:, :, n:], layer.scaling)
        exact = answers(tokens, later, queries)
        errors += relative_error(exact, answers(sketch.slots, later, queries), heads)[0].tolist()
    return errors


def held_to(
    model: Any, texts: list[Tensor], caught: list[list[Activations]], tolerance: float, follow: int
) -> dict[str, Any]:
    """The row of one tolerance. Every prompt is read by a new cache."""
    errors: list[float] = []
    reported: list[float] = []
    kept = size = exact_heads = 0.0
    for text, layers in zip(texts, caught, strict=True):
        n = text.shape[1] - follow
        cache = SketchCache(model.config, tolerance=tolerance, keep=["decoded"], **WINDOW)
        with torch.no_grad():
            model(text[:, :n], past_key_values=cache, use_cache=True, logits_to_keep=1)
        errors += following(cache, layers, n)
        rows = cache.error()
        reported += [x for row in rows for x in row["prompt"]]
        summary = cache.summary()
        kept += summary["slots"] / n
        exact_heads += sum(len(layer["exact_heads"]) for layer in summary["layers"])
        size += held_by(cache, **WINDOW).bytes / n
    found = torch.tensor(errors, dtype=torch.float64)
    return {
        "tolerance": tolerance,
        "within": round(float((found <= SLACK * tolerance).double().mean()), 4),
        "median": round(float(found.median()), 5),
        "p95": round(float(found.quantile(0.95)), 5),
        "worst": round(float(found.max()), 5),
        "reported_median": round(float(torch.tensor(reported).median()), 5),
        "layer_heads": len(errors),
        "kept": round(kept / len(texts), 4),
        "exact_heads": round(exact_heads / len(errors), 4),
        "bytes_per_token": round(size / len(texts), 3),
    }


def reservoir_error(
    slots: Slots, tokens: Slots, asked: Observed, size: int, generator: torch.Generator
) -> Tensor:
    """The error of ``slots``, estimated from sinks, recent tokens and a uniform sample of ``size``
    exact tokens between them."""
    n, (sink, recent) = tokens.count, WINDOW.values()
    middle = tokens.narrow(sink, n - sink - recent)
    batch, heads, count = middle.keys.shape[:3]
    chosen = torch.rand(batch, heads, count, generator=generator).argsort(-1)[..., :size]
    weight = torch.full((batch, heads, size), count / size)
    parts = [tokens.narrow(0, sink), middle.take(chosen).scaled(weight)]
    sampled = Slots.cat([*parts, tokens.narrow(n - recent, recent)])
    exact, answer = (newest(s, asked) for s in (sampled, slots))
    return relative_error(exact, answer, heads)


def newest(slots: Slots, asked: Observed) -> Tensor:
    """The attention output of the newest queries, which is causal over the newest tokens."""
    count = asked.queries.shape[2]
    before = slots.count - count
    return answers(slots.narrow(0, before), slots.narrow(before, count), asked)


def running(caught: list[Activations], budget: float, stream: int) -> list[dict[str, float]]:
    """Stream the last ``stream`` tokens of a prompt. Returns the actual and estimated errors."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for layer in caught:
        tokens = Slots(layer.keys, layer.values)
        n = tokens.count - stream
        compressed = Stream(windowed("heavy_merge", **WINDOW), Budget(budget), track_error=True)
        compressed.extend(tokens.narrow(0, n))
        compressed.settle(Observed(layer.queries[:, :, :n], layer.scaling), prefill=True)
        for i in range(n, tokens.count):
            compressed.extend(tokens.narrow(i, 1))
            compressed.settle(
                Observed(layer.queries[:, :, i : i + 1], layer.scaling), prefill=False
            )
        asked = Observed(layer.queries[:, :, -QUERIES:], layer.scaling)
        held = compressed.slots
        exact, answer = (newest(s, asked) for s in (tokens, held))
        actual = relative_error(exact, answer, tokens.keys.shape[1])[0]
        probe = compressed.running_error
        assert probe is not None
        group = layer.queries.shape[1] // layer.keys.shape[1]
        by_tokens = reservoir_error(held, tokens, asked, QUERIES * group, generator)[0]
        for numbers in zip(actual.tolist(), probe[0].tolist(), by_tokens.tolist(), strict=True):
            rows.append(dict(zip(("actual", "probe", "reservoir"), numbers, strict=True)))
    return rows


def main(
    models: Annotated[str, typer.Option(help="Comma-separated folders or hub ids.")] = "",
    tolerances: Annotated[str, typer.Option(help="Comma-separated, in (0, 1).")] = "0.02,0.05,0.1",
    prompts: Annotated[int, typer.Option(help="Prompts per model.")] = 10,
    follow: Annotated[int, typer.Option(help="Held-back tokens.")] = 128,
    files: Annotated[str, typer.Option(help="Comma-separated text files as prompts.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.tolerance --tolerances 0.05 --prompts 2 --json"""
    console = Console(stderr=True)
    options.positive(prompts=prompts, follow=follow)
    wanted = options.fractions("tolerances", tolerances)
    paths = options.paths(files)
    results = Results(
        out, command="tolerance", slack=SLACK, follow=follow, prompts=prompts, seed=seed, **WINDOW
    )
    for model_name in models.split(",") if models else default_models():
        model, tokenizer = load(model_name)
        source, texts = prompts_for(model_name, model, tokenizer, prompts, seed, paths)
        shortest = min(text.shape[1] for text in texts)
        least = 2 * follow + sum(WINDOW.values())
        if shortest < least:
            raise typer.BadParameter(
                f"{model_name}: a prompt has {shortest} tokens, but --follow {follow} needs {least}"
            )
        label = f"{Path(model_name).name}:{source}"
        caught = [capture(model, text) for text in texts]
        with Progress(console=console) as progress:
            task = progress.add_task(label, total=len(wanted) + len(texts))
            for tolerance in wanted:
                if not results.has(source=label, kind="tolerance", tolerance=tolerance):
                    row = held_to(model, texts, caught, tolerance, follow)
                    results.add([{"kind": "tolerance", "source": label, **row}])
                progress.advance(task)
            if not results.has(source=label, kind="running"):
                rows = []
                for layers in caught:
                    rows += running(layers, 0.25, follow)
                    progress.advance(task)
                results.add([{"kind": "running", "source": label, **summarised(rows)}])
        console.print(table(results.rows, label))
    result = results.finish()
    if json:
        print(dumps(result))


def summarised(rows: list[dict[str, float]]) -> dict[str, Any]:
    """The 5%, 50% and 95% quantiles of the ratios of estimated to actual errors."""
    told: dict[str, Any] = {"budget": 0.25, "layer_heads": len(rows)}
    told["actual_median"] = round(float(torch.tensor([r["actual"] for r in rows]).median()), 5)
    for name in ("probe", "reservoir"):
        ratio = torch.tensor([r[name] / max(r["actual"], 1e-9) for r in rows])
        found = ratio.quantile(torch.tensor([0.05, 0.5, 0.95]))
        told[name] = [round(x, 3) for x in found.tolist()]
    return told


def table(rows: list[dict[str, Any]], source: str) -> Table:
    """The rows of one source."""
    shown = Table(title=f"{source}: following tokens within {SLACK} x tolerance")
    for column in ("tolerance", "within", "median", "95%", "kept", "exact heads", "bytes/token"):
        shown.add_column(column)
    for row in rows:
        if row["source"] == source and row["kind"] == "tolerance":
            names = ("tolerance", "within", "median", "p95", "kept", "exact_heads")
            shown.add_row(*(f"{row[name]:.3f}" for name in names), f"{row['bytes_per_token']:.0f}")
    return shown


if __name__ == "__main__":
    typer.run(main)
