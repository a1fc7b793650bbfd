"""Turns the measurements of a layer on all prompts into one row of plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch import theory
from kvsketch.cache.curves import Curves, pooled
from kvsketch.errors import InputError
from kvsketch.evaluation.inspection.measures import SHARES, rounded
from kvsketch.evaluation.inspection.readings import TOLERANCES

#: The number of bins of a histogram of norms.
BINS = 24
#: The share at which a curve is read if it is summarised by one number.
EIGHTH = 1 / 8
#: The eps of the theorems.
EPS = 0.5


@dataclass(frozen=True)
class Layer:
    """Measurements of one layer on one prompt, without the batch axis. The first axis is that of
    query heads or KV heads, the second that of tokens or shares.

    Attributes:
        norms: "query", "key", "value": ``[heads, n]``.
        radius: "keys", "values": covering radius over spread at ``SHARES``, ``[kv_heads, shares]``.
        balls: "keys", "values": the number of balls with a radius of half the spread that cover
            them, over n, ``[kv_heads]``.
        delta: the radius at which n/8 balls cover every head's keys, in units of the keys.
        attention: the results of ``measures.attention``, ``[heads]`` each.
        errors: the relative error by method, ``[kv_heads]``.
        curves: the curves of ``TOLERANCE_METHOD``.
    """

    tokens: int
    dims: tuple[int, int]
    scaling: float
    norms: dict[str, Tensor]
    radius: dict[str, Tensor]
    balls: dict[str, Tensor]
    delta: float
    attention: dict[str, Tensor]
    errors: dict[str, Tensor]
    curves: Curves


def rows_of(found: dict[int, list[Layer]]) -> list[dict[str, Any]]:
    norms = {
        layer: {name: torch.cat([x.norms[name] for x in seen], -1) for name in seen[0].norms}
        for layer, seen in found.items()
    }
    # All layers have the same bins, so that they can be compared.
    top = {name: max(float(x[name].max()) for x in norms.values()) for name in _KINDS}
    rows = []
    for layer, seen in found.items():
        row: dict[str, Any] = {"layer": layer, "tokens": [x.tokens for x in seen]}
        row["norms"] = {
            name: _histogram(values, top[name]) for name, values in norms[layer].items()
        }
        row["norms"]["score"] = _scores(seen)
        row["clusterability"] = {what: _cover_row(seen, what) for what in ("keys", "values")}
        row["attention"] = _attention_row(seen)
        row["theory"] = _theory_row(seen)
        heads = {
            name: torch.stack([x.errors[name] for x in seen]).mean(0) for name in seen[0].errors
        }
        row["errors"] = {name: rounded(x.mean()) for name, x in heads.items()}
        row["errors_by_head"] = {name: _list(x) for name, x in heads.items()}
        curves = pooled([x.curves for x in seen])
        row["within"] = {str(t): rounded(curves.within(t)[0].mean()) for t in TOLERANCES}
        rows.append(row)
    return rows


_KINDS = ("query", "key", "value")


def _histogram(norms: Tensor, top: float) -> dict[str, Any]:
    """The histogram of norms ``[heads, n]`` of one layer."""
    counts = torch.histc(norms.flatten(), BINS, 0.0, max(top, 1e-12))
    return {
        "mean": rounded(norms.mean()),
        "max": rounded(norms.max()),
        "heads": _list(norms.mean(-1)),
        "edges": _list(torch.linspace(0, max(top, 1e-12), BINS + 1, dtype=torch.float64)),
        "counts": [int(x) for x in counts],
    }


def _scores(seen: Sequence[Layer]) -> dict[str, float]:
    """Statistics of |q| |k| scaling. Its mean over all pairs is the product of the means."""
    means, most = [], []
    for x in seen:
        query, key = x.norms["query"], x.norms["key"]
        key = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0)
        means.append((query.mean(-1) * key.mean(-1)).mean() * x.scaling)
        most.append((query.amax(-1) * key.amax(-1)).max() * x.scaling)
    return {"mean": rounded(torch.stack(means).mean()), "max": rounded(torch.stack(most).max())}


def _cover_row(seen: Sequence[Layer], what: str) -> dict[str, Any]:
    radius = torch.stack([x.radius[what] for x in seen]).mean(0)
    eighth = radius[:, SHARES.index(EIGHTH)]
    return {
        "shares": [rounded(share) for share in SHARES],
        "radius": _list(radius.mean(0)),
        "eighth": rounded(eighth.mean()),
        "heads": _list(eighth),
        "balls_of_half_the_spread": rounded(torch.stack([x.balls[what] for x in seen]).mean()),
    }


def _attention_row(seen: Sequence[Layer]) -> dict[str, Any]:
    heads = {
        name: torch.stack([x.attention[name] for x in seen]).mean(0) for name in seen[0].attention
    }
    row: dict[str, Any] = {name: rounded(x.mean()) for name, x in heads.items()}
    return {**row, "heads": {name: _list(x) for name, x in heads.items()}}


def _theory_row(seen: Sequence[Layer]) -> dict[str, Any]:
    """The parameters that the theorems require, their arguments, and the result in words."""
    query, key = (max(float(x.norms[name].max()) for x in seen) for name in ("query", "key"))
    n, delta = max(x.tokens for x in seen), max(max(x.delta for x in seen), 1e-9)
    dim, value_dim = seen[0].dims
    scaling = seen[0].scaling
    # BalanceKV's scores are <q, k>/sqrt(d). Any other scaling is made part of the query.
    r = max(query * scaling * math.sqrt(dim), key)
    return {
        "eps": EPS,
        "n": n,
        "query_norm": rounded(query),
        "key_norm": rounded(key),
        "delta": rounded(delta),
        "subgen": _asked(
            lambda: theory.subgen(EPS, delta, query * scaling, n, value_dim, m=max(1, n // 8)), n
        ),
        "balancekv": _asked(lambda: theory.balancekv(EPS, r, n, dim, value_dim=value_dim), n),
    }


def _asked(size: Callable[[], Any], n: int) -> dict[str, Any]:
    try:
        found = size()
    except InputError as error:  # the exponent is too large to be computed
        return {"slots": None, "verdict": str(error)}
    return {"slots": rounded(found.slots), "verdict": found.verdict(n)}


def _list(values: Tensor) -> list[float]:
    return [rounded(x) for x in values]
