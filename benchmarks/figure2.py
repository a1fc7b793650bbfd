"""BalanceKV's figure 2 as printed, layer by layer, and the effect of the walk's constant on it.

    python -m benchmarks.figure2 --out docs/results/figure2.json --plot docs/figures/figure2.svg
    python -m benchmarks.figure2 --model meta-llama/Llama-3.1-8B-Instruct --device cuda \\
        --dtype bfloat16 --layers 1,2,5 --records triviaqa.jsonl --out figure2.json

The protocol is that of section 4.1. The first 256 tokens are kept and, for query j of the last 256,
the tokens from n - 256 to j. Of the tokens between them, the share 2^-T is kept, for T = 1..4. The
error is |z - Attn|_F / |Attn|_F over all queries and heads of a layer, the mean over prompts and
10 seeds, and ``std`` is the standard deviation over seeds. A model with too few positions for this
gets 128 tokens and 128 queries (``kept_at_ends`` in its rows).

``uniform`` keeps a uniform sample whose members count 2^T times each, as BalanceKV's do. With
``uniform, unweighted`` they count once, as the exact tokens do. ``balancekv c=30`` has the paper's
constant in c = constant log(n / delta), and the rows after it have smaller ones.

A second part has synthetic keys and shows where balancing helps: the keys are in clusters of a
given spread, the rows are by dimension, block and constant, and ``over_uniform`` is the same error
over that of ``uniform``.
"""

from __future__ import annotations

import itertools
import json as json_
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from benchmarks.figures import subplots, write
from benchmarks.options import integers, paths, positive
from benchmarks.prompts import default_models, load, prompts_for
from benchmarks.results import Results, ResumeOption
from kvsketch import Slots
from kvsketch.evaluation.report.report import dumps
from kvsketch.evaluation.runner.loading import load_model, load_tokenizer, resolve_model
from kvsketch.hf.activations import Activations, capture
from kvsketch.hf.measuring import answer_later
from kvsketch.methods import BalanceKV, Compressor, Uniform

KEPT, SMALL = 256, 128  # tokens kept at each end
RATES = (1, 2, 3, 4)
#: The paper's constant is 30. With the smallest, each sign is the one that reduces the signed sum.
CONSTANTS = (30.0, 1.0, 1e-2, 1e-4, 1e-6, 1e-9, 1e-12, 1e-30)
#: For the synthetic keys: spread of a cluster, head_dim, block size.
SPREADS, DIMS, BLOCKS = (0.0, 0.1, 0.3, 1.0), (4, 16, 64), (64, 256, 1024)
MADE_UP = 2048
LONGBENCH = (
    "Answer the question based on the given passage. Only give me the answer and do not output "
    "any other words. The following are some examples.\n\n{context}\n\n{input}"
)

Row = dict[str, Any]


def samplers(constants: Iterable[float], block: int = KEPT) -> dict[str, type[Compressor] | Any]:
    """The compared samplers by name. Each makes a compressor from a seed."""
    found: dict[str, Any] = {"uniform": Uniform, "uniform, unweighted": Uniform}
    for constant in constants:
        found[f"balancekv c={constant:g}"] = lambda seed, constant=constant: BalanceKV(
            seed, constant=constant, block=block
        )
    return found


def compressed(middle: Slots, name: str, sampler: Any, rate: int, seed: int) -> Slots:
    kept = sampler(seed)(middle, middle.count >> rate)
    return Slots(kept.keys, kept.mean_values()) if name == "uniform, unweighted" else kept


def layer_errors(
    caught: Activations, kept: int, rates: Iterable[int], found: dict[str, Any], seeds: range
) -> dict[tuple[str, int], list[float]]:
    """The errors in one layer on one prompt, by sampler and rate, with one error per seed."""
    n = caught.keys.shape[2]
    tokens = Slots(caught.keys, caught.values)
    held_back, queries = tokens.narrow(n - kept, kept), caught.queries[:, :, n - kept :]
    before = tokens.narrow(0, n - kept)
    exact = answer_later(before, held_back, queries, caught.scaling)
    first, middle = before.narrow(0, kept), before.narrow(kept, n - 2 * kept)
    errors: dict[tuple[str, int], list[float]] = {}
    for (name, sampler), rate in itertools.product(found.items(), rates):
        for seed in seeds:
            slots = Slots.cat([first, compressed(middle, name, sampler, rate, seed)])
            answer = answer_later(slots, held_back, queries, caught.scaling)
            error = float((answer - exact).norm() / exact.norm())
            errors.setdefault((name, rate), []).append(error)
    return errors


def on_model(
    texts: list[Tensor],
    model: Any,
    layers: list[int] | None,
    kept: int,
    found: dict[str, Any],
    seeds: range,
) -> list[Row]:
    """A row per layer, sampler and rate, then the rows over all layers (layer "all")."""
    everything: dict[tuple[int, str, int], list[list[float]]] = {}
    for text in texts:
        for caught in capture(model, text, layers):
            for (name, rate), errors in layer_errors(caught, kept, RATES, found, seeds).items():
                everything.setdefault((caught.layer, name, rate), []).append(errors)
    rows = []
    by_layer: dict[tuple[str, int], list[list[float]]] = {}
    for (layer, name, rate), errors in everything.items():
        by_layer.setdefault((name, rate), []).extend(errors)
        rows.append({"layer": layer, "sampler": name, "rate": rate, **over_seeds(errors)})
    return rows + [
        {"layer": "all", "sampler": name, "rate": rate, **over_seeds(errors)}
        for (name, rate), errors in by_layer.items()
    ]


def over_seeds(errors: list[list[float]]) -> dict[str, float]:
    """The mean over prompts for every seed, then the mean and standard deviation over seeds."""
    means = [statistics.fmean(of_seed) for of_seed in zip(*errors, strict=True)]
    spread = statistics.stdev(means) if len(means) > 1 else 0.0
    return {"error": statistics.fmean(means), "std": spread}


def made_up(spread: float, dim: int, seed: int) -> tuple[Slots, Tensor, Slots]:
    """Synthetic slots and queries of 4 heads, and an empty set of held-back slots: ``MADE_UP`` keys
    of norm about sqrt(d) in 16 clusters, and values with the same clusters and spread."""
    g = torch.Generator().manual_seed(seed)
    own = torch.randint(16, (MADE_UP,), generator=g)

    def around(size: int) -> Tensor:
        centers = torch.randn(1, 4, 16, size, generator=g)
        noise = torch.randn(1, 4, MADE_UP, size, generator=g)
        return (centers[:, :, own] + spread * noise) / (1 + spread**2) ** 0.5

    slots = Slots(around(dim), 1 + around(dim))
    queries = torch.randn(1, 4, 64, dim, generator=g)
    empty = slots.narrow(0, 0)
    return slots, queries, empty


def on_made_up(spread: float, dim: int, block: int, seeds: range, seed: int) -> list[Row]:
    """The errors with half of the tokens kept, also relative to the error of ``uniform``."""
    slots, queries, empty = made_up(spread, dim, seed)
    exact = answer_later(slots, empty, queries, dim**-0.5)
    errors: dict[str, list[float]] = {}
    for name, sampler in samplers(CONSTANTS, block).items():
        for s in seeds:
            kept = compressed(slots, name, sampler, 1, s)
            answer = answer_later(kept, empty, queries, dim**-0.5)
            errors.setdefault(name, []).append(float((answer - exact).norm() / exact.norm()))
    base = statistics.fmean(errors["uniform"])
    return [
        {"sampler": name, "error": statistics.fmean(e), "over_uniform": statistics.fmean(e) / base}
        for name, e in errors.items()
    ]


def figure(rows: list[Row], path: Path) -> None:
    """A panel per model: BalanceKV's error over uniform's, by constant. Then the synthetic keys."""
    sources = list(dict.fromkeys(r["source"] for r in rows if r["part"] == "model"))
    shown = [(16, 256), (4, 256), (16, 1024)]
    panels = len(sources) + len(shown)
    fig, axes = subplots(panels, 3.6 * panels, 3.8)
    names = [f"balancekv c={c:g}" for c in CONSTANTS]
    for panel, source in zip(axes, sources, strict=False):
        part = [r for r in rows if r.get("source") == source]
        for layer in dict.fromkeys(r["layer"] for r in part):
            here = {(r["sampler"], r["rate"]): r["error"] for r in part if r["layer"] == layer}
            line = [here[name, 1] / here["uniform", 1] for name in names]
            width = 2.5 if layer == "all" else 1.0
            panel.plot(CONSTANTS, line, marker="o", ms=3, lw=width, label=f"layer {layer}")
        panel.set(title=source)
    for panel, (dim, block) in zip(axes[len(sources) :], shown, strict=True):
        for spread in SPREADS:
            part = [
                r
                for r in rows
                if r["part"] == "made-up"
                and (r["dim"], r["block"], r["spread"]) == (dim, block, spread)
            ]
            here = {r["sampler"]: r["over_uniform"] for r in part}
            panel.plot(
                CONSTANTS, [here[n] for n in names], marker="o", ms=3, label=f"spread {spread:g}"
            )
        panel.set(title=f"made-up keys, d={dim}, b={block}")
    for panel in axes:
        panel.axhline(1.0, color="k", lw=0.8, ls="--")
        panel.set(xscale="log", xlabel="constant of c", ylim=(0, 1.3))
        panel.legend(fontsize=6)
        panel.grid(True, alpha=0.3)
    axes[0].set_ylabel("error over uniform's, T = 1")
    write(fig, path)


def printed(rows: list[Row], path: Path) -> None:
    """The figure as the paper prints it: uniform and BalanceKV side by side, layer by layer."""
    found = [r for r in rows if r["part"] == "model"]
    panels = list(dict.fromkeys((r["source"], r["layer"]) for r in found))
    fig, axes = subplots(len(panels), 2.4 * len(panels), 3.2)
    for panel, (source, layer) in zip(axes, panels, strict=True):
        for name, shift in (("uniform", -0.15), ("balancekv c=30", 0.15)):
            part = [
                r for r in found if (r["source"], r["layer"], r["sampler"]) == (source, layer, name)
            ]
            panel.bar(
                [r["rate"] + shift for r in part],
                [r["error"] for r in part],
                0.3,
                yerr=[r["std"] for r in part],
                label=name,
            )
        panel.set(title=f"{source.split(':')[0]}, layer {layer}", xlabel="T")
        panel.title.set_fontsize(8)
        panel.set_xticks(RATES)
    axes[0].set_ylabel("relative error")
    axes[0].legend(fontsize=7)
    write(fig, path)


def records_of(tokenizer: Any, file: Path, limit: int, count: int) -> list[Tensor]:
    """LongBench's TriviaQA prompts. The middle of long prompts is cut out, as in LongBench."""
    lines = file.read_text(encoding="utf-8").splitlines()[:count]
    found = []
    for record in map(json_.loads, lines):
        text = LONGBENCH.format(context=record["context"], input=record["input"])
        ids = tokenizer(text, return_tensors="pt").input_ids
        if ids.shape[1] > limit:
            half = limit // 2
            ids = torch.cat([ids[:, :half], ids[:, ids.shape[1] - half :]], dim=1)
        found.append(ids)
    return found


def main(
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub id. Default: all local models.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, with --model.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, with --model.")] = "float32",
    layers: Annotated[
        str | None, typer.Option(help="Layer numbers. Default: all. The paper has 1,2,5.")
    ] = None,
    files: Annotated[str, typer.Option(help="Comma-separated text files as prompts.")] = "",
    records: Annotated[
        Path | None, typer.Option(help="LongBench records (triviaqa.jsonl) as prompts.")
    ] = None,
    prompts: Annotated[int, typer.Option(help="Prompts per model.")] = 3,
    tokens: Annotated[int, typer.Option(help="Maximum length of a record's prompt.")] = 8192,
    seeds: Annotated[int, typer.Option(help="Seeds. The paper has 10.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    out: ResumeOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw figures FILE, FILE_layers.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.figure2 --model ./my-model --layers 1,2,5 --json"""
    console = Console(stderr=True)
    positive(prompts=prompts, seeds=seeds, tokens=tokens)
    if records is not None and not records.is_file():
        raise typer.BadParameter(f"--records {str(records)!r} is not a file")
    given, numbers = paths(files), integers("layers", layers)
    names = [model] if model else default_models()
    results = Results(
        out,
        command="figure2",
        models=[Path(name).name for name in names],
        layers=numbers,
        files=[str(path) for path in given],
        records=None if records is None else records.name,
        prompts=prompts,
        tokens=tokens,
        seeds=seeds,
        seed=seed,
    )
    each = range(seed, seed + seeds)
    for name in names:
        if results.has(part="model", model=Path(name).name):
            continue
        if model:
            folder = resolve_model(name)
            loaded, tokenizer = load_model(folder, device, dtype), load_tokenizer(folder)
        else:
            loaded, tokenizer = load(name)
        limit = int(loaded.config.max_position_embeddings)
        if records is not None:
            source = records.stem
            texts = records_of(tokenizer, records, min(limit, tokens), prompts)
        else:
            source, texts = prompts_for(name, loaded, tokenizer, prompts, seed, given)
        shortest = min(text.shape[1] for text in texts)
        kept = KEPT if shortest >= 3 * KEPT else SMALL
        if shortest < 3 * kept:
            raise typer.BadParameter(
                f"{name}: a prompt has {shortest} tokens, but {3 * kept} are needed"
            )
        console.print(f"{name}: {len(texts)} prompts of {source}, {kept} exact tokens at each end")
        found = samplers(CONSTANTS)
        about = {"part": "model", "model": Path(name).name, "kept_at_ends": kept}
        about["source"] = f"{Path(name).name}:{source}"
        rows = on_model(texts, loaded, numbers, kept, found, each)
        results.add([{**about, **row} for row in rows])
    grid = list(itertools.product(SPREADS, DIMS, BLOCKS)) if model is None else []
    with Progress(console=console) as progress:
        for spread, dim, block in progress.track(grid, description="made-up keys"):
            about = {"part": "made-up", "spread": spread, "dim": dim, "block": block}
            if not results.has(**about):
                rows = on_made_up(spread, dim, block, range(seed, seed + min(seeds, 5)), seed)
                results.add([{**about, **row} for row in rows])
    result = results.finish()
    if plot is not None:
        printed(results.rows, plot.with_stem(f"{plot.stem}_layers"))
    if plot is not None and model is None:
        figure(results.rows, plot)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
