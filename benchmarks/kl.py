"""Next-token KL to the exact cache, and how often the most likely token is the same.

    python -m benchmarks.kl --json

For a packaged model, the texts are LongEval prompts with the answers of the exact cache, and the
answers are scored. For other models, they are samples of the model itself (or given files), and the
last ``follow`` tokens are scored. A one-shot ``SketchCache`` reads the beginning of a text and
compresses it. The other tokens are fed one at a time, through the same cache, as in decoding.
``queries`` (``benchmarks.prompts``) states which queries query-aware methods had seen when they
compressed. KL(exact || sketch) is in nats, the mean over texts and tokens, and top-1 is the share
of tokens for which both caches agree.

``kept`` and ``bytes_per_token`` are those of ``benchmarks.equal_bytes``, right after the prompt was
compressed, over its tokens. Tokens that are fed later are not counted, because every cache keeps
them as they are. (``cache.nbytes()`` would also count score columns, which only another compression
needs, and numbers in this model's float32.) ``int8`` and ``int4`` keep all tokens in fewer bits:
their ``kept`` is 1, and ``bytes_per_token`` is what they take.

Methods are named as in ``kvsketch eval --methods``. A bare name is the method as ``SketchCache(
model.config, name, budget=...)`` runs it by default: ``heavy_merge`` as ``@measured+measured``,
every other method as ``@even+16bit``. ``@even`` gives every head the same budget. ``@measured``
allocates the same bytes to heads and layers by errors measured on this text, ``@calibrated`` by
errors measured beforehand on three other texts (``kvsketch eval`` takes these as ``@FILE``).
``+int4`` stores slots in 4 bits, so that more of them fit into the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache

import kvsketch
from benchmarks.equal_bytes import ITEMSIZE, Fit, Held, held_by, of_budget
from benchmarks.options import (
    ALONE,
    METHODS_HELP,
    OURS,
    USUAL,
    Method,
    among,
    fractions,
    methods,
    paths,
    positive,
)
from benchmarks.prompts import PROTOCOLS, Text, default_models, feed, load, prefill, texts_for
from benchmarks.results import Results, ResumeOption, Row
from kvsketch import SketchCache
from kvsketch.arguments import RECENT
from kvsketch.cache.curves import Curves
from kvsketch.evaluation.report.report import dumps
from kvsketch.hf import reading
from kvsketch.hf.measuring import measure_curves
from kvsketch.page.quantized import FULL

SHARES = "0.5,0.25,0.125,0.0625"
#: Takes seconds per prompt, so it is not among the default methods.
SLOW = ("balancekv_streaming",)


def logits(model: Any, text: Text, cache: Any) -> Tensor:
    """Log-probabilities of the scored tokens, from a cache that has read the prompt."""
    return feed(model, text.ids[:, text.cut :], cache)[text.asked - text.cut :]


def compare(exact: Tensor, sketch: Tensor) -> tuple[float, float]:
    """Mean KL(exact || sketch) in nats, and the share of equal most likely tokens."""
    kl = (exact.exp() * (exact - sketch)).sum(-1).mean()
    return float(kl), float((exact.argmax(-1) == sketch.argmax(-1)).double().mean())


def compressed(
    model: Any,
    prompt: Tensor,
    method: Method,
    tokens: int,
    fit: Fit,
    curves: Curves | None,
    seed: int = 0,
    sink: int = 4,
    recent: int = 32,
    tokenizer: Any = None,
) -> tuple[int, Held] | None:
    """A one-shot cache that has read ``prompt`` and takes at most the bytes of ``tokens`` plain
    tokens, with its budget before it. None if ``Fit`` finds no such budget."""
    n = prompt.shape[1]

    def run(budget: int) -> Held:
        cache = SketchCache(
            model.config,
            method.made or "streaming_llm",
            budget=budget if method.name else 1.0,
            sink=sink,
            recent=None if recent == RECENT else recent,  # the default is fewer in few bits
            keep=["decoded"],
            bits=method.bits,
            allocation=method.allocation if curves is None else curves,
            seed=seed,
        )
        cache.plan.itemsize = ITEMSIZE
        if method.queries != "prompt":
            more = getattr(method.made, "queries_kept", reading._SAMPLE)
            with mock.patch.object(reading, "_SAMPLE", more):
                kvsketch.prefill(model, prompt, cache, queries=method.queries, tokenizer=tokenizer)
        else:
            prefill(model, prompt, cache)
        found = held_by(cache, sink, recent)
        return found if method.bits == FULL.keys else of_budget(found, budget)

    if method.name is None:
        return n, run(n)
    return fit(run, tokens, sink + recent + 1, n)


def slots_of(cache: SketchCache) -> float:
    """Slots per KV head, the mean over the layers that are compressed."""
    return float(cache.summary()["slots"])


def curves_of(
    model: Any, texts: list[Text], method: Method, sink: int = 4, recent: int = 32
) -> Curves | None:
    """The errors of a method's heads on ``texts``, which ``@calibrated`` needs. None for other
    methods. As many tokens as in ``measure`` follow the compression."""
    if method.spent != "calibrated":
        return None
    follow = max(text.ids.shape[1] - text.cut for text in texts)
    window = {"follow": follow, "sink": sink, "recent": recent}
    return measure_curves(model, [text.ids for text in texts], str(method.name), **window)


def measure(
    model: Any,
    texts: list[Text],
    exact: list[Tensor],
    method: Method,
    kept: float,
    curves: Curves | None,
    seeds: int,
    sink: int,
    recent: int,
) -> Row | None:
    """Means over texts and seeds. None if the method does not fit into the bytes of a text."""
    kls, agreed, size, slots = [], [], 0.0, 0.0
    fit = Fit()
    for text, truth in zip(texts, exact, strict=True):
        prompt = text.ids[:, : text.cut]
        tokens = sink + recent + max(1, round(kept * (text.cut - sink - recent)))
        for seed in range(seeds):
            found = compressed(model, prompt, method, tokens, fit, curves, seed, sink, recent)
            if found is None:
                return None
            _, held = found
            slots += slots_of(held.what) / text.cut
            kl, same = compare(truth, logits(model, text, held.what))
            kls.append(kl)
            agreed.append(same)
            size += held.bytes / text.cut
    tensor = torch.tensor(kls, dtype=torch.float64)
    return {
        "kl": round(float(tensor.mean()), 6),
        "std": round(float(tensor.std()), 6) if len(kls) > 1 else 0.0,
        "top1": round(sum(agreed) / len(agreed), 4),
        "bytes_per_token": round(size / len(kls), 3),
        "slots_per_token": round(slots / len(kls), 4),
        "texts": len(texts),
        "seeds": seeds,
    }


def main(
    models: Annotated[str, typer.Option(help="Comma-separated folders or hub ids.")] = "",
    methods_: Annotated[
        str,
        typer.Option("--methods", help=METHODS_HELP),
    ] = ",".join([*(name for name in USUAL if name not in SLOW), *OURS, *ALONE]),
    queries: Annotated[str, typer.Option(help="Comma-separated protocols.")] = ",".join(PROTOCOLS),
    shares_: Annotated[str, typer.Option("--shares", help="Kept fractions of the bytes.")] = SHARES,
    texts: Annotated[int, typer.Option(help="Texts per model.")] = 8,
    follow: Annotated[int, typer.Option(help="Scored tokens of texts without a question.")] = 127,
    sink: int = 4,
    recent: int = 32,
    files: Annotated[str, typer.Option(help="Comma-separated text files.")] = "",
    seeds: Annotated[int, typer.Option(help="Seeds of randomised methods.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 0,
    out: ResumeOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.kl --methods uniform,heavy_merge@even --texts 2 --json"""
    console = Console(stderr=True)
    chosen = methods(methods_)
    protocols = among("queries", queries, PROTOCOLS)
    kept_shares = fractions("shares", shares_)
    positive(texts=texts, follow=follow, seeds=seeds)
    given = paths(files)
    names = models.split(",") if models else default_models()
    results = Results(
        out,
        command="kl",
        models=[Path(name).name for name in names],
        methods=[method.label for method in chosen],
        protocols=protocols,
        shares=kept_shares,
        files=[str(path) for path in given],
        texts=texts,
        seeds=seeds,
        seed=seed,
        follow=follow,
        sink=sink,
        recent=recent,
    )
    for model_name in names:
        model, tokenizer = load(model_name)
        for protocol in protocols:
            like = (given, follow, protocol)
            source, found = texts_for(model_name, model, tokenizer, texts, seed, *like)
            shortest, least = min(text.cut for text in found), sink + recent + 16
            if shortest < least:
                raise typer.BadParameter(
                    f"{model_name}: a text has {shortest} tokens before --follow {follow}, but "
                    f"{least} are needed"
                )
            part = {"source": f"{Path(model_name).name}:{source}", "queries": protocol}
            exact = []
            for text in found:
                cache = DynamicCache(config=model.config)
                prefill(model, text.ids[:, : text.cut], cache)
                exact.append(logits(model, text, cache))
            _, other = texts_for(model_name, model, tokenizer, 3, seed + 1000, *like)
            title = f"{part['source']}, {protocol}"
            with Progress(console=console) as progress:
                for method in progress.track(chosen, description=title):
                    if results.has(method=method.label, **part):
                        continue
                    curves = curves_of(model, other, method, sink, recent)
                    rows = []
                    for kept in kept_shares if method.name else [1.0]:
                        row = measure(
                            model, found, exact, method, kept, curves, seeds, sink, recent
                        )
                        if row is None:
                            console.print(
                                f"left out: {method.label} (kept share {kept} is too small)"
                            )
                            continue
                        rows.append({"method": method.label, **part, "kept": kept, **row})
                    results.add(rows)
            console.print(table([r for r in results.rows if part.items() <= r.items()], title))
    result = results.finish()
    if json:
        print(dumps(result))


def table(rows: list[Row], title: str) -> Table:
    """The KL divergence: a row for each method, a column for each kept share."""
    shown = Table(title=f"{title}: KL, nats")
    every = sorted({row["kept"] for row in rows}, reverse=True)
    for column in ("method", *(f"1/{round(1 / share)}" for share in every)):
        shown.add_column(column)
    for name in dict.fromkeys(row["method"] for row in rows):
        by_share = {row["kept"]: row["kl"] for row in rows if row["method"] == name}
        shown.add_row(name, *(f"{by_share[s]:.4f}" if s in by_share else "" for s in every))
    return shown


if __name__ == "__main__":
    typer.run(main)
