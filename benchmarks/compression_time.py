"""The time of compressing a prompt, compared with that of its prefill.

    python -m benchmarks.compression_time --json

The prefill is one run of a transformers ``LlamaDecoderLayer`` with the size of a Llama 3 8B layer
(hidden 4096, MLP 14336, 32 query and 8 KV heads of 128, rotary, causal sdpa) over random hidden
states. The compression is what ``SketchCache`` does in that layer afterwards, in the same threads,
with the layer's own queries, keys and values: it scores the tokens by the queries and compresses
to the budget, which is the same for every head (``@even``). Every number of seconds is that of the
fastest of ``repeats`` runs, and ``share_of_prefill`` is this time over that of the prefill.

``heavy_merge`` by default measures errors before it compresses, and allocates its budget by them.
``measuring`` is the time of this measurement for one layer. ``probe`` is the attention of the last
``probe`` queries of all heads over the kept slots and over all keys, which is the cost of measuring
an error. Random weights and inputs are good enough for times, but not for errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from benchmarks.measuring import waiting
from benchmarks.options import Method, methods
from benchmarks.page import save
from kvsketch import METHODS, Observed, Slots, attend
from kvsketch.cache import windowed
from kvsketch.cache.measure import measure
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.methods.registry import default_allocation

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
USUAL = "uniform,streaming_llm,knorm,keydiff,snapkv,cluster_merge,heavy_merge@even,kcenter"
#: By default, this method measures errors in every layer and allocates its budget by them.
MEASURED = "heavy_merge"
# The MLP's intermediate results for a whole prompt, three tensors of 14336 numbers per token, may
# not fit into memory.
_MLP_TOKENS = 4096


class Chunked(nn.Module):
    """An MLP that runs on a few thousand tokens at a time, which needs less memory."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.mlp(part) for part in x.split(_MLP_TOKENS, dim=1)], dim=1)


def prefill(tokens: int, dtype: torch.dtype, seed: int) -> tuple[float, Slots, Observed]:
    """The seconds of the layer's prefill, the keys and values that it computes, and the queries."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=1,
        max_position_embeddings=max(tokens, 131072),
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    layer = LlamaDecoderLayer(config, 0).to(dtype).eval()
    layer.mlp = Chunked(layer.mlp)
    hidden = torch.randn(1, tokens, config.hidden_size).to(dtype)
    rotary = LlamaRotaryEmbedding(config)(hidden, torch.arange(tokens)[None])
    layer(hidden[:, :64], position_embeddings=tuple(t[:, :64] for t in rotary))  # warm-up
    cache = DynamicCache(config=config)
    seconds = timed(lambda: layer(hidden, position_embeddings=rotary, past_key_values=cache))
    keys, values = cache.layers[0].keys, cache.layers[0].values
    attention = layer.self_attn
    queries = attention.q_proj(layer.input_layernorm(hidden)).view(1, tokens, 32, 128)
    queries, _ = apply_rotary_pos_emb(queries.transpose(1, 2), keys, *rotary)
    return seconds, Slots(keys, values), Observed(queries, attention.scaling)


def evenly_spent(text: str) -> list[Method]:
    """Parse ``--methods``. Only methods with the same budget for every head are timed."""
    chosen = methods(text)
    for method in chosen:
        if method.name not in METHODS or method.bits not in (16, "measured"):
            raise typer.BadParameter(f"--methods {method.label!r} must be one of {_all()}")
        if method.spent != "even":
            raise typer.BadParameter(
                f"--methods {method.label!r} allocates its budget by measured errors, which "
                f"are timed separately; use {method.name}@even"
            )
    return chosen


def _all() -> str:
    return ", ".join(n if default_allocation(n) == "even" else f"{n}@even" for n in METHODS)


def timed(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def main(
    methods_: Annotated[
        str, typer.Option("--methods", help="Methods with the same budget for every head.")
    ] = USUAL,
    tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 32768,
    shares: Annotated[str, typer.Option(help="Comma-separated kept shares.")] = "0.25,0.125",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    repeats: Annotated[int, typer.Option(help="Runs per method, of which the fastest counts.")] = 3,
    probe: Annotated[int, typer.Option(help="Queries of an error probe.")] = 32,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.compression_time --tokens 4096 --methods snapkv --json"""
    chosen = evenly_spent(methods_)
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype {dtype!r} must be one of {', '.join(DTYPES)}")
    try:
        kept = [float(x) for x in shares.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--shares {shares!r} must be comma-separated numbers") from None
    if not all(0 < share < 1 for share in kept):
        raise typer.BadParameter(f"--shares {shares!r} must be numbers in (0, 1)")
    for option, value in (("threads", threads), ("repeats", repeats), ("probe", probe)):
        if value < 1:
            raise typer.BadParameter(f"--{option} {value} must be at least 1")
    if min(kept) * tokens < 64 or tokens < probe:
        raise typer.BadParameter(
            f"--tokens {tokens} must be at least --probe {probe}, and 64 tokens must remain at "
            f"each of --shares {shares}"
        )
    torch.set_num_threads(threads)
    console = Console(stderr=True)
    results: list[dict[str, Any]] = []
    with Progress(console=console) as progress, torch.inference_mode():
        task = progress.add_task("prefill", total=1 + len(chosen) * len(kept))
        whole, slots, seen = prefill(tokens, DTYPES[dtype], seed)
        progress.advance(task)
        asked = seen.queries[:, :, -probe:]
        probe_all = fastest(partial(attend, asked, slots, scaling=seen.scaling), repeats)
        measured = fastest(partial(measure, waiting(slots, seen, MEASURED), None), repeats)
        probes: dict[float, float] = {}
        for method in chosen:
            for share in kept:
                progress.update(task, description=f"{method.label} {share}")
                budget = round(share * tokens)
                into = [slots]

                name = str(method.name)

                def compress(name: str = name, budget: int = budget, into: Any = into) -> None:
                    into[0] = windowed(name)(slots, budget, seen)

                first = timed(compress)
                # Slow runs are precise enough without a repetition.
                seconds = first if first > 30 else min(first, fastest(compress, repeats - 1))
                if share not in probes:
                    kept_slots = into[0]
                    over_kept = partial(attend, asked, kept_slots, scaling=seen.scaling)
                    probes[share] = fastest(over_kept, repeats)
                row = {"method": method.label, "kept": share, "seconds": round(seconds, 3)}
                results.append(row | {"share_of_prefill": round(seconds / whole, 5)})
                console.print(
                    f"{method.label:16s} {share:6.4f} {seconds:8.2f} s {seconds / whole:8.2%}"
                )
                progress.advance(task)
    result: dict[str, Any] = {"command": "compression_time", "results": results}
    result["prefill_seconds"] = round(whole, 2)
    result["measuring"] = {
        "method": MEASURED,
        "seconds": round(measured, 3),
        "share_of_prefill": round(measured / whole, 5),
    }
    result["probe"] = {
        "queries": probe,
        "all": {"seconds": round(probe_all, 4), "share_of_prefill": round(probe_all / whole, 6)},
        **{
            f"kept {share}": {
                "seconds": round(probes[share], 4),
                "share_of_prefill": round(probes[share] / whole, 6),
            }
            for share in kept
        },
    }
    settings = {"tokens": tokens, "dtype": dtype, "threads": threads, "repeats": repeats}
    result |= {**settings, "heads": 32, "kv_heads": 8, "head_dim": 128, "seed": seed}
    result |= environment()
    save(result, out)
    if json:
        print(dumps(result))


def fastest(fn: Callable[[], Any], repeats: int) -> float:
    """The seconds of the fastest run, infinite if there is none."""
    return min((timed(fn) for _ in range(repeats)), default=float("inf"))


if __name__ == "__main__":
    typer.run(main)
