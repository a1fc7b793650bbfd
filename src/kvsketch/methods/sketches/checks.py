"""Checks of what a sketch is given: tokens, another sketch, and its state from a file."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.methods.base import all_finite
from kvsketch.slots import Slots
from kvsketch.state import FLOATS, name_of

#: The entries of ``token_layout``.
_TOKEN = {
    *("batch", "heads", "head_dim", "value_dim"),
    *("keys", "values", "device", "positions"),
}
#: An upper bound of the numbers (depths, buckets) that a sketch stores in addition to its tensors.
_MOST_META = 1 << 20


def token_layout(new: Slots) -> dict[str, Any]:
    """The shapes and dtypes that must be the same for every chunk."""
    return {
        "batch": new.keys.shape[0],
        "heads": new.keys.shape[1],
        "head_dim": new.keys.shape[3],
        "value_dim": new.values.shape[3],
        "keys": name_of(new.keys.dtype),
        "values": name_of(new.values.dtype),
        "device": str(new.keys.device),
        "positions": new.positions is not None,
    }


def check_tokens(new: Slots, held: Mapping[str, Any] | None) -> Tensor | None:
    """Raise unless ``new`` may be appended to tokens of the layout ``held`` (None: there are none);
    return which tokens are live (None: all)."""
    for name, tensor in (("keys", new.keys), ("values", new.values)):
        if not tensor.is_floating_point():
            raise InputError(f"{name} must be floating point, got {tensor.dtype}")
        if not all_finite(tensor):
            raise InputError(f"{name} are not finite (NaN or infinity); sketch unchanged")
    layout = token_layout(new)
    if held is not None and layout != held:
        raise InputError(f"tokens {layout} do not fit this sketch, which holds {held}")
    if new.mass is None:
        return None
    if not bool(((new.mass == 0) | (new.mass == 1)).all()):
        raise InputError("a sketch takes exact tokens: mass must be 1 (or 0 for padding)")
    if bool((new.values[new.mass == 0] != 0).any()):
        raise InputError("a sketch takes exact tokens: a slot of mass 0 must have value 0")
    return new.live()


def check_merge(sketch: Any, other: Any) -> None:
    """Raise InputError unless a ``Sketch`` may be merged into another."""
    if type(other) is not type(sketch):
        raise InputError(
            f"merge: {type(other).__name__} cannot be merged into {type(sketch).__name__}"
        )
    if other is sketch:
        raise InputError("merge: a sketch cannot be merged into itself")
    for name in sketch.parameters:
        mine, theirs = getattr(sketch, name), getattr(other, name)
        if mine != theirs:
            raise InputError(f"merge: {name} differs, {mine!r} here and {theirs!r} there")
    if not other.seen or not sketch.seen:
        return
    if sketch.meta["token"] != other.meta["token"]:
        raise InputError(
            f"merge: this sketch holds tokens {sketch.meta['token']}, the other "
            f"{other.meta['token']}"
        )
    if sketch.randomised and sketch.seed == other.seed:
        raise InputError(
            f"merge: both sketches have seed={sketch.seed}, so their random choices are the "
            "same; give each its own seed"
        )


def check_state(name: str, meta: Any, state: Mapping[str, Tensor], token: Slots | None) -> None:
    """Raise InputError unless the state of a sketch is possible for tokens of one kind."""
    if not isinstance(meta, dict) or any(
        type(value) is not int or abs(value) > _MOST_META
        for key, value in meta.items()
        if key not in ("token", "rows")
    ):
        raise InputError(f"meta={meta!r:.80}: a {name} sketch remembers small whole numbers")
    if not state and "token" not in meta:
        return
    told = meta.get("token")
    if not isinstance(told, dict) or set(told) != _TOKEN or told["keys"] not in FLOATS:
        raise InputError(f"meta.token={told!r:.80} must say what the tokens are like")
    sizes = [told[key] for key in ("batch", "heads", "head_dim", "value_dim")]
    known = all(type(x) is int and 0 < x <= _MOST_META for x in sizes)
    if not known or told["values"] not in FLOATS or type(told["positions"]) is not bool:
        raise InputError(f"meta.token={told!r:.80} must say what the tokens are like")
    if token is not None and {**token_layout(token), "device": told["device"]} != told:
        raise InputError(f"meta.token={told!r:.80} is not that of the exact tokens")
    rows = meta.get("rows", [0] * told["batch"])
    whole = isinstance(rows, list) and all(type(x) is int and 0 <= x < 1 << 40 for x in rows)
    if not whole or len(rows) != told["batch"]:
        raise InputError(f"meta.rows={rows!r:.80} must number the rows of the batch")
    for key, tensor in state.items():
        if tensor.dim() < 2 or tensor.shape[0] != sizes[0] or tensor.shape[1] % sizes[1]:
            raise InputError(f"{key} {list(tensor.shape)} must begin with {sizes[:2]}")
        if bool(tensor.isnan().any()):
            raise InputError(f"{key} is not a number")


def try_state(sketch: Any, token: dict[str, Any]) -> None:
    """Raise InputError unless a copy of a ``Sketch`` can return its slots and take in a token. This
    checks that the tensors of the state, which differ between sketches, are consistent."""
    dtypes = FLOATS[token["keys"]], FLOATS[token["values"]]
    shape = (token["batch"], token["heads"], 1)
    sizes = token["head_dim"], token["value_dim"]
    keys, values = (
        torch.zeros(*shape, n, dtype=d, device="cpu") for n, d in zip(sizes, dtypes, strict=True)
    )
    positions = (
        torch.zeros(shape, dtype=torch.float32, device="cpu") if token["positions"] else None
    )
    new = Slots(keys, values, positions=positions)
    twin, fresh = copy.deepcopy(sketch), copy.deepcopy(sketch)
    twin.meta["token"] = {**token, "device": "cpu"}
    fresh.reset()
    try:
        fresh.extend(new)
        for key, like in fresh.state.items():
            if key not in twin.state or _kind(twin.state[key]) != _kind(like):
                raise InputError(f"{key} must be there, as {_kind(like)}")
        twin._check()
        if twin.slots.keys.shape[:2] != shape[:2] or not all_finite(twin.slots.keys):
            raise InputError("its slots are not as they should be")
        twin.extend(new)
        found = twin.slots
    except Exception as error:  # an inconsistent state may raise any error
        raise InputError(f"the state of {sketch.name} does not fit together: {error}") from error
    if not all_finite(found.keys) or not all_finite(found.values):
        raise InputError(f"the state of {sketch.name} does not fit together: it is not finite")


def _kind(tensor: Tensor) -> tuple[torch.dtype, int, list[int]]:
    """The properties that do not depend on the number of tokens seen: dtype, number of axes, and
    batch and heads."""
    return tensor.dtype, tensor.dim(), list(tensor.shape[:2])
