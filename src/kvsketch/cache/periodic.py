"""The drivers: one-shot after prefill, and periodic (budget + buffer, recompress when full)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..budget import Budget
from ..errors import InputError, UnsupportedError
from ..methods import Windowed
from ..slots import Observed, Slots
from .error import Probe, window_error
from .page import Page, QuantizedPage
from .quantized import check_bits
from .sketch_page import SketchPage
from .windowed_sketch import WindowedSketch

Reducer = Windowed | WindowedSketch

# Decoded queries wait in groups of this many before they are turned into scores: fewer groups cost
# less time, smaller ones less memory.
FOLD_EVERY = 32


class Periodic:
    """Slots of one attention layer as a stream.

    Three verbs, in this order for every chunk of tokens: ``extend`` with the new tokens, let the
    model attend to ``slots``, ``settle`` (observe the queries and compress if due). Nothing is
    compressed while all tokens fit the budget. Once something was, the slots live on a page of
    ``budget + buffer`` that decoding never outgrows: when it is full, it is compressed to
    ``budget - buffer``.

    Args:
        compressor: the method with its sink and recent window.
        budget: how many slots may be kept.
        buffer: how far decoding may run above (and compresses below) the budget, in slots, >= 1;
            a compression every ``2 * buffer`` tokens. Default: 1/40 of the average head's budget,
            at least 1, at most 64, so that all pages, scores included, stay within 5% of it.
        one_shot: compress after prefill only; decoded tokens are then kept exactly (as in SubGen
            section 3.2) and memory grows with them.
        bits: 16: keys and values are stored as they come. 8 or 4: those between sinks and recent
            window are stored in so many bits from the end of the prompt on, whether or not the
            prompt fits the budget (a budget of 1.0 only quantises); sinks, recent window, buffer,
            masses and scores stay as they are. ``slots`` is then a dequantised copy, which lives
            from ``extend`` to ``settle``. Not with a sketch, whose state has the dtype of the
            tokens.
        track_error: keep the exact answers of a few queries up to date (``running_error``).

    Attributes:
        error: relative error of the prompt's last queries on what the first compression made of
            it, float64 ``[batch, num_key_value_heads]`` (``window_error``); None before.


    Raises:
        InputError: buffer < 1, or bits not 16, 8 or 4, or not 16 with a sketch.
    """

    def __init__(
        self,
        compressor: Reducer,
        budget: Budget,
        buffer: int | None = None,
        one_shot: bool = False,
        bits: int = 16,
        track_error: bool = False,
    ) -> None:
        if buffer is not None and (isinstance(buffer, bool) or buffer < 1):
            raise InputError(f"buffer={buffer!r} must be an int >= 1 (tokens per recompression)")
        if check_bits(bits) != 16 and isinstance(compressor, WindowedSketch):
            raise InputError(
                f"bits={bits}: a streaming sketch keeps its state as the tokens come, so storing "
                "what attention sees in fewer bits would save nothing; bits must be 16 with a "
                "sketch"
            )
        self.compressor = compressor
        self.budget = budget
        self.one_shot = one_shot
        self.bits = bits
        self.track_error = track_error
        self._buffer = buffer
        self._observed: list[Observed] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.seen = 0
        self.padded = False  # whether any token was padding, so that slots may be dead
        self._dense: Slots | None = None
        self._live: Tensor | None = None
        self._page: Page | None = None
        self._observed = []
        self.error: Tensor | None = None
        self._probe: Probe | None = None
        self._probed = 0  # tokens the probe has taken in
        self._full = 0  # slots at which the page is due
        self.compressor.reset()

    def wants_queries(self, count: int) -> bool:
        """Whether ``settle`` has a use for the queries of the newest ``count`` tokens."""
        return self.compressor.needs_queries or (count > 1 and self._page is None)

    @property
    def compressed(self) -> bool:
        """Whether anything was ever compressed; until then ``slots`` are all tokens, in order."""
        return self._page is not None

    @property
    def slots(self) -> Slots:
        """What the next attention sees."""
        if self._page is not None:
            return self._page.slots
        if self._dense is None:
            raise InputError("the sketch is empty: extend() it first")
        return self._dense

    @property
    def held(self) -> float:
        """Slots per KV head."""
        return self._count()

    @property
    def held_by_head(self) -> list[float]:
        """Slots of each KV head."""
        return [self._count()] * self.slots.keys.shape[1]

    @property
    def visible(self) -> Slots:
        """The slots with padding dead, whether or not anything was compressed."""
        return self._masked(self.slots)

    def buffer_for(self, budget: int) -> int:
        return self._buffer or max(1, min(64, budget // 40))

    @property
    def buffer(self) -> int:
        """That of the average head: one with a small share would else compress every other token,
        and the bytes of all heads are what counts."""
        return self.buffer_for(self.budget.average(self.seen))

    @property
    def quiet(self) -> bool:
        """Whether ``settle`` would leave everything as it is after a decoded token, but for taking
        note of its query."""
        transient = self._page is not None and self._page.transient
        return not (transient or self._due(prefill=False))

    def extend(self, new: Slots) -> None:
        """Append tokens, ``[batch, num_key_value_heads, q, ...]``."""
        self.seen += new.count
        if self._page is None:
            if self._dense is None:
                self._dense = new
            else:
                self._dense = Slots.cat([self._dense, new])
            if self._live is not None:
                tail = self._live.new_ones(self._live.shape[0], new.count)
                self._live = torch.cat([self._live, tail], dim=1)
            return
        if self._page.count >= self._full:
            self._full = self._next_full(self.seen - new.count + 1)
        if self._page.room < new.count:
            # decoding takes a whole buffer at once, a chunk what it needs
            beyond = self._full if new.count == 1 else 0
            self._page = self._page.grown(max(self._page.count + new.count, beyond))
        self._page.append(new)

    def _next_full(self, seen: int) -> int:
        """How many slots the page may hold before it is due, once there are ``seen`` tokens."""
        assert self._page is not None
        count = self._page.count
        if self.one_shot:  # grows for good, by a few per cent at a time
            return count + self.buffer_for(count)
        if self._quantises_early():  # room is in full precision: only the buffer
            return count + self.buffer
        return max(count + 1, self.budget.slots(seen) + self.buffer)

    def mark_padding(self, live: Tensor) -> None:
        """Say which of the tokens just appended are real. ``live``: bool ``[batch, q]``."""
        q = live.shape[1]
        self.padded = True
        if self._page is not None:
            slots = self._page.slots
            last = slots.narrow(slots.count - q, q).only(live[:, None, :])
            self._page.rewrite_last(last)
            return
        assert self._dense is not None
        if self._live is None:
            self._live = live.new_ones(live.shape[0], self._dense.count)
        self._live[:, self._dense.count - q :] = live

    def note(self, observed: Observed | None) -> None:
        """Take note of the queries of the newest tokens; ignored by methods that need none."""
        if observed is not None and self.compressor.needs_queries and not self._whole:
            self._observed.append(observed)

    def settle(self, observed: Observed | None, prefill: bool, hold: bool = False) -> bool:
        """``note`` the queries of the newest tokens and compress if due.

        Args:
            observed: their queries.
            prefill: compress down to the budget now (else only when the buffer is full).
            hold: do not compress yet (more of the prompt is to come).

        Returns:
            Whether it compressed.
        """
        self.note(observed)
        if hold or not self._due(prefill):
            # Fold a prompt's queries now (they are many), a decoded token's only now and then.
            # What looks at a window of queries only waits for the last chunk of a held prompt.
            if hold and self.compressor.window is not None:
                self._keep_last(self.compressor.window)
            elif prefill or waited_enough(self._observed, self.tensors):
                self.fold()
            if self._page is not None:
                self._page.release()
            return False
        exact = self._masked(self.slots) if self._page is None else None
        self._update_probe()
        budget, room = self.budget.slots(self.seen), 0
        if not prefill:
            # A buffer below the budget, and room for one above: the budget is what is held on
            # average, and compressing comes half as often.
            room = self.buffer
            floor = min(budget, self.compressor.sink + self.compressor.recent)
            budget = max(budget - room, floor, 1)
        if isinstance(self.compressor, WindowedSketch):
            self._page = self._sketched(self.compressor, budget, room)
        elif self.bits == 16:
            waiting = self._waiting() if self._observed else None
            kept = self.compressor(self._masked(self.slots), budget, waiting, fit=prefill)
            self._page = Page(kept, max(self.budget.slots(self.seen), kept.count) + room)
        else:
            self._page = self._quantized(self.compressor, budget, room, fit=prefill)
        self._full = self._page.capacity
        self._dense = self._live = None
        self._observed = []
        if exact is not None and observed is not None and prefill:
            recent = self.compressor.recent_at(budget)
            self.error = window_error(exact, self.slots, observed, recent)
            if self.track_error:
                self._probe, self._probed = Probe(exact, observed), self.seen
        return True

    @property
    def running_error(self) -> Tensor | None:
        """Relative error of a few of the prompt's last queries over all tokens seen, as if they
        were asked now, float64 ``[batch, num_key_value_heads]``; None without ``track_error`` and
        before the first compression."""
        self._update_probe()
        return None if self._probe is None else self._probe.error(self.slots)

    def _update_probe(self) -> None:
        """Show the probe the tokens appended since it last looked: they are still exact."""
        if self._probe is not None:
            new, slots = self.seen - self._probed, self.slots
            self._probe.extend(slots.narrow(slots.count - new, new))
            self._probed = self.seen

    def _sketched(self, sketching: WindowedSketch, budget: int, room: int) -> Page:
        """The next page around a sketch, which takes in what is between sinks and recent window."""
        page = self._page if isinstance(self._page, SketchPage) else None
        exact = self._masked(self.slots) if page is None else page.exact
        parts = sketching.take(exact, budget)
        limit = self.budget.slots(self.seen)
        if parts is None:
            return Page(exact, max(limit, exact.count) + room)
        first, last = parts
        assert sketching.sketch is not None
        capacity = max(limit, first.count + sketching.worth + last.count) + room
        return SketchPage(first, sketching.sketch, sketching.worth, last, capacity)

    def _quantized(self, compressor: Windowed, budget: int, room: int, fit: bool) -> QuantizedPage:
        """The next page, in fewer bits; with fewer slots only where there are too many."""
        page = self._page if isinstance(self._page, QuantizedPage) else None
        limit, window = self.budget.slots(self.seen), (compressor.sink, compressor.recent)
        slots = self.slots if page is None else page.read(exactly=True)
        kept = self._masked(self._scored(slots))
        if kept.count > limit:
            waiting = self._waiting() if self._observed else None
            kept = compressor(kept, budget, waiting, scored=kept.score is not None, fit=fit)
        # room is in full precision: only what comes
        capacity = min(max(limit, kept.count) + room, kept.count + 2 * room)
        return QuantizedPage(kept, capacity, self.bits, *window, page)

    def _due(self, prefill: bool) -> bool:
        budget = fits = self.budget.slots(self.seen)
        if self._quantises_early():
            fits = min(budget, self.compressor.sink + self.compressor.recent)
        if prefill:
            return self._count() > fits
        if self.one_shot:
            return False
        if self._page is not None:
            return self._page.count >= self._full
        return self._count() >= fits + self.buffer

    @property
    def _whole(self) -> bool:
        """Whether all tokens are kept as they are, however many come."""
        budget = self.budget
        whole = (
            budget.is_fraction and budget.limit is None and budget.value * budget.share >= 1 - 1e-9
        )
        return whole and self.bits == 16

    def _quantises_early(self) -> bool:
        """Whether slots are quantised although they fit the budget."""
        return self.bits != 16 and isinstance(self.compressor, Windowed)

    def _count(self) -> int:
        held = self._dense if self._page is None else self._page
        return 0 if held is None else held.count

    def _masked(self, slots: Slots) -> Slots:
        """Padding of the uncompressed phase as dead slots."""
        return slots if self._live is None else slots.only(self._live[:, None, :])

    def _scored(self, slots: Slots | None = None) -> Slots:
        """The slots with the waiting queries folded in. The slots these saw are still all here,
        so this equals observing every query at its own time."""
        slots = self.slots if slots is None else slots
        if not self._observed:
            return slots
        score = self.compressor.observe(self._masked(slots), self._waiting()).score
        return replace(slots, score=score)

    def _keep_last(self, window: int) -> None:
        """Of the waiting queries keep the last ``window``."""
        if not self._observed:
            return
        together = self._waiting()
        live = None if together.live is None else together.live[:, -window:].clone()
        queries = together.queries[:, :, -window:].clone()
        self._observed = [replace(together, queries=queries, live=live)]

    def _waiting(self) -> Observed:
        """All waiting queries as one."""
        return joined(self._observed)

    def fold(self) -> None:
        """Turn waiting queries into scores now."""
        if self._observed:
            self._store(self._scored())

    def _store(self, slots: Slots) -> None:
        self._observed = []
        if self._page is None:
            self._dense = slots
        elif slots.score is not None:
            self._page.set_score(slots.score)

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn`` (which acts on axis 0, the batch) to everything held: beam search,
        repeating or selecting rows."""
        self.compressor.map_batch(fn)
        if self._page is not None:
            self._page = self._page.map(fn)
        if self._dense is not None:
            self._dense = self._dense.map(fn)
        if self._live is not None:
            self._live = fn(self._live)
        if self._probe is not None:
            self._probe.map_batch(fn)
        self.error = None if self.error is None else fn(self.error)
        self._observed = [observed.map_batch(fn) for observed in self._observed]

    def number_rows(self, rows: Tensor) -> None:
        """Say which rows of a larger batch these are, for random choices to be theirs."""
        self.compressor.number_rows(rows)

    def crop(self, tokens: int) -> None:
        """Forget the last ``tokens`` tokens; only possible while nothing was compressed.

        Raises:
            UnsupportedError: something was compressed already.
        """
        if self.compressed:
            raise UnsupportedError(
                f"crop({-tokens}) needs the last {tokens} tokens one by one, but this cache is "
                "already compressed; use a budget >= the number of tokens, or DynamicCache"
            )
        if self._dense is None or tokens == 0:
            return
        self.fold()
        kept = max(0, self._dense.count - tokens)
        self._dense = self._dense.narrow(0, kept)
        if self._live is not None:
            self._live = self._live[:, :kept]
        self.seen = kept

    def drop(self, tokens: int) -> None:
        """Forget the last ``tokens`` tokens, which were appended since the last ``settle``."""
        if self._page is None:
            if self._dense is not None:
                self._dense = self._dense.narrow(0, self._dense.count - tokens)
            if self._live is not None:
                self._live = self._live[:, : self._live.shape[1] - tokens]
        else:
            self._page.drop(tokens)
        self.seen -= tokens

    def compresses_next(self, tokens: int) -> bool:
        """Whether ``slots`` are no tokens, or will not be once ``tokens`` newest ones settle."""
        return self.compressed or self._due(prefill=tokens > 1)

    @property
    def above_budget(self) -> bool:
        """Whether more is held than decoding may run above the budget."""
        return self._count() > self.budget.slots(self.seen) + self.buffer

    def tensors(self) -> list[Tensor]:
        """Every tensor held, for byte counting."""
        held = list(self._dense.tensors().values()) if self._dense is not None else []
        held += self._page.tensors() if self._page is not None else []
        held += [] if self._live is None else [self._live]
        held += self.compressor.tensors()
        held += [] if self._probe is None else self._probe.tensors()
        return held + [o.queries for o in self._observed]


def waited_enough(waiting: Sequence[Observed], held: Callable[[], Iterable[Tensor]]) -> bool:
    """Whether decoded queries should be turned into scores: there are ``FOLD_EVERY``, or one more
    would be above 1% of the bytes held."""
    if not waiting:
        return False
    count = sum(observed.queries.shape[2] for observed in waiting)
    if count >= FOLD_EVERY:
        return True
    size = sum(observed.queries.nbytes for observed in waiting)
    return size * (count + 1) / count > 0.01 * sum(tensor.nbytes for tensor in held())


def joined(observed: Sequence[Observed]) -> Observed:
    """Queries of successive tokens as one."""
    queries = torch.cat([o.queries for o in observed], dim=2)
    live = None
    if any(o.live is not None for o in observed):
        live = torch.cat([_live_queries(o) for o in observed], dim=1)
    return replace(observed[0], queries=queries, live=live)


def _live_queries(observed: Observed) -> Tensor:
    queries = observed.queries
    if observed.live is not None:
        return observed.live
    return torch.ones(queries.shape[0], queries.shape[2], dtype=torch.bool, device=queries.device)
