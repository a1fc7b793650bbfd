"""`kvsketch plan`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvsketch.cli.printing import print_json
from kvsketch.errors import InputError

EPILOG = (
    "Example: kvsketch plan --model YOUR_MODEL --gpu-memory 80GiB --context 128k --concurrency 64"
)
DTYPES = ("bfloat16", "float16", "float32")


def plan_command(
    model: Annotated[str, typer.Option(help="Model folder, Hugging Face id, or a packaged model.")],
    gpu_memory: Annotated[
        str, typer.Option(help="Memory of the GPU with its unit, e.g. 80GiB or 24GB.")
    ],
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
    if method == "exact":
        raise InputError("--method exact keeps every token: there is no budget to calculate")
    if concurrency is None and budget is None:
        raise InputError(
            "give --concurrency N (which calculates the budget) or --budget N (which calculates "
            "the number of requests)"
        )
    if concurrency is not None and budget is not None:
        raise InputError(
            f"--concurrency {concurrency} and --budget {budget} exclude each other: one is "
            "calculated from the other"
        )
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype!r}: one of {', '.join(DTYPES)}")
    import torch

    from kvsketch.evaluation.runner.loading import load_config, resolve_model
    from kvsketch.vllm.plan import plan, size_of, tokens_of
    from kvsketch.vllm.settings import SCHEDULER, PageSettings

    tokens, memory = tokens_of(context, "--context"), size_of(gpu_memory, "--gpu-memory")
    kept = 1024 if budget is None else budget
    settings = PageSettings(method, kept, sink, recent, bits=bits)
    folder = resolve_model(model)
    config, numbers = load_config(folder), getattr(torch, dtype)
    found = plan(config, memory, tokens, concurrency, settings, numbers)
    # What vLLM can be given: it does not know the names of packaged models.
    served = str(Path(folder).resolve()) if Path(folder).is_dir() else folder
    backend = "--attention-backend CUSTOM"
    if found.sliding:
        backend = """--attention-config '{"backend_per_kind": {"full_attention": "CUSTOM"}}'"""
    few = f" KVSKETCH_BITS={bits}" if bits != 16 else ""
    command = (
        f"KVSKETCH_METHOD={method} KVSKETCH_BUDGET={found.budget} KVSKETCH_SINK={sink} "
        f"KVSKETCH_RECENT={recent}{few} vllm serve {shlex.quote(served)} "
        f"--max-model-len {tokens} --dtype {dtype} {backend} --scheduler-cls {SCHEDULER}"
    )
    if as_json:
        given = {"model": model, "gpu_memory": memory, "context": tokens, "method": method}
        more = {"bits": bits, "dtype": dtype, "command_line": command, "warning": found.warning}
        print_json("plan", **{**given, **more, **asdict(found)})
        return
    gib = 2**30
    exact, small = found.request_bytes / gib, found.request_bytes / numbers.itemsize / gib
    table = Table()
    for column in ("", "vLLM", "vLLM, FP8", f"kvsketch, {method}"):
        table.add_column(column, overflow="fold")
    table.add_row("slots per KV head", f"{tokens:,}", f"{tokens:,}", f"{found.budget:,}")
    pages = f"{found.page_bytes / gib:.3f}"
    table.add_row("a request, GiB", f"{exact:.3f}", f"{small:.3f}", pages)
    fits = f"{found.before:,.1f}", f"{found.before_fp8:,.1f}", f"{found.after:,}"
    table.add_row("requests at once", *fits)
    console = Console()
    console.print(
        f"{found.weight_bytes / gib:.1f} GiB of weights, {found.kv_bytes / gib:.1f} GiB for caches"
    )
    console.print(table)
    if found.sliding:
        console.print(
            f"{found.sliding} layers have a sliding window and keep vLLM's own cache of it."
        )
    if found.warning is not None:
        console.print(found.warning, highlight=False)
    console.print(command, soft_wrap=True, markup=False, highlight=False)
