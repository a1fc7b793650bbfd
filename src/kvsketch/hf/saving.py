"""A SketchCache as a file, and back."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from kvsketch.budget import ALLOCATIONS, plain
from kvsketch.cache import Curves, Plan, RetrievalHeads
from kvsketch.cache.stream_state import restore, stream_state
from kvsketch.errors import InputError, KVSketchError, UnsupportedError
from kvsketch.files import container
from kvsketch.files.format import read, write
from kvsketch.hf import accounting, identity, models
from kvsketch.hf.forward import Forward
from kvsketch.hf.history import History
from kvsketch.hf.hybrid_layer import HybridSketchLayer
from kvsketch.hf.layer import SketchLayer
from kvsketch.hf.other_layers import (
    check_saved,
    layer_state,
    linear_state,
    restore_layer,
    restore_linear,
)
from kvsketch.hf.size import predicted_size
from kvsketch.hf.wrapped import transformers_model
from kvsketch.methods.registry import ALL_METHODS
from kvsketch.page.kind import Kind
from kvsketch.state import FLOATS, Reader, State, name_of, numbered
from kvsketch.writing import check_replaced, path_of

#: the kind of file, in its header
KIND = "cache"


class Kept(Protocol):
    """What is used of a ``SketchCache``."""

    arguments: dict[str, Any]
    about: dict[str, Any]
    method: str
    plan: Plan
    layers: list[Any]
    max_positions: int | None
    _forward: Forward
    _marks: dict[str, Any]
    origin: identity.Origin
    history: History
    _tokenizer: str | None

    def summary(self) -> dict[str, Any]: ...


_Cache = TypeVar("_Cache", bound=Kept)


def save(cache: Kept, path: str | Path, tokenizer: Any, about: Mapping[str, Any] | None) -> None:
    """See ``SketchCache.save``."""
    path = path_of(path, "path")
    check_replaced(path, "path", container.BEGINS, "a file of `SketchCache.save`")
    state = cache_state(cache)
    header: dict[str, Any] = {
        "model": told_model(cache),
        "tokenizer": cache._tokenizer,
        "summary": summary_of(cache),
        "about": dict(cache.about if about is None else about),
        "texts": cache.history.told(cache._forward.tokens),
    }
    if tokenizer is not None:
        identity.check_tokenizer(cache._tokenizer, tokenizer)
        header["tokenizer"] = identity.tokenizer_mark(tokenizer)
    header["predicted_file_bytes"] = predicted_size(cache)
    write(path, KIND, header, state)
    cache._tokenizer, cache.about = header["tokenizer"], header["about"]


def load(
    make: Callable[..., _Cache], path: str | Path, model: PreTrainedModel, tokenizer: Any
) -> _Cache:
    """See ``SketchCache.load``."""
    model = transformers_model(model)
    header, state = read(path_of(path, "path"), KIND)
    try:
        told, about = header.get("model"), header.get("about")
        identity.check_model(told, model)
        identity.check_tokenizer(header.get("tokenizer"), tokenizer)
        cache = _restored(make, Reader(state), model)
    except KVSketchError as error:
        raise type(error)(f"{str(path)!r}: {error}") from error
    cache.about = about if isinstance(about, dict) else {}
    cache._tokenizer = header.get("tokenizer")
    cache.history.read(header.get("texts"))
    assert isinstance(told, dict)
    known = {name: told.get(name) for name in ("layers", "weights", "dtype")}
    cache._marks = {name: mark for name, mark in known.items() if mark is not None}
    if "weights" in cache._marks:
        cache.origin = identity.Origin(model)
    return cache


@torch.no_grad()
def cache_state(cache: Kept) -> State:
    """The arguments and the state of a cache.

    Raises:
        UnsupportedError: what cannot be saved, by name.
    """
    _check(cache)
    forward, plan = cache._forward, cache.plan
    values = {
        "settled": forward.masks.settled,
        "peak": cache._forward.peak_nbytes,
        "again": plan.again,
        "above": {str(n): heads.tolist() for n, heads in plan.above.items()},
    }
    state = State(values=values)
    state.put("arguments", cache_arguments(cache))
    state.keep(live=forward.masks.live)
    layers = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, SketchLayer):
            layers.append(_sketch_state(layer))
        else:
            check_saved(layer, index)
            layers.append(layer_state(layer))
    state.put("layers", numbered(layers))
    return state


def _check(cache: Kept) -> None:
    forward = cache._forward
    if not cache._forward.tokens:
        raise UnsupportedError("the cache is empty: there is nothing to save yet")
    busy = not forward.over or forward._torn or forward._taking or forward.reading is not None
    if busy or any(layer.pending for layer in forward.sketches):
        raise UnsupportedError("the cache is in the middle of a forward, or stopped there")
    if forward.first.unverified:
        raise UnsupportedError(
            "the cache holds tokens that crop() may remove (assisted decoding), which cannot be "
            "saved: call crop(0) first"
        )
    if cache.plan.waiting:
        raise UnsupportedError("the plan has measured some layers only: read the prompt to its end")
    for index, layer in enumerate(cache.layers):
        heads = layer.token_shape[1] if isinstance(layer, SketchLayer) else None
        if heads is not None and heads != models.kv_heads_of(forward._config, index):
            raise UnsupportedError(
                f"layer {index} holds {heads} of the model's KV heads: a part of a cache that is "
                "spread over processes cannot be saved"
            )


def cache_arguments(cache: Kept) -> State:
    """What a cache was made with, errors measured beforehand included."""
    given = dict(cache.arguments)
    method = given["method"]
    if not isinstance(method, str):
        if not (isinstance(method, type) and ALL_METHODS.get(cache.method) is method):
            raise UnsupportedError(
                f"method={cache.method!r} is a Compressor object or a user-defined class, which a "
                "file cannot hold; make the cache with a name of `kvsketch methods` and options="
            )
        given["method"] = cache.method
    if isinstance(cache.plan.curves, Curves) or cache.plan.retrieval is not None:
        given["allocation"] = None
    given["options"] = dict(given["options"] or {})
    state = State()
    for name, value in given.items():
        try:
            text = json.dumps(value, allow_nan=False, default=plain)
        except (TypeError, ValueError) as error:
            raise UnsupportedError(f"{name}={value!r:.80} cannot be represented in JSON") from error
        state.values[name] = json.loads(text)
    if cache.plan.curves is not None:
        curves = cache.plan.curves
        state.keep(error=curves.error, kept=curves.kept, relative=curves.relative)
    if cache.plan.retrieval is not None:
        state.keep(scores=cache.plan.retrieval.scores)
    return state


def _sketch_state(layer: SketchLayer) -> State:
    stream = layer.stream
    assert layer.dtype is not None
    kind = Kind.of(stream.slots, layer.dtype)
    state = State(values={"kind": kind.values(), "dim": layer.token_shape[3]})
    state.values["token_bytes"] = layer.token_bytes
    state.put("stream", stream_state(stream))
    if isinstance(layer, HybridSketchLayer):
        state.put("linear", linear_state(layer))
    return state


def _restored(make: Callable[..., _Cache], reader: Reader, model: PreTrainedModel) -> _Cache:
    cache = _made(make, reader.part("arguments"), model)
    forward = cache._forward
    parts = reader.parts("layers", len(cache.layers))
    sketches, batch, seen = 0, None, 0
    for index, (layer, part) in enumerate(zip(cache.layers, parts, strict=True)):
        if not isinstance(layer, SketchLayer):
            continue
        part.device = identity.device_of(model, index)
        kind = _restore_sketch(layer, part, cache.max_positions)
        if batch not in (None, kind.batch) or (sketches and seen != layer.stream.seen):
            raise part.wrong("kind", kind, "of as many rows and tokens as the other layers")
        batch, seen, sketches = kind.batch, layer.stream.seen, sketches + 1
        if kind.heads != models.kv_heads_of(model.config, index):
            raise part.wrong("kind", kind, "of as many KV heads as the model has")
    assert batch is not None
    for index, (layer, part) in enumerate(zip(cache.layers, parts, strict=True)):
        if not isinstance(layer, SketchLayer):
            check_saved(layer, index)
            part.device = identity.device_of(model, index)
            restore_layer(layer, part, batch, seen)
    forward.masks.settled = reader.flag("settled")
    forward.peak_nbytes = reader.whole("peak")
    if reader.has("again"):  # not in older files
        cache.plan.read_again(reader.flag("again"))
    if reader.has("live"):
        forward.masks.live = reader.tensor("live", (batch, None), torch.bool).to(model.device)
        if forward.masks.live.shape[1] > seen:
            raise reader.wrong("live", forward.masks.live.shape[1], f"at most {seen} tokens")
    _restore_above(cache, reader, sketches)
    reader.close()
    return cache


def _made(make: Callable[..., _Cache], reader: Reader, model: PreTrainedModel) -> _Cache:
    """A cache of the same arguments, which holds nothing yet."""
    names = list(inspect.signature(make).parameters)[1:-1]  # without the config and former ones
    given = {name: reader.anything(name) for name in names}
    allocation: Any = given["allocation"]
    named = allocation is None or isinstance(allocation, list) or allocation in ALLOCATIONS
    if not named:  # never the path of a file
        raise reader.wrong("allocation", allocation, f"one of {', '.join(ALLOCATIONS)}")
    if not isinstance(given["method"], str):
        raise reader.wrong("method", given["method"], "the name of a method")
    wide, any_float = (None, None, None), tuple(FLOATS.values())
    if reader.has("error"):
        levels = (None, None) if reader.axes("kept") == 2 else (None,)
        error, kept = (reader.tensor(*x, *any_float) for x in (("error", wide), ("kept", levels)))
        relative = reader.tensor("relative", wide, *any_float) if reader.has("relative") else None
        given["allocation"] = Curves(error, kept, relative)
    elif reader.has("scores"):
        given["allocation"] = RetrievalHeads(reader.tensor("scores", (None, None), *any_float))
    reader.close()
    try:
        return make(model.config, **given)
    except KVSketchError:
        raise
    except Exception as error:  # of types that no argument has
        raise InputError(f"arguments: {error}") from error


def _restore_sketch(layer: SketchLayer, reader: Reader, most: int | None) -> Kind:
    kind = Kind.read(reader.part("kind"))
    dim = reader.whole("dim", 1, kind.key_dim)
    restore(layer.stream, reader.part("stream"), kind, most)
    layer.dtype, layer.device = kind.dtype, torch.device(reader.device)
    layer.token_shape = (kind.batch, kind.heads, 1, dim)
    layer.key_dim = kind.key_dim
    layer.token_bytes = reader.whole("token_bytes")
    layer.is_initialized = True
    if isinstance(layer, HybridSketchLayer):
        restore_linear(layer, reader.part("linear"), kind.batch)
    reader.close()
    return kind


def _restore_above(cache: Kept, reader: Reader, layers: int) -> None:
    part = reader.part("above")
    for number in range(layers):
        if part.has(str(number)):
            heads = part.anything(str(number))
            if not isinstance(heads, list) or not all(type(x) is bool for x in heads):
                raise part.wrong(str(number), heads, "true or false for every head")
            cache.plan.above[number] = torch.tensor(heads, dtype=torch.bool, device="cpu")
    part.close()


def told_model(cache: Kept) -> dict[str, Any]:
    """Which model a cache is of, as far as its modules are still there."""
    config = cache._forward._config
    text = config.get_text_config(decoder=True)
    told = {"type": text.model_type, "config": identity.config_mark(config), **cache._marks}
    modules = [layer.module() if layer.module else None for layer in cache._forward.sketches]
    if all(module is not None for module in modules):
        own = [module for module in modules if module is not None]
        told["layers"] = [identity.module_mark(module) for module in own]
        told["dtype"] = identity.dtype_of(own[0])
    model = cache.origin()
    whole = None if model is None else identity.model_mark(model)
    if whole is not None:
        told["weights"] = whole
    return told


def summary_of(cache: Kept) -> dict[str, Any]:
    """What `kvsketch info` shows without loading anything."""
    said = cache.summary()
    layers = said.pop("layers")
    error, now = accounting.known_error(cache.layers)
    first = cache._forward.sketches[0]
    assert first.dtype is not None
    return {
        **said,
        "seed": cache.arguments["seed"],
        "dtype": name_of(first.dtype),
        "rows": first.token_shape[0],
        "layers": len(layers),
        "layer_slots": [row["slots"] for row in layers],
        "layer_bits": [row["bits"] for row in layers],
        "error": {"mean": sum(error) / len(error), "largest": max(error), "now": now}
        if error
        else None,
    }
