"""A layer with a linear-attention state beside its keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from kvsketch.cache.stream import Stream
from kvsketch.hf.layer import LayerSettings, SketchLayer


class HybridSketchLayer(SketchLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A layer with a linear-attention state beside its keys and values (Falcon-H1, Zamba 2): the
    state stays as transformers keeps it, the keys and values are a ``SketchLayer``'s."""

    def __init__(
        self,
        stream: Stream,
        settings: LayerSettings,
        number_of_states: int,
    ) -> None:
        SketchLayer.__init__(self, stream, settings)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if args:
            SketchLayer.lazy_initialization(self, *args)
        else:  # of the state, which names its arguments
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    @property
    def is_croppable(self) -> bool:
        recurrent = any(self.is_recurrent_states_initialized.values())
        return not recurrent and (self.record_past or not self.stream.compressed)

    def activate_past_recording(self) -> None:
        LinearAttentionLayer.activate_past_recording(self)
        SketchLayer.activate_past_recording(self)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        SketchLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        SketchLayer.reset(self)

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        SketchLayer.map_batch(self, fn)
        for states in (self.conv_states, self.recurrent_states):
            for number, state in states.items():
                states[number] = None if state is None else fn(state)

    def tensors(self) -> list[Tensor]:
        return SketchLayer.tensors(self) + linear_states(self)


def linear_states(layer: Any) -> list[Tensor]:
    """The tensors of a linear-attention or convolution layer of transformers."""
    states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [state for state in states if state is not None]
