"""When a stream is compressed, and to how many slots: its budget as numbers of slots."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.arguments import PIECE
from kvsketch.budget import Budget
from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.pins import Pins
from kvsketch.cache.sketch_page import SketchPage
from kvsketch.cache.storage import bits_of
from kvsketch.cache.windowed_sketch import WindowedSketch
from kvsketch.errors import InputError
from kvsketch.methods.base import Compressor
from kvsketch.page.page import Page
from kvsketch.page.quantized import FULL, Bits
from kvsketch.page.schedule import Rhythm, Schedule, pieces, recent_beside


class Aim(NamedTuple):
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


class Pace:
    """The pace at which a stream is compressed: what its budget, buffer and bits allow a page to
    hold after ``seen`` tokens.

    Args:
        method: a method with its sink and recent window.
        pins: tokens that stay unchanged besides these.
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
        streaming: compress prompts in pieces, if the method is a compressor.
        goal: the budget on average over layers and heads, of which recent tokens take a part at
            most beside slots in few bits; None: all recent tokens stay as they are.

    Attributes:
        streaming: as given.
        piece: pieces of a prompt end at multiples of so many tokens.
        given: the budget as given.
        budget: the budget now; None: a plan still has to give it.
        bits: of the slots between sinks and recent window now.
        schedule: the rule that follows from bits and buffer.
        rhythm: of a stream that compresses prompts in pieces to a budget that is a number of slots
            and the same for all heads; None: of another.
        limit: the number of appended tokens at which a compressed page is due.

    Raises:
        InputError: buffer < 1, bits not as above, or not 16 with a sketch.
    """

    def __init__(
        self,
        method: Compressor | WindowedSketch,
        pins: Pins,
        budget: Budget | HeadBudgets | None,
        buffer: int | None,
        one_shot: bool,
        bits: int | str,
        streaming: bool,
        goal: Budget | None = None,
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
        self._method, self._pins, self._buffer, self._one_shot = method, pins, buffer, one_shot
        self._goal = goal
        self._bits, self.streaming, self.piece = known or FULL, streaming, PIECE
        self.given = HeadBudgets([[budget]]) if isinstance(budget, Budget) else budget
        self.reset()

    def reset(self) -> None:
        """Begin again, and forget a budget that a plan has given."""
        self.store(self._bits, 0)
        self.start(self.given)
        self.limit = 0

    def store(self, bits: Bits, seen: int) -> None:
        """Store slots in these bits from now on."""
        self.bits = bits
        (sink, self._pins.recent), sketch = self.window(bits, seen), not self._method.recompresses
        given = self._buffer, bits != FULL, sketch, self._one_shot
        self.schedule = Schedule(sink, self._pins.recent, *given)

    def start(self, budget: HeadBudgets | None) -> None:
        """Take a budget while nothing is compressed, and the rhythm that follows from it."""
        self.budget = budget
        self.rhythm: Rhythm | None = None
        if budget is None or budget.even is None or not self.streaming or self._one_shot:
            return
        if isinstance(budget.value, float) or not self._method.recompresses or self._pins:
            return
        slots = budget.slots(budget.value + 1)
        assert isinstance(slots, int)
        self.rhythm = self.schedule.rhythm(slots)

    def cuts(self, seen: int, tokens: int) -> list[int]:
        """The numbers of tokens after which a stream has to ``settle``, if the last ``tokens`` of
        those seen were appended one after another: their sum is ``tokens``."""
        if not self.streaming or not self._method.recompresses:
            return [tokens]
        return pieces(seen - tokens, tokens, self.piece)

    def around(self, seen: int) -> tuple[int, int]:
        """Slots at the start and at the end of a head that a compression now keeps unchanged."""
        recent = self._pins.recent
        pinned = self._pins.count(seen, recent) if self._pins else 0
        return self._method.around[0] + pinned, recent

    def window(self, bits: Bits, seen: int) -> tuple[int, int]:
        """``around``, if the slots after ``seen`` tokens were in these bits: beside slots in few
        bits a small budget leaves room for few recent tokens. Streaming keeps all of them, as the
        pages of an engine do."""
        sink, recent = self._method.around
        if bits != FULL and self._goal is not None and seen and not self.streaming:
            recent = recent_beside(recent, self._goal.slots(seen))
        return sink + (self._pins.count(seen, recent) if self._pins else 0), recent

    def count_window(self, seen: int) -> None:
        """Let the tokens that stay as they are after so many tokens count in the budget."""
        self.store(self.bits, seen)
        if self.budget is not None and self.budget.price.fixed:
            self.budget.price = replace(self.budget.price, window=sum(self.around(seen)))

    def resume(self, page: Page | SketchPage) -> None:
        """Go on with a page that was restored."""
        if self.rhythm is not None and page.compressed:
            most = self.rhythm.kept + page.appended
            if bool((page.held > most).any()):
                self.rhythm = None  # it was put together from others

    def buffer(self, seen: int) -> int:
        """The number of slots by which decoding may exceed the budget."""
        assert self.budget is not None
        return self.schedule.buffer(self.budget.average(seen))

    def above(self, page: Page | SketchPage, seen: int) -> bool:
        """Whether there are more slots than budget and buffer allow."""
        if self.budget is None:
            return False
        budget = torch.as_tensor(self.budget.slots(seen), device="cpu")
        return bool((page.held.cpu() > budget + self.buffer(seen)).any())

    def due(self, page: Page | SketchPage, seen: int, prefill: bool) -> bool:
        """Whether the page is to be compressed now: at the end of a chunk of a prompt
        (``prefill``), or after a decoded token."""
        if self.budget is None:
            return False
        if self.rhythm is not None and not page.compressed:
            return seen > self.rhythm.first if prefill else seen >= self.rhythm.slots
        if self.rhythm is not None and prefill:
            return True
        if page.compressed and not self._one_shot:
            return page.appended >= self.limit
        if self._one_shot and not prefill:
            return False
        # Tokens that were never compressed: at the end of a prompt if they exceed the budget,
        # otherwise if they exceed it by a buffer; in few bits also if they fit it.
        fits, schedule = self.budget.slots(seen), self.schedule
        least = schedule.least(fits) if schedule.few_bits else fits
        above = page.held.cpu().to(torch.int64) - torch.as_tensor(least, device="cpu")
        return bool((above >= (1 if prefill else self.buffer(seen))).any())

    def may_wait(self, page: Page | SketchPage, seen: int, newest: int) -> bool:
        """Whether the newest tokens of those seen can wait until it is known what follows them:
        they take at most half of the slots."""
        if not page.compressed or self.streaming or self.budget is None:
            return False
        slots = torch.as_tensor(self.budget.slots(seen), device="cpu").double().mean()
        return self._method.requires.echo and 2 * newest <= float(slots)

    def undue(self, page: Page | SketchPage) -> int:
        """How many decoded tokens can be appended until a compression is ``due``, and nothing else
        than to keep their queries and turn them into scores. Before the first compression, after it
        with a rhythm, and in a sketch, more is always due."""
        if not page.compressed or self.rhythm is not None or not self._method.recompresses:
            return 0
        return min(page.room, self.limit - page.appended)

    def aim(
        self, seen: int, batch: int, budgets: HeadBudgets, prefill: bool, provisional: bool = False
    ) -> Aim:
        """What a compression to these budgets aims at now."""
        self.count_window(seen)
        limit = budget = budgets.slots(seen, batch)
        room, (sink, recent) = 0, self.around(seen)
        if self.rhythm is not None:
            limit = budget = self.rhythm.kept
            room = self.rhythm.every // self.schedule.period
        elif not prefill:
            room = self.buffer(seen)
            budget = self.schedule.below(budget, room, budgets.price.slot, budgets.price.whole)
            # Heads that keep every token have no use for room. In few bits, the tokens until the
            # next compression must fit, too, in a budget that does not grow with them.
            all_until, fixed = seen, isinstance(budgets.value, int)
            if self.schedule.few_bits and fixed:
                all_until += self.schedule.period * room
            if isinstance(limit, Tensor):
                budget = torch.where(limit >= all_until, limit, budget)
            elif self.schedule.few_bits and limit >= all_until:
                budget = limit
            if self.schedule.few_bits:  # new tokens cost more bytes than the slots they become
                limit = budget
        if self._pins:  # they are kept, whatever the budget is
            limit, budget = (_at_least(x, sink + recent + 1) for x in (limit, budget))
        if provisional:  # the queries of the final compression must attend to the same tokens
            recent = max(recent, self._method.window or 0)
        return Aim(budget, limit, room, (sink, recent))

    def space(self, aim: Aim, kept: int) -> int:
        """How many slots can be appended to every head of a page of ``kept`` slots."""
        often = self.schedule.period * aim.room
        if self.rhythm is not None:
            return self.rhythm.every
        if isinstance(aim.limit, Tensor) or self.bits != FULL:
            return often
        return max(aim.limit, kept) + aim.room - kept

    def compressed(self, page: Page | SketchPage, aim: Aim) -> None:
        """Count anew: the page was compressed now."""
        self.limit = page.appended + page.room
        # All heads of groups equally, independently of their sizes.
        if page.places is not None:
            self.limit = page.appended + self.schedule.period * aim.room

    def with_room(self, page: Page | SketchPage, tokens: int, seen: int) -> Page | SketchPage:
        """A compressed page that has room for the newest ``tokens`` of those seen."""
        if page.appended >= self.limit and self.rhythm is None:
            self.limit = page.appended + self._more(page.count, seen)
        if page.room >= tokens:
            return page
        # decoding takes a whole buffer at once, a chunk what it needs
        grown = max(tokens, self.limit - page.appended) if tokens == 1 else tokens
        before, page = page.appended, page.grown(grown)
        self.limit += page.appended - before  # some count from 0 again
        return page

    def _more(self, count: int, seen: int) -> int:
        """How many more tokens a page of ``count`` slots that is full may take before it is
        compressed."""
        assert self.budget is not None
        if self._one_shot:  # grows without limit, by a few per cent at a time
            return self.schedule.buffer(count)
        average = self.budget.average(seen)
        buffer = self.schedule.buffer(average)
        if self.schedule.few_bits:  # room is in full precision: only the buffer
            return buffer
        if self.budget.even is not None:
            return max(1, self.budget.even.slots(seen) + buffer - count)
        # The same for all heads and rows, independently of their sizes.
        return buffer + average - self.budget.average(seen - 1)


def _at_least(slots: int | Tensor, least: int) -> int | Tensor:
    return max(slots, least) if isinstance(slots, int) else slots.clamp(min=least)
