"""Next-token KL to the exact cache, and how often the most likely token is the same.

    python -m benchmarks.kl --json

Texts are sampled from the model itself (or given files; LongEval prompts for the packaged model).
The first tokens are the prompt, compressed by a real ``SketchCache`` after it; the last ``follow``
tokens are then fed one at a time, through the same cache, as decoding would. KL(exact || sketch) in
nats, the mean over texts and tokens; top-1 is the share of tokens where both caches agree.
``bytes_per_token`` is what the cache held at the end over what an exact one would have, times the
exact cache's bytes per token and KV head (at 2 bytes a number).
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
from transformers import Cache, DynamicCache

from benchmarks.page import save
from benchmarks.prompts import default_models, load, prompts_for
from kvsketch import ALL_METHODS, SketchCache
from kvsketch.evaluation.report import dumps, environment

SHARES = [1 / 2, 1 / 4, 1 / 8, 1 / 16]
LEFT_OUT = ("one_dimensional",)


def logits(model: Any, text: Tensor, follow: int, cache: Cache) -> Tensor:
    """Log-probabilities for the last ``follow`` tokens' successors, ``[follow, vocabulary]``."""
    steps = []
    with torch.no_grad():
        start = text.shape[1] - follow
        model(text[:, :start], past_key_values=cache, use_cache=True, logits_to_keep=1)
        for i in range(start, text.shape[1]):
            out = model(text[:, i : i + 1], past_key_values=cache, use_cache=True)
            steps.append(out.logits[0, -1].log_softmax(-1))
    return torch.stack(steps)


def compare(exact: Tensor, sketch: Tensor) -> tuple[float, float]:
    """Mean KL(exact || sketch) in nats, and the share of equal most likely tokens."""
    kl = (exact.exp() * (exact - sketch)).sum(-1).mean()
    return float(kl), float((exact.argmax(-1) == sketch.argmax(-1)).double().mean())


def main(
    models: Annotated[str, typer.Option(help="Comma-separated folders or hub ids.")] = "",
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(
        name for name in ALL_METHODS if name not in LEFT_OUT
    ),
    texts: Annotated[int, typer.Option(help="Texts per model.")] = 8,
    follow: Annotated[int, typer.Option(help="Tokens fed one at a time.")] = 127,
    sink: int = 4,
    recent: int = 32,
    files: Annotated[str, typer.Option(help="Comma-separated text files.")] = "",
    seeds: Annotated[int, typer.Option(help="Seeds of randomised methods.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.kl --methods uniform,kcenter --texts 2 --json"""
    console = Console(stderr=True)
    chosen = methods.split(",")
    for name in chosen:
        if name not in ALL_METHODS or name in LEFT_OUT:
            raise typer.BadParameter(f"--methods: {name!r} is not one of {', '.join(ALL_METHODS)}")
    if min(texts, follow, seeds) < 1:
        raise typer.BadParameter("--texts, --follow and --seeds must be at least 1")
    paths = [Path(file) for file in files.split(",") if file]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise typer.BadParameter(f"--files: {', '.join(missing)} not there")
    results = []
    for model_name in models.split(",") if models else default_models():
        model, tokenizer = load(model_name)
        source, found = prompts_for(model_name, model, tokenizer, texts, seed, paths)
        if min(text.shape[1] for text in found) < sink + recent + follow + 16:
            raise typer.BadParameter(f"{model_name}: a text is too short for --follow {follow}")
        label = f"{Path(model_name).name}:{source}"
        exact = [logits(model, t, follow, DynamicCache(config=model.config)) for t in found]
        with Progress(console=console) as progress:
            task = progress.add_task(label, total=len(chosen) * len(SHARES) * len(found))
            for name in chosen:
                for kept in SHARES:
                    kls, agreed, share, width = [], [], 0.0, 0.0
                    for text, truth in zip(found, exact, strict=True):
                        prompt = text.shape[1] - follow
                        budget = sink + recent + max(1, round(kept * (prompt - sink - recent)))
                        for s in range(seeds):
                            cache = SketchCache(
                                model.config,
                                name,
                                budget=budget,
                                sink=sink,
                                recent=recent,
                                one_shot=True,
                                seed=s,
                            )
                            kl, same = compare(truth, logits(model, text, follow, cache))
                            kls.append(kl)
                            agreed.append(same)
                            share += cache.nbytes() / cache.exact_nbytes()
                        layer = cache.layers[0]
                        width = 2 * (layer.keys.shape[-1] + layer.values.shape[-1])
                        progress.advance(task)
                    tensor = torch.tensor(kls, dtype=torch.float64)
                    results.append(
                        {
                            "method": name,
                            "source": label,
                            "kept": kept,
                            "kl": round(float(tensor.mean()), 6),
                            "std": round(float(tensor.std()), 6) if len(kls) > 1 else 0.0,
                            "top1": round(sum(agreed) / len(agreed), 4),
                            "bytes_per_token": round(share / len(kls) * width, 3),
                            "texts": len(found),
                            "seeds": seeds,
                        }
                    )
        console.print(table(results, label))
    result = {"command": "kl", "results": results, "seed": seed, "follow": follow}
    result |= {"sink": sink, "recent": recent, **environment()}
    save(result, out)
    if json:
        print(dumps(result))


def table(results: list[dict[str, Any]], source: str) -> Table:
    """KL by method and kept share, one source."""
    rows = [r for r in results if r["source"] == source]
    shown = Table(title=f"{source}: KL, nats")
    for column in ("method", *(f"1/{round(1 / share)}" for share in SHARES)):
        shown.add_column(column)
    for name in dict.fromkeys(r["method"] for r in rows):
        by_share = {r["kept"]: r["kl"] for r in rows if r["method"] == name}
        shown.add_row(name, *(f"{by_share[s]:.4f}" for s in SHARES))
    return shown


if __name__ == "__main__":
    typer.run(main)
