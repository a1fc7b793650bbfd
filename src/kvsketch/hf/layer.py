"""One attention layer of a SketchCache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..compressors.base import all_finite
from ..errors import InputError, UnsupportedError
from ..slots import Observed, Slots
from ..streaming import HeadGroups, Periodic, Waiting
from .attention import tag


class SketchLayer(DynamicLayer):  # type: ignore[misc]
    """Glue between transformers' layer protocol and the ``Periodic`` driver, which does the work.

    ``update`` appends and returns the keys and values to attend to; the registered attention
    function then calls ``after_attention``, where compression happens.

    Args:
        sketch: the driver, or one per group of heads; or what will ``take`` it when budgets are
            known, and comes back at ``reset``.
        exact_prefill: do not compress before ``prompt_length`` tokens were seen.
        prompt_length: tokens of the first prompt if it arrives in several chunks.
        track_positions: store each slot's position (ALiBi models).
        on_change: called after every change of the tensors held.
    """

    is_sliding = False

    def __init__(
        self,
        sketch: Periodic | HeadGroups,
        exact_prefill: bool,
        prompt_length: int | None,
        track_positions: bool,
        on_change: Callable[[], None],
    ) -> None:
        self.sketch = self._first = sketch
        if isinstance(sketch, Waiting):
            sketch.on_told = self.take
        self.exact_prefill = exact_prefill
        self.prompt_length = prompt_length
        self.track_positions = track_positions
        self.on_change = on_change
        self._pending = 0  # tokens appended whose attention has not run yet
        self._token_shape: tuple[int, ...] = ()
        self.dtype: torch.dtype | None = None
        self.token_bytes = 0  # keys and values of one token, all rows and heads, uncompressed
        super().__init__()

    def take(self, sketch: Periodic | HeadGroups) -> None:
        """Go on with another driver, which has all tokens."""
        self.sketch = sketch
        self.on_change()

    # keys and values are what the sketch holds; transformers' base class only ever clears them
    @property
    def keys(self) -> Tensor | None:
        return self.sketch.slots.keys if self.sketch.seen else None

    @keys.setter
    def keys(self, value: None) -> None:
        assert value is None

    @property
    def values(self) -> Tensor | None:
        return self.sketch.slots.values if self.sketch.seen else None

    @values.setter
    def values(self, value: None) -> None:
        assert value is None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._token_shape = (*key_states.shape[:2], 1, key_states.shape[3])
        self.token_bytes = (
            (key_states.shape[-1] + value_states.shape[-1])
            * (key_states.shape[0] * key_states.shape[1])
            * key_states.element_size()
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append ``[batch, num_key_value_heads, q, head_dim]`` keys and values.

        Raises:
            InputError: shapes, dtype or device do not fit what is held, or a prompt chunk is not
                finite. The cache is unchanged then.
            UnsupportedError: the previous tokens never went through our attention function.
        """
        # A token like the one before needs no second look: this runs once per layer and token.
        if key_states.shape != self._token_shape or key_states.dtype != self.dtype or self._pending:
            self._check(key_states, value_states)
            self.lazy_initialization(key_states, value_states)
        q = key_states.shape[2]
        positions = self._positions(key_states) if self.track_positions else None
        self.sketch.extend(Slots(key_states, value_states, positions=positions))
        self._pending = q
        slots = self.sketch.slots
        if q > 1:
            self.on_change()
        return tag(slots.keys, self), slots.values

    def after_attention(self, observed: Observed | None) -> None:
        """The attention of the tokens just appended is done: compress if due.

        Args:
            observed: their queries; may be None if the method needs none.
        """
        prefill = self._pending > 1
        hold = (
            self.exact_prefill
            and self.prompt_length is not None
            and self.sketch.seen < self.prompt_length
        )
        self._pending = 0
        if self.sketch.settle(observed, prefill=prefill, hold=hold) or prefill:
            self.on_change()

    def get_seq_length(self) -> int:
        """Tokens seen, however few slots they became: positions stay right."""
        return self.sketch.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are made over all tokens seen, as for an uncompressed cache; the attention
        function reads padding and causality off the newest columns."""
        return self.sketch.seen + query_length, 0

    @property
    def is_croppable(self) -> bool:
        return not self.sketch.compressed

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens (a negative number, as in transformers)."""
        if tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove}): pass minus the number of tokens to remove")
        self.sketch.crop(-tokens_to_remove)
        self.on_change()

    def reset(self) -> None:
        self.sketch = self._first
        self.sketch.reset()
        self._pending = 0
        self._token_shape = ()
        self.token_bytes = 0
        self.is_initialized = False
        self.on_change()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i continues from row ``beam_idx[i]``."""
        self._map_batch(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_batch(lambda t: t[indices.to(t.device)])

    def _map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.sketch.map_batch(fn)
        if self._token_shape:  # the batch may have another size now
            batch = fn(torch.arange(self._token_shape[0])).shape[0]
            self.token_bytes = self.token_bytes // self._token_shape[0] * batch
            self._token_shape = (batch, *self._token_shape[1:])

    def offload(self) -> None:
        raise UnsupportedError("SketchCache does not offload; it is small enough to stay")

    def prefetch(self) -> None:
        raise UnsupportedError("SketchCache does not offload; it is small enough to stay")

    def _positions(self, keys: Tensor) -> Tensor:
        start = self.sketch.seen
        index = torch.arange(start, start + keys.shape[2], device=keys.device).float()
        return index.expand(*keys.shape[:3])

    def _check(self, keys: Tensor, values: Tensor) -> None:
        if self._pending:
            raise UnsupportedError(
                f"the last {self._pending} tokens of this layer never went through kvsketch's "
                "attention function: the model's attention was replaced after the SketchCache "
                "was made, or it does not use transformers' attention interface"
            )
        if keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
            raise InputError(
                "keys and values must be [batch, num_key_value_heads, q, head_dim], got "
                f"{tuple(keys.shape)} and {tuple(values.shape)}"
            )
        if isinstance(self.sketch, HeadGroups) and len(self.sketch.order) != keys.shape[1]:
            raise InputError(
                f"schedule has {len(self.sketch.order)} KV heads, this process holds "
                f"{keys.shape[1]}: under tensor parallelism give one share per layer"
            )
        if self.sketch.seen:
            held = self._token_shape
            if keys.shape[:2] != held[:2] or keys.shape[3] != held[3]:
                raise InputError(
                    f"keys {tuple(keys.shape)} do not fit the cache, which holds {held} per "
                    "token: batch, heads and head_dim must be equal"
                )
            if keys.dtype != self.dtype or keys.device != self.device:
                raise InputError(
                    f"keys are {keys.dtype} on {keys.device}, the cache holds {self.dtype} on "
                    f"{self.device}"
                )
        if keys.shape[2] > 1:  # decoded tokens are checked when they are compressed
            for name, tensor in (("keys", keys), ("values", values)):
                if not all_finite(tensor):
                    raise InputError(f"{name} are not finite (NaN or infinity); cache unchanged")
