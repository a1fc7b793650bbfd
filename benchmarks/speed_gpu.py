"""Speed and memory on a GPU: the attention of one token over slots, and whole models.

    python -m benchmarks.speed_gpu --part token --json
    python -m benchmarks.speed_gpu --part model --tokens 32768 --json

token   The attention of one token of every request with 32 query and 8 KV heads of 128, over slots
        in 16 (bfloat16), 8 and 4 bits, compared with torch's fused attention over as many bfloat16
        tokens. ``call_ms`` is the time of a call as a model makes it, ``kernel_ms`` that of a
        replayed CUDA graph, which leaves out what Python and the launches take. ``floor_ms``: the
        bytes that must be read over the measured bandwidth of a copy (bytes read and written).
model   A model of Llama 3 8B's shape (32 layers, random bfloat16 weights): seconds of the prefill,
        milliseconds of a decoded token of all requests together, and bytes beside the weights (the
        most of the prefill, and those held after it), with the exact cache (``DynamicCache``) and
        with the default method. The exact cache decodes with torch's flash attention;
        ``token_cudnn_ms`` is its time with cuDNN's, which torch prefers, at lengths for which it
        has its plans; it makes one for every new length.

Times of ``token`` are medians, those of ``model`` one run, after one of the same length that does
not count, in which kernels are compiled.
With ``--out``, the rows so far are kept, and the same command resumes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from benchmarks.options import integers, positive
from benchmarks.results import Results, ResumeOption
from kvsketch import Observed, SketchCache, Slots
from kvsketch.attention import attend_to
from kvsketch.evaluation.report.report import dumps
from kvsketch.page.part import Part
from kvsketch.page.quantized import Bits

HEADS, KV_HEADS, DIM = 32, 8, 128
PARTS = ("token", "model")
Rows = list[dict[str, Any]]


def milliseconds(fn: Callable[[], Any], repeats: int = 20) -> float:
    """The median time of a call on the device, between events."""
    fn()
    return statistics.median(once(fn) for _ in range(repeats))


def once(fn: Callable[[], Any]) -> float:
    """The milliseconds of a call on the device, between events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    fn()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def replayed(fn: Callable[[], Any]) -> float:
    """The median time of ten calls in a CUDA graph, over ten."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            fn()
    return milliseconds(graph.replay) / 10


def bandwidth() -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.ones(1 << 29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / (1e-3 * milliseconds(lambda: target.copy_(source)))


def token(results: Results, lengths: list[int], batches: list[int], seed: int) -> None:
    speed = bandwidth()
    for batch in batches:
        for n in lengths:
            where = {"requests": batch, "slots": n}
            if batch * n > 1 << 21 or results.has(**where):
                continue
            rows: Rows = []
            draw = torch.Generator("cuda").manual_seed(seed)
            normal = partial(torch.randn, generator=draw, device="cuda", dtype=torch.bfloat16)
            keys, values = (normal(batch, KV_HEADS, n, DIM) for _ in range(2))
            queries = normal(batch, HEADS, 1, DIM)
            plain = partial(F.scaled_dot_product_attention, queries, keys, values, enable_gqa=True)
            packed = queries.view(batch, KV_HEADS, -1, DIM)
            both = [plain, partial(F.scaled_dot_product_attention, packed, keys, values)]
            call, kernel = (min(map(time, both)) for time in (milliseconds, replayed))
            mass = torch.rand(batch, KV_HEADS, n, device="cuda", generator=draw) + 0.5
            slots = Slots(keys, values * mass.unsqueeze(-1).bfloat16(), mass)
            asked = Observed(queries, DIM**-0.5)
            for bits in (16, 8, 4):
                part = Part(slots, bits=Bits(bits, bits))
                run = partial(attend_to, asked, [part])
                mine = {"call_ms": milliseconds(run), "kernel_ms": replayed(run)}
                read = sum(tensor.nbytes for tensor in part.contents())
                rows.append(
                    {**where, "bits": bits}
                    | mine
                    | {"floor_ms": 1e3 * read / speed, "fused_call_ms": call}
                    | {"fused_kernel_ms": kernel, "over_fused": mine["kernel_ms"] / kernel}
                )
            results.add(rows)


def llama(layers: int, positions: int) -> Any:
    """A model of Llama 3 8B's shape with random weights."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=HEADS * DIM,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def model(
    results: Results,
    layers: int,
    lengths: list[int],
    batches: list[int],
    budget: float,
    new: int,
    seed: int,
) -> None:
    todo = [(n, batch) for n in lengths for batch in batches]
    built = llama(layers, max(lengths) + 4 * new + 64)
    weights = torch.cuda.memory_allocated()
    made: dict[str, Callable[[], Any]] = {
        "exact": lambda: DynamicCache(config=built.config),
        "heavy_merge": lambda: SketchCache(built.config, budget=budget, seed=seed),
        "heavy_merge, 4 bits": lambda: SketchCache(
            built.config, budget=budget, bits=4, allocation="even", seed=seed
        ),
    }
    for n, batch in todo:
        draw = torch.Generator("cuda").manual_seed(seed)
        ids = torch.randint(3, 1000, (batch, n), generator=draw, device="cuda")
        for name, make in made.items():
            part = {"layers": layers, "tokens": n, "requests": batch, "cache": name}
            if results.has(**part):
                continue
            _run(built, make(), ids, 4, weights)  # compiles the kernels
            row = _run(built, make(), ids, new, weights)
            kept = None if name == "exact" else budget
            results.add([{**part, "budget": kept, **row}])


def _run(built: Any, cache: Any, ids: Tensor, new: int, weights: int) -> dict[str, float]:
    """A prefill and ``new`` decoded tokens."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    read = once(lambda: built(ids, past_key_values=cache, logits_to_keep=1))
    peak = torch.cuda.max_memory_allocated() - weights
    held = torch.cuda.memory_allocated() - weights
    last = ids[:, -1:]

    def decode(tokens: int) -> float:
        def run() -> None:
            for _ in range(tokens):
                built(last, past_key_values=cache, logits_to_keep=1)

        return once(run) / tokens

    row = {"prefill_s": read / 1e3, "peak_bytes": float(peak), "held_bytes": float(held)}
    if not isinstance(cache, SketchCache):
        # cuDNN's attention, torch's first choice, makes a plan anew for every length.
        row["token_cudnn_ms"] = decode(4)
        torch.backends.cuda.enable_cudnn_sdp(False)
    decode(4)
    row["token_ms"] = decode(new)
    torch.backends.cuda.enable_cudnn_sdp(True)
    return row


def main(
    part: Annotated[str, typer.Option(help=f"One of {', '.join(PARTS)}.")] = "token",
    tokens: Annotated[str, typer.Option(help="Comma-separated lengths.")] = "",
    requests: Annotated[str, typer.Option(help="Comma-separated requests at once.")] = "1,16",
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    budget: Annotated[float, typer.Option(help="The kept fraction.")] = 0.125,
    new: Annotated[int, typer.Option(help="Decoded tokens.")] = 64,
    seed: int = 0,
    out: ResumeOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.speed_gpu --part token --tokens 16384 --json"""
    if part not in PARTS:
        raise typer.BadParameter(f"--part {part!r} must be one of {', '.join(PARTS)}")
    usual = {"token": "4096,16384,131072", "model": "32768"}[part]
    lengths, batches = integers("tokens", tokens or usual), integers("requests", requests)
    positive(tokens=min(lengths), requests=min(batches), layers=layers, new=new)
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device, and torch finds none")
    settings = {"tokens": lengths, "requests": batches, "seed": seed}
    if part == "model":
        settings |= {"layers": layers, "budget": budget, "new": new}
    results = Results(out, command="speed_gpu", part=part, **settings)
    console = Console(stderr=True)
    with torch.inference_mode(), console.status(f"measuring {part}, which takes some minutes"):
        if part == "token":
            token(results, lengths, batches, seed)
        else:
            model(results, layers, lengths, batches, budget, new, seed)
    result = results.finish()
    for row in results.rows:
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        console.print(shown, soft_wrap=True)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
