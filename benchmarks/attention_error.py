"""Relative error of single layers' attention outputs, on real activations.

    python -m benchmarks.attention_error --json
    python -m benchmarks.attention_error --preset balancekv   # the protocol of its figure 2

The last ``follow`` tokens of a prompt are held back. The cache is compressed after the tokens
before them, and query-aware methods have seen the queries of those tokens only. The held-back
queries then attend to the slots and, causally, to each other. In a LongEval prompt they contain
the question (``queries`` is "agnostic": queries unseen). In other texts they are the continuation
(``queries`` is "aware", see ``benchmarks.prompts``). The error is |z - exact|_F / |exact|_F over
those queries and all heads of a layer, the mean over layers and prompts. ``std`` is the standard
deviation over seeds.

``kept`` is the share of the bytes between sinks and recent window that is kept, the same for every
method. ``bytes_per_token`` is the number of bytes of one KV head over the number of tokens before
the held-back ones. See ``benchmarks.equal_bytes``. Rows of quantised caches have ``kept`` 1, and
their bytes are smaller.

Methods are named as in ``kvsketch eval --methods``. A bare name is the method as ``SketchCache(
model.config, name, budget=...)`` runs it by default: ``heavy_merge`` as ``@measured+measured``,
every other method as ``@even+16bit``. ``@even`` gives every head the same budget. ``@measured``
allocates the same bytes to heads and layers by errors measured on this prompt, ``@calibrated`` by
errors measured beforehand on two other prompts (``kvsketch eval`` takes these as ``@FILE``).
``+int4`` stores slots in 4 bits, so that more of them fit into the same bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from benchmarks.equal_bytes import (
    Fit,
    Held,
    held,
    held_bytes,
    held_in,
    of_budget,
    plain_bytes,
    shares,
)
from benchmarks.figures import subplots, write
from benchmarks.measuring import parts_of, planned
from benchmarks.options import (
    ALONE,
    METHODS_HELP,
    OURS,
    USUAL,
    Method,
    among,
    integers,
    methods,
    paths,
    positive,
)
from benchmarks.peers import balancekv, goodpoints, quantized_cache, thinformer
from benchmarks.prompts import ONE_HEAD, default_models, load, prompts_for, protocol_of
from benchmarks.results import Results, ResumeOption, Row
from kvsketch import InputError, Observed, Slots
from kvsketch.cache import windowed
from kvsketch.cache.curves import Curves
from kvsketch.cache.storage import MEASURED, bits_of
from kvsketch.evaluation.report.report import dumps
from kvsketch.hf.activations import Activations, capture
from kvsketch.hf.measuring import answer_later, measure_curves
from kvsketch.methods.registry import SKETCHES
from kvsketch.methods.sketches.base import lengthened
from kvsketch.page.page import Page
from kvsketch.page.quantized import FULL, Bits

__all__ = ["PRESETS", "held_bytes", "relative_error", "split"]

#: For each preset: sink, recent, number of held-back queries, kept shares.
PRESETS: dict[str, tuple[int, int, int, list[float]]] = {
    "default": (16, 64, 64, [1 / 2, 1 / 4, 1 / 8, 1 / 16]),
    "balancekv": (256, 0, 256, [1 / 2, 1 / 4, 1 / 8, 1 / 16]),
}
#: Halving algorithms of other authors, run with their own code.
HALVINGS: dict[str, Any] = {
    "peer:balancekv": balancekv,
    "peer:thinformer": thinformer,
    "peer:goodpoints": goodpoints,
}
#: Makes one Python call per token, so it is not among the default methods.
SLOW = "peer:goodpoints"
#: transformers' own quantised cache, with the number of bits of its slots.
QUANTIZED_CACHES = {"peer:quantized_cache-int4": 4, "peer:quantized_cache-int2": 2}
PEERS = {
    **{name: peer.available for name, peer in HALVINGS.items()},
    **{name: partial(quantized_cache.available, n) for name, n in QUANTIZED_CACHES.items()},
}


@dataclass(frozen=True)
class Layer:
    """The activations of one layer on one prompt.

    Attributes:
        slots: the tokens that are compressed.
        observed: the queries of these tokens.
        held_back: the tokens after them.
        queries: the queries of the held-back tokens.
        exact: the exact attention output of the held-back queries.
    """

    slots: Slots
    observed: Observed
    held_back: Slots
    queries: Tensor
    exact: Tensor


#: Compresses all layers of a prompt to a number of slots per KV head, with a seed. Returns the
#: slots of every layer and their bytes.
Compress = Callable[[list[Layer], int, int], Held]


def layer_of(caught: Activations, follow: int) -> Layer:
    slots, observed, held_back, queries = split(caught, follow)
    exact = answer_later(slots, held_back, queries, caught.scaling)
    return Layer(slots, observed, held_back, queries, exact)


def split(caught: Activations, follow: int) -> tuple[Slots, Observed, Slots, Tensor]:
    """The tokens to compress and their queries, then the held-back tokens and their queries."""
    n = caught.keys.shape[2] - follow
    whole = Slots(caught.keys, caught.values)
    observed = Observed(caught.queries[:, :, :n], caught.scaling)
    return whole.narrow(0, n), observed, whole.narrow(n, follow), caught.queries[:, :, n:]


def relative_error(
    slots: Slots, held_back: Slots, queries: Tensor, exact: Tensor, scaling: float
) -> float:
    answer = answer_later(slots, held_back, queries, scaling)
    return float((answer - exact).norm() / exact.norm())


def ours(method: Method, sink: int, recent: int, curves: Curves | None = None) -> Compress:
    """A method of this package. ``curves`` were measured beforehand on other prompts."""

    def compress(layers: list[Layer], budget: int, seed: int) -> Held:
        found, held_by_heads, reducers = [], [], []
        n = layers[0].slots.count
        schedule = None if curves is None else shares(curves, budget / n)
        chosen = method.bits == MEASURED
        if chosen or method.spent == "measured":
            prompts = [(x.slots, x.observed) for x in layers]
            spent = method.spent if schedule is None else "schedule"
            streams = planned(
                prompts, str(method.name), budget, sink, recent, spent, schedule, method.bits
            )
            bits = [stream.pace.bits if chosen else in_bits(method.bits) for stream in streams]
            for stream, own in zip(streams, bits, strict=True):
                parts = [part for part, _ in parts_of(stream)]
                if not chosen:
                    parts = [stored(part, own, sink, recent) for part in parts]
                found.append(together(parts))
            all_of_it = held_in(found, streams, sink, recent, bits)
            return of_budget(all_of_it, budget) if chosen else all_of_it
        for number, layer in enumerate(layers):
            parts = [(layer.slots, layer.observed, budget)]
            if schedule is not None:
                parts = by_head(layer, [round(share * budget) for share in schedule[number]])
            kept = []
            for head, (slots, observed, size) in enumerate(parts):
                reducers.append(None)
                if method.name is not None:
                    size = min(n, max(sink + recent + 1, size))
                    reducers[-1] = windowed(method.name, sink, recent, seed + head)
                    slots = reducers[-1](slots, size, observed)
                kept.append(slots)
            held_by_heads += kept
            bits = in_bits(method.bits)
            found.append(together([stored(part, bits, sink, recent) for part in kept]))
        every = [in_bits(method.bits)] * len(held_by_heads)
        return held(found, held_by_heads, every, sink, recent, reducers)

    return compress


def by_head(layer: Layer, sizes: list[int]) -> list[tuple[Slots, Observed, int]]:
    """The slots of each KV head, its queries, and its number of slots."""
    heads = len(sizes)
    queries = layer.observed.queries.chunk(heads, dim=1)
    return [
        (
            layer.slots.map(partial(torch.narrow, dim=1, start=head, length=1)),
            replace(layer.observed, queries=queries[head]),
            size,
        )
        for head, size in enumerate(sizes)
    ]


def in_bits(bits: int | str) -> Bits:
    """The bits of keys and of values, which are equal. Bits that are to be measured count as 16."""
    return bits_of(bits) or FULL


def stored(slots: Slots, bits: Bits, sink: int, recent: int) -> Slots:
    """The slots as attention reads them after those between sinks and recent were quantised."""
    if bits == FULL:
        return slots
    return Page(slots, None, 0, bits, sink, recent).slots


def together(parts: list[Slots]) -> Slots:
    """Separately compressed heads as one layer. Shorter heads are padded with dead slots."""
    if len(parts) == 1:
        return parts[0]
    longest = max(part.count for part in parts)
    padded = [
        Slots(part.keys, part.values, part.masses()).map(
            lambda t, n=longest - part.count: lengthened(t, n)
        )
        for part in parts
    ]
    names = padded[0].tensors()
    return Slots(**{k: torch.cat([part.tensors()[k] for part in padded], 1) for k in names})


def halved(peer: Any, sink: int, recent: int) -> Compress:
    """A peer's own halvings of the middle. Sinks and recent tokens are kept, as with any method."""

    def compress(layers: list[Layer], budget: int, seed: int) -> Held:
        found = []
        for layer in layers:
            n = layer.slots.count
            middle = halvings(n - sink - recent, budget - sink - recent)
            parts, start = [], 0
            for size, times in [(sink, 0), *middle, (recent, 0)]:
                part = layer.slots.narrow(start, size)
                if times and size:
                    part = peer.halved(part.keys, part.values, times, seed)
                parts.append(part)
                start += size
            found.append(Slots.cat(parts))
        return held(found, found)

    return compress


def halvings(middle: int, kept: int) -> list[tuple[int, int]]:
    """The halvings that reduce ``middle`` tokens to ``kept`` slots: pairs (tokens, times), oldest
    tokens first. Every number of tokens is a multiple of 2^times, because some peers need that.
    The remainder of the division by this power of two is split into powers of two, which come
    first. Of the other tokens, the older ones are halved once more than the newer ones. If no
    halvings lead to ``kept`` slots, all tokens are kept."""
    for rounds in range(middle.bit_length()):
        over = [(1 << b, b) for b in reversed(range(rounds)) if middle >> b & 1]
        rest = middle >> rounds
        twice = 2 * max(0, len(over) + rest - kept)
        if twice <= rest:
            newer = (rest - twice) << rounds
            return [*over, (twice << rounds, rounds + 1), (newer, rounds)]
    return [(middle, 0)]


def their_cache(bits: int, sink: int, recent: int) -> Compress:
    """The whole middle in transformers' QuantizedCache, with the recent window as its residual."""

    def compress(layers: list[Layer], budget: int, seed: int) -> Held:
        n = layers[0].slots.count
        shape = layers[0].slots.keys.shape
        # It quantises groups of 64 numbers. Tokens that fill no group are kept with the sinks.
        unit = 64 // math.gcd(64, shape[1] * shape[3])
        first = sink + (n - sink - recent) % unit
        middles = [layer.slots.narrow(first, n - first - recent) for layer in layers]
        bfloat = [(part.keys.bfloat16(), part.values.bfloat16()) for part in middles]
        found, size = [], 0.0
        for layer, (keys, values, packed) in zip(
            layers, quantized_cache.roundtrips(bfloat, bits), strict=True
        ):
            last = layer.slots.narrow(n - recent, recent)
            middle = Slots(keys.float(), values.float())
            found.append(Slots.cat([layer.slots.narrow(0, first), middle, last]))
            size += packed / shape[1] / len(layers)
        token = plain_bytes(layers[0].slots)
        return Held(found, size + (first + recent) * token, token, token)

    return compress


def measure(
    prompts: list[list[Layer]],
    compress: Compress,
    kept: float,
    preset: tuple[int, int, int, list[float]],
    seeds: int,
) -> Row | None:
    """The mean error over prompts and layers, its mean over seeds and their standard deviation.
    None if the method does not fit into the bytes of ``kept``. If the second seed gives the same
    error as the first, the method is not random, and no further seeds are run."""
    sink, recent, _, _ = preset
    errors: list[float] = []
    start = time.perf_counter()
    for seed in range(seeds):
        total, parts, size, slots = 0.0, 0, 0.0, 0.0
        fit = Fit()  # a new one for each seed: a method that is not random repeats itself
        for layers in prompts:
            n = layers[0].slots.count
            tokens = sink + recent + max(1, round(kept * (n - sink - recent)))
            if kept == 1:
                budget, found = n, compress(layers, n, seed)
            else:
                one = fit(lambda b: compress(layers, b, seed), tokens, sink + recent + 1, n)  # noqa: B023
                if one is None:
                    return None
                budget, found = one
            for layer, what in zip(layers, found.what, strict=True):
                scaling = layer.observed.scaling
                total += relative_error(what, layer.held_back, layer.queries, layer.exact, scaling)
            parts += len(layers)
            size += found.bytes / n / len(prompts)
            slots += budget / n / len(prompts)
        errors.append(total / parts)
        if seed == 1 and errors[0] == errors[1]:
            errors = errors[:1]
            break
    tensor = torch.tensor(errors, dtype=torch.float64)
    return {
        "relative_error": round(float(tensor.mean()), 5),
        "std": round(float(tensor.std()), 5) if len(errors) > 1 else 0.0,
        "seeds": len(errors),
        "bytes_per_token": round(size, 3),
        "slots_per_token": round(slots, 4),
        "seconds": round(time.perf_counter() - start, 2),
    }


def main(
    models: Annotated[str, typer.Option(help="Comma-separated folders or hub ids.")] = "",
    methods_: Annotated[
        str,
        typer.Option("--methods", help=METHODS_HELP),
    ] = ",".join(
        [*USUAL, *OURS, "heavy_merge@even+int4", *ALONE, *(name for name in PEERS if name != SLOW)]
    ),
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "default",
    layers: Annotated[str, typer.Option(help="Comma-separated layer numbers. Default: all.")] = "",
    prompts: Annotated[int, typer.Option(help="Prompts per model.")] = 2,
    files: Annotated[str, typer.Option(help="Comma-separated text files as prompts.")] = "",
    seeds: Annotated[
        int, typer.Option(help="Seeds of randomised methods, at most 3 for slow ones.")
    ] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    out: ResumeOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure (.svg or .png).")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.attention_error --methods uniform,kcenter --seeds 3 --json"""
    console = Console(stderr=True)
    among("preset", preset, PRESETS)
    chosen = methods(methods_, others=PEERS)
    positive(prompts=prompts, seeds=seeds)
    given = paths(files)
    numbers = integers("layers", layers)
    for method in list(chosen):
        reason = PEERS[method.label]() if method.label in PEERS else None
        if reason is not None:
            console.print(f"left out: {method.label}: {reason}")
            chosen.remove(method)
    sink, recent, follow, every = PRESETS[preset]
    names = models.split(",") if models else default_models()
    results = Results(
        out,
        command="attention_error",
        preset=preset,
        models=[Path(name).name for name in names],
        methods=[method.label for method in chosen],
        files=[str(path) for path in given],
        layers=numbers,
        prompts=prompts,
        seeds=seeds,
        seed=seed,
        sink=sink,
        recent=recent,
        follow=follow,
    )
    for model_name in names:
        model, tokenizer = load(model_name)
        source, texts = prompts_for(model_name, model, tokenizer, prompts, seed, given)
        shortest = min(text.shape[1] for text in texts)
        least = sink + recent + follow + 16
        if shortest < least:
            message = f"{model_name}: a prompt has {shortest} tokens, but --preset {preset} needs"
            if not models and model_name != ONE_HEAD:
                console.print(f"skipped: {message} {least}")
                continue
            raise typer.BadParameter(f"{message} {least} (sink {sink}, queries {follow})")
        part = {"source": f"{Path(model_name).name}:{source}", "queries": protocol_of(source)}
        try:
            caught = [
                [layer_of(layer, follow) for layer in capture(model, text, numbers)]
                for text in texts
            ]
        except InputError as error:
            raise typer.BadParameter(str(error)) from error
        _, other = prompts_for(model_name, model, tokenizer, 2, seed + 1000, given)
        with Progress(console=console) as progress:
            for method in progress.track(chosen, description=part["source"]):
                if results.has(method=method.label, **part):
                    continue
                curves = None
                if method.spent == "calibrated":
                    window = {"sink": sink, "recent": recent, "follow": follow}
                    curves = measure_curves(model, other, str(method.name), **window)
                    if numbers:  # The budget is shared by the selected layers only.
                        curves = replace(curves, error=curves.error[numbers])
                if method.label in HALVINGS:
                    compress = halved(HALVINGS[method.label], sink, recent)
                elif method.label in QUANTIZED_CACHES:
                    compress = their_cache(QUANTIZED_CACHES[method.label], sink, recent)
                else:
                    compress = ours(method, sink, recent, curves)
                whole = method.name is None or method.label in QUANTIZED_CACHES
                slow = method.label in HALVINGS or method.name in SKETCHES
                repeats = 1 if whole else min(seeds, 3) if slow else seeds
                rows = []
                for kept in [1.0] if whole else every:
                    row = measure(caught, compress, kept, PRESETS[preset], repeats)
                    if row is None:
                        console.print(f"left out: {method.label} (kept share {kept} is too small)")
                        continue
                    rows.append({"method": method.label, **part, "kept": kept, **row})
                results.add(rows)
        here = [row for row in results.rows if part.items() <= row.items()]
        console.print(table(here, part["source"]))
    result = results.finish()
    if plot is not None:
        figure(results.rows, plot)
    if json:
        print(dumps(result))


def figure(results: list[Row], path: Path) -> None:
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
        panel.set(
            xscale="log", yscale="log", title=source, xlabel="kept share of the middle's bytes"
        )
        panel.set_xticks([1 / 2, 1 / 4, 1 / 8, 1 / 16], ["1/2", "1/4", "1/8", "1/16"])
        panel.minorticks_off()
        panel.grid(True, alpha=0.3)
    axes[0].set_ylabel("relative error of a layer's attention")
    entries, columns = axes[0].get_legend_handles_labels(), 2 * len(sources)
    fig.legend(*entries, loc="outside lower center", ncols=columns)
    write(fig, path)


def table(rows: list[Row], source: str) -> Table:
    """The errors of one source: a row for each method, a column for each kept share."""
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
