"""The stream of one layer: its tokens or slots, and when it compresses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.arguments import PIECE
from kvsketch.budget import Budget
from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.compress import Newest, compress, compress_newest, scored
from kvsketch.cache.echo import Echo, some_of
from kvsketch.cache.error import QUERIES, Errors
from kvsketch.cache.pins import Pins
from kvsketch.cache.queries import Queries
from kvsketch.cache.sketch_page import SketchPage
from kvsketch.cache.storage import bits_of
from kvsketch.cache.windowed_sketch import WindowedSketch
from kvsketch.errors import InputError, UnsupportedError
from kvsketch.kernels import cpu
from kvsketch.methods.base import Compressor
from kvsketch.observed import Observed
from kvsketch.page.fields import owned
from kvsketch.page.page import Page
from kvsketch.page.part import Part
from kvsketch.page.quantized import FULL, Bits
from kvsketch.page.schedule import Rhythm, Schedule, pieces
from kvsketch.slots import Slots, compute_dtype

#: Added to the scores of a question's tokens while it is answered; scores are far below it.
MARK = 64.0


class _Aim(NamedTuple):
    """What a compression of a page aims at.

    Attributes:
        budget: slots per KV head, or of every head, int64 ``[batch, num_key_value_heads]``.
        limit: heads of at most so many slots need not be reduced.
        room: the buffer.
        around: numbers of first and of last tokens that stay unchanged.
    """

    budget: int | Tensor
    limit: int | Tensor
    room: int
    around: tuple[int, int]


class Stream:
    """Slots of one attention layer as a stream.

    Three verbs, in this order for every chunk of tokens: ``extend`` with the new tokens, let the
    model attend to what is ``open``, ``settle`` (record the queries, compress if due). Nothing is
    compressed while all tokens fit the budget, nor while there is no budget: a plan that measures
    hands it down later (``spend``). Once something was compressed, the slots live on a
    page: every head has its budget and a buffer, which decoding fills; when it is full, all heads
    are compressed to a buffer below their budgets. No token allocates in between.

    A stream that is ``streaming`` reads a prompt in pieces: each is attended to together with what
    is held, and compressed with it. ``settle`` must then be called where ``cuts`` says. With
    ``rhythm``, it holds what a page of a serving engine would hold.

    Args:
        method: a method with its sink and recent window.
        budget: how many slots may be kept, of all heads or head by head; None: not known yet.
        buffer: number of slots by which tokens after the first compression may exceed the budget,
            >= 1. A chunk of a prompt is then compressed to the budget. Decoding compresses
            to 3 times as much below it (once as much below it in fewer than 16 bits and with a
            sketch), so that it compresses every ``4 * buffer`` tokens (``2 * buffer``). Default:
            1/40 of the average head's budget, at least 1, at most 64, so that all pages, scores
            included, stay within 5% of it.
        one_shot: compress after prefill only; decoded tokens are then kept unchanged (as in SubGen
            section 3.2) and memory grows with them.
        bits: 16: keys and values are stored in their own dtype. 8 or 4: those between sinks and
            recent window are stored in this many bits from the end of the prompt on, whether or not
            the prompt fits the budget (a budget of 1.0 only quantises); sinks, recent window,
            buffer, masses and scores stay unchanged. Not with a sketch, whose state has the dtype
            of the tokens. "measured": 16 until a plan gives other bits with the budget.
        track_error: keep the exact outputs of a few queries up to date (``running_error``).
        streaming: compress prompts in pieces, if the method is a compressor.

    Attributes:
        streaming: as given.
        piece: pieces of a prompt end at multiples of so many tokens.
        sketch, compressor: the method, if it is one.
        rhythm: of a stream that compresses prompts in pieces to a budget that is a number of slots
            and the same for all heads; None: of another.
        seen: tokens so far.
        compressed: whether any token was ever compressed.
        errors: the measured errors of the slots.
        echo: a prompt's queries, if they can be asked again after it; None: they cannot.
        begun: whether a first prompt, or a first token, is read to its end.
        held_page: ``page``; None: there is no token yet.
        asked_again: whether the scores of a prompt are those of its queries, asked again.

    Raises:
        InputError: buffer < 1, bits not as above, or not 16 with a sketch.
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
    ) -> None:
        if buffer is not None and (type(buffer) is not int or buffer < 1):
            raise InputError(f"buffer={buffer!r} must be an int >= 1 (tokens per recompression)")
        known = bits_of(bits)
        if known != FULL and not method.recompresses:
            raise InputError(
                f"bits={bits!r}: a streaming sketch keeps its state in the dtype of the tokens, so "
                "storing the slots for attention in fewer bits would save nothing; bits must be "
                "16 with a sketch"
            )
        self.method = method
        self.sketch: WindowedSketch | None = None
        self.compressor: Compressor | None = None
        if isinstance(method, WindowedSketch):
            self.sketch = method
        else:
            self.compressor = method
        self._given = HeadBudgets([[budget]]) if isinstance(budget, Budget) else budget
        self.one_shot = one_shot
        self._bits, self._buffer, self.streaming = known or FULL, buffer, streaming
        self.piece = PIECE
        self.queries, self.errors = Queries(), Errors(track_error)
        self.pins = Pins(*method.around)
        self.echo: Echo | None = None
        self.reset()

    def reset(self) -> None:
        """Remove all tokens, and a budget that a plan has given."""
        self.budget = self._given
        self.pins.clear()
        self._store(self._bits)
        self.seen = self._newest = 0  # tokens, and how many of them were appended last
        self.padded = False  # whether any token was padding, so that slots may be dead
        self.compressed = False
        self.held_page: Page | SketchPage | None = None
        self.rhythm: Rhythm | None
        self.echo = None
        self.asked_again = self._anew = self.begun = False
        self.answers = False  # whether tokens are decoded after the newest piece of a prompt
        self._last: Observed | None = None  # the prompt's last queries, if others wait
        self._heard: Tensor | None = None  # scores by an echo, during a second reading
        self.queries.clear()
        self.errors.reset()
        self._limit = 0  # appended tokens at which the page is due
        self._begin()
        self._bytes = 0  # beside which queries wait
        self.method.reset()

    def _store(self, bits: Bits) -> None:
        self.bits = bits
        (sink, recent), sketch = self.around, not self.method.recompresses
        given = self._buffer, bits != FULL, sketch, self.one_shot
        self.schedule = Schedule(sink, recent, *given)

    def _begin(self) -> None:
        """Set the rhythm that follows from the budget."""
        self.rhythm, budget = None, self.budget
        if budget is None or budget.even is None or not self.streaming or self.one_shot:
            return
        if isinstance(budget.value, float) or not self.method.recompresses or self.pins:
            return
        slots = budget.slots(budget.value + 1)
        assert isinstance(slots, int)
        self.rhythm = self.schedule.rhythm(slots)

    def wants_queries(self, count: int) -> bool:
        """Whether ``settle`` needs the queries of the newest ``count`` tokens."""
        return (
            self.method.requires.queries
            or self.budget is None
            or (count > 1 and not self.compressed)
        )

    @property
    def waits(self) -> bool:
        """Whether a plan still has to give the budget."""
        return self.budget is None

    @property
    def around(self) -> tuple[int, int]:
        """Slots at the start and at the end of a head that a compression now keeps unchanged."""
        sink, recent = self.method.around
        return sink + (self.pins.count(self.seen) if self.pins else 0), recent

    def pin(self, start: int, end: int) -> None:
        """Never compress the tokens from ``start`` to ``end``, see ``Pins.add``."""
        self.pins.add(start, end)
        self.rhythm = None  # an engine's pages have none
        self._count_pins()

    def _count_pins(self) -> None:
        """Let the pinned tokens that were read count in the budget."""
        self._store(self.bits)
        if self.budget is not None and self.budget.price.fixed:
            self.budget.price = replace(self.budget.price, window=sum(self.around))

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
    def tokens(self) -> tuple[Tensor, Tensor]:
        """Keys and values before the first compression, padding included."""
        return self.parted.tokens

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

    @property
    def buffer(self) -> int:
        """The number of slots by which decoding may exceed the budget."""
        assert self.budget is not None
        return self.schedule.buffer(self.budget.average(self.seen))

    def _room(self, count: int) -> int:
        """How many more tokens a page of ``count`` slots that is full may take before it is
        compressed."""
        assert self.budget is not None
        if self.one_shot:  # grows without limit, by a few per cent at a time
            return self.schedule.buffer(count)
        average = self.budget.average(self.seen)
        buffer = self.schedule.buffer(average)
        if self.schedule.few_bits:  # room is in full precision: only the buffer
            return buffer
        if self.budget.even is not None:
            return max(1, self.budget.even.slots(self.seen) + buffer - count)
        # The same for all heads and rows, independently of their sizes.
        return buffer + average - self.budget.average(self.seen - 1)

    def reopen(self) -> None:
        """Wait for a plan to divide the budget anew, because more of a prompt was read."""
        self.budget, self._anew = None, True

    def put_off(self) -> None:
        """Go on without a budget, after a prompt that is too short for one."""
        self._last = None
        if self.queries.after:  # these are in the scores
            self.queries.clear()

    def start(self, budget: HeadBudgets) -> None:
        """Take a budget that a plan gives while nothing is compressed."""
        self.budget = budget
        self._begin()

    def resume(self) -> None:
        """Go on from a page that was restored."""
        self.begun = True
        rhythm = self.rhythm
        if rhythm is not None and self.compressed:
            most = rhythm.kept + self.page.appended
            if bool((self.held > most).any()):
                self.rhythm = None  # it was put together from others

    def cuts(self, tokens: int, soon: bool) -> list[int]:
        """The numbers of tokens after which ``settle`` has to be called, if the last ``tokens``
        were appended one after another: their sum is ``tokens``. ``soon``: a piece can be
        compressed before other layers have read it."""
        if not self.streaming or self.compressor is None or not soon:
            return [tokens]
        return pieces(self.seen - tokens, tokens, self.piece)

    @property
    def undue(self) -> int:
        """How many decoded tokens can be appended until a compression is ``due``, and nothing else
        than to keep their queries and ``fold`` them. Before the first compression, after it with a
        rhythm, and in a sketch, more is always due."""
        if not self.compressed or self.rhythm is not None or not self.method.recompresses:
            return 0
        page = self.page
        return min(page.room, self._limit - page.appended)

    def most_queries(self, each: int) -> int:
        """How many queries of decoded tokens, of ``each`` bytes, become scores together."""
        return self.queries.most(self._bytes, each)

    def extend(self, new: Slots) -> None:
        """Append tokens, ``[batch, num_key_value_heads, q, ...]``."""
        q = self._newest = new.keys.shape[2]
        self.seen += q
        if self.held_page is None:
            self.held_page = Page.of_tokens(new)
            return
        page = self.held_page
        if self.compressed:
            if page.appended >= self._limit and self.rhythm is None:
                self._limit = page.appended + self._room(page.count)
            if page.room < q:
                # decoding takes a whole buffer at once, a chunk what it needs
                grown = max(q, self._limit - page.appended) if q == 1 else q
                before = page.appended
                page = self.held_page = page.grown(grown)
                self._limit += page.appended - before  # some count from 0 again
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
        piece = prefill and self._newest > 1 and not hold and self.compressor is not None
        self.begun |= not hold
        if self.pins:
            self._count_pins()
        if piece and not self.waits and (self.streaming or self.asks_piece):
            return self._settle_piece(observed)
        if self.rhythm is not None:
            return self._settle_at(self.rhythm, observed, hold)
        budget = self.budget
        wanted = self.method.requires.queries or hold  # at least to measure the error on
        if observed is not None and (budget is None or (wanted and not self._whole)):
            self.queries.add(observed)
            if self.echo is not None and prefill:
                self.echo.add(observed, self.seen)
        if budget is None:
            return False
        if not hold and self.due(prefill):
            if later and not prefill:
                return True
            last = (observed or self.queries.all()) if prefill else None
            if prefill:
                self.ask_again()
            self._compress(budget, prefill=prefill, last=last)
            return True
        if not hold:
            self.echo = None
        # Turn a prompt's queries into scores now (they are many), a decoded token's only now and
        # then. What looks at a window of queries only waits for the last chunk of a held prompt.
        if hold and not self.method.requires.queries:
            self.queries.keep_last(QUERIES)
        elif hold and self.method.window is not None:
            self.queries.keep_last(self.method.window)
        elif hold and self.method.requires.whole_prompt:
            pass
        elif prefill or (self.queries.count and self.queries.many(self._bytes)):
            self.fold()
        self.page.release()
        return False

    def _settle_at(self, rhythm: Rhythm, observed: Observed | None, hold: bool) -> bool:
        """``settle`` of decoded tokens with a rhythm. Queries become scores where it compresses,
        and only the last ones, which is all that a page in an engine's memory keeps."""
        assert self.budget is not None
        kept = rhythm.queries(self.method.window)
        due = self.due(prefill=False) and not hold
        if observed is not None and self.method.requires.queries:
            count = observed.queries.shape[2]
            last = observed.narrow(max(0, count - kept), min(count, kept))
            self.queries.add(replace(last, queries=owned(last.queries)))
            if due or self.queries.count >= 2 * kept:
                self.queries.keep_last(kept)
        if due:
            self._compress(self.budget, prefill=False, last=observed)
        self.page.release()
        return due

    @torch.no_grad()
    def _settle_piece(self, observed: Observed | None) -> bool:
        """``settle`` at the end of a piece of a prompt: all of its queries are asked again after
        it, if the method can use them, and it is compressed unless all fits."""
        method = self.compressor
        assert method is not None
        assert self.budget is not None
        if observed is not None and method.requires.echo:
            self.ask_piece_again(observed)
        else:
            self.queries.clear()
            if observed is not None and method.requires.queries:
                self.queries.add(observed)
        due = self.due(prefill=True)
        if due:
            self._compress(self.budget, prefill=self.rhythm is None, last=observed, fit=False)
        else:
            self.fold()
        self.page.release()
        return due

    @property
    def asks_piece(self) -> bool:
        """Whether more of a prompt, read after a compression, is asked again and compressed now."""
        return self.compressed and self.method.requires.echo and self.due(prefill=True)

    @property
    def may_wait(self) -> bool:
        """Whether the tokens just appended can wait until it is known what follows them: they take
        at most half of the slots."""
        if not self.compressed or self.streaming or self.budget is None:
            return False
        slots = torch.as_tensor(self.budget.slots(self.seen)).double().mean()
        return self.method.requires.echo and 2 * self._newest <= float(slots)

    @torch.no_grad()
    def ask_piece_again(self, observed: Observed) -> None:
        """Ask the queries of the newest piece of a prompt again after it: they become scores, and
        wait instead of all others; if there is no budget yet, a few of them, to measure on. Of a
        piece that is answered next, the tokens are marked, until the next piece."""
        method, page, asked = self.compressor, self.parted, replace(observed, after=True)
        assert method is not None
        slots = page.read(exactly=page.middle is not None)
        score = scored(method, slots, observed, asked).score
        assert score is not None
        score = unmarked(score)
        if self.answers:
            score[..., -self._newest :] += MARK
        page.set_score(score)
        self.queries.clear()
        if self.waits:
            self.queries.add(observed)
            self._last, self.asked_again = self.queries.last(QUERIES), True
            self.queries.clear()
            asked = some_of(asked)
        self.queries.add(asked)

    @torch.no_grad()
    def hear(self, observed: Observed, tokens: int) -> None:
        """Take the queries of the newest tokens of a prompt of which a sample will be read again:
        at its end, after ``tokens``, all of them are asked again."""
        if self.echo is None:
            return
        self.echo.add(observed, self.seen)
        if self.echo.covered == tokens:  # scores are far smaller than the queries
            self._heard = self.method.echo(self.slots, *self.echo.asked(), alone=True).score
            self.echo = None

    @torch.no_grad()
    def ask_again(self) -> bool:
        """Ask the prompt's own queries again, after it: they become scores, and a few of them wait
        instead of the last ones. Returns whether this was possible."""
        echo, self.echo = self.echo, None
        if echo is None or self.compressed or not 0 < echo.covered == self.seen:
            return False
        slots = self.scored()
        asked, sample = echo.asked()
        score = self.method.echo(slots, asked, sample, alone=False).score
        assert score is not None
        self.page.set_score(score)
        self._last, self.asked_again = self.queries.last(QUERIES), True
        self.queries.clear()
        self.queries.add(some_of(asked))
        return True

    @property
    def _whole(self) -> bool:
        """Whether all tokens are always kept unchanged."""
        return not self.compressed and self.bits == FULL and bool(self.budget and self.budget.whole)

    def due(self, prefill: bool) -> bool:
        """Whether ``settle`` would compress now."""
        if self.budget is None:
            return False
        if self.rhythm is not None and not self.compressed:
            return self.seen > self.rhythm.first if prefill else self.seen >= self.rhythm.slots
        if self.rhythm is not None and prefill:
            return True
        if self.compressed and not self.one_shot:
            return self.page.appended >= self._limit
        if self.one_shot and not prefill:
            return False
        # Tokens that were never compressed: at the end of a prompt if they exceed the budget,
        # otherwise if they exceed it by a buffer; in few bits also if they fit it.
        fits, schedule = self.budget.slots(self.seen), self.schedule
        least = schedule.least(fits) if schedule.few_bits else fits
        above = self.held.to(torch.int64) - torch.as_tensor(least)
        return bool((above >= (1 if prefill else self.buffer)).any())

    def spend(
        self,
        budget: HeadBudgets,
        provisional: bool = False,
        bits: Bits | None = None,
        fit: bool = True,
    ) -> None:
        """Compress to a budget that a plan gives, with the waiting queries.

        Args:
            budget: of every head.
            provisional: it is an upper bound; the final one will follow.
            bits: bits of the slots from now on; None: unchanged.
            fit: slots may be fitted to the waiting queries, which are those of a prompt.
        """
        if not provisional:
            self.budget = budget
        if bits is not None:
            self._store(bits)
        size = torch.as_tensor(budget.slots(self.seen, len(self.held)))
        fits = bool((self.held <= size).all())
        if provisional and fits and self.compressed:
            pass  # to that bound already
        elif provisional or not (budget.whole and self.bits == FULL and fits):
            last = self._last or self.queries.all()
            self._compress(budget, prefill=True, last=last, provisional=provisional, fit=fit)
        elif not provisional:
            self.fold()
        if provisional:
            self.queries.keep_last(self.method.window or 0)
        else:
            self.queries.clear()
            self._anew = False

    @torch.no_grad()
    def compact(self, smaller: HeadBudgets, own: HeadBudgets, bits: Bits) -> None:
        """Compress to a budget once.

        Args:
            smaller: that budget.
            own: the budget from now on.
            bits: of the slots from now on.
        """
        self.fold()
        if (score := self.slots.score) is not None:  # the answer has been given
            self.page.set_score(unmarked(score))
        self.rhythm, self.begun = None, True
        self._store(bits)
        self._compress(smaller, prefill=True, last=self._last, fit=False)
        self.budget = own

    @torch.no_grad()
    def _compress(
        self,
        budgets: HeadBudgets,
        prefill: bool,
        last: Observed | None,
        provisional: bool = False,
        fit: bool = True,
        whole: bool = False,
    ) -> None:
        """Compress to the budgets now; ``last``: queries to measure the error on; ``whole``: all
        slots, also if the newest would do."""
        begins, rhythm = not self.compressed, self.rhythm
        if self.errors.probing:
            self.errors.update(self.slots, self.seen)
        aim = self._aim(budgets, prefill, provisional)
        first = prefill or (begins and rhythm is not None)
        if begins and first and last is not None:
            recent = int(torch.as_tensor(self.schedule.recent_within(aim.budget)).min())
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
                method.restart(torch.full((len(self.held),), self.seen))
            # Only to the queries of a whole prompt: those of a part do not ask for all of it.
            fit = fit and prefill and not self.streaming and not self._anew
            page = self._slotted(method, aim, fit, whole)
        self._turn_to(page, aim, budgets, provisional)
        if first:
            self.errors.compressed(self.open(), final=not provisional)
        page.release(lookups=True)  # of the errors; many decode without them

    def _aim(self, budgets: HeadBudgets, prefill: bool, provisional: bool = False) -> _Aim:
        """What a compression to these budgets aims at now."""
        limit = budget = budgets.slots(self.seen, len(self.held))
        room, (sink, recent) = 0, self.around
        if self.rhythm is not None:
            limit = budget = self.rhythm.kept
            room = self.rhythm.every // self.schedule.period
        elif not prefill:
            room = self.buffer
            budget = self.schedule.below(budget, room, budgets.price.slot, budgets.price.whole)
            if isinstance(limit, Tensor):  # heads that keep every token have no use for room
                budget = torch.where(limit >= self.seen, limit, budget)
            elif self.schedule.few_bits and limit >= self.seen:
                budget = limit
            if self.schedule.few_bits:  # new tokens cost more bytes than the slots they become
                limit = budget
        if self.pins:  # they are kept, whatever the budget is
            limit, budget = (_at_least(x, sink + recent + 1) for x in (limit, budget))
        if provisional:  # the queries of the final compression must attend to the same tokens
            recent = max(recent, self.method.window or 0)
        return _Aim(budget, limit, room, (sink, recent))

    def _turn_to(
        self, page: Page | SketchPage, aim: _Aim, budgets: HeadBudgets, provisional: bool = False
    ) -> None:
        """Go on from a page that was compressed now."""
        self._limit = page.appended + page.room
        # All heads of groups equally, independently of their sizes.
        if page.places is not None:
            self._limit = page.appended + self.schedule.period * aim.room
        self.page, self.compressed = page, True
        within = torch.as_tensor(self.schedule.recent_within(aim.budget))  # few leave no room
        self.pins.passed(self.seen, int(within.min()))
        self._last = None
        if not provisional:
            self.queries.clear()
        self._bytes = self._allowed(budgets)

    def _newest_of(self, page: Page, aim: _Aim) -> Newest | None:
        """What becomes of the newest tokens, if no others need be compressed."""
        method = self.compressor
        if method is None or not method.local or page.middle is None or self.rhythm is not None:
            return None
        self.fold()
        room = self.schedule.period * aim.room
        return Newest.of(page, aim.budget, around=aim.around, room=room)

    def newest(self) -> tuple[Newest, Callable[[Page], None]] | None:
        """What becomes of the newest tokens now that a compression is due while it decodes, and
        what takes the next page. None: more than these must be compressed (``compress_due``)."""
        budget = self.budget
        assert budget is not None
        if self.sketch is not None:
            return None
        if self.errors.probing:
            self.errors.update(self.slots, self.seen)
        aim = self._aim(budget, prefill=False)
        newest = self._newest_of(self.parted, aim)

        def turn_to(page: Page) -> None:
            self._turn_to(page, aim, budget)
            page.release(lookups=True)

        return None if newest is None else (newest, turn_to)

    def compress_due(self) -> None:
        """Compress all slots while it decodes."""
        assert self.budget is not None
        self._compress(self.budget, prefill=False, last=None, whole=True)

    def _allowed(self, budgets: HeadBudgets) -> int:
        """The bytes of a budget in the dtype of the tokens. Queries become scores together by their
        number beside these bytes: by what is held, it would depend on the other rows of a batch."""
        if self.sketch is not None:
            return sum(tensor.nbytes for tensor in self.tensors())
        token = self.parted.newest(1)
        return budgets.average(self.seen) * (token.keys.nbytes + token.values.nbytes)

    def _space(self, aim: _Aim, kept: int) -> int:
        """How many slots can be appended to every head of a page of ``kept`` slots."""
        often = self.schedule.period * aim.room
        if self.rhythm is not None:
            return self.rhythm.every
        if isinstance(aim.limit, Tensor) or self.bits != FULL:
            return often
        return max(aim.limit, kept) + aim.room - kept

    def _slotted(self, method: Compressor, aim: _Aim, fit: bool, whole: bool) -> Page:
        """The next page of a compressor's."""
        page = self.parted
        asked = self.queries.all()
        newest = None if fit or whole else self._newest_of(page, aim)
        smaller = None if newest is None else compress_newest(method, [newest])[0]
        if smaller is not None:
            return smaller
        self._received()
        slots = page.read(exactly=page.middle is not None)
        if self.rhythm is not None:  # as in an engine's memory, where every slot has a mass
            slots = replace(slots, values=slots.values.to(compute_dtype(slots.values.dtype)))
        # Scored before: where nothing is compressed, the queries must not be lost either.
        slots = self._scored(slots)
        if self.pins:
            fit = fit and not self.pins.reached(self.seen)
            slots = self.pins.gathered(slots, self.seen)

        return compress(
            page,
            slots,
            method,
            aim.budget,
            asked,
            limit=aim.limit,
            room=functools.partial(self._space, aim),
            bits=self.bits,
            fit=fit,
            around=aim.around,
        )

    @property
    def running_error(self) -> Tensor | None:
        """Relative error of a few of the prompt's last queries over all tokens seen, as if they
        came now, float64 ``[batch, num_key_value_heads]``; None without ``track_error`` and before
        the first compression."""
        return self.errors.running(self.slots, self.seen) if self.seen else None

    def importance(self) -> Tensor:
        """The importance of the tokens to the method, float ``[batch, num_key_value_heads, n]``;
        -inf for padding.

        Raises:
            UnsupportedError: the method has none.
        """
        method = self.method
        slots = self._scored(self.slots)
        found = method.importance(slots)
        if found is None:
            raise UnsupportedError("this method has no scores by which heads could be compared")
        live = slots.live()
        return found if live is None else found.masked_fill(~live, -torch.inf)

    @torch.no_grad()
    def ask(self, observed: Observed, about: slice | Tensor, sample: int) -> None:
        """Record the queries of a part of a second reading, whose tokens are the newest here and go
        again: they are no part of the stream.

        Args:
            observed: the queries.
            about: the tokens of the first reading that are read again, as in ``Compressor.reread``.
            sample: of the queries, which are kept for what else looks at queries.
        """
        slots = self.slots
        if self.method.requires.queries:
            score = self.method.reread(slots, observed, about).score
        self.drop(observed.queries.shape[2])
        self.page = self.page.map(Tensor.detach)  # of a reading that took gradients
        if self.method.requires.queries and score is not None:
            self.page.set_score(score)
        step = max(1, observed.queries.shape[2] // max(1, sample))
        some = replace(observed, after=True, weights=None).every(0, step)
        self.queries.add(replace(some, queries=some.queries.clone()))

    def complete(self, sample: Tensor) -> None:
        """The second reading is over and repeated only these tokens, int64, in order. Scores are
        those of the prompt's echo; without one, the others' are predicted from these tokens'."""
        heard, self._heard = self._heard, None
        if heard is not None:
            self.page.set_score(heard)
        elif self.method.requires.queries:
            score = self.method.complete(self.slots, sample).score
            assert score is not None
            self.page.set_score(score)

    def scored(self) -> Slots:
        """``slots`` with scores updated by the waiting queries."""
        return replace(self.slots, score=self._scored(self.slots).score)

    def _scored(self, slots: Slots) -> Slots:
        """Slots with the waiting queries folded in. What these saw is still all here, so this
        equals observing every query at its own time."""
        observed = self.queries.all()
        if observed is None or observed.after:
            return slots  # those of a second reading are in the scores already
        return replace(slots, score=self.method.observe(slots, observed).score)

    @torch.no_grad()
    def fold(self) -> None:
        """Update scores by the waiting queries now."""
        if not self.queries.count:
            return
        if self._received():
            return
        page = self.page
        score = self._scored(page.to_score(self.method.requires.values)).score
        self.queries.clear()
        if score is not None:
            page.set_score(score)
            page.release()

    def _received(self) -> bool:
        """Update scores by the waiting queries where the slots are, if a kernel can: they are not
        turned into floats for it."""
        asked = self.queries.all()
        if asked is None or not self.compressed or self.rhythm is not None:
            return False  # with a rhythm, slots are to be those of an engine
        weights = self.method.weights_of(asked) if cpu.takes(asked.queries) else None
        if weights is None:
            return False
        parts = self.page.scored()
        group = asked.queries.shape[1] // parts[0].heads
        if not cpu.receive(asked, parts, weights / group):
            return False
        self.queries.clear()
        return True

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn`` (which acts on axis 0, the batch) to all tensors: beam search, repeating or
        selecting rows."""
        self.method.map_batch(fn)
        if self.budget is not None:
            self.budget = self.budget.map_batch(fn)
        if self.held_page is not None:
            self.held_page = self.held_page.map(fn)
        self.errors.map_batch(fn)
        self.queries.map_batch(fn)
        if self.echo is not None:
            self.echo.map_batch(fn)

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
        page, self.begun = Page.of_tokens(slots), True
        self.pins.tail = seen  # which slots are tokens is not known
        self.held_page, self.seen, self.budget, self._limit = page, seen, budget, 0
        self.compressed, before, self.rhythm = False, self.compressed, None
        self.queries.clear()
        self.errors.reset()
        self._store(bits)
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
            self.queries.clear()
        else:
            self.fold()
        self.page.drop(tokens)
        self.seen = max(0, self.seen - tokens)

    def drop(self, tokens: int) -> None:
        """Remove the last ``tokens`` tokens, which were appended since the last ``settle``."""
        self.page.drop(tokens)
        self.seen -= tokens

    @property
    def above_budget(self) -> bool:
        """Whether there are more slots than budget and buffer allow."""
        if self.budget is None:
            return False
        budget = torch.as_tensor(self.budget.slots(self.seen))
        return bool((self.held > budget + self.buffer).any())

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        held = [] if self.held_page is None else self.held_page.tensors()
        held += [] if self._last is None else [self._last.queries]
        held += [] if self._heard is None else [self._heard]
        parts = (self.method, self.errors, self.queries, self.echo)
        return held + [tensor for part in parts if part is not None for tensor in part.tensors()]


def unmarked(score: Tensor) -> Tensor:
    """Scores without ``MARK``, which are summed where slots are merged."""
    return torch.where(score >= MARK, score.remainder(MARK), score)


def _at_least(slots: int | Tensor, least: int) -> int | Tensor:
    return max(slots, least) if isinstance(slots, int) else slots.clamp(min=least)
