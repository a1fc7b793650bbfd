"""How often the bounds of the theorems fail at the parameters that the theorems require, and when
these parameters exceed the number of tokens.

    python -m benchmarks.guarantee --json

- ``results``: streams to which the theorems apply (small clusters, short queries). Every trial is
  an independent sketch of the same stream with one query, and a failure is an error above
  eps |softmax(Kq)|_2 |V|_op (SubGen) or eps |softmax(Kq)|_2 |V|_F (BalanceKV). Intervals are exact
  binomial (Clopper-Pearson), 95%.
- ``real``: the parameters required at the norms of real models, in words.
- ``index``: the lower bound. It counts the bits of the INDEX instance (Theorem 6) that Bob recovers
  from a cache of n/4 slots, and from the exact one. ``advantage`` is 2 x (fraction right) - 1, so
  that guessing scores 0.
- ``covering``, ``sparsity``, ``merge_and_reduce``, ``saves``, ``break_even``: see
  ``benchmarks.theorems``.

Some parts take long. ``--only covering,sparsity --out FILE`` measures these parts and keeps the
others that the file has. ``environments`` states the seed, versions and hardware of each part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from json import loads
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from benchmarks.figures import subplots, write
from benchmarks.page import save
from benchmarks.prompts import default_models, load
from benchmarks.theorems import (
    MERGE_AND_REDUCE,
    SAVES,
    break_even_rows,
    covering_rows,
    in_ball,
    merge_and_reduce_case,
    saving_case,
    sparsity_rows,
    summary,
)
from kvsketch import METHODS, SKETCHES, InputError, Slots, attend, theory
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.evaluation.runner.longeval_cases import generate_cases
from kvsketch.hf.activations import capture
from kvsketch.methods import make
from kvsketch.methods.sketches import BalanceKVStreaming, Sketch, SubGen

CHUNK = 4096
#: The number of trials that run at the same time, as KV heads of one sketch.
SIDE_BY_SIDE = {"subgen": 50, "balancekv_streaming": 10}

SUBGEN = [
    {"eps": 0.9, "delta": 0.1, "r": 1.0, "n": 65536, "d": 8, "clusters": 32},
    {"eps": 0.9, "delta": 0.5, "r": 1.0, "n": 65536, "d": 8, "clusters": 32},
    {"eps": 0.9, "delta": 0.1, "r": 3.0, "n": 65536, "d": 4, "clusters": 256},
]
PARTS = (
    "results",
    "real",
    "index",
    "covering",
    "sparsity",
    "merge_and_reduce",
    "saves",
    "break_even",
)
BALANCEKV = [
    {"eps": 1.0, "r": 0.5, "n": 32768, "d": 4},
    {"eps": 1.0, "r": 0.25, "n": 32768, "d": 2},
]


def run_trials(
    sketch_of: Callable[[int], Sketch],
    tokens: Slots,
    queries: Tensor,
    side: int,
    scaling: float | None,
    advance: Callable[[], None],
) -> Tensor:
    """Errors of independent sketches of one stream, float64 ``[trials]``. Trial i has query i."""
    exact = attend(
        queries[None, None].double(), tokens.map(Tensor.double), scaling=scaling
    ).squeeze(0)
    errors = []
    for first in range(0, queries.shape[0], side):
        mine = queries[first : first + side]
        sketch = sketch_of(first)
        for start in range(0, tokens.count, CHUNK):
            part = tokens.narrow(start, min(CHUNK, tokens.count - start))
            index = torch.zeros(len(mine), dtype=torch.int64)
            sketch.extend(part.map(partial(torch.index_select, dim=1, index=index)))
        asked = mine[None, :, None].double()
        answers = attend(asked, sketch.slots.map(Tensor.double), scaling=scaling)[0, :, 0]
        errors.append((answers - exact[0, first : first + side]).norm(dim=-1))
        for _ in mine:
            advance()
    return torch.cat(errors)


def subgen_case(case: dict[str, Any], trials: int, seed: int, tick: Any) -> dict[str, Any]:
    eps, delta, r = case["eps"], case["delta"], case["r"]
    n, d, m = case["n"], case["d"], case["clusters"]
    generator = torch.Generator().manual_seed(seed)
    centers = 4 * torch.randn(m, d, generator=generator)
    keys = centers[torch.randint(0, m, (n,), generator=generator)]
    keys = keys + in_ball((n, d), delta / 2, generator)
    tokens = Slots(keys[None, None], torch.randn(1, 1, n, d, generator=generator))
    queries = torch.nn.functional.normalize(torch.randn(trials, d, generator=generator), dim=-1) * r
    size = theory.subgen(eps, delta, r, n, d, m=m)
    errors = run_trials(
        lambda first: SubGen(delta, s=size.s, t=size.t, seed=seed + 1 + first),
        tokens,
        queries,
        SIDE_BY_SIDE["subgen"],
        1.0,
        tick,
    )
    bound = theory.error_bounds(queries[None, None], tokens.keys, tokens.values, scaling=1.0)
    found = summary(eps, errors / bound.operator.flatten())
    parameters = {"s": size.s, "t": size.t, "tail": size.tail}
    return {"sketch": "subgen", "norm": "operator", **case, **parameters, **found} | {
        "slots_needed": size.slots,
        "verdict": size.verdict(n),
    }


def balancekv_case(case: dict[str, Any], trials: int, seed: int, tick: Any) -> dict[str, Any]:
    eps, r, n, d = case["eps"], case["r"], case["n"], case["d"]
    generator = torch.Generator().manual_seed(seed)
    keys = in_ball((1, 1, n, d), r, generator)
    tokens = Slots(keys, torch.randn(1, 1, n, d, generator=generator))
    queries = torch.nn.functional.normalize(torch.randn(trials, d, generator=generator), dim=-1) * r
    size = theory.balancekv(eps, r, n, d)
    errors = run_trials(
        lambda first: BalanceKVStreaming(
            r=r, batch_size=size.t, eps=eps, max_tokens=n, delta=size.delta, seed=seed + 1 + first
        ),
        tokens,
        queries,
        SIDE_BY_SIDE["balancekv_streaming"],
        None,
        tick,
    )
    bound = theory.error_bounds(queries[None, None], tokens.keys, tokens.values)
    found = summary(eps, errors / bound.frobenius.flatten())
    parameters = {"batch_size": size.t, "levels": size.levels}
    return {"sketch": "balancekv_streaming", "norm": "frobenius", **case, **parameters, **found} | {
        "slots_needed": size.slots,
        "verdict": size.verdict(n),
    }


def real_norms(model: str, seed: int, eps: float = 0.5) -> list[dict[str, Any]]:
    """What the theorems require at the norms of each layer of a model, in words."""
    loaded, tokenizer = load(model)
    limit = loaded.config.max_position_embeddings
    prompt = generate_cases(100, 1, seed)[0]["prompt"]
    ids = tokenizer(prompt, return_tensors="pt").input_ids[:, :limit]
    rows = []
    for caught in capture(loaded, ids):
        n, d = caught.keys.shape[2], caught.keys.shape[3]
        curve = theory.clusterability(caught.keys, max_clusters=max(1, n // 8))
        # SubGen's delta is the radius at which n/8 balls cover the keys of every head.
        delta = float(curve.lower[..., -1].max())
        query = float(caught.queries.norm(dim=-1).max())
        key = float(caught.keys.norm(dim=-1).max())
        rows.append(
            {
                "model": model,
                "layer": caught.layer,
                "n": n,
                "head_dim": d,
                "query_norm": round(query, 3),
                "key_norm": round(key, 3),
                "delta": round(delta, 3),
                "subgen": _words(
                    partial(theory.subgen, eps, delta, query * caught.scaling, n, d, m=n // 8), n
                ),
                "balancekv": _words(partial(theory.balancekv, eps, max(query, key), n, d), n),
            }
        )
    return rows


def _words(size: Callable[[], Any], n: int) -> str:
    try:
        return size().verdict(n)
    except InputError as error:  # The exponent is too large to be computed.
        return str(error)


def index_rows(rows: int, seed: int) -> list[dict[str, Any]]:
    """The share of bits recovered from n/4 slots, by method."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.rand(rows, 64, generator=generator) < 0.5
    game = theory.index_game(bits, d=512, eps=0.25, seed=seed)
    budget = rows // 4
    found = [("exact", game.slots)]
    for name in METHODS:
        if not METHODS[name].requires.queries:  # The only query is Bob's, after compression.
            found.append((name, make(name, seed)(game.slots, budget)))
    for name, cls in SKETCHES.items():
        if name == "one_dimensional":
            continue
        sketch = cls.for_budget(budget, seed=seed)
        sketch.extend(game.slots)
        found.append((name, sketch.slots))
    return [
        {
            "method": name,
            "rows": rows,
            "head_dim": 512,
            "slots": slots.count,
            "fraction": round(game.play(slots).fraction, 4),
            "advantage": round(game.play(slots).advantage, 4),
        }
        for name, slots in found
    ]


def figure(result: dict[str, Any], path: Path) -> None:
    """Left: errors relative to the bound. Right: the bits that Bob recovers."""
    fig, (left, right) = subplots(2, 10, 4)
    names = [f"{r['sketch']}\nd={r['d']}, r={r['r']}" for r in result["results"]]
    place = range(len(names))
    left.bar(
        place, [r["largest_eps"] for r in result["results"]], color="tab:blue", label="largest"
    )
    left.plot(place, [r["median_eps"] for r in result["results"]], "ko", label="median")
    left.plot(
        place, [r["eps"] for r in result["results"]], "r_", ms=24, mew=2, label="allowed: eps"
    )
    left.set_xticks(place, names, rotation=20, fontsize=7)
    left.set(title="error / bound, over the trials", ylabel="eps", yscale="log")
    left.legend()
    bars = sorted(result["index"], key=lambda r: r["advantage"])
    right.barh([r["method"] for r in bars], [r["advantage"] for r in bars], color="tab:orange")
    right.set(title="INDEX: bits beyond guessing, n/4 slots", xlim=(-0.05, 1.02))
    right.tick_params(axis="y", labelsize=7)
    write(fig, path)


def main(
    trials: Annotated[int, typer.Option(help="Sketches per SubGen case.")] = 400,
    balance_trials: Annotated[int, typer.Option(help="Sketches per BalanceKV case.")] = 200,
    saves_trials: Annotated[int, typer.Option(help="Sketches of the part saves.")] = 20,
    covering_trials: Annotated[int, typer.Option(help="Streams of the part covering.")] = 20,
    models: Annotated[
        str, typer.Option(help="Comma-separated folders or hub ids, for the part real.")
    ] = "",
    rows: Annotated[int, typer.Option(help="Rows of the INDEX instance.")] = 512,
    saves_tokens: Annotated[int, typer.Option(help="Longest stream of the part saves.")] = (
        1 << 22
    ),
    only: Annotated[str, typer.Option(help=f"Comma-separated parts, of: {', '.join(PARTS)}.")] = "",
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure (.svg or .png).")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.guarantee --trials 100 --balance-trials 20 --json"""
    console = Console(stderr=True)
    for name, value in (
        ("--trials", trials),
        ("--balance-trials", balance_trials),
        ("--saves-trials", saves_trials),
        ("--covering-trials", covering_trials),
    ):
        if value < 1:
            raise typer.BadParameter(f"{name} {value} must be at least 1")
    if rows < 8:
        raise typer.BadParameter(f"--rows {rows} must be at least 8")
    parts = only.split(",") if only else list(PARTS)
    if unknown := set(parts) - set(PARTS):
        raise typer.BadParameter(f"--only {min(unknown)!r} must be one of {', '.join(PARTS)}")
    chosen = models.split(",") if models else default_models()
    result: dict[str, Any] = {"command": "guarantee"}
    if only and out is not None and out.is_file():
        result = loads(out.read_text(encoding="utf-8"))
    environments = result.pop("environments", {})
    saved = [case for case in SAVES if case["n"] <= saves_tokens]
    with Progress(console=console) as progress:
        task = progress.add_task("trials", total=None)

        def tick() -> None:
            progress.advance(task)

        def bounds() -> list[dict[str, Any]]:
            found = [subgen_case(case, trials, seed, tick) for case in SUBGEN]
            return found + [balancekv_case(case, balance_trials, seed, tick) for case in BALANCEKV]

        measured: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "results": bounds,
            "real": lambda: [row for model in chosen for row in real_norms(model, seed)],
            "index": lambda: index_rows(rows, seed),
            "covering": lambda: covering_rows(covering_trials, seed),
            "sparsity": lambda: sparsity_rows(seed),
            "merge_and_reduce": lambda: [
                merge_and_reduce_case(case, balance_trials, seed, tick) for case in MERGE_AND_REDUCE
            ],
            "saves": lambda: [saving_case(case, saves_trials, seed, tick) for case in saved],
            "break_even": break_even_rows,
        }
        for part in parts:
            result[part] = measured[part]()
            environments[part] = {"seed": seed, **environment()}
            for row in result[part]:
                if "model" in row:
                    row["model"] = Path(row["model"]).name
                console.print(row)
    result["environments"] = environments
    if not only:
        result |= {"seed": seed, "threads": torch.get_num_threads(), **environment()}
    save(result, out)
    if plot is not None and {"results", "index"} <= result.keys():
        figure(result, plot)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
