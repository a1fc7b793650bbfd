"""Measures of the queries, keys and values of one prompt: the tokens that get attention, how well
few balls cover keys and values, and their projection to the plane."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from kvsketch import theory
from kvsketch.errors import InputError
from kvsketch.estimator import attention_scores
from kvsketch.evaluation.inspection.readings import CENTERS, LAST, RECENT, SINK
from kvsketch.farthest_first import farthest_first
from kvsketch.observed import causal
from kvsketch.slots import Slots

#: Balls over tokens, at which the clusterability curves are computed: 1/128 .. 1/2.
SHARES = tuple(2.0 ** (-k / 2) for k in range(14, 1, -1))
#: points of a t-SNE
POINTS = 1000


def attention(
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    softcap: float | None = None,
    last: int = LAST,
    sink: int = SINK,
    recent: int = RECENT,
    slopes: Tensor | None = None,
) -> dict[str, Tensor]:
    """How the attention of the last queries is distributed over the tokens up to their own. All
    results are means over these queries.

    Args:
        queries: ``[batch, num_attention_heads, n, head_dim]``.
        keys: ``[batch, num_key_value_heads, n, head_dim]``.
        scaling: multiplies <q, k>.
        softcap: of the scores (Gemma 2).
        slopes: of ALiBi, ``[num_attention_heads]``: added to a score per position (MPT).

    Returns:
        float64 ``[batch, num_attention_heads]`` each. "entropy": divided by the log of the number
        of tokens attended to, 0 (one token) .. 1 (all tokens alike). "sink", "recent": the share of
        the first and of the last tokens (a token that is both counts as a sink). "holding": the
        smallest number of tokens that get 90%. "holding_share": this number over the number of
        tokens attended to.
    """
    n, q = keys.shape[2], min(last, queries.shape[2])
    place = torch.arange(n, device=keys.device)
    slots = Slots(keys.double(), keys.double(), positions=place.float().expand(keys.shape[:3]))
    mask = causal(q, n, keys.device)
    asked = queries[:, :, -q:].double()
    scores = attention_scores(asked, slots, scaling, softcap, mask, slopes)
    share = scores.softmax(-1).flatten(1, 2)
    seen = torch.arange(n - q + 1, n + 1, device=keys.device, dtype=torch.float64)
    # The newest token that a query attends to is its own.
    late = (place >= seen[:, None] - recent) & (place >= sink)
    falling = share.sort(dim=-1, descending=True).values.cumsum(-1)
    holding = (falling < 0.9 - 1e-12).sum(-1).double() + 1
    entropy = torch.special.entr(share).sum(-1) / seen.log().clamp(min=1e-12)
    found = {
        "entropy": entropy,
        "sink": share[..., :sink].sum(-1),
        "recent": (share * late).sum(-1),
        "holding": holding,
        "holding_share": holding / seen,
    }
    return {name: rows.mean(-1) for name, rows in found.items()}


def cover(points: Tensor) -> tuple[Tensor, Tensor]:
    """How well few balls cover points, by greedy k-center (SubGen, section 3.2). Radii are in units
    of the points' spread, the root of their mean squared distance from their mean.

    Args:
        points: keys or values, ``[batch, heads, n, dim]``.

    Returns:
        The radius of the balls if share * n of them cover all points, for each share in ``SHARES``,
        float64 ``[batch, heads, shares]``. And the number of balls with a radius of half the spread
        that are needed, over n, ``[batch, heads]`` (1 if n/2 are too few).
    """
    n = points.shape[2]
    points = points.double() - points.double().mean(2, keepdim=True)
    spread = points.square().sum(-1).mean(-1).sqrt().clamp(min=1e-300)
    curve = theory.clusterability(points / spread[..., None, None], max_clusters=max(1, n // 2))
    number = [min(max(1, round(share * n)), curve.m.numel()) - 1 for share in SHARES]
    # Its delta is a diameter.
    return curve.lower[..., number], curve.clusters(2 * 0.5).double() / n


def embed(points: Tensor, seed: int) -> dict[str, Any]:
    """t-SNE of the keys or values of one head, and its greedy k-center points, as in Figure 1 of
    SubGen and ClusterGen. It runs on one thread, so that a seed always gives the same picture.

    Args:
        points: ``[n, dim]``. If n is above ``POINTS``, evenly spaced ones are used.

    Returns:
        "points": ``[[x, y], ...]``. "positions": those of their tokens. "centers": indices into
        both. "radius": the radius at which balls around the centers cover all points, over their
        spread.

    Raises:
        InputError: scikit-learn is not installed.
    """
    require("sklearn")
    manifold = importlib.import_module("sklearn.manifold")
    threads = importlib.import_module("threadpoolctl")
    n = points.shape[0]
    at = torch.linspace(0, n - 1, min(n, POINTS)).round().long()
    chosen = points[at.to(points.device)].double().cpu()
    inserted = farthest_first(chosen[None, None], None, CENTERS)[0, 0]
    centers = inserted.topk(min(CENTERS, int((inserted > 0).sum()))).indices
    curve = theory.clusterability(chosen[None, None], CENTERS)
    spread = (chosen - chosen.mean(0)).square().sum(-1).mean().sqrt()
    perplexity = min(30.0, (len(at) - 1) / 3)
    with threads.threadpool_limits(limits=1):
        flat = manifold.TSNE(
            2, perplexity=perplexity, init="pca", learning_rate="auto", random_state=seed
        ).fit_transform(chosen.float().numpy())
    return {
        "points": [[round(float(x), 2), round(float(y), 2)] for x, y in flat],
        "positions": at.tolist(),
        "centers": centers.tolist(),
        "radius": rounded(curve.lower[0, 0, -1] / spread.clamp(min=1e-300)),
    }


def require(*modules: str) -> None:
    """Raise InputError unless the modules that figures need can be imported."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise InputError(
                f"the figures need {module} ({error}): pip install 'kvsketch[report]'"
            ) from error


def rounded(value: Any) -> float:
    """A number rounded to five digits."""
    return float(f"{float(value):.5g}")
