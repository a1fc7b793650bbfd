"""Measures the queries, keys and values of a model, layer by layer.

Only full-attention layers are measured, because kvsketch leaves the others unchanged. The
activations come from ``evaluation.activations.capture``. The result consists of plain numbers that
can be written as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvsketch import theory
from kvsketch.cache import windowed
from kvsketch.cache.curves import Curves
from kvsketch.cache.held_out import LEVELS, held_out_for, measure_layer
from kvsketch.errors import InputError, KVSketchError, UnsupportedError
from kvsketch.evaluation.inspection.measures import attention, cover, embed, rounded
from kvsketch.evaluation.inspection.readings import (
    KEPT,
    LAST,
    LEAST_TOKENS,
    RECENT,
    SINK,
    TOLERANCE_METHOD,
    mean,
    readings,
)
from kvsketch.evaluation.inspection.rows import Layer, rows_of
from kvsketch.hf.activations import Activations, can_be_caught, capture
from kvsketch.observed import Observed
from kvsketch.slots import Slots

#: The methods whose errors are measured, each with the share ``KEPT`` of the tokens.
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
    """Measure a model on prompts. Norms are over the tokens of all prompts. Everything else is a
    mean over prompts, except that tolerances and the theorems' parameters are the worst over
    prompts.

    Args:
        model: a transformers causal language model.
        prompts: token ids, ``[1, n]`` each, n at least ``LEAST_TOKENS``.
        layers: numbers of layers. None: all with full attention.
        methods: names in ``kvsketch.ALL_METHODS``.
        projected: layers for which a t-SNE of the keys and one of the values is computed for every
            KV head on the first prompt (needs scikit-learn).
        seed: of random methods and the t-SNE.
        advance: called ``steps(...)`` times to report progress.

    Returns:
        "layers" (a list of dicts), "errors" (mean over layers and heads, by method), "tsne" and
        "readings" (see ``readings``).

    Raises:
        InputError: there is no prompt, a prompt is too short, or a layer does not exist or has a
            sliding window.
        UnsupportedError: as for ``capture``, or the model has no full-attention layer.
    """
    if not prompts:
        raise InputError("prompts is empty: at least one is needed to look at")
    for prompt in prompts:
        check_prompt(prompt)
    chosen = choose_layers(model.config, layers)
    softcap = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    found: dict[int, list[Layer]] = {layer: [] for layer in chosen}
    views: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):
        all_caught = catch(model, prompt, chosen)
        advance()
        for caught in all_caught:
            found[caught.layer].append(_measure(caught, softcap, methods, seed, advance))
            if number == 0 and caught.layer in projected:
                for head in range(caught.keys.shape[1]):
                    for what, points in (("keys", caught.keys), ("values", caught.values)):
                        view = embed(points[0, head], seed)
                        views.append({"layer": caught.layer, "head": head, "what": what, **view})
                        advance()
    result: dict[str, Any] = {"kept": KEPT, "queries": LAST, "layers": rows_of(found)}
    result["errors"] = {
        name: rounded(mean(row["errors"][name] for row in result["layers"])) for name in methods
    }
    result["tsne"] = views
    result["readings"] = readings(result)
    return result


def steps(prompts: int, layers: int, methods: int, projected: int) -> int:
    """How often ``inspect_model`` calls ``advance``. ``projected`` is the number of KV heads of all
    layers with a t-SNE."""
    return prompts * (1 + layers * (methods + 2)) + 2 * projected


def check_prompt(prompt: Tensor) -> None:
    """Raise InputError unless a prompt has enough tokens."""
    if int(prompt.shape[-1]) < LEAST_TOKENS:
        raise InputError(
            f"a prompt of {int(prompt.shape[-1])} tokens is too short: at least {LEAST_TOKENS} are "
            "needed"
        )


def choose_layers(config: Any, layers: Sequence[int] | None = None) -> list[int]:
    """The layers to inspect, in ascending order. Needs no weights. Refuses models that cannot be
    inspected.

    Args:
        config: the config of the model.
        layers: numbers of layers. None: all with full attention.

    Raises:
        InputError: a layer does not exist, or has a sliding window or no KV cache.
        UnsupportedError: no layer has full attention, or the model does not use transformers'
            attention interface.
    """
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    cls = found[0] if isinstance(found, (list, tuple)) else found
    if cls is not None and not can_be_caught(cls, config):
        raise UnsupportedError(
            f"{cls.__name__} does not use transformers' attention interface, so its activations "
            "cannot be caught"
        )
    made = DynamicCache(config=config).layers
    count = config.get_text_config(decoder=True).num_hidden_layers
    # Without layer types in the config, the cache adds layers when they are first used, and all of
    # them have full attention.
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
    """``capture``, with the name of the model in its errors.

    Raises:
        UnsupportedError: the activations of the model cannot be captured.
    """
    try:
        return capture(model, prompt, layers)
    except KVSketchError:
        raise
    except ValueError as error:  # sdpa, which capture runs, has no softcap (Gemma 2)
        raise UnsupportedError(
            f"{type(model).__name__}: its activations cannot be caught: {error}"
        ) from error


def _measure(
    caught: Activations,
    softcap: float | None,
    methods: Sequence[str],
    seed: int,
    advance: Callable[[], None],
) -> Layer:
    queries, keys, values = caught.queries, caught.keys, caught.values
    n = keys.shape[2]
    covers = {"keys": cover(keys), "values": cover(values)}
    advance()
    slots, observed = caught.slots, replace(caught.observed, softcap=softcap)
    after = held_out_for(n, SINK, RECENT)
    before = n - after
    # The share of the tokens that are neither sinks nor recent.
    level = (KEPT * before - SINK - RECENT) / (before - SINK - RECENT)

    def measured(method: str, levels: Sequence[float]) -> tuple[Curves, Tensor]:
        def compress(tokens: Slots, budget: int, seen: Observed) -> Slots:
            reduce = windowed(method, SINK, RECENT, seed + caught.layer)
            return reduce(tokens, budget, seen, scored=True)

        observe = windowed(method, SINK, RECENT, seed + caught.layer).observe
        curves = measure_layer(slots, observed, compress, after, SINK, RECENT, levels, observe)
        advance()
        assert curves.relative is not None  # measure_layer always has them
        return curves, curves.relative[0, :, 0]

    tensors = {"query": queries, "key": keys, "value": values}
    return Layer(
        tokens=n,
        dims=(keys.shape[3], values.shape[3]),
        scaling=caught.scaling,
        norms={name: t[0].double().norm(dim=-1).cpu() for name, t in tensors.items()},
        radius={what: radius[0].cpu() for what, (radius, _) in covers.items()},
        balls={what: balls[0].cpu() for what, (_, balls) in covers.items()},
        # SubGen's delta is a radius in units of the keys.
        delta=float(theory.clusterability(keys, max(1, n // 8)).lower[..., -1].max()),
        attention={
            name: rows[0].cpu()
            for name, rows in attention(
                queries, keys, caught.scaling, softcap, slopes=caught.slopes
            ).items()
        },
        errors={name: measured(name, (level,))[1] for name in methods},
        curves=measured(TOLERANCE_METHOD, LEVELS)[0],
    )
