"""The stream of one layer: its page, and what happens to it while tokens come."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.budget import Budget
from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.compress import Newest, compress, compress_newest
from kvsketch.cache.error import Errors
from kvsketch.cache.pace import Aim, Pace
from kvsketch.cache.pins import Pins
from kvsketch.cache.scores import Scores, unmarked
from kvsketch.cache.sketch_page import SketchPage
from kvsketch.cache.windowed_sketch import WindowedSketch
from kvsketch.errors import InputError, UnsupportedError
from kvsketch.methods.base import Compressor
from kvsketch.observed import Observed
from kvsketch.page.page import Page
from kvsketch.page.part import Part
from kvsketch.page.quantized import FULL, Bits
from kvsketch.page.schedule import Rhythm
from kvsketch.slots import Slots


class Stream:
    """Slots of one attention layer as a stream.

    Three verbs, in this order for every chunk of tokens: ``extend`` with the new tokens, let the
    model attend to what is ``open``, ``settle`` (record the queries, compress if due). Nothing is
    compressed while all tokens fit the budget, nor while there is no budget: a plan that measures
    hands it down later (``spend``). Once something was compressed, the slots live on a
    page: every head has its budget and a buffer, which decoding fills; when it is full, all heads
    are compressed to a buffer below their budgets. No token allocates in between.

    A stream that is ``streaming`` reads a prompt in pieces: each is attended to together with what
    is held, and compressed with it. ``settle`` must then be called where ``Pace.cuts`` says. With
    ``Pace.rhythm``, it holds what a page of a serving engine would hold.

    Args:
        method: a method with its sink and recent window.
        budget: how many slots may be kept, of all heads or head by head; None: not known yet.
        buffer, one_shot, bits: see ``Pace``.
        track_error: keep the exact outputs of a few queries up to date (``running_error``).
        streaming: compress prompts in pieces, if the method is a compressor.

    Attributes:
        sketch, compressor: the method, if it is one.
        seen: tokens so far.
        chunk: how many of them were appended last.
        begun: whether a first prompt, or a first token, is read to its end.
        held_page: ``page``; None: there is no token yet.
        pins: tokens that are never compressed.
        pace: when it is compressed, and to how many slots.
        scores: what the slots are worth to the method.
        errors: the measured errors of the slots.

    Raises:
        InputError: see ``Pace``.
    """

    def __init__(
        self,
        method: Compressor | WindowedSketch,
        budget: Budget | HeadBudgets | None,
        buffer: int | None = None,
        one_shot: bool = False,
        bits: int | str = 16,
        track_error: bool = False,
        streaming: bool = False,
        goal: Budget | None = None,
    ) -> None:
        self.method = method
        self.sketch: WindowedSketch | None = None
        self.compressor: Compressor | None = None
        if isinstance(method, WindowedSketch):
            self.sketch = method
        else:
            self.compressor = method
        self.pins = Pins(*method.around)
        self.pace = Pace(method, self.pins, budget, buffer, one_shot, bits, streaming, goal)
        self.scores, self.errors = Scores(method, self.pace), Errors(track_error)
        self.reset()

    def reset(self) -> None:
        """Remove all tokens, and a budget that a plan has given."""
        self.pins.clear()
        self.pace.reset()
        self.scores.reset()
        self.errors.reset()
        self.method.reset()
        self.held_page: Page | SketchPage | None = None
        self.seen = self.chunk = 0
        self.padded = False  # whether any token was padding, so that slots may be dead
        self.begun = False

    @property
    def compressed(self) -> bool:
        """Whether any token was ever compressed."""
        return self.held_page is not None and self.held_page.compressed

    def wants_queries(self, count: int) -> bool:
        """Whether ``settle`` needs the queries of the newest ``count`` tokens."""
        return self.method.requires.queries or self.waits or (count > 1 and not self.compressed)

    @property
    def waits(self) -> bool:
        """Whether a plan still has to give the budget."""
        return self.pace.budget is None

    @property
    def around(self) -> tuple[int, int]:
        """Slots at the start and at the end of a head that a compression now keeps unchanged."""
        return self.pace.around(self.seen)

    def pin(self, start: int, end: int) -> None:
        """Never compress the tokens from ``start`` to ``end``, see ``Pins.add``."""
        self.pins.add(start, end)
        self.pace.rhythm = None  # an engine's pages have none
        self.pace.count_window(self.seen)

    @property
    def heads(self) -> int:
        """The number of KV heads."""
        return self.page.held.shape[1]

    @property
    def slots(self) -> Slots:
        """All slots ``[batch, num_key_value_heads, n, ...]``; where heads differ in size, the
        smaller ones' are the last ones, behind dead slots."""
        return self.page.slots

    @property
    def page(self) -> Page | SketchPage:
        """All tokens, in order, until the first compression, then the slots.

        Raises:
            InputError: there is no token yet.
        """
        if self.held_page is None:
            raise InputError("the stream is empty: extend() it first")
        return self.held_page

    @page.setter
    def page(self, page: Page | SketchPage) -> None:
        self.held_page = page

    @property
    def parted(self) -> Page:
        """The page of a compressor, or of tokens that no sketch has taken yet."""
        assert isinstance(self.page, Page)
        return self.page

    def open(self) -> Sequence[Part] | Slots:
        """What the newest tokens attend to: parts of a page, or slots."""
        return self.page.open()

    @property
    def held(self) -> Tensor:
        """Slots of every row and head, int64 ``[batch, num_key_value_heads]`` on the CPU."""
        return self.page.held.cpu()

    def reopen(self) -> None:
        """Wait for a plan to divide the budget anew, because more of a prompt was read."""
        self.pace.budget = None

    def extend(self, new: Slots) -> None:
        """Append tokens, ``[batch, num_key_value_heads, q, ...]``."""
        self.chunk = new.keys.shape[2]
        self.seen += self.chunk
        page = self.held_page
        if page is None:
            self.held_page = Page.of_tokens(new)
            return
        if page.compressed:
            page = self.held_page = self.pace.with_room(page, self.chunk, self.seen)
        page.append(new)

    def mark_padding(self, live: Tensor) -> None:
        """Mark which of the tokens just appended are real. ``live``: bool ``[batch, q]``."""
        self.padded = True
        self.page.mark_last(live)

    def settle(
        self, observed: Observed | None, prefill: bool, hold: bool = False, later: bool = False
    ) -> bool:
        """Record the queries of the newest tokens and compress if due.

        Args:
            observed: their queries.
            prefill: the tokens are a chunk of a prompt: the first compression is now if they
                exceed the budget, and every compression is to the budget.
            hold: do not compress yet (more of the prompt will follow).
            later: ``compress_due`` follows, or ``together.compress_together``, if decoded tokens
                make a compression due.

        Returns:
            Whether it compressed, or would have.
        """
        piece = prefill and self.chunk > 1 and not hold and self.compressor is not None
        self.begun |= not hold
        if self.pins:
            self.pace.count_window(self.seen)
        if piece and not self.waits and (self.pace.streaming or self.asks_piece):
            return self._settle_piece(observed)
        if self.pace.rhythm is not None:
            return self._settle_at(self.pace.rhythm, observed, hold)
        budget, scores = self.pace.budget, self.scores
        exact = not self.compressed and self.pace.bits == FULL
        wanted = self.method.requires.queries or hold  # at least to measure the error on
        if observed is not None and (budget is None or (wanted and not (exact and budget.whole))):
            scores.queries.add(observed)
            if scores.echo is not None and prefill:
                scores.echo.add(observed, self.seen)
        if budget is None:
            return False
        if not hold and self.due(prefill):
            if later and not prefill:
                return True
            last = (observed or scores.queries.all()) if prefill else None
            if prefill:
                scores.ask_again(self.page, self.seen)
            self._compress(budget, prefill=prefill, last=last)
            return True
        if not hold:
            scores.echo = None
        scores.settle(self.page, prefill, hold)
        self.page.release()
        return False

    def _settle_at(self, rhythm: Rhythm, observed: Observed | None, hold: bool) -> bool:
        """``settle`` of decoded tokens with a rhythm. Queries become scores where it compresses,
        and only the last ones, which is all that a page in an engine's memory keeps."""
        assert self.pace.budget is not None
        due = self.due(prefill=False) and not hold
        if observed is not None and self.method.requires.queries:
            self.scores.add_last(observed, rhythm.queries(self.method.window), due)
        if due:
            self._compress(self.pace.budget, prefill=False, last=observed)
        self.page.release()
        return due

    @torch.no_grad()
    def _settle_piece(self, observed: Observed | None) -> bool:
        """``settle`` at the end of a piece of a prompt: all of its queries are asked again after
        it, if the method can use them, and it is compressed unless all fits."""
        budget, scores = self.pace.budget, self.scores
        assert budget is not None
        if observed is not None and self.method.requires.echo:
            scores.ask_piece_again(self.parted, observed, self.chunk)
        else:
            scores.queries.clear()
            if observed is not None and self.method.requires.queries:
                scores.queries.add(observed)
        due = self.due(prefill=True)
        if due:
            streams = self.pace.rhythm is None
            self._compress(budget, prefill=streams, last=observed, whole=not streams)
        else:
            scores.fold(self.page)
        self.page.release()
        return due

    @property
    def asks_piece(self) -> bool:
        """Whether more of a prompt, read after a compression, is asked again and compressed now."""
        return self.compressed and self.method.requires.echo and self.due(prefill=True)

    def due(self, prefill: bool) -> bool:
        """Whether ``settle`` would compress now."""
        return self.pace.due(self.page, self.seen, prefill)

    def spend(
        self,
        budget: HeadBudgets,
        provisional: bool = False,
        bits: Bits | None = None,
    ) -> None:
        """Compress to a budget that a plan gives, with the waiting queries.

        Args:
            budget: of every head.
            provisional: it is an upper bound; the final one will follow.
            bits: bits of the slots from now on; None: unchanged.
        """
        pace, queries = self.pace, self.scores.queries
        if not provisional:
            pace.budget = budget
        if bits is not None:
            pace.store(bits, self.seen)
        size = torch.as_tensor(budget.slots(self.seen, len(self.held)), device="cpu")
        fits = bool((self.held <= size).all())
        if provisional and fits and self.compressed:
            pass  # to that bound already
        elif provisional or not (budget.whole and pace.bits == FULL and fits):
            last = self.scores.last or queries.all()
            self._compress(budget, prefill=True, last=last, provisional=provisional)
        else:
            self.scores.fold(self.page)
        if provisional:
            queries.keep_last(self.method.window or 0)
        else:
            queries.clear()

    @torch.no_grad()
    def compact(self, smaller: HeadBudgets, own: HeadBudgets, bits: Bits) -> None:
        """Compress to a budget once.

        Args:
            smaller: that budget.
            own: the budget from now on.
            bits: of the slots from now on.
        """
        self.scores.fold(self.page)
        if (score := self.slots.score) is not None:  # the answer has been given
            self.page.set_score(unmarked(score))
        self.pace.rhythm, self.begun = None, True
        self.pace.store(bits, self.seen)
        self._compress(smaller, prefill=True, last=self.scores.last)
        self.pace.budget = own

    @torch.no_grad()
    def _compress(
        self,
        budgets: HeadBudgets,
        prefill: bool,
        last: Observed | None,
        provisional: bool = False,
        whole: bool = False,
    ) -> None:
        """Compress to the budgets now; ``last``: queries to measure the error on; ``whole``: all
        slots, also if the newest would do."""
        begins, rhythm = not self.compressed, self.pace.rhythm
        if self.errors.probing:
            self.errors.update(self.slots, self.seen)
        aim = self.pace.aim(self.seen, len(self.held), budgets, prefill, provisional)
        first = prefill or (begins and rhythm is not None)
        if begins and first and last is not None:
            recent = self.pace.schedule.recent_within(aim.budget)
            recent = int(torch.as_tensor(recent, device="cpu").min())
            self.errors.ask(self.open(), last, recent, self.padded)
            if self.errors.track:
                self.errors.probe(self.slots, last, self.seen)
        page: Page | SketchPage
        if self.sketch is not None:
            held = self.page, self.slots
            page = SketchPage.after(*held, self.sketch, budgets, aim.budget, aim.limit, aim.room)
        else:
            method = self.compressor
            assert method is not None
            if rhythm is not None:  # random choices depend on this number, and not on other rows
                method.restart(torch.full((len(self.held),), self.seen, device="cpu"))
            page = self._slotted(method, aim, not prefill, whole)
        self._turn_to(page, aim, budgets, provisional)
        if first and not provisional:
            self.errors.compressed(self.open())
        page.release(lookups=True)  # of the errors; many decode without them

    def _turn_to(
        self, page: Page | SketchPage, aim: Aim, budgets: HeadBudgets, provisional: bool = False
    ) -> None:
        """Go on from a page that was compressed now."""
        self.page = page
        self.pace.compressed(page, aim)
        within = self.pace.schedule.recent_within(aim.budget)  # few leave no room
        within = torch.as_tensor(within, device="cpu")
        self.pins.passed(self.seen, int(within.min()))
        self.scores.forget(waiting=not provisional)
        self.scores.row_bytes = self._row_bytes(budgets)

    def _newest_of(self, page: Page, aim: Aim) -> Newest | None:
        """What becomes of the newest tokens, if no others need be compressed."""
        method = self.compressor
        if method is None or not method.local or page.middle is None:
            return None
        self.scores.fold(page)
        room = self.pace.schedule.period * aim.room
        return Newest.of(page, aim.budget, around=aim.around, room=room)

    def newest(self) -> tuple[Newest, Callable[[Page], None]] | None:
        """What becomes of the newest tokens now that a compression is due while it decodes, and
        what takes the next page. None: more than these must be compressed (``compress_due``)."""
        budget = self.pace.budget
        assert budget is not None
        if self.compressor is None:
            return None
        if self.errors.probing:
            self.errors.update(self.slots, self.seen)
        aim = self.pace.aim(self.seen, len(self.held), budget, prefill=False)
        newest = self._newest_of(self.parted, aim)

        def turn_to(page: Page) -> None:
            self._turn_to(page, aim, budget)
            page.release(lookups=True)

        return None if newest is None else (newest, turn_to)

    def compress_due(self) -> None:
        """Compress all slots while it decodes."""
        assert self.pace.budget is not None
        self._compress(self.pace.budget, prefill=False, last=None, whole=True)

    def _row_bytes(self, budgets: HeadBudgets) -> int:
        """The bytes of a row's budget in the dtype of the tokens; of a sketch, what it holds for an
        average row."""
        if self.compressor is None:
            return sum(tensor.nbytes for tensor in self.tensors()) // len(self.held)
        token = self.parted.newest(1)
        return budgets.average(self.seen) * (token.keys[0].nbytes + token.values[0].nbytes)

    def _slotted(self, method: Compressor, aim: Aim, decoding: bool, whole: bool) -> Page:
        """The next page of a compressor's."""
        page = self.parted
        asked = self.scores.queries.all()
        newest = None if whole else self._newest_of(page, aim)
        smaller = None if newest is None else compress_newest(method, [newest])[0]
        if smaller is not None:
            return smaller
        # Scored before: where nothing is compressed, the queries must not be lost either.
        slots = self.scores.read(page)
        if self.pins:
            slots = self.pins.gathered(slots, self.seen)
        return compress(
            page,
            slots,
            method,
            aim.budget,
            asked,
            limit=aim.limit,
            room=functools.partial(self.pace.space, aim),
            bits=self.pace.bits,
            decoding=decoding,
            around=aim.around,
        )

    @property
    def running_error(self) -> Tensor | None:
        """Relative error of a few of the prompt's last queries over all tokens seen, as if they
        came now, float64 ``[batch, num_key_value_heads]``; None without ``track_error`` and before
        the first compression."""
        return self.errors.running(self.slots, self.seen) if self.seen else None

    def ask(self, observed: Observed, about: slice | Tensor, sample: int) -> None:
        """Take the queries of a part of a second reading, see ``Scores.ask``."""
        self.page = self.scores.ask(self.page, observed, about, sample)
        self.seen -= observed.queries.shape[2]

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn`` (which acts on axis 0, the batch) to all tensors: beam search, repeating or
        selecting rows."""
        self.method.map_batch(fn)
        if self.pace.budget is not None:
            self.pace.budget = self.pace.budget.map_batch(fn)
        if self.held_page is not None:
            self.held_page = self.held_page.map(fn)
        self.errors.map_batch(fn)
        self.scores.map_batch(fn)

    def adopt(self, slots: Slots, seen: int, budget: HeadBudgets, bits: Bits) -> None:
        """Hold slots that were made elsewhere, scores included, instead of what is held, and
        compress them if they are more than the budget.

        Args:
            slots: ``[batch, num_key_value_heads, n, ...]`` in the order of the tokens, dead ones
                anywhere.
            seen: number of tokens that they represent.
            budget: budget of every head from now on.
            bits: of the slots between sinks and recent window.
        """
        if slots.score is not None:
            slots = replace(slots, score=unmarked(slots.score))
        pace, before = self.pace, self.compressed
        self.page, self.seen, self.begun = Page.of_tokens(slots), seen, True
        self.pins.tail = seen  # which slots are tokens is not known
        pace.budget, pace.rhythm, pace.limit = budget, None, 0
        pace.store(bits, seen)
        self.scores.queries.clear()
        self.errors.reset()
        if before or slots.count < seen or self.due(prefill=True):
            self._compress(budget, prefill=True, last=None)

    def number_rows(self, rows: Tensor) -> None:
        """Say which rows of another batch these are (int64 ``[batch]``): random choices are then
        those that would be made there."""
        self.method.number_rows(rows)
        if self.held_page is not None:
            self.held_page.number_rows(rows)

    def crop(self, tokens: int) -> None:
        """Remove the last ``tokens`` tokens; only possible before the first compression.

        Raises:
            UnsupportedError: tokens were compressed already.
        """
        if self.compressed:
            raise UnsupportedError(
                f"crop({-tokens}) needs the last {tokens} tokens one by one, but this cache is "
                "already compressed; use a budget >= the number of tokens, or DynamicCache"
            )
        if not self.seen or tokens == 0:
            return
        if self.waits:
            self.scores.queries.clear()
        else:
            self.scores.fold(self.page)
        self.page.drop(tokens)
        self.seen = max(0, self.seen - tokens)

    def drop(self, tokens: int) -> None:
        """Remove the last ``tokens`` tokens, which were appended since the last ``settle``."""
        self.page.drop(tokens)
        self.seen -= tokens

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        held = [] if self.held_page is None else self.held_page.tensors()
        parts = (self.method, self.errors, self.scores)
        return held + [tensor for part in parts for tensor in part.tensors()]
