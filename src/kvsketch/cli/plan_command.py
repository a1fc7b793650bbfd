"""`kvsketch plan`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvsketch.errors import InputError

EPILOG = (
    "Example: kvsketch plan --model YOUR_MODEL --gpu-memory 80GiB --context 128k --concurrency 64"
)
DTYPES = ("bfloat16", "float16", "float32")


def plan_command(
    model: Annotated[str, typer.Option(help="Model folder, Hugging Face id, or a packaged model.")],
    gpu_memory: Annotated[str, typer.Option(help="Memory of the GPU, e.g. 80GiB or 24GB.")],
    context: Annotated[str, typer.Option(help="Longest context in tokens, e.g. 128k or 8192.")],
    concurrency: Annotated[
        int | None, typer.Option(help="Number of requests at once; calculates the budget.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="Slots per KV head; calculates the number of requests.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="One of the values of KVSKETCH_METHOD.")
    ] = "heavy_merge",
    sink: Annotated[int, typer.Option(help="Number of first tokens that are always kept.")] = 4,
    recent: Annotated[int, typer.Option(help="Number of last tokens that are always kept.")] = 32,
    bits: Annotated[int, typer.Option(help="Bits of compressed slots: 16, 8 or 4.")] = 16,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, on one line.")] = False,
) -> None:
    """Calculate how many requests vLLM serves at once, with and without kvsketch, and the
    budget."""
    if (concurrency is None) == (budget is None):
        raise InputError(
            "give either --concurrency (which calculates the budget) or --budget, not both"
        )
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype!r}: one of {', '.join(DTYPES)}")
    import torch

    from kvsketch.evaluation.report.report import dumps
    from kvsketch.evaluation.runner.loading import load_config, resolve_model
    from kvsketch.serving.plan import plan, size_of, tokens_of
    from kvsketch.serving.settings import Settings

    tokens, memory = tokens_of(context, "context"), size_of(gpu_memory, "gpu-memory")
    kept = 1024 if budget is None else budget
    settings = Settings(method, kept, sink, recent, bits=bits)
    found = plan(
        load_config(resolve_model(model)),
        memory,
        tokens,
        concurrency,
        settings,
        getattr(torch, dtype),
    )
    if as_json:
        given = {"model": model, "gpu_memory": memory, "context": tokens, "method": method}
        given["bits"] = bits
        print(dumps({"command": "plan", **given, **asdict(found)}))
        return
    table = Table("", "vLLM", f"kvsketch, {method}")
    gib = 2**30
    exact = tokens * found.token_bytes
    table.add_row("slots per KV head", f"{tokens:,}", f"{found.budget:,}")
    table.add_row("a request, GiB", f"{exact / gib:.3f}", f"{found.page_bytes / gib:.3f}")
    table.add_row("requests at once", f"{found.before:.1f}", f"{found.after:,}")
    console = Console()
    console.print(
        f"{found.weight_bytes / gib:.1f} GiB of weights, {found.kv_bytes / gib:.1f} GiB for caches"
    )
    console.print(table)
    few = f" KVSKETCH_BITS={bits}" if bits != 16 else ""
    console.print(
        f"KVSKETCH_METHOD={method} KVSKETCH_BUDGET={found.budget} KVSKETCH_SINK={sink} "
        f"KVSKETCH_RECENT={recent}{few} vllm serve {model} --max-model-len {tokens}",
        soft_wrap=True,
    )
