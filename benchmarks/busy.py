"""Time of a prompt and of decoded tokens on a machine whose cores other processes keep busy.

    python -m benchmarks.busy --json

``busy`` other processes compute without end. ``spins`` is the environment variable
``GOMP_SPINCOUNT``: how often a thread of torch that waits for the others at the end of an operation
looks before it sleeps, and keeps its core, perhaps the one that the others need: 300,000 times by
default (the manual of GNU's libgomp), 100,000 times in the command ``kvsketch``, which sets it.
``prompt`` and ``decode`` are medians of wall-clock seconds; docs/benchmarks.md has them over those
of the exact cache by default with all threads on the idle machine.
"""

from __future__ import annotations

import json as jsonlib
import os
import statistics
import subprocess
import sys
import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers import DynamicCache

from benchmarks.options import positive
from benchmarks.results import Results, ResumeOption, Row, show
from kvsketch import SketchCache
from kvsketch.evaluation.report.report import dumps
from kvsketch.evaluation.runner import loading

MODEL = "spread"
BUDGET, DECODED = 0.1, 64
SPINS = ("default", "100000")


def seconds(method: str, tokens: int, rounds: int, seed: int) -> dict[str, list[float]]:
    """Wall-clock seconds of a prompt and of ``DECODED`` tokens after it, after one more round."""
    model = loading.load_model(loading.resolve_model(MODEL), "cpu", "float32")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, model.config.vocab_size, (1, tokens), generator=generator)
    found: dict[str, list[float]] = {"prompt": [], "decode": []}
    for _ in range(rounds + 1):
        config = model.config
        cache = (
            DynamicCache(config=config)
            if method == "exact"
            else SketchCache(config, method, budget=BUDGET)
        )
        with torch.inference_mode():
            times = [time.perf_counter()]
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            times.append(time.perf_counter())
            for i in range(DECODED):
                model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            times.append(time.perf_counter())
        found["prompt"].append(times[1] - times[0])
        found["decode"].append(times[2] - times[1])
    return {part: all_of_them[1:] for part, all_of_them in found.items()}


def apart(method: str, spins: str, threads: int, *numbers: int) -> dict[str, list[float]]:
    """``seconds`` in a process of its own, since OpenMP reads its variables once."""
    given = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    given["OMP_NUM_THREADS"] = str(threads)
    if spins != "default":
        given["GOMP_SPINCOUNT"] = spins
    code = f"from benchmarks.busy import *; print(jsonlib.dumps(seconds{(method, *numbers)}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    found: dict[str, list[float]] = jsonlib.loads(done.stdout.splitlines()[-1])
    return found


def main(
    methods: Annotated[str, typer.Option(help="exact, and methods.")] = "exact,heavy_merge",
    tokens: Annotated[int, typer.Option(help="Of the prompt.")] = 3000,
    rounds: int = 3,
    seed: int = 0,
    out: ResumeOption = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.busy --tokens 500 --rounds 1 --json"""
    positive(tokens=tokens, rounds=rounds)
    cores = len(os.sched_getaffinity(0))
    given = {"model": MODEL, "tokens": tokens, "rounds": rounds, "seed": seed}
    results = Results(out, command="busy", methods=methods.split(","), **given)
    parts = [
        (busy, threads, spins, method)
        for busy in (0, cores)
        for threads in sorted({1, cores}, reverse=True)
        for spins in (SPINS if threads > 1 else SPINS[:1])
        for method in results.settings["methods"]
    ]
    with Progress(console=Console(stderr=True)) as progress:
        for busy, threads, spins, method in progress.track(parts, description="processes"):
            key: Row = {"busy": busy, "threads": threads, "spins": spins, "method": method}
            if results.has(**key):
                continue
            command = [sys.executable, "-c", "while 1: 1"]
            others = [subprocess.Popen(command, start_new_session=True) for _ in range(busy)]
            try:
                found = apart(method, spins, threads, tokens, rounds, seed)
            finally:
                for other in others:
                    other.kill()
                    other.wait()
            medians = {part: round(statistics.median(each), 4) for part, each in found.items()}
            results.add([key | medians])
    result = results.finish()
    show("seconds", ("busy", "threads", "spins", "method", "prompt", "decode"), results.rows)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
