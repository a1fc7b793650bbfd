"""The state of what transformers keeps beside compressed layers: sliding windows, linear-attention
and convolution states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from kvsketch.errors import UnsupportedError
from kvsketch.state import FLOATS, Reader, State

_ANY = tuple(FLOATS.values())


# Of a layer that has no cache, or reads that of another one.
_EMPTY = "DummyLayer"
_SAVED = frozenset({_EMPTY, "DynamicSlidingWindowLayer", "LinearAttentionLayer"})
#: transformers' layers whose states ``kept`` can put back
RESTORED = _SAVED | {"LinearAttentionAndSlidingWindowAttentionLayer"}


def kept(layers: Sequence[Any]) -> Callable[[], None]:
    """What puts back the states that layers have now, as often as it is called: a window's tokens,
    and states that further tokens change in place. Keys and values of compressed layers stay."""
    windows = [
        (layer, layer.keys, layer.values, layer.cumulative_length)
        for layer in layers
        if isinstance(layer, DynamicSlidingWindowLayer)
    ]
    states = [
        (held, number, state.clone())
        for layer in layers
        if isinstance(layer, LinearAttentionLayer)
        for held in (layer.conv_states, layer.recurrent_states)
        for number, state in held.items()
        if state is not None
    ]

    def put_back() -> None:
        for layer, keys, values, seen in windows:  # transformers makes new tensors for new tokens
            layer.keys, layer.values, layer.cumulative_length = keys, values, seen
        for held, number, state in states:
            _fill(held, number, state)

    return put_back


def _fill(held: dict[int, Tensor | None], number: int, state: Tensor) -> None:
    """Put a state back, into the same memory unless gradients were computed through it."""
    now = held[number]
    if now is not None and now.shape == state.shape and not now.requires_grad:
        now.copy_(state)
    else:
        held[number] = state.clone()


def check_saved(layer: Any, index: int) -> None:
    """Raise UnsupportedError unless the state of a layer can be saved."""
    if type(layer).__name__ not in _SAVED:
        raise UnsupportedError(
            f"layer {index} is a {type(layer).__name__}, whose state kvsketch cannot save"
        )


def layer_state(layer: Any) -> State:
    """Of a sliding-window, linear-attention or convolution layer, or one without a cache."""
    if isinstance(layer, LinearAttentionLayer):
        return linear_state(layer)
    if type(layer).__name__ == _EMPTY:
        return State()
    state = State(values={"seen": layer.cumulative_length})
    if layer.is_initialized:
        state.keep(keys=layer.keys, values=layer.values)
    return state


def restore_layer(layer: Any, reader: Reader, batch: int, seen: int) -> None:
    """Take in what ``layer_state`` said, into a layer that holds nothing yet.

    Raises:
        InputError: inconsistent tensors or numbers.
    """
    if isinstance(layer, LinearAttentionLayer):
        restore_linear(layer, reader, batch)
        return
    if type(layer).__name__ == _EMPTY:
        reader.close()
        return
    total = reader.whole("seen", 0, seen)
    if reader.has("keys"):
        kept = min(total, layer.sliding_window - 1)
        keys = reader.tensor("keys", (batch, None, kept, None), *_ANY)
        values = reader.tensor("values", (batch, keys.shape[1], kept, None), keys.dtype)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values, layer.cumulative_length = keys, values, total
        if total != seen:
            raise reader.wrong("seen", total, f"{seen}, as in the other layers")
    reader.close()


def linear_state(layer: LinearAttentionLayer) -> State:
    """Every convolution and recurrent state that there is."""
    state = State(values={"sizes": {}, "before": {}})
    for number in range(layer.number_of_states):
        conv, recurrent = layer.conv_states[number], layer.recurrent_states[number]
        state.keep(**{f"conv{number}": conv, f"recurrent{number}": recurrent})
        if conv is not None:
            state.values["sizes"][str(number)] = layer.conv_kernel_size[number]
        state.values["before"][str(number)] = layer.has_previous_state[number]
    return state


def restore_linear(layer: LinearAttentionLayer, reader: Reader, batch: int) -> None:
    """Take in what ``linear_state`` said. Shapes are the model's business: what does not fit fails
    at the first token."""
    sizes, before = reader.part("sizes"), reader.part("before")
    for number in range(layer.number_of_states):
        for kind in ("conv", "recurrent"):
            name = f"{kind}{number}"
            if not reader.has(name):
                continue
            found = _batched(reader, name, batch)
            if kind == "conv":
                size = sizes.whole(str(number), 1, 1 << 20)
                if found.shape[-1] != size:
                    raise reader.wrong(name, tuple(found.shape), f"of {size} columns")
                layer.lazy_initialization(conv_states=found, state_idx=number)
                layer.conv_states[number].copy_(found)
            else:
                layer.lazy_initialization(recurrent_states=found, state_idx=number)
                layer.recurrent_states[number].copy_(found)
        layer.has_previous_state[number] = before.flag(str(number))
    sizes.close()
    before.close()
    reader.close()


def _batched(reader: Reader, name: str, batch: int) -> Any:
    """A tensor whose first axis is the batch, with any others."""
    axes = reader.axes(name)
    return reader.tensor(name, (batch, *[None] * (axes - 1)), *_ANY)
