"""What a model's own queries, keys and values say about compressing its cache, layer by layer.

Everything is measured on full-attention layers (the others stay as they are), on activations caught
by ``evaluation.activations.capture``; the result is plain numbers, ready for JSON.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvsketch import theory
from kvsketch.compressors.kcenter import farthest_first
from kvsketch.errors import InputError, KVSketchError, UnsupportedError
from kvsketch.evaluation.activations import Activations, capture
from kvsketch.evaluation.inspection_readings import (
    CENTERS,
    RECENT,
    SINK,
    TOLERANCE_METHOD,
    TOLERANCES,
    mean,
    readings,
)
from kvsketch.slots import Observed, Slots, attention_scores, causal
from kvsketch.streaming import windowed
from kvsketch.streaming.curves import LEVELS, Curves, held_out_for, measure_layer, pooled

#: whose errors are measured
METHODS = (
    "uniform",
    "streaming_llm",
    "snapkv",
    "keydiff",
    "kcenter",
    "balancekv",
    "cluster_merge",
    "heavy_merge",
)
#: the share of the tokens they keep
KEPT = 0.25
#: queries at a prompt's end whose attention is looked at
LAST = 64
#: the shortest prompt that leaves all methods something to choose at ``KEPT``
LEAST_TOKENS = 256
#: balls over tokens: where the clusterability curves are read, 1/128 .. 1/2
SHARES = tuple(2.0 ** (-k / 2) for k in range(14, 1, -1))
#: the share that is one number's worth of a curve
EIGHTH = 1 / 8
#: bins of a histogram of norms
BINS = 24
#: eps of the theorems
EPS = 0.5
#: points of a t-SNE
POINTS = 1000


@dataclass(frozen=True)
class _Layer:
    """One layer on one prompt, batch axis gone. Per query head or KV head, then tokens or shares.

    Attributes:
        norms: "query", "key", "value": ``[heads, n]``.
        radius: "keys", "values": covering radius over spread at ``SHARES``, ``[kv_heads, shares]``.
        balls: balls of half the spread that cover them, over n, ``[kv_heads]``.
        delta: the radius at which n/8 balls cover every head's keys, in units of the keys.
        attention: see ``attention``, ``[heads]`` each.
        errors: relative error by method, ``[kv_heads]``.
        curves: of ``TOLERANCE_METHOD``.
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


def inspect_model(
    model: Any,
    prompts: Sequence[Tensor],
    *,
    layers: Sequence[int] | None = None,
    methods: Sequence[str] = METHODS,
    projected: Sequence[int] = (),
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure a model on prompts. Norms are over the tokens of all prompts; everything else is the
    mean over prompts, except that tolerances and the theorems' parameters take the worst.

    Args:
        model: a transformers causal language model.
        prompts: token ids, ``[1, n]`` each, n at least ``LEAST_TOKENS``.
        layers: which; None: all with full attention.
        methods: names in ``kvsketch.streaming.ALL_METHODS``.
        projected: layers whose first KV head gets a t-SNE on the first prompt (needs scikit-learn).
        seed: of random methods and the t-SNE.
        advance: called ``steps(...)`` times.

    Returns:
        "layers" (a list of dicts), "errors" (mean over layers and heads, by method), "tsne" and
        "readings" (see ``readings``).

    Raises:
        InputError: no prompt, one too short, or a layer that the model has not or that has a
            sliding window.
        UnsupportedError: as ``capture``; a model without a full-attention layer.
    """
    if not prompts:
        raise InputError("prompts is empty: at least one is needed to look at")
    for prompt in prompts:
        check_prompt(prompt)
    chosen = choose_layers(model.config, layers)
    softcap = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    found: dict[int, list[_Layer]] = {layer: [] for layer in chosen}
    views: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):
        all_caught = catch(model, prompt, chosen)
        advance()
        for caught in all_caught:
            found[caught.layer].append(_measure(caught, softcap, methods, seed, advance))
            if number == 0 and caught.layer in projected:
                for what, points in (("keys", caught.keys), ("values", caught.values)):
                    view = embed(points[0, 0], seed)
                    views.append({"layer": caught.layer, "head": 0, "what": what, **view})
                    advance()
    result: dict[str, Any] = {"kept": KEPT, "queries": LAST, "layers": _rows(found)}
    result["errors"] = {
        name: _round(mean(row["errors"][name] for row in result["layers"])) for name in methods
    }
    result["tsne"] = views
    result["readings"] = readings(result)
    return result


def steps(prompts: int, layers: int, methods: int, projected: int) -> int:
    """How often ``inspect_model`` calls ``advance``."""
    return prompts * (1 + layers * (methods + 2)) + 2 * projected


def check_prompt(prompt: Tensor) -> None:
    """Raise InputError unless a prompt has tokens enough."""
    if int(prompt.shape[-1]) < LEAST_TOKENS:
        raise InputError(
            f"a prompt of {int(prompt.shape[-1])} tokens is too short: at least {LEAST_TOKENS} are "
            "needed"
        )


def choose_layers(config: Any, layers: Sequence[int] | None = None) -> list[int]:
    """The layers to look at, rising; needs no weights. Refuses models that cannot be looked at.

    Args:
        config: the model's.
        layers: which; None: all with full attention.

    Raises:
        InputError: a layer that the model has not, or that has a sliding window or no KV cache.
        UnsupportedError: no layer has full attention, or the model does not use transformers'
            attention interface.
    """
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    cls = found[0] if isinstance(found, (list, tuple)) else found
    if cls is not None and not getattr(cls, "_supports_attention_backend", False):
        raise UnsupportedError(
            f"{cls.__name__} does not use transformers' attention interface, so its activations "
            "cannot be caught"
        )
    made = DynamicCache(config=config).layers
    count = config.get_text_config(decoder=True).num_hidden_layers
    # without layer types in the config, the cache makes its layers as they come: all are full
    full = [i for i, x in enumerate(made) if type(x) is DynamicLayer] if made else [*range(count)]
    if not full:
        raise UnsupportedError(
            f"{type(config).__name__} has no full-attention layer to look at: all its layers have "
            "a sliding window or no KV cache"
        )
    for layer in layers or ():
        if not 0 <= layer < count:
            raise InputError(f"layers: {layer} must be in 0 .. {count - 1}")
        if layer not in full:
            raise InputError(
                f"layers: {layer} has a sliding window or no KV cache and is never compressed; "
                f"allowed: {', '.join(map(str, full))}"
            )
    return full if layers is None else sorted(set(layers))


def catch(model: Any, prompt: Tensor, layers: Sequence[int]) -> list[Activations]:
    """``capture``, which names the model it fails on.

    Raises:
        UnsupportedError: the model's attention cannot be caught.
    """
    try:
        return capture(model, prompt, layers)
    except KVSketchError:
        raise
    except ValueError as error:  # sdpa, which capture runs, has no softcap (Gemma 2)
        raise UnsupportedError(
            f"{type(model).__name__}: its activations cannot be caught: {error}"
        ) from error


def attention(
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    softcap: float | None = None,
    last: int = LAST,
    sink: int = SINK,
    recent: int = RECENT,
) -> dict[str, Tensor]:
    """Where the last queries look, each at itself and what is before it; means over the queries.

    Args:
        queries: ``[batch, num_attention_heads, n, head_dim]``.
        keys: ``[batch, num_key_value_heads, n, head_dim]``.
        scaling: multiplies <q, k>.
        softcap: of the scores (Gemma 2).

    Returns:
        float64 ``[batch, num_attention_heads]`` each. "entropy": over the log of the tokens seen,
        0 (one token) .. 1 (all alike); "sink", "recent": share on the first and last tokens (where
        they overlap, the sink's); "holding": tokens that hold 90%, the fewest; "holding_share":
        over the tokens seen.
    """
    n, q = keys.shape[2], min(last, queries.shape[2])
    slots = Slots(keys.double(), keys.double())
    mask = causal(q, n, keys.device)
    asked = queries[:, :, -q:].double()
    share = attention_scores(asked, slots, scaling, softcap, mask, None).softmax(-1).flatten(1, 2)
    seen = torch.arange(n - q + 1, n + 1, device=keys.device, dtype=torch.float64)
    place = torch.arange(n, device=keys.device)
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
        "radius": _round(curve.lower[0, 0, -1] / spread.clamp(min=1e-300)),
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


def _measure(
    caught: Activations,
    softcap: float | None,
    methods: Sequence[str],
    seed: int,
    advance: Callable[[], None],
) -> _Layer:
    queries, keys, values = caught.queries, caught.keys, caught.values
    n = keys.shape[2]
    covers = {"keys": cover(keys), "values": cover(values)}
    advance()
    slots, observed = Slots(keys, values), Observed(queries, caught.scaling, softcap)
    after = held_out_for(n, SINK, RECENT)
    before = n - after
    # as a share of what is neither sink nor recent
    level = (KEPT * before - SINK - RECENT) / (before - SINK - RECENT)

    def measured(method: str, levels: Sequence[float]) -> Curves:
        def compress(tokens: Slots, budget: int, seen: Observed) -> Slots:
            return windowed(method, SINK, RECENT, seed + caught.layer)(tokens, budget, seen)

        curves = measure_layer(slots, observed, compress, after, SINK, RECENT, levels)
        advance()
        return curves

    tensors = {"query": queries, "key": keys, "value": values}
    return _Layer(
        tokens=n,
        dims=(keys.shape[3], values.shape[3]),
        scaling=caught.scaling,
        norms={name: t[0].double().norm(dim=-1).cpu() for name, t in tensors.items()},
        radius={what: radius[0].cpu() for what, (radius, _) in covers.items()},
        balls={what: balls[0].cpu() for what, (_, balls) in covers.items()},
        # SubGen's delta is a radius, in units of the keys
        delta=float(theory.clusterability(keys, max(1, n // 8)).lower[..., -1].max()),
        attention={
            name: rows[0].cpu()
            for name, rows in attention(queries, keys, caught.scaling, softcap).items()
        },
        errors={name: _relative(measured(name, (level,)))[0, :, 0] for name in methods},
        curves=measured(TOLERANCE_METHOD, LEVELS),
    )


def _relative(curves: Curves) -> Tensor:
    assert curves.relative is not None  # measure_layer always has them
    return curves.relative


def _rows(found: dict[int, list[_Layer]]) -> list[dict[str, Any]]:
    norms = {
        layer: {name: torch.cat([x.norms[name] for x in seen], -1) for name in seen[0].norms}
        for layer, seen in found.items()
    }
    # the same bins for all layers, so that they can be drawn side by side
    top = {name: max(float(x[name].max()) for x in norms.values()) for name in _KINDS}
    rows = []
    for layer, seen in found.items():
        row: dict[str, Any] = {"layer": layer, "tokens": [x.tokens for x in seen]}
        row["norms"] = {
            name: _histogram(rows_of, top[name]) for name, rows_of in norms[layer].items()
        }
        row["norms"]["score"] = _scores(seen)
        row["clusterability"] = {what: _cover_row(seen, what) for what in ("keys", "values")}
        row["attention"] = _attention_row(seen)
        row["theory"] = _theory_row(seen)
        heads = {
            name: torch.stack([x.errors[name] for x in seen]).mean(0) for name in seen[0].errors
        }
        row["errors"] = {name: _round(x.mean()) for name, x in heads.items()}
        row["errors_by_head"] = {name: _list(x) for name, x in heads.items()}
        curves = pooled([x.curves for x in seen])
        row["within"] = {str(t): _round(curves.within(t)[0].mean()) for t in TOLERANCES}
        rows.append(row)
    return rows


_KINDS = ("query", "key", "value")


def _histogram(norms: Tensor, top: float) -> dict[str, Any]:
    """Norms ``[heads, n]`` of one layer."""
    counts = torch.histc(norms.flatten(), BINS, 0.0, max(top, 1e-12))
    return {
        "mean": _round(norms.mean()),
        "max": _round(norms.max()),
        "heads": _list(norms.mean(-1)),
        "edges": _list(torch.linspace(0, max(top, 1e-12), BINS + 1, dtype=torch.float64)),
        "counts": [int(x) for x in counts],
    }


def _scores(seen: Sequence[_Layer]) -> dict[str, float]:
    """|q| |k| scaling: its mean over all pairs is the product of the means."""
    means, most = [], []
    for x in seen:
        query, key = x.norms["query"], x.norms["key"]
        key = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0)
        means.append((query.mean(-1) * key.mean(-1)).mean() * x.scaling)
        most.append((query.amax(-1) * key.amax(-1)).max() * x.scaling)
    return {"mean": _round(torch.stack(means).mean()), "max": _round(torch.stack(most).max())}


def _cover_row(seen: Sequence[_Layer], what: str) -> dict[str, Any]:
    radius = torch.stack([x.radius[what] for x in seen]).mean(0)
    eighth = radius[:, SHARES.index(EIGHTH)]
    return {
        "shares": [_round(share) for share in SHARES],
        "radius": _list(radius.mean(0)),
        "eighth": _round(eighth.mean()),
        "heads": _list(eighth),
        "balls_of_half_the_spread": _round(torch.stack([x.balls[what] for x in seen]).mean()),
    }


def _attention_row(seen: Sequence[_Layer]) -> dict[str, Any]:
    heads = {
        name: torch.stack([x.attention[name] for x in seen]).mean(0) for name in seen[0].attention
    }
    row: dict[str, Any] = {name: _round(x.mean()) for name, x in heads.items()}
    return {**row, "heads": {name: _list(x) for name, x in heads.items()}}


def _theory_row(seen: Sequence[_Layer]) -> dict[str, Any]:
    """What the theorems ask for, their arguments and the answer in words."""
    query, key = (max(float(x.norms[name].max()) for x in seen) for name in ("query", "key"))
    n, delta = max(x.tokens for x in seen), max(max(x.delta for x in seen), 1e-9)
    dim, value_dim = seen[0].dims
    scaling = seen[0].scaling
    # BalanceKV's scores are <q, k>/sqrt(d): another scaling goes into the query
    r = max(query * scaling * math.sqrt(dim), key)
    return {
        "eps": EPS,
        "n": n,
        "query_norm": _round(query),
        "key_norm": _round(key),
        "delta": _round(delta),
        "subgen": _asked(
            lambda: theory.subgen(EPS, delta, query * scaling, n, value_dim, m=max(1, n // 8)), n
        ),
        "balancekv": _asked(lambda: theory.balancekv(EPS, r, n, dim, value_dim=value_dim), n),
    }


def _asked(size: Callable[[], Any], n: int) -> dict[str, Any]:
    try:
        found = size()
    except InputError as error:  # the exponent is beyond what can be computed
        return {"slots": None, "verdict": str(error)}
    return {"slots": _round(found.slots), "verdict": found.verdict(n)}


def _round(value: Any) -> float:
    """Five digits: all that is worth keeping."""
    return float(f"{float(value):.5g}")


def _list(values: Tensor) -> list[float]:
    return [_round(x) for x in values]
