"""The plan: when layers get their budgets, and in how many bits their slots are stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsketch.budget import Budget
from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.curves import Curves
from kvsketch.cache.error import QUERIES
from kvsketch.cache.held_out import least_tokens
from kvsketch.cache.measure import Measurements, measurable
from kvsketch.cache.retrieval_heads import RetrievalHeads
from kvsketch.cache.shard import Shard
from kvsketch.cache.solvers import (
    ByScores,
    LayerBudgets,
    Prompt,
    Solver,
    fitting,
    price_of,
)
from kvsketch.cache.stream import Stream
from kvsketch.page.quantized import FULL, Bits


class Plan:
    """Gives layers their budgets, which a solver computes. The cache owns it and calls
    ``hand_down`` when the attention of a layer is computed.

    A budget is the bytes of that many tokens in the model's own dtype: in 8 or 4 bits it buys more
    slots. With several choices of bits, the solver chooses a layer's.

    Args:
        solver: how the budget is divided.
        choices: bits of the slots, or several to choose from; slots under an upper bound are stored
            in the first ones.
        reread: the solver after a second reading of the prompt, or after its own queries were asked
            again (``read_again``); None: the same.

    Attributes:
        again: whether the budgets are those after a second reading, or after an echo.
        above: heads above the tolerance in any row, bool ``[heads]``, by layer.
    """

    def __init__(
        self, solver: Solver, choices: Sequence[Bits] = (FULL,), reread: Solver | None = None
    ) -> None:
        self.solver = solver
        self._solvers = solver, reread or solver
        self.again = False
        self._layers, self._heads = 0, 0
        self.above: dict[int, Tensor] = {}
        self._measured = Measurements(choices)
        #: bytes of a number of a token, of which a budget is a share; None: those of the keys. The
        #: benchmarks set 2, so that a model in float32 stands for one in 16 bits.
        self.itemsize: int | None = None

    @property
    def kind(self) -> str:
        """The name of the way in which the budget is divided."""
        return self.solver.name

    @property
    def budget(self) -> Budget | None:
        """The average over layers and heads; None with a tolerance."""
        return self.solver.goal.budget

    @property
    def tolerance(self) -> float | None:
        """Limit on every head's relative error; None with a budget."""
        return self.solver.goal.tolerance

    @property
    def max_budget(self) -> Budget | None:
        """Limit on the average cost of a tolerance; None: no limit."""
        return self.solver.goal.max_budget

    @property
    def curves(self) -> Curves | None:
        """Errors measured beforehand."""
        return self.solver.curves

    @property
    def retrieval(self) -> RetrievalHeads | None:
        """Scores of retrieval heads."""
        return self.solver.retrieval

    def begin(
        self, layers: int, heads: int, window: int = 0, model: str | None = None
    ) -> list[HeadBudgets | None]:
        """The budgets of every layer that are known before the first token; None if they follow
        from the prompt.

        Args:
            layers: how many are compressed.
            heads: KV heads of the model. A layer that has fewer is one of a tensor-parallel rank:
                budgets are then spread over the heads of all ranks.
            window: sinks and recent tokens.
            model: its name by ``curves.model_shape``; None: unknown.

        Raises:
            InputError: a schedule, curves or scores for other heads.
        """
        self._layers, self._heads = layers, heads
        self.solver.check(layers, heads, model)
        if self.retrieval is not None:
            assert self.budget is not None
            return [*self.retrieval.budgets(float(self.budget.value), window, layers, heads)]
        rows = None if self.prices else self.solver.before(layers, heads, window)
        return [None] * layers if rows is None else [HeadBudgets([row]) for row in rows]

    def read_again(self, again: bool) -> None:
        """Say whether the queries ask for the whole prompt: those of a second reading, or its own
        again."""
        self.again, self.solver = again, self._solvers[again]

    def asks_again(self, stream: Stream) -> bool:
        """Whether a prompt's own queries are to be asked again: the budgets that follow then
        neither come from measured errors nor need the heads of other processes."""
        solver = self._solvers[True]
        measures = solver.measures or solver.curves is not None
        sharded = solver.compares and Shard.of(stream.heads, self._heads).ranks > 1
        return not measures and not sharded

    @property
    def renews(self) -> bool:
        """Whether the budget is divided anew where more of a prompt is compressed: by scores of its
        own queries, which are alike in all parts of it."""
        return self.again and self.solver.compares

    @property
    def chooses(self) -> bool:
        """Whether it chooses bits."""
        return len(self._measured.choices) > 1

    @property
    def prices(self) -> bool:
        """Whether slots are not stored in the model's dtype, so that their number follows from
        their price."""
        return self._measured.choices[0] != FULL or self.chooses

    def ready(self, stream: Stream, prefill: bool) -> bool:
        """Whether a waiting layer has enough tokens to compute its budget."""
        if self.budget is not None and not self.budget.is_fraction:
            budget = self.budget.slots(stream.seen)
            above = 0 if prefill else stream.pace.schedule.buffer(budget)
            return stream.seen > budget and stream.seen >= budget + above
        return not self._needs_prompt or self._enough(stream) or self._all_window(stream)

    def _enough(self, stream: Stream) -> bool:
        """Whether errors can be measured on a stream, or scores compared that it has already."""
        if self._solvers[stream.scores.asked_again].compares and stream.scores.asked_again:
            return self._long(stream)
        return measurable(stream)

    def _long(self, stream: Stream) -> bool:
        return stream.seen >= least_tokens(*stream.around)

    @property
    def _needs_prompt(self) -> bool:
        """Whether it needs a prompt that is long enough to measure on, or scores of one."""
        return self.chooses or self.solver.needs_prompt

    def known(self, number: int, stream: Stream) -> HeadBudgets | None:
        """The budgets of a layer that follow from the shape of its first tokens, on which the price
        of slots in few bits depends; None: they follow from more of the prompt."""
        rows = self.solver.before(self._layers, self._heads, 0)
        if self._needs_prompt or rows is None or self.kind != "even":
            return None
        row = Shard.of(stream.slots.keys.shape[1], self._heads).own(rows[number])
        price = price_of(stream, self._measured.choices[0], self.itemsize)
        return HeadBudgets([row], price=price)

    def _all_window(self, stream: Stream) -> bool:
        """Whether sinks and recent window take the whole budget of a prompt that would otherwise be
        measured, so that nothing is left to allocate."""
        if self.budget is None:
            return False
        sink, recent = stream.pace.window(self._measured.choices[0], stream.seen)
        slots = self.budget.slots(stream.seen)
        least = least_tokens(sink, min(recent, max(32, slots - sink)))
        return slots <= sink + recent and stream.seen >= least

    @torch.no_grad()
    def hand_down(
        self, stream: Stream, streams: Sequence[Stream], prefill: bool, hold: bool = False
    ) -> bool:
        """Compute the budgets that follow from the prompt of a waiting stream, and pass them on.

        Args:
            stream: one of ``streams``, those of all layers, in their order.
            prefill: as for ``Stream.settle``.
            hold: more of the prompt will follow.

        Returns:
            Whether any layer was compressed.
        """
        window = stream.method.window
        if window is not None or not stream.method.requires.queries:
            most = 128 + max(QUERIES, window or 0)  # the last queries are enough to measure on
            if stream.scores.queries.count > 2 * most:
                stream.scores.queries.keep_last(most)
        if hold:
            return False
        if prefill:
            stream.scores.ask_again(stream.page, stream.seen)
        if not self.ready(stream, prefill):
            stream.scores.forget(waiting=stream.scores.queries.after)  # these are in the scores
            return False
        if stream.scores.asked_again:
            self.read_again(True)
        number = next(i for i, other in enumerate(streams) if other is stream)
        found = self._given(number, streams)
        for given in found:
            if given.above is not None:
                self.above[given.layer] = given.above
            bits = given.bits if self.prices else None
            streams[given.layer].spend(given.budgets, given.provisional, bits)
        if stream.waits and window is not None:
            stream.scores.queries.keep_last(window)  # it has been measured
        elif stream.waits and number in self._measured.layers:
            stream.scores.fold(stream.page)  # all queries count, and scores are smaller
        return bool(found)

    @torch.no_grad()
    def compact(self, streams: Sequence[Stream], to: Budget) -> None:
        """Compress all layers to a budget once: by their scores, if budgets follow from these, else
        with the shares that they have."""
        assert self.budget is not None
        solver, found = self._solvers[True], []
        again = self.again or all(stream.scores.asked_again for stream in streams)
        if isinstance(solver, ByScores) and again:
            solver = ByScores(solver.name, to)
            shard, size = Shard.of(streams[0].heads, self._heads), (self._layers, self._heads)
            for number in range(len(streams)):
                prompt = Prompt(number, streams, shard, *size, self._measured, self.itemsize)
                found += [given for given in solver.solve(prompt) if not given.provisional]
            self.read_again(True)
        for number, stream in enumerate(streams) if not found else ():
            budgets, bits = stream.pace.budget, stream.pace.bits
            if budgets is None:
                bits, price = fitting(to, self._measured.choices, stream, self.itemsize)
                budgets = HeadBudgets([[self.budget] * stream.heads], price=price)
            found.append(LayerBudgets(number, budgets.of(to.value), bits))
        for given in found:
            own = given.budgets.of(self.budget.value)
            streams[given.layer].compact(given.budgets, own, given.bits)

    def _given(self, number: int, streams: Sequence[Stream]) -> list[LayerBudgets]:
        """What to pass on, now that layer ``number`` has its prompt."""
        stream, heads = streams[number], streams[number].heads
        shard = Shard.of(heads, self._heads)
        if self._needs_prompt and not self._enough(stream):
            # a number of slots, which must not be exceeded, or nothing to allocate
            assert self.budget is not None
            choices = self._measured.choices if self._long(stream) else [stream.pace.bits]
            bits, price = fitting(self.budget, choices, stream, self.itemsize)
            return [LayerBudgets(number, HeadBudgets([[self.budget] * heads], price=price), bits)]
        if self.solver.measures or (self.chooses and self.solver.curves is not None):
            own = None if self.solver.alone else shard
            self._measured.take(number, stream, own, self.itemsize)
        size = self._layers, self._heads
        prompt = Prompt(number, streams, shard, *size, self._measured, self.itemsize)
        return self.solver.solve(prompt)

    @property
    def waiting(self) -> bool:
        """Whether it has measured some layers, or has scores of some, and waits for others."""
        return bool(self._measured.layers) or self.solver.waiting

    def forget(self, number: int) -> None:
        """Discard measurements of a layer that has changed."""
        self._measured.forget([number])
        for solver in self._solvers:
            solver.forget(number)
        self.above.pop(number, None)
