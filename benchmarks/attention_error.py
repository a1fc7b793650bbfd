"""Relative error of single layers' attention outputs, on real activations.

    python -m benchmarks.attention_error --json
    python -m benchmarks.attention_error --preset balancekv   # the protocol of its figure 2

A prompt's last ``follow`` tokens are held back: the cache is compressed after the tokens before
them, query-aware methods having seen those tokens' queries only, and the held-back queries then
attend to the slots and, causally, to each other. Error: |z - exact|_F / |exact|_F over those
queries and all heads of a layer; mean over layers and prompts; ``std`` over seeds. ``kept`` is the
share of the middle (what is neither sink nor recent) that is kept.

``bytes_per_token`` counts keys and values at 2 bytes a number (bfloat16), masses at 4 where a
method has them, quantised parts as they are stored; all tokens before the held-back ones, one KV
head. Rows of quantised caches have ``kept`` 1 and stand at their own bytes. ``method@measured``
spends the same total over heads and layers by errors measured on other prompts
(``measure_schedule``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from benchmarks.figures import subplots, write
from benchmarks.page import save
from benchmarks.peers import balancekv, goodpoints, thinformer
from benchmarks.prompts import default_models, load, prompts_for
from kvsketch import ALL_METHODS, InputError, Observed, Slots
from kvsketch.evaluation.activations import Activations, capture
from kvsketch.evaluation.allocation import Curves, answer_later, measure_curves
from kvsketch.evaluation.loading import PACKAGED
from kvsketch.evaluation.report import dumps, environment
from kvsketch.quantized import quantize
from kvsketch.streaming import windowed
from kvsketch.streaming.base import lengthened

#: sink, recent, held-back queries, kept shares
PRESETS: dict[str, tuple[int, int, int, list[float]]] = {
    "default": (16, 64, 64, [1 / 2, 1 / 4, 1 / 8, 1 / 16]),
    "balancekv": (256, 0, 256, [1 / 2, 1 / 4, 1 / 8, 1 / 16]),
}
QUANTISED = {"int8": 8, "int4": 4}
#: one_dimensional needs head_dim 1; sampling numerator and denominator apart is off by any factor
LEFT_OUT = ("one_dimensional",)

#: a method whose budget is spent over heads and layers by measured errors
MEASURED = "@measured"

Compress = Callable[[Slots, Observed, int, int], tuple[Slots, float]]


def held_bytes(slots: Slots) -> float:
    """Bytes per KV head, by the rule of the module's docstring."""
    live = slots.live()
    count = slots.count if live is None else float(live.sum(-1).double().mean())
    width = slots.keys.shape[-1] + slots.values.shape[-1]
    return count * (2 * width + (4 if slots.mass is not None else 0))


def split(caught: Activations, follow: int) -> tuple[Slots, Observed, Slots, Tensor]:
    """The prompt's tokens and queries, the held-back tokens and their queries."""
    n = caught.keys.shape[2] - follow
    whole = Slots(caught.keys, caught.values)
    observed = Observed(caught.queries[:, :, :n], caught.scaling)
    return whole.narrow(0, n), observed, whole.narrow(n, follow), caught.queries[:, :, n:]


def relative_error(
    slots: Slots, held_back: Slots, queries: Tensor, exact: Tensor, scaling: float
) -> float:
    answer = answer_later(slots, held_back, queries, scaling)
    return float((answer - exact).norm() / exact.norm())


def ours(name: str, seed: int, sink: int, recent: int) -> Compress:
    def compress(slots: Slots, observed: Observed, budget: int, layer: int) -> tuple[Slots, float]:
        kept = windowed(name, sink, recent, seed)(slots, budget, observed)
        return kept, held_bytes(kept)

    return compress


def allocated(name: str, seed: int, sink: int, recent: int, curves: Curves) -> Compress:
    """``name`` with the same total, spent by ``curves`` (measured on another prompt)."""

    def compress(slots: Slots, observed: Observed, budget: int, layer: int) -> tuple[Slots, float]:
        n, heads = slots.count, slots.keys.shape[1]
        shares = curves.allocate(budget / n)[layer]
        group = observed.queries.shape[1] // heads
        parts: list[Slots] = []
        for head, share in enumerate(shares):
            mine = slots.map(lambda t, h=head: t[:, h : h + 1])
            queries = observed.queries[:, head * group : (head + 1) * group]
            size = min(n, max(sink + recent + 1, round(share * budget)))
            seen = replace(observed, queries=queries)
            kept = windowed(name, sink, recent, seed + head)(mine, size, seen)
            parts.append(replace(kept, mass=kept.masses(), score=None, positions=None))
        size = sum(held_bytes(part) for part in parts) / heads
        longest = max(part.count for part in parts)
        padded = [part.map(lambda t: lengthened(t, longest - t.shape[2])) for part in parts]
        names = padded[0].tensors()
        return Slots(**{k: torch.cat([p.tensors()[k] for p in padded], 1) for k in names}), size

    return compress


#: one Python call per token: only where asked for
SLOW = "peer:goodpoints"
#: the peers' own halvings
HALVINGS: dict[str, Any] = {
    "peer:balancekv": balancekv,
    "peer:thinformer": thinformer,
    "peer:goodpoints": goodpoints,
}


def theirs(peer: Any, seed: int, sink: int, recent: int, kept: float) -> Compress:
    """A peer's own code on the middle; sinks and recent tokens as for everybody."""

    def compress(slots: Slots, observed: Observed, budget: int, layer: int) -> tuple[Slots, float]:
        rounds = round(-math.log2(kept))
        # Some of them need a multiple of 2^rounds: what is over stays with the sinks.
        over = (slots.count - sink - recent) % 2**rounds
        middle = slots.narrow(sink + over, slots.count - sink - over - recent)
        halved = peer.halved(middle.keys, middle.values, rounds, seed)
        first, last = slots.narrow(0, sink + over), slots.narrow(slots.count - recent, recent)
        together = Slots.cat([first, halved, last])
        return together, held_bytes(together)

    return compress


def quantised(bits: int, sink: int, recent: int) -> Compress:
    """All of the middle in fewer bits, by our own storage (``SketchCache(bits=...)``)."""

    def compress(slots: Slots, observed: Observed, budget: int, layer: int) -> tuple[Slots, float]:
        n = slots.count
        middle = slots.narrow(sink, n - sink - recent)
        size, read = 0.0, []
        for rows, per_channel in ((middle.keys, True), (middle.values, False)):
            packed = quantize(rows, bits, per_channel=per_channel)
            out = torch.empty_like(rows)
            packed.read(out)
            read.append(out)
            size += sum(t.nbytes for t in packed.tensors()) / slots.keys.shape[1]
        width = slots.keys.shape[-1] + slots.values.shape[-1]
        first, last = slots.narrow(0, sink), slots.narrow(n - recent, recent)
        return Slots.cat([first, Slots(*read), last]), size + (sink + recent) * 2 * width

    return compress


def measure(
    layers: list[list[Activations]],
    make: Callable[[int], Compress],
    kept: float,
    preset: tuple[int, int, int, list[float]],
    seeds: int,
) -> dict[str, Any]:
    """Mean error over prompts and layers, per seed. Stops at the second seed if it changes
    nothing: the method has no randomness."""
    sink, recent, follow, _ = preset
    errors: list[float] = []
    size = 0.0
    for seed in range(seeds):
        total, parts, size = 0.0, 0, 0.0
        for caught_layers in layers:
            for caught in caught_layers:
                slots, observed, held_back, queries = split(caught, follow)
                middle = slots.count - sink - recent
                budget = sink + recent + max(1, round(kept * middle))
                compressed, held = make(seed)(slots, observed, budget, caught.layer)
                exact = answer_later(slots, held_back, queries, caught.scaling)
                total += relative_error(compressed, held_back, queries, exact, caught.scaling)
                size += held / slots.count
                parts += 1
        errors.append(total / parts)
        if seed == 1 and errors[0] == errors[1]:
            errors = errors[:1]
            break
    tensor = torch.tensor(errors, dtype=torch.float64)
    return {
        "relative_error": round(float(tensor.mean()), 5),
        "std": round(float(tensor.std()), 5) if len(errors) > 1 else 0.0,
        "seeds": len(errors),
        "bytes_per_token": round(size / parts, 3),
    }


def main(
    models: Annotated[str, typer.Option(help="Comma-separated folders or hub ids.")] = "",
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(
        [
            *(name for name in ALL_METHODS if name not in LEFT_OUT),
            "heavy_merge" + MEASURED,
            *QUANTISED,
            *(name for name in HALVINGS if name != SLOW),
        ]
    ),
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "default",
    layers: Annotated[str, typer.Option(help="Comma-separated layer numbers; all if empty.")] = "",
    prompts: Annotated[int, typer.Option(help="Prompts per model.")] = 2,
    files: Annotated[str, typer.Option(help="Comma-separated text files as prompts.")] = "",
    seeds: Annotated[int, typer.Option(help="Seeds of randomised methods.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure (.svg or .png).")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.attention_error --methods uniform,kcenter --seeds 3 --json"""
    console = Console(stderr=True)
    if preset not in PRESETS:
        raise typer.BadParameter(f"--preset {preset!r} must be one of {', '.join(PRESETS)}")
    chosen = methods.split(",")
    for name, peer in HALVINGS.items():
        reason = peer.available()
        if name in chosen and reason is not None:
            console.print(f"left out: {name}: {reason}")
            chosen.remove(name)
    known = {*ALL_METHODS, *HALVINGS, *QUANTISED}
    for name in chosen:
        if name.removesuffix(MEASURED) not in known or name in LEFT_OUT:
            raise typer.BadParameter(f"--methods: {name!r} is not one of {', '.join(ALL_METHODS)}")
    if min(prompts, seeds) < 1:
        raise typer.BadParameter("--prompts and --seeds must be at least 1")
    paths = [Path(file) for file in files.split(",") if file]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise typer.BadParameter(f"--files: {', '.join(missing)} not there")
    numbers = [int(x) for x in layers.split(",")] if layers else None
    sink, recent, follow, shares = PRESETS[preset]
    results = []
    for model_name in models.split(",") if models else default_models():
        model, tokenizer = load(model_name)
        source, texts = prompts_for(model_name, model, tokenizer, prompts, seed, paths)
        shortest = min(text.shape[1] for text in texts)
        if shortest < sink + recent + follow + 16:
            message = f"{model_name}: a prompt of {shortest} tokens is too short for --preset"
            if not models and model_name != PACKAGED:
                console.print(f"skipped: {message} {preset}")
                continue
            raise typer.BadParameter(f"{message} {preset} (sink {sink}, queries {follow})")
        label = f"{Path(model_name).name}:{source}"
        try:
            caught = [capture(model, text, numbers) for text in texts]
            _, other = prompts_for(model_name, model, tokenizer, 2, seed + 1000, paths)
        except InputError as error:
            raise typer.BadParameter(str(error)) from error
        with Progress(console=console) as progress:
            task = progress.add_task(label, total=len(chosen) * len(shares))
            for label_name in chosen:
                name = label_name.removesuffix(MEASURED)
                curves = None
                if name != label_name:
                    window = {"sink": sink, "recent": recent, "follow": follow}
                    curves = measure_curves(model, other, name, **window)
                for kept in [1.0] if name.startswith("int") else shares:
                    start = time.perf_counter()

                    def make(
                        s: int, name: str = name, curves: Any = curves, kept: float = kept
                    ) -> Compress:
                        if name in HALVINGS:
                            return theirs(HALVINGS[name], s, sink, recent, kept)
                        if name in QUANTISED:
                            return quantised(QUANTISED[name], sink, recent)
                        if curves is not None:
                            return allocated(name, s, sink, recent, curves)
                        return ours(name, s, sink, recent)

                    repeats = min(seeds, 3) if name in HALVINGS else seeds
                    row = measure(caught, make, kept, PRESETS[preset], repeats)
                    seconds = round(time.perf_counter() - start, 2)
                    results.append(
                        {
                            "method": label_name,
                            "source": label,
                            "kept": kept,
                            **row,
                            "seconds": seconds,
                        }
                    )
                    progress.advance(task)
        console.print(table(results, label))
    result = {"command": "attention_error", "preset": preset, "results": results, "seed": seed}
    result |= {"sink": sink, "recent": recent, "follow": follow, "prompts": prompts}
    result |= environment()
    save(result, out)
    if plot is not None:
        figure(results, plot)
    if json:
        print(dumps(result))


def figure(results: list[dict[str, Any]], path: Path) -> None:
    """Error against the kept share, one panel per source (BalanceKV's figure 2)."""
    sources = list(dict.fromkeys(r["source"] for r in results))
    fig, axes = subplots(len(sources), 5.5 * len(sources), 5)
    names = list(dict.fromkeys(r["method"] for r in results if r["kept"] < 1))
    for panel, source in zip(axes, sources, strict=True):
        for number, name in enumerate(names):
            rows = [r for r in results if r["source"] == source and r["method"] == name]
            panel.errorbar(
                [r["kept"] for r in rows],
                [r["relative_error"] for r in rows],
                yerr=[r["std"] for r in rows],
                marker="o",
                ms=3,
                color=f"C{number}",
                ls=("-", "--", ":")[number // 10 % 3],
                label=name,
            )
        panel.set(xscale="log", yscale="log", title=source, xlabel="kept share of the middle")
        panel.set_xticks([1 / 2, 1 / 4, 1 / 8, 1 / 16], ["1/2", "1/4", "1/8", "1/16"])
        panel.minorticks_off()
        panel.grid(True, alpha=0.3)
    axes[0].set_ylabel("relative error of a layer's attention")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    write(fig, path)


def table(results: list[dict[str, Any]], source: str) -> Table:
    """Methods by kept share, one source."""
    rows = [r for r in results if r["source"] == source]
    shares = sorted({r["kept"] for r in rows}, reverse=True)
    shown = Table(title=source)
    for column in ("method", *(f"1/{round(1 / share)}" for share in shares)):
        shown.add_column(column)
    for name in dict.fromkeys(r["method"] for r in rows):
        by_share = {r["kept"]: r["relative_error"] for r in rows if r["method"] == name}
        shown.add_row(name, *(f"{by_share[s]:.3f}" if s in by_share else "" for s in shares))
    return shown


if __name__ == "__main__":
    typer.run(main)
