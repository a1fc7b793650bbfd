"""Parts of ``benchmarks.guarantee``.

They are the number of clusters in the unit ball (``covering``; Compression Barriers, Theorem 15),
the sparsity of INDEX (``sparsity``; Corollary 16), the errors of MergeAndReduce
(``merge_and_reduce``; BalanceKV, Theorem 3.3), those of BalanceKV with Theorem 3.1's parameters
where these save memory (``saves``), and the number of tokens from which on they do
(``break_even``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor

from kvsketch import Slots, theory
from kvsketch.farthest_first import farthest_first
from kvsketch.methods.sketches import BalanceKVStreaming, SubGen

Row = dict[str, Any]

MERGE_AND_REDUCE = [
    {"eps": 0.5, "r": 0.5, "n": 32768, "d": 4},
    {"eps": 0.25, "r": 0.25, "n": 32768, "d": 2},
]
#: The sums are compared after i n/16 tokens and one more, for each of these i.
STEPS = (1, 2, 3, 5, 8, 11, 16)
SAVES = [
    {"eps": 1.0, "r": 0.25, "n": 1 << 18, "d": 2, "norm_ratio": 1.0},
    {"eps": 1.0, "r": 0.25, "n": 1 << 22, "d": 2, "norm_ratio": None},
]
BREAK_EVEN = [
    {"eps": eps, "r": r, "d": d, "constant": constant, "norm_ratio": ratio}
    for constant in (30.0, 1.0)
    for ratio in (None, 1.0)
    for eps, r, d in ((1.0, 0.0, 1), (1.0, 0.25, 2), (1.0, 1.0, 64), (0.5, 1.0, 128))
]


def in_ball(shape: tuple[int, ...], radius: float, generator: torch.Generator) -> Tensor:
    """Points of norm at most ``radius``, in uniformly distributed directions."""
    points = torch.randn(shape, generator=generator)
    length = torch.rand((*shape[:-1], 1), generator=generator)
    return points * (radius * length / points.norm(dim=-1, keepdim=True))


def covering_rows(trials: int, seed: int, n: int = 20_000) -> list[Row]:
    """The largest number of clusters of radius e/3 that SubGen finds among keys of norm at most 1,
    for d = 1..6: with keys uniform in the ball, on its surface, and in the ball with the farthest
    first, an order that leads to many clusters."""
    rows = []
    for d in range(1, 7):
        generator = torch.Generator().manual_seed(seed + d)
        most = {"inside": 0, "surface": 0, "farthest_first": 0}
        for _ in range(trials):
            surface = torch.nn.functional.normalize(torch.randn(n, d, generator=generator), dim=-1)
            inside = surface * torch.rand(n, 1, generator=generator) ** (1 / d)
            spread = inside[_most_separated_first(inside)]
            for name, keys in zip(most, (inside, surface, spread), strict=True):
                sketch = SubGen(theory.UNIT_BALL_DELTA, s=1, t=1)
                sketch.extend(Slots(keys[None, None], keys[None, None, :, :1]))
                most[name] = max(most[name], int(sketch.clusters))
        size = theory.low_dimensional(0.9, 1.0, d)
        rows.append(
            {
                "d": d,
                "n": n,
                "trials": trials,
                **most,
                "proven": theory.clusters_in_ball(d, theory.UNIT_BALL_DELTA),
                "e_to_the_d": math.ceil(math.e**d),
                "slots": size.slots,
            }
        )
    return rows


def _most_separated_first(points: Tensor, count: int = 500) -> Tensor:
    """An order of the points: a farthest-first traversal that starts from the point farthest from
    the origin, then the other points."""
    start = points.norm(dim=-1).argmax()
    turned = torch.cat([points[start : start + 1], points])
    inserted = farthest_first((turned - points[start])[None, None], None, count)[0, 0]
    return inserted[1:].argsort(descending=True)


def sparsity_rows(seed: int) -> list[Row]:
    """The sparsity of QK^T in INDEX, which cannot be compressed (Corollary 16)."""
    rows = []
    for n in (128, 512, 2048):
        generator = torch.Generator().manual_seed(seed)
        bits = torch.rand(n, 16, generator=generator) < 0.5
        game = theory.index_game(bits, d=512, eps=0.25, seed=seed, strict=False)
        scores = game.queries[0, 0] @ game.slots.keys[0, 0].T
        weights = scores.softmax(-1)
        rows.append(
            {
                "rows": n,
                "coherence": round(game.coherence, 3),
                # Alice's n queries are 0, and Bob has one.
                "zero_share": round(n / (n + 1), 5),
                "own_weight": round(float(weights.diagonal().min()), 4),
                "others_beyond_1_percent": int((weights > 0.01).sum() - n),
            }
        )
    return rows


def merge_and_reduce_case(case: Row, trials: int, seed: int, tick: Callable[[], None]) -> Row:
    """The errors of MergeAndReduce. If all values have the same norm, BalanceKVStreaming consists
    of MergeAndReduce on (k, v) and on (k, 1). A trial fails if the error of either sum exceeds the
    bound at any of ``STEPS``."""
    eps, r, n, d = case["eps"], case["r"], case["n"], case["d"]
    generator = torch.Generator().manual_seed(seed)
    keys = in_ball((1, 1, n, d), r, generator).double()
    values = torch.nn.functional.normalize(
        torch.randn(1, 1, n, d, generator=generator).double(), dim=-1
    )
    tokens, side = Slots(keys, values), 10
    queries = torch.nn.functional.normalize(torch.randn(trials, d, generator=generator), dim=-1)
    size = theory.merge_and_reduce(eps, r, n, d)
    stops = [min(n, n // 16 * i + 1) for i in STEPS]
    ratio = []
    for first in range(0, trials, side):
        mine = (r * queries[first : first + side]).double()
        sketch = BalanceKVStreaming(
            r=r, batch_size=size.t, eps=1.0, max_tokens=n, delta=size.delta, seed=seed + 1 + first
        )
        worst = torch.zeros(len(mine))
        for start, stop in pairwise([0, *stops]):
            part = tokens.narrow(start, stop - start)
            index = torch.zeros(len(mine), dtype=torch.int64)
            sketch.extend(part.map(partial(torch.index_select, dim=1, index=index)))
            exact = _sums(mine, tokens.narrow(0, stop))
            allowed = stop * math.exp(-(r**2) / math.sqrt(d))
            for one, other in zip(exact, _sums(mine, sketch.slots), strict=True):
                worst = torch.maximum(worst, (other - one).norm(dim=-1).float() / allowed)
        ratio.append(worst)
        for _ in mine:
            tick()
    parameters = {"batch_size": size.t, "levels": size.levels}
    return {
        **case,
        **parameters,
        **summary(eps, torch.cat(ratio)),
        "slots_needed": size.slots,
        "verdict": size.verdict(n),
        "denominator": theory.merge_and_reduce(eps, r, n, d, value_dim=1).verdict(n),
        "steps": len(stops),
    }


def _sums(queries: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    """Two sums over the slots, for query i in head i. The first is that of 2^l exp(<k, q>/sqrt(d))
    v, ``[queries, value_dim]``, where 2^l is a slot's mass. The second is the same without v,
    ``[queries, 1]``."""
    score = (slots.keys[0].double() * queries.unsqueeze(1)).sum(-1) / queries.shape[-1] ** 0.5
    weight = score.exp()
    values = (weight.unsqueeze(-1) * slots.values[0].double()).sum(1)
    return values, (weight * slots.masses()[0].double()).sum(1, keepdim=True)


def break_even_rows() -> list[Row]:
    """The least n at which Theorem 3.1 requires fewer slots than tokens."""
    return [{**case, "tokens": theory.break_even(partial(_at, case))} for case in BREAK_EVEN]


def _at(case: Row, n: int) -> theory.BalanceKVSize:
    return theory.balancekv(
        case["eps"],
        case["r"],
        n,
        case["d"],
        constant=case["constant"],
        norm_ratio=case["norm_ratio"],
    )


def summary(eps: float, ratio: Tensor) -> Row:
    """How often error <= eps bound fails, with an interval. ``ratio`` is error / bound."""
    failures = int((ratio > eps).sum())
    interval = binomtest(failures, ratio.numel()).proportion_ci(0.95)
    return {
        "trials": ratio.numel(),
        "failures": failures,
        "failure_rate": failures / ratio.numel(),
        "ci95": [round(interval.low, 5), round(interval.high, 5)],
        "median_eps": round(float(ratio.median()), 5),
        "largest_eps": round(float(ratio.max()), 5),
    }


def saving_case(case: Row, trials: int, seed: int, tick: Callable[[], None]) -> Row:
    """The errors where Theorem 3.1 requires fewer slots than tokens, with values of the same norm
    (norm_ratio 1) or Gaussian ones. Four sketches run at the same time, with one query each. If the
    stream is too long for that, one sketch gets ``trials`` queries, which are then not independent
    trials."""
    eps, r, n, d = case["eps"], case["r"], case["n"], case["d"]
    generator = torch.Generator().manual_seed(seed)
    keys = in_ball((1, 1, n, d), r, generator)
    values = torch.randn(1, 1, n, d, generator=generator)
    if case["norm_ratio"] is not None:
        values = torch.nn.functional.normalize(values, dim=-1)
    queries = torch.nn.functional.normalize(torch.randn(trials, d, generator=generator), dim=-1) * r
    size = theory.balancekv(eps, r, n, d, norm_ratio=case["norm_ratio"])
    together = n > 1 << 20
    heads = 1 if together else 4
    bound = theory.error_bounds(queries[None, None], keys, values).frobenius[0, 0]
    ratio, held = [], (0, 0)
    for first in range(0, 1 if together else trials, heads):
        mine = queries if together else queries[first : first + heads]
        sketch = BalanceKVStreaming(
            r=r, batch_size=size.t, eps=eps, max_tokens=n, delta=size.delta, seed=seed + 1 + first
        )
        used = 1 if together else len(mine)
        for start in range(0, n, 8192):
            part = Slots(keys, values).narrow(start, min(8192, n - start))
            sketch.extend(part.map(lambda x, used=used: x.expand(1, used, -1, -1)))
        asked = mine[None, None] if together else mine[None, :, None]
        slots = sketch.slots
        held = (slots.count, sketch.nbytes() // used)
        error = theory.measured_error(
            asked,
            slots,
            keys.expand(1, used, -1, -1),
            values.expand(1, used, -1, -1),
        ).flatten()
        index = slice(None) if together else slice(first, first + heads)
        ratio.append(error / bound[index])
        for _ in mine:
            tick()
    found = summary(eps, torch.cat(ratio))
    if together:  # The queries share one sketch, so failures are not binomial.
        found["ci95"] = None
    return {
        **case,
        "batch_size": size.t,
        "levels": size.levels,
        "buckets": size.buckets,
        **found,
        "sketches": 1 if together else trials,
        "slots_needed": size.slots,
        "verdict": size.verdict(n),
        "slots_held": held[0],
        "bytes_held": held[1],
        "exact_bytes": keys.nbytes + values.nbytes,
    }
