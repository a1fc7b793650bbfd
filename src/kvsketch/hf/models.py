"""The cache of a model, by its configuration, and the models that are refused."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig, __version__
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvsketch.errors import UnsupportedError
from kvsketch.hf import adapters

#: the newest transformers whose models were tried (docs/models.md)
TESTED = (5, 24)
_LATENT = "caches latents of two sizes in one model (multi-head latent attention)"
_BIAS = "adds a position bias to its scores, by the distance of tokens"
#: Families whose attention does not use exactly the cached keys, by model type. ``forward`` and
#: ``attention`` would detect it at the first layer; this refuses them when the cache is made.
REFUSED = {
    "blt": "keeps the caches of several decoders of bytes and patches in one object",
    "diffllama": "attends twice in every layer, to two halves of the values",
    "doge": "adds learned numbers, made from the values, to its attention mask",
    "dory": "runs some of its layers several times, each time with a cache of its own",
    "dots3_note": _LATENT,
    "dots3_note_text": _LATENT,
    "git": "computes attention itself, without transformers' attention interface",
    "inkling2_loop_text": _BIAS,
    "inkling2_text": _BIAS,
    "inkling_text": _BIAS,
    "jetmoe": "repeats its keys for the experts between the cache and attention",
    "minimax": "takes no cache but its own",
    "mllama": "keeps cross-attention to images and self-attention in one cache",
    "mllama_text_model": "keeps cross-attention to images and self-attention in one cache",
    "xlstm": "has no attention",
}
#: contents of transformers' layers that do not keep all keys and values
_KINDS = {
    "DynamicIndexedLayer": "sparse attention to tokens that an indexer picks",
    "DynamicSlidingWindowLayer": "a sliding window",
    "LinearAttentionLayer": "a linear-attention or convolution state",
}
_COMPRESSIBLE = (DynamicLayer, LinearAttentionAndFullAttentionLayer)


def check_supported(config: PretrainedConfig) -> None:
    """Raise unless the cache of such a model can be compressed.

    Raises:
        UnsupportedError: an encoder-decoder, or attention that is known not to be transformers'
            attention interface over the cached keys and values.
    """
    _warn_of_newer(__version__)
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise UnsupportedError(
            f"{type(config).__name__} is an encoder-decoder; SketchCache is for decoder-only models"
        )
    if adapters.of(text) is not None:
        if text.model_type == "falcon" and text.alibi:
            raise UnsupportedError(
                "FalconForCausalLM with alibi=True adds its position bias to the attention mask; "
                "use DynamicCache for it"
            )
        return
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    model = model[0] if isinstance(model, (list, tuple)) else model
    name = type(config).__name__ if model is None else model.__name__
    reason = REFUSED.get(text.model_type)
    if reason is None and model is not None and not has_interface(model):
        reason = (
            "does not use transformers' attention interface, so its attention cannot be replaced"
        )
    if reason is not None:
        raise UnsupportedError(f"{name} {reason}; use DynamicCache for it")


def _warn_of_newer(version: str) -> None:
    """Warn of a transformers that nobody has tried: minor versions have renamed arguments."""
    if tuple(int(number) for number in version.split(".")[:2]) > TESTED:
        tested = ".".join(map(str, TESTED))
        warnings.warn(
            f"transformers {version} is newer than {tested}, the last one that this kvsketch was "
            "tested with: compare some answers with DynamicCache's, or install an older one",
            UserWarning,
            stacklevel=4,
        )


def check_projection(config: PretrainedConfig, method: str) -> None:
    """Raise unless each layer caches values that go into one output projection.

    Raises:
        UnsupportedError: latents, or keys and values that several layers share.
    """
    text = config.get_text_config(decoder=True)
    reason = "caches latents instead of values" if has_latents(config) else None
    if getattr(text, "num_kv_shared_layers", None):
        reason = "shares keys and values between layers, each with a projection of its own"
    if reason is not None:
        raise UnsupportedError(
            f"method={method!r} uses the contribution of values to the output of their layer, and "
            f"{type(config).__name__} {reason}; use another method"
        )


def has_interface(model: Any) -> bool:
    """Whether a model class uses the attention interface: it declares so, or transformers finds the
    call in its source."""
    if getattr(model, "_supports_attention_backend", False):
        return True
    found = getattr(model, "_can_set_attn_implementation", None)
    return found is not None and bool(found())


def layers_of(config: PretrainedConfig) -> tuple[list[Any], list[int]]:
    """transformers' own cache layers for the model, and which of them can be compressed.

    Raises:
        UnsupportedError: none can be compressed.
    """
    text = config.get_text_config(decoder=True)
    try:
        layers = list(DynamicCache(config=config).layers)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"{type(config).__name__} does not describe a cache transformers can make: "
            f"{type(error).__name__}: {error}"
        ) from error
    chosen = [i for i, layer in enumerate(layers) if type(layer) in _COMPRESSIBLE]
    if not chosen:
        kinds = sorted({type(layer).__name__ for layer in layers})
        named = ", ".join(f"{_KINDS[kind]} ({kind})" if kind in _KINDS else kind for kind in kinds)
        raise UnsupportedError(
            f"{type(text).__name__} has no full-attention layer to compress; its layers have "
            f"{named or 'no cache'}"
        )
    return layers, chosen


def readers_of(config: PretrainedConfig, layers: Sequence[Any]) -> list[int]:
    """How many layers of the model attend to the keys of each cache layer: more than itself where
    later layers share them (Gemma 3n, Gemma 4)."""
    text = config.get_text_config(decoder=True)
    readers = [1] * len(layers)
    kinds = list(getattr(text, "layer_types", None) or [])
    shared = getattr(text, "num_kv_shared_layers", None) or 0
    if not shared or not kinds:
        return readers
    first = len(kinds) - shared
    for kind in kinds[first:]:
        own = [i for i in range(first) if kinds[i] == kind]
        if own:
            readers[own[-1]] += 1
    return readers


def max_positions(config: PretrainedConfig) -> int | None:
    """The number of positions of the model, if it is limited."""
    text = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "max_seq_len"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def has_latents(config: PretrainedConfig) -> bool:
    """Whether the model caches latents instead of keys and values (see ``latent``)."""
    text = config.get_text_config(decoder=True)
    return text.to_dict().get("kv_lora_rank") is not None


def kv_heads_of(config: PretrainedConfig, index: int) -> int:
    """KV heads of cache layer ``index``, by the configuration.

    Raises:
        UnsupportedError: the configuration does not state it.
    """
    if has_latents(config):
        return 1
    text = config.get_text_config(decoder=True)
    layered = getattr(text, "per_layer_config", None)
    if isinstance(layered, Sequence) and index < len(layered):
        text = layered[index]
    # Falcon 7B and GPT-BigCode; a newer Falcon caches keys and values of all attention heads.
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    for name in ("num_key_value_heads", "num_attention_heads", "n_heads", "n_head"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise UnsupportedError(f"{type(text).__name__} does not say how many KV heads it has")
