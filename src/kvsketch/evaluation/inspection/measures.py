"""Measures of one prompt's queries, keys and values: where attention goes, how well few balls cover
them, and how they lie in the plane."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from kvsketch import theory
from kvsketch.errors import InputError
from kvsketch.evaluation.inspection.readings import CENTERS, LAST, RECENT, SINK
from kvsketch.methods.kcenter import farthest_first
from kvsketch.slots import Slots, attention_scores, causal

#: balls over tokens: where the clusterability curves are read, 1/128 .. 1/2
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
    """Where the last queries look, each at itself and what is before it; means over the queries.

    Args:
        queries: ``[batch, num_attention_heads, n, head_dim]``.
        keys: ``[batch, num_key_value_heads, n, head_dim]``.
        scaling: multiplies <q, k>.
        softcap: of the scores (Gemma 2).
        slopes: of ALiBi, ``[num_attention_heads]``: what a score gains per position (MPT).

    Returns:
        float64 ``[batch, num_attention_heads]`` each. "entropy": over the log of the tokens seen,
        0 (one token) .. 1 (all alike); "sink", "recent": share on the first and last tokens (where
        they overlap, the sink's); "holding": tokens that hold 90%, the fewest; "holding_share":
        over the tokens seen.
    """
    n, q = keys.shape[2], min(last, queries.shape[2])
    place = torch.arange(n, device=keys.device)
    slots = Slots(keys.double(), keys.double(), positions=place.float().expand(keys.shape[:3]))
    mask = causal(q, n, keys.device)
    asked = queries[:, :, -q:].double()
    scores = attention_scores(asked, slots, scaling, softcap, mask, slopes)
    share = scores.softmax(-1).flatten(1, 2)
    seen = torch.arange(n - q + 1, n + 1, device=keys.device, dtype=torch.float64)
    # the newest token a query sees is its own
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
    """How well few balls cover points: greedy k-center (SubGen, section 3.2), radii in units of the
    points' spread, the root of their mean squared distance from their mean.

    Args:
        points: keys or values, ``[batch, heads, n, dim]``.

    Returns:
        The radius that share n balls need for share in ``SHARES``, float64 ``[batch, heads,
        shares]``; and the balls of half the spread that are needed, over n, ``[batch, heads]`` (1
        where n/2 are too few).
    """
    n = points.shape[2]
    points = points.double() - points.double().mean(2, keepdim=True)
    spread = points.square().sum(-1).mean(-1).sqrt().clamp(min=1e-300)
    curve = theory.clusterability(points / spread[..., None, None], max_clusters=max(1, n // 2))
    number = [min(max(1, round(share * n)), curve.m.numel()) - 1 for share in SHARES]
    # its delta is a diameter
    return curve.lower[..., number], curve.clusters(2 * 0.5).double() / n


def embed(points: Tensor, seed: int) -> dict[str, Any]:
    """t-SNE of one head's keys or values, and its greedy k-center points, as SubGen's and
    ClusterGen's Figure 1; on one thread, so that a seed means the same picture.

    Args:
        points: ``[n, dim]``; every so-manieth of them where n is above ``POINTS``.

    Returns:
        "points": ``[[x, y], ...]``; "positions" of their tokens; "centers": indices into both;
        "radius": at which balls around the centers cover all points, over their spread.

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
    """Raise InputError unless what figures need can be imported."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise InputError(
                f"the figures need {module} ({error}): pip install 'kvsketch[report]'"
            ) from error


def rounded(value: Any) -> float:
    """Five digits: all that is worth keeping."""
    return float(f"{float(value):.5g}")
