"""The cost of a second reading of the context relative to the first, and its benefit.

    python -m benchmarks.reading --json

Cost: ``second_over_first`` and ``compress_over_first`` are the CPU seconds of the second reading
and of the compression after it, over those of reading the context with an uncompressed cache. The
models are ``longeval-one-head``, and two layers of Llama 3 8B's shape with random weights. The
second reading stops after the queries of the last layer, and the share saved by this is larger in a
model of two layers than in one of 32. ``layer_over_first`` is therefore the ratio for the first
layer alone, and ``of_32_over_first`` that of a model with 31 such layers and the last one. CPU
seconds include all threads, so that other load on the machine has little influence. Runs are
paired, and the medians of their ratios are reported. ``peers`` has the ratio of the ``whole``
prefill to the same first reading, for heavy_merge and for the methods of other authors that read
the context a second time, with ``longeval-one-head``.

Accuracy: ``--beside`` names a result of ``benchmarks.longeval``. The rows of the methods in
it that were run with every source of queries are copied.
"""

from __future__ import annotations

import json as jsonlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig

import kvsketch
from benchmarks.page import save
from benchmarks.prompts import ONE_HEAD
from benchmarks.speed import prompt
from kvsketch import SketchCache
from kvsketch.arguments import QUERY_SOURCES
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.evaluation.runner.loading import resolve_model

#: The methods of other authors that read the context a second time.
PEERS = ("kvzip", "kvzip_plus", "kvgrad")
#: The layers of the model whose cost is computed from that of the measured ones.
DEEP = 32


def models() -> dict[str, Callable[[], Any]]:
    """How each model is made, by its name in the table."""

    def wide() -> Any:
        config = LlamaConfig(
            vocab_size=8000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=2,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=32768,
        )
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()

    def packaged() -> Any:
        return AutoModelForCausalLM.from_pretrained(resolve_model(ONE_HEAD)).eval()

    return {ONE_HEAD: packaged, "two layers of Llama 3 8B's shape": wide}


class Clock:
    """Notes when every forward pass of a model and of its decoder layers begins, and when the pass
    ends, in CPU seconds of the process."""

    def __init__(self, model: Any) -> None:
        self.forwards: list[float] = []  # when each forward pass began
        self.layers: list[list[float]] = []  # per pass: when each layer began, and the end
        inner = model.base_model
        self._hooks = [inner.register_forward_pre_hook(self._forward)]
        self._hooks += [x.register_forward_pre_hook(self._layer) for x in inner.layers]

    def _forward(self, *_: Any) -> None:
        self.end()
        self.forwards.append(time.process_time())
        self.layers.append([])

    def _layer(self, *_: Any) -> None:
        self.layers[-1].append(time.process_time())

    def end(self) -> float:
        """Note that the last forward pass is over. Returns the time."""
        now = time.process_time()
        if self.layers and self.layers[-1]:
            self.layers[-1].append(now)
        return now

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def seconds(
    model: Any, ids: Tensor, queries: str | None, tokenizer: Any, method: str = "heavy_merge"
) -> dict[str, float]:
    """CPU seconds of reading ``ids`` (``first``), of reading them again (``second``), of
    compressing (``compress``) and of all of this (``whole``). ``layer`` and ``last`` are those of
    the first and the last layer in the second reading, or in the first if it is the only one. If
    ``queries`` is None, ``ids`` are only read once, with an uncompressed cache."""
    clock = Clock(model)
    if queries is None:
        model.base_model(ids, past_key_values=DynamicCache(config=model.config))
        read = done = clock.end()
    else:
        cache = SketchCache(model.config, method, budget=0.1, allocation="global", bits=16)
        forward = cache._forward
        finish, ends = forward.finish_reading, []
        forward.finish_reading = lambda *a: (ends.append(clock.end()), finish(*a))
        kvsketch.prefill(model, ids, cache, queries=queries, tokenizer=tokenizer)
        read, done = ends[0], time.process_time()
    clock.close()
    begin = clock.forwards[0]
    second = clock.forwards[1] if len(clock.forwards) > 1 else read
    parts = clock.layers if queries in (None, "prompt") else clock.layers[1:]
    return {
        "first": second - begin,
        "second": read - second,
        "compress": done - read,
        "whole": done - begin,
        "layer": sum(times[1] - times[0] for times in parts),
        "last": sum(times[-1] - times[-2] for times in parts),
    }


def costs(
    name: str, model: Any, ids: Tensor, tokenizer: Any, sources: list[str], repeats: int
) -> list[dict[str, Any]]:
    """The rows of one model: ratios to the seconds of a first reading in the same round."""
    found: dict[str, list[dict[str, float]]] = {source: [] for source in sources}
    for _ in range(repeats):
        plain = seconds(model, ids, None, tokenizer)
        for source in sources:
            one = seconds(model, ids, source, tokenizer)
            deep = (DEEP - 1) * one["layer"] + one["last"]
            ratios = {
                "second": one["second"] / plain["first"],
                "layer": one["layer"] / plain["layer"] if source != "prompt" else 0.0,
                "of_32": deep / (DEEP * plain["layer"]) if source != "prompt" else 0.0,
                "compress": one["compress"] / plain["first"],
            }
            found[source].append(ratios)
    return [
        {"model": name, "queries": source, "tokens": ids.shape[1], "pairs": repeats}
        | {f"{key}_over_first": statistics.median(r[key] for r in rows) for key in rows[0]}
        for source, rows in found.items()
    ]


def wholes(model: Any, ids: Tensor, tokenizer: Any, repeats: int) -> list[dict[str, Any]]:
    """The whole prefill over a first reading, of our method and of ``PEERS``."""
    found: dict[str, list[float]] = {method: [] for method in ("heavy_merge", *PEERS)}
    for _ in range(repeats):
        plain = seconds(model, ids, None, tokenizer)
        for method, ratios in found.items():
            one = seconds(model, ids, "reread", tokenizer, method)
            ratios.append(one["whole"] / plain["first"])
    return [
        {"method": method, "pairs": repeats, "whole_over_first": statistics.median(ratios)}
        for method, ratios in found.items()
    ]


def accuracies(beside: Path, sources: list[str]) -> list[dict[str, Any]]:
    """The rows of the methods that ``benchmarks.longeval`` ran with every source of queries."""
    result = jsonlib.loads(beside.read_text(encoding="utf-8"))
    found = []
    for row in result["results"]:
        name, _, source = row["method"].partition("/")
        found.append(
            row | {"method": name, "queries": source or "prompt", "lines": result["lines"]}
        )
    has = {(row["method"], row["queries"]) for row in found}
    return [row for row in found if all((row["method"], source) in has for source in sources)]


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the context.")] = 4000,
    repeats: Annotated[
        int, typer.Option(help="Paired runs, a third as many for the large layers.")
    ] = 3,
    beside: Annotated[
        Path | None, typer.Option(help="JSON of benchmarks.longeval with accuracies to copy.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.reading --tokens 1000 --repeats 1 --json"""
    if tokens < 256 or repeats < 1 or threads < 1:
        raise typer.BadParameter(
            f"--tokens {tokens} must be at least 256, --repeats {repeats} and "
            f"--threads {threads} at least 1"
        )
    if beside is not None and not beside.is_file():
        raise typer.BadParameter(f"--beside {str(beside)!r} is not a file")
    torch.set_num_threads(threads)
    console = Console(stderr=True)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(ONE_HEAD))
    sources, rows = list(QUERY_SOURCES), []
    peers: list[dict[str, Any]] = []
    with torch.no_grad(), console.status("measuring, which takes many minutes"):
        for name, make in models().items():
            model = make()
            ids = prompt(model, tokens, seed)
            rounds = repeats if name == ONE_HEAD else max(1, repeats // 3)
            rows += costs(name, model, ids, tokenizer, sources, rounds)
            if name == ONE_HEAD:
                peers = wholes(model, ids, tokenizer, rounds)
            for row in rows[-len(sources) :]:
                console.print(
                    {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
                )
    right = [] if beside is None else accuracies(beside, sources)
    result: dict[str, Any] = {"command": "reading", "results": rows, "accuracy": right}
    result["peers"] = peers
    result |= {"tokens": tokens, "repeats": repeats, "threads": threads, "seed": seed}
    result |= environment()
    save(result, out)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
