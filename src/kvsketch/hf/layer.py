"""One attention layer of a SketchCache."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from kvsketch.cache.echo import Echo
from kvsketch.cache.queries import joined, side_by_side
from kvsketch.cache.stream import Stream
from kvsketch.errors import InputError, UnsupportedError
from kvsketch.hf.checks import BEHIND, check_config, check_queries, check_tokens
from kvsketch.hf.masks import View
from kvsketch.hf.output import output_weight
from kvsketch.hf.rotary import home_of, rotation_of, turn_of
from kvsketch.observed import Observed
from kvsketch.slots import Slots

#: So many forwards without ``crop`` end the recording of tokens that it may remove. A draft is
#: shorter, and transformers does not say when assisted decoding is over.
GUESSES = 32


@dataclass(frozen=True)
class LayerSettings:
    """Settings that a cache passes to its layers.

    Attributes:
        exact_prefill: whether prompts are read without compression in between.
        prompt_length: tokens of the first prompt if it arrives in several chunks.
        track_positions: store each slot's position.
        readers: layers of the model that attend to this one's keys, itself included.
        lossless: tokens are never compressed, unless ``compact`` is called.
        config: of the model.
    """

    exact_prefill: bool = True
    prompt_length: int | None = None
    track_positions: bool = False
    readers: int = 1
    lossless: bool = False
    config: Any = None


class SketchLayer(DynamicLayer):  # type: ignore[misc]
    """Connects transformers' layer protocol with a ``Stream``, which does the work.

    ``update`` appends and returns the keys and values to attend to. The attention over them, and
    the compression that may follow, are the business of ``forward.Forward``: a layer knows neither
    the cache nor the other layers.

    Args:
        stream: the stream of the layer's slots.
    """

    is_sliding = False

    def __init__(self, stream: Stream, settings: LayerSettings) -> None:
        self.stream = stream
        self.settings = settings
        self.token_shape: tuple[int, ...] = ()
        self.key_dim = 0  # of a slot
        self.query_shape: tuple[int, ...] = ()  # of the last queries that were checked
        self.dtype: torch.dtype | None = None
        self.token_bytes = 0  # keys and values of one token, all rows and heads, uncompressed
        self.module: weakref.ref[nn.Module] | None = None  # whose cache this is
        self._returned: tuple[Tensor, Tensor] | None = None
        self._reads = 0  # readers that have attended to the pending tokens
        self._clear()
        super().__init__()

    def _clear(self) -> None:
        self.pending = 0  # tokens appended that not all readers have attended to
        self.record_past = False
        self._waiting: list[Observed] = []  # of this forward's readers
        self._unverified: list[Observed | None] = []  # of forwards that ``crop`` will settle
        self._unverified_tokens = 0
        self._verified: list[Observed | None] = []  # what ``crop`` has left of them

    @property
    def lossless(self) -> bool:
        """Whether the model's own kernel attends to all tokens, and nobody needs their queries."""
        return self.settings.lossless and not self.stream.compressed

    # keys and values are what the stream holds; transformers' base class only ever clears them
    @property
    def keys(self) -> Tensor | None:
        """Keys of all slots; where heads differ in size, the smaller ones' after dead ones."""
        return self.stream.slots.keys if self.stream.seen else None

    @keys.setter
    def keys(self, value: None) -> None:
        assert value is None

    @property
    def values(self) -> Tensor | None:
        return self.stream.slots.values if self.stream.seen else None

    @values.setter
    def values(self, value: None) -> None:
        assert value is None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.token_shape = (*key_states.shape[:2], 1, key_states.shape[3])
        self.key_dim = self._slots_of(key_states, value_states).keys.shape[3]
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
            InputError: shapes, dtype or device do not fit the cache, or a prompt chunk is not
                finite. The cache is unchanged then.
        """
        # A token with the same layout as the previous one needs no check: this runs once per layer
        # and token.
        if key_states.shape != self.token_shape or key_states.dtype != self.dtype:
            held = (self.token_shape, self.dtype, self.device) if self.stream.seen else None
            check_tokens(key_states, value_states, self.stream.pace.budget, held)
            self.lazy_initialization(key_states, value_states)
        q = key_states.shape[2]
        if self.stream.compressed and key_states.requires_grad:
            key_states, value_states = key_states.detach(), value_states.detach()
        new = self._slots_of(key_states, value_states)
        if self.settings.track_positions:
            new = replace(new, positions=self._positions(key_states))
        self.stream.extend(new)
        self.pending = q
        self._returned = self._to_return(key_states, value_states)
        return self._returned

    def _slots_of(self, key_states: Tensor, value_states: Tensor) -> Slots:
        """New tokens in the form that the stream stores."""
        return Slots(key_states, value_states)

    def _to_return(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values for the model: all tokens until a compression, for its own kernel;
        then only the new ones, because attention uses the slots."""
        if self.stream.compressed:
            return key_states, value_states
        return self.stream.parted.tokens

    def to_slots(self, module: nn.Module | None, query: Tensor) -> Tensor:
        """Queries in the space of the slots' keys."""
        return query

    def from_slots(self, module: nn.Module | None, out: Tensor) -> Tensor:
        """Attention over slots, ``[batch, num_attention_heads, q, ...]``, in the form that the
        model expects."""
        return out

    def returned(self, key: Tensor) -> bool:
        """Whether ``key`` is the last return value of ``update``."""
        return self._returned is not None and key is self._returned[0]

    def check_returned(self, module: nn.Module | None, key: Tensor, value: Tensor) -> None:
        """Raise UnsupportedError unless a module attends to exactly the return values of
        ``update``."""
        if self._returned is None or key is not self._returned[0] or value is not self._returned[1]:
            raise UnsupportedError(
                f"{type(module).__name__} changes keys or values between the cache and attention "
                "(it caches latents, or attends in several parts), so its cache cannot be "
                "compressed; use DynamicCache for this model"
            )
        if module is None:
            self._project(None)
        elif self.module is None or self.module() is not module:
            self.claim(module)

    def claim(self, module: nn.Module) -> None:
        """Record the module that owns this cache.

        Raises:
            InputError: it belongs to another module, or to a model of another configuration.
        """
        if self._reads:
            return  # another layer of the same model, which shares these keys
        if self.module is None:
            check_config(self.settings.config, module)
            self._project(module)
            self.note_positions(*home_of(module))
            self.module = weakref.ref(module)
        elif self.module() is not module:
            raise InputError(
                "this SketchCache holds the context of another model (or of a copy of the model): "
                "make one cache per model, or call reset()"
            )

    def note_positions(self, home: str, rotates: bool) -> None:
        """Take note of how the attention module depends on positions, at its first tokens, for a
        method that needs it, and for an echo, if the method wants one: a stream that compresses
        while it reads does not see all queries.

        Args:
            home, rotates: of the module, as from ``home_of``.

        Raises:
            UnsupportedError: a method needs to know how it rotates queries and keys, and it does
                not, or by frequencies that are not known.
        """
        stream, method = self.stream, self.stream.compressor
        turn = turn_of(home, rotates, self.settings.config.get_text_config(decoder=True))
        if method is not None and method.requires.rotary:
            method.turn = rotation_of(turn, home, method.name)
        if self.settings.exact_prefill and stream.method.requires.echo:
            stream.scores.echo = None if turn is None else Echo(turn)

    def _project(self, module: nn.Module | None) -> None:
        """Pass the module's output projection to a method that needs it.

        Raises:
            UnsupportedError: it cannot be found.
        """
        method = self.stream.compressor
        if method is not None and method.requires.output:
            name = method.name
            if module is None:
                if method.output is None:
                    raise UnsupportedError(
                        f"method={name!r} needs the output projection of every layer, which a "
                        "compiled graph does not show: read the prompt with the model as it was "
                        "before torch.compile, or use another method"
                    )
                return
            heads, dim = self.token_shape[1], self.stream.slots.values.shape[3]
            method.output = output_weight(module, heads, dim, name)

    def check_queries(self, queries: Tensor) -> None:
        """Raise InputError unless queries ``[batch, num_attention_heads, q, head_dim]`` fit the
        slots."""
        if queries.shape != self.query_shape:
            batch, heads = self.token_shape[:2]
            check_queries(queries, batch, heads, self.key_dim)
            self.query_shape = queries.shape

    def resumed(self, returned: tuple[Tensor, Tensor]) -> None:
        """Go on after a token that was appended, of these keys and values."""
        self.pending, self._returned = 1, returned

    def mark(self, view: View) -> None:
        """Record which tokens are padding; once for each chunk of tokens."""
        if self._reads:
            return
        if self.stream.compressed:
            if view.newest is not None:
                self.stream.mark_padding(view.newest)
        elif view.live is not None:
            self.stream.mark_padding(view.live)
        elif self.stream.padded:  # a mask that unmasks all tokens, before any was dropped
            rows = self.token_shape[0]
            live = torch.ones(rows, self.stream.seen, dtype=torch.bool, device=self.device)
            self.stream.mark_padding(live)

    def cuts(self, view: View, soon: bool) -> list[int]:
        """The sizes of the pieces in which the new tokens are attended to, as ``Pace.cuts``. They
        are one piece for layers whose keys other layers read, too, for masks that say more than
        padding, for tokens that ``crop`` may remove, and unless a piece can be compressed ``soon``,
        before other layers have read it."""
        if not soon or self.settings.readers > 1 or self.record_past or not view.plain:
            return [self.pending]
        return self.stream.pace.cuts(self.stream.seen, self.pending)

    def attended(self, observed: Observed | None, asking: bool) -> bool:
        """Take note of one reader's attention to the tokens just appended.

        Args:
            observed: its queries; None if tokens are never compressed.
            asking: whether a second reading needs them.

        Returns:
            Whether all readers have attended; ``taken`` then gives what they asked.
        """
        if observed is not None and (asking or self.stream.wants_queries(self.pending)):
            self._waiting.append(observed)
        self._reads += 1
        return self._reads >= self.settings.readers

    def taken(self) -> tuple[Observed | None, int]:
        """The queries of all readers, and the number of tokens that they attended to last: these
        are no longer pending."""
        observed = side_by_side(self._waiting, self.token_shape[1])
        q, self.pending, self._returned = self.pending, 0, None
        self._waiting, self._reads = [], 0
        return observed, q

    def keep_unverified(self, observed: Observed | None, tokens: int) -> None:
        """Keep the queries of tokens until ``crop`` determines how many of them are kept."""
        self._unverified.append(observed)
        self._unverified_tokens += tokens

    @property
    def holds(self) -> bool:
        """Whether more of the first prompt will follow, so that nothing is compressed yet."""
        settings = self.settings
        return settings.prompt_length is not None and (
            settings.exact_prefill and self.stream.seen < settings.prompt_length
        )

    def get_seq_length(self) -> int:
        """The number of tokens seen, not of slots, so that positions stay correct."""
        return self.stream.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are made over all tokens seen, as for an uncompressed cache; see ``masks``."""
        if not query_length:
            if not self.stream.seen:
                raise InputError("input_ids: the text is empty")
            raise InputError(BEHIND.format(seen=self.stream.seen))
        return self.stream.seen + query_length, 0

    @property
    def is_croppable(self) -> bool:
        return self.record_past or not self.stream.compressed

    def activate_past_recording(self) -> None:
        """From now on tokens stay exact until ``crop`` determines how many of them are kept
        (assisted decoding), or until more than ``GUESSES`` forwards came without it."""
        self.record_past = True

    @property
    def guessed(self) -> bool:
        """Whether too many forwards came without ``crop`` for assisted decoding."""
        return self.record_past and len(self._unverified) >= GUESSES

    @property
    def unverified(self) -> bool:
        """Whether ``crop`` may still remove tokens."""
        return self._unverified_tokens > 0

    def check_crop(self, tokens: int) -> None:
        """Raise unless the last ``tokens`` tokens can be removed.

        Raises:
            UnsupportedError: they may be compressed already.
        """
        exact = self._unverified_tokens if self.record_past else 0
        if tokens > exact and self.stream.compressed:
            raise UnsupportedError(
                f"crop({-tokens}) needs the last {tokens} tokens one by one, but this cache is "
                "already compressed; use a budget >= the number of tokens, DynamicCache, or call "
                "activate_past_recording() before the tokens that may have to be removed"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens (a negative number, as in transformers); after
        ``activate_past_recording`` the tokens before them are ``verified``."""
        if tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove}): pass minus the number of tokens to remove")
        tokens = -tokens_to_remove
        self.check_crop(tokens)
        if tokens <= self._unverified_tokens:
            self.stream.drop(tokens)
        else:
            self.stream.crop(tokens)
        if self._unverified_tokens:
            count = max(0, self._unverified_tokens - tokens)
            held = [observed for observed in self._unverified if observed is not None]
            self._unverified, self._unverified_tokens = [], 0
            if count:
                self._verified = [joined(held).narrow(0, count) if held else None]

    def verified(self) -> list[Observed | None]:
        """The queries of tokens that ``crop`` has kept, once: none or one."""
        found, self._verified = self._verified, []
        return found

    def reset(self) -> None:
        self.stream.reset()
        self._clear()
        self._reads, self._returned, self.module = 0, None, None
        self.token_shape = ()
        self.token_bytes = 0
        self.is_initialized = False

    def undo(self) -> None:
        """Remove the tokens that were appended and not attended to."""
        if self.pending:
            self.stream.drop(self.pending)
        self.pending = self._reads = 0
        self._waiting, self._returned = [], None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i continues from row ``beam_idx[i]``."""
        self.map_batch(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_batch(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map_batch(lambda t: t[indices.to(t.device)])

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn``, which acts on axis 0, the batch, to all tensors."""
        self.stream.map_batch(fn)
        self._unverified = [None if o is None else o.map_batch(fn) for o in self._unverified]
        if self.token_shape:  # the batch may have another size now
            batch = fn(torch.arange(self.token_shape[0], device="cpu")).shape[0]
            self.token_bytes = self.token_bytes // self.token_shape[0] * batch
            self.token_shape = (batch, *self.token_shape[1:])

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        return self.stream.tensors() + [o.queries for o in self._unverified if o is not None]

    def offload(self) -> None:
        raise UnsupportedError("SketchCache does not offload; it is small enough to stay")

    def prefetch(self) -> None:
        raise UnsupportedError("SketchCache does not offload; it is small enough to stay")

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which are not in the middle of a forward and may be used in another
        process."""
        if self.pending:
            raise UnsupportedError("a SketchCache cannot be copied in the middle of a forward")
        return {**self.__dict__, "module": None, "_returned": None}

    def _positions(self, keys: Tensor) -> Tensor:
        start = self.stream.seen
        index = torch.arange(start, start + keys.shape[2], device=keys.device).float()
        return index.expand(*keys.shape[:3])
