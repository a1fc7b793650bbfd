"""Throughput of vLLM on a GPU: its own caches in 16 bits, FP8 and TurboQuant, and kvsketch's pages.

    pip install 'kvsketch[vllm]' && python -m benchmarks.vllm_gpu --json

The model has the shape of Llama 3.1 8B and random weights, because only times are measured, unless
``--model`` names another one. All caches take turns in every round. A row has the tokens decoded
and read per second, by a number of requests of the same length at once, and how many requests of
that length fit into the memory that vLLM leaves for the cache.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import LlamaConfig

from benchmarks.options import among, integers, positive
from benchmarks.results import Results, ResumeOption, Row
from benchmarks.vllm_engine import FULL_ATTENTION, drawn, run
from kvsketch.evaluation.report.report import dumps

_OURS = {"attention_config": FULL_ATTENTION}
#: The caches by name: bits of the slots of ``heavy_merge`` or None, and the engine's arguments.
CACHES: dict[str, tuple[int | None, dict[str, Any]]] = {
    "bfloat16": (None, {}),
    "fp8": (None, {"kv_cache_dtype": "fp8"}),
    "turboquant_4bit_nc": (None, {"kv_cache_dtype": "turboquant_4bit_nc"}),
    "heavy_merge": (16, _OURS),
    "heavy_merge+int8": (8, _OURS),
    "heavy_merge+int4": (4, _OURS),
}


def shaped(folder: Path, **others: Any) -> str:
    """Write the configuration of a model with the shape of Llama 3.1 8B, and ``others``."""
    shape = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    }
    LlamaConfig(**{**shape, **others}, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return str(folder)


def measured(
    cache: str,
    tokens: int,
    requests: int,
    new: int,
    budget: int,
    seed: int,
    variables: dict[str, str],
    **engine: Any,
) -> Row:
    """The row of one engine. Without rates if the requests do not fit at once.

    Args:
        tokens: of each prompt; new: decoded tokens of each request.
        variables: further variables of the engine's process; engine: further arguments.
    """
    bits, arguments = CACHES[cache]
    if bits is not None:
        variables = {
            **variables,
            "KVSKETCH_METHOD": "heavy_merge",
            "KVSKETCH_BUDGET": str(budget),
            "KVSKETCH_BITS": str(bits),
        }
    given = {"dtype": "bfloat16", "max_model_len": tokens + new + 1, "max_num_seqs": requests}
    given |= {"enforce_eager": False, "enable_prefix_caching": False}
    asked = drawn([tokens] * requests, new, seed)
    found = run(asked, variables, **{**given, **arguments, **engine})
    row = {"vllm": found["vllm"], "requests_that_fit": found["concurrency"]}
    steps = found["steps"]
    together = [at for at, (_, _, out) in enumerate(steps) if out == requests]
    if len(together) < 2:  # they do not fit at once
        return {**row, "decoded_tokens_per_s": None, "read_tokens_per_s": None}
    first, *decoding = together
    read, decoded = (sum(steps[at][0] for at in part) for part in (range(first + 1), decoding))
    return {
        **row,
        "decoded_tokens_per_s": requests * len(decoding) / decoded,
        "read_tokens_per_s": requests * tokens / read,
    }


def main(
    tokens: Annotated[str, typer.Option(help="Tokens of a prompt.")] = "4000,12000,32000",
    caches: Annotated[str, typer.Option(help="Comma-separated caches.")] = ",".join(CACHES),
    requests: Annotated[int, typer.Option(help="Requests at once.")] = 16,
    new: Annotated[int, typer.Option(help="Decoded tokens of a request.")] = 256,
    budget: Annotated[int, typer.Option(help="Slots per KV head.")] = 2048,
    model: Annotated[str, typer.Option(help="Folder or hub id; default: random weights.")] = "",
    rounds: Annotated[int, typer.Option(help="Runs of every cache.")] = 3,
    seed: int = 0,
    out: ResumeOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.vllm_gpu --tokens 12000 --rounds 1 --json"""
    lengths = integers("tokens", tokens) or [0]
    names = among("caches", caches, CACHES)
    positive(tokens=min(lengths), requests=requests, new=new, budget=budget, rounds=rounds)
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device, and torch finds none")
    settings = {"requests": requests, "new": new, "budget": budget, "seed": seed}
    results = Results(out, command="vllm_gpu", model=model or "shape of Llama 3.1 8B", **settings)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        engine: dict[str, Any] = {"model": model}
        if not model:
            engine = {"model": shaped(Path(folder)), "load_format": "dummy"}
            engine["skip_tokenizer_init"] = True
        todo = [(n, length, name) for n in range(rounds) for length in lengths for name in names]
        for number, length, name in progress.track(todo, description="engines"):
            part = {"round": number, "tokens": length, "cache": name}
            if not results.has(**part):
                row = measured(name, length, variables={}, **settings, **engine)
                results.add([{**part, **row}])
    result = results.finish()
    console.print(table(results.rows))
    if json:
        print(dumps(result))


def table(rows: list[Row]) -> Table:
    """The medians of all rounds."""
    shown = Table(title="tokens per second, median of all rounds")
    for column in ("tokens", "cache", "decoded", "read", "requests that fit"):
        shown.add_column(column)
    for length, cache in dict.fromkeys((row["tokens"], row["cache"]) for row in rows):
        mine = [row for row in rows if (row["tokens"], row["cache"]) == (length, cache)]
        names = ("decoded_tokens_per_s", "read_tokens_per_s", "requests_that_fit")
        columns = [[row[name] for row in mine if row[name] is not None] for name in names]
        medians = [f"{statistics.median(column):,.1f}" if column else "-" for column in columns]
        shown.add_row(f"{length:,}", cache, *medians)
    return shown


if __name__ == "__main__":
    typer.run(main)
