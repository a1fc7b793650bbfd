"""The plan: how a budget is divided among layers and KV heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvsketch.budget import SAFEGUARD, Budget, Schedule, scheduled
from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.curves import Curves, least_tokens, of_layers
from kvsketch.cache.error import QUERIES
from kvsketch.cache.goal import Goal
from kvsketch.cache.measure import Measurements, measurable
from kvsketch.cache.needs import by_need, by_variance
from kvsketch.cache.retrieval_heads import RetrievalHeads
from kvsketch.cache.shard import Shard
from kvsketch.cache.storage import Price, best_at, choose, priced
from kvsketch.cache.stream import Stream
from kvsketch.errors import UnsupportedError
from kvsketch.page.quantized import FULL, Bits

# A bound on a head is worth a compression if it removes this fraction of the head's slots.
_WORTH = 0.9
#: Allocations that compare scores.
BY_NEED = ("layer", "global", "variance")


class _Told(NamedTuple):
    """What a plan gives to a layer: the budgets of its heads, its bits (None: unchanged), and
    whether the budgets are upper bounds that will be replaced."""

    layer: int
    budgets: HeadBudgets
    bits: Bits | None = None
    provisional: bool = False


class Plan:
    """One of nine ways to divide a budget:

    - ``even``: the same budget for every head.
    - ``schedule``: shares of it, given per layer or per layer and head.
    - ``heads``: all tokens for a fraction of the heads, sinks and recent window for the others.
    - ``curves``: where errors fall most, by curves measured beforehand on other prompts.
    - ``measured``: the same, by curves measured on this prompt.
    - ``layer``, ``global``: by the method's scores, compared among the heads of a layer (AdaKV) or
      of the model (KVzip).
    - ``variance``: more in the layers whose scores vary less (D2O).
    - ``tolerance``: the fewest slots that keep every head's error within it, by curves of either
      kind; on average no more than ``max_budget``.

    A budget is the bytes of that many tokens in the model's own dtype: in 8 or 4 bits it buys more
    slots. With several choices of bits, a layer's are those with the smallest error, measured on
    this prompt.

    The cache owns the plan and calls ``hand_down`` when the attention of a layer is computed.

    Args:
        kind: see above.
        budget: the average over layers and heads; None with a tolerance.
        schedule: as for ``scheduled``.
        curves: measured beforehand.
        tolerance: limit on every head's relative error.
        max_budget: limit on the average cost of a tolerance; None: no limit.
        choices: bits of the slots, or several to choose from; slots under an upper bound are stored
            in the first ones.
        retrieval: for ``heads``: the retrieval heads.
        reread: the kind after a second reading of the prompt (``read_again``).
    """

    def __init__(
        self,
        kind: str,
        budget: Budget | None,
        schedule: Schedule | None = None,
        curves: Curves | None = None,
        tolerance: float | None = None,
        max_budget: Budget | None = None,
        choices: Sequence[Bits] = (FULL,),
        retrieval: RetrievalHeads | None = None,
        reread: str | None = None,
    ) -> None:
        self.retrieval = retrieval
        self._kinds = kind, reread or kind
        self.kind, self.budget, self.schedule, self.curves = kind, budget, schedule, curves
        self.tolerance, self.max_budget = tolerance, max_budget
        self.goal = Goal(budget, tolerance, max_budget)
        self._layers, self._heads = 0, 0
        #: heads above the tolerance in any row, bool ``[heads]``, by layer
        self.above: dict[int, Tensor] = {}
        self._measured = Measurements(choices)
        #: bytes of a number of a token, of which a budget is a share; None: those of the keys. The
        #: benchmarks set 2, so that a model in float32 stands for one in 16 bits.
        self.itemsize: int | None = None
        self._scores: dict[int, Tensor] = {}  # by layer, [batch, heads, n]

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
        if self.curves is not None:
            self.curves.check_model(layers, heads, model)
        if self.retrieval is not None:
            assert self.budget is not None
            return [*self.retrieval.budgets(float(self.budget.value), window, layers, heads)]
        if self.prices or self.kind not in ("even", "schedule"):
            return [None] * layers
        assert self.budget is not None
        return [HeadBudgets([row]) for row in self._told()]

    def _told(self) -> list[list[Budget]]:
        """The budgets of every layer's heads that are known before the first token."""
        assert self.budget is not None
        return scheduled(self.budget, self.schedule, self._layers, [self._heads] * self._layers)

    def read_again(self, again: bool) -> None:
        """Say whether the queries are those of a second reading, before any token is read."""
        self.kind = self._kinds[again]

    @property
    def chooses(self) -> bool:
        """Whether it chooses bits."""
        return len(self._measured.choices) > 1

    @property
    def prices(self) -> bool:
        """Whether slots are not stored in the model's dtype, so that their number follows from
        their price."""
        return self._measured.choices[0] != FULL or self.chooses

    @property
    def measures(self) -> bool:
        """Whether it measures on the prompt, for which it needs the prompt's queries."""
        return self.chooses or self.measures_errors

    @property
    def measures_on_prompt(self) -> bool:
        """Whether it needs a prompt that is long enough to measure on, or scores of one."""
        return self.chooses or (self.curves is None and self.kind not in ("even", "schedule"))

    @property
    def measures_errors(self) -> bool:
        """Whether numbers of slots follow from errors that it measures on the prompt."""
        return self.kind in ("measured", "tolerance") and self.curves is None

    def queries_for(self, stream: Stream) -> int | None:
        """The number of a prompt's last queries for the measurement; None: all of them."""
        window = stream.method.window
        if stream.method.requires.queries and window is None:
            return None
        return 128 + max(QUERIES, window or 0)

    def ready(self, stream: Stream, prefill: bool) -> bool:
        """Whether a waiting layer has enough tokens to compute its budget."""
        if self.budget is not None and not self.budget.is_fraction:
            budget = self.budget.slots(stream.seen)
            above = 0 if prefill else stream.schedule.buffer(budget)
            return stream.seen > budget and stream.seen >= budget + above
        return not self.measures_on_prompt or measurable(stream) or self._all_window(stream)

    def known(self, number: int, stream: Stream) -> HeadBudgets | None:
        """The budgets of a layer that follow from the shape of its first tokens, on which the price
        of slots in few bits depends; None: they follow from more of the prompt."""
        if self.kind != "even" or self.chooses or self.budget is None:
            return None
        heads = stream.slots.keys.shape[1]
        row = Shard.of(heads, self._heads).own(self._told()[number])
        price = _price(stream, self._measured.choices[0], self.itemsize)
        return HeadBudgets([row], bound=self.goal.bound, price=price)

    def _all_window(self, stream: Stream) -> bool:
        """Whether sinks and recent window take the whole budget of a prompt that would otherwise be
        measured, so that nothing is left to allocate."""
        if self.budget is None:
            return False
        sink, recent = stream.method.sink, stream.method.recent
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
        most = self.queries_for(stream)
        if most is not None and stream.queries.count > 2 * most:
            stream.queries.keep_last(most)
        if hold or not self.ready(stream, prefill):
            return False
        number = next(i for i, other in enumerate(streams) if other is stream)
        found = self._next_budgets(number, streams)
        for told in found:
            streams[told.layer].spend(told.budgets, told.provisional, told.bits)
        if stream.waits and stream.method.window is not None:
            stream.queries.keep_last(stream.method.window)  # it has been measured
        elif stream.waits and number in self._measured.layers:
            stream.fold()  # all queries count, and scores are smaller
        return bool(found)

    def _next_budgets(self, number: int, streams: Sequence[Stream]) -> list[_Told]:
        """What to pass on, now that layer ``number`` has its prompt.

        Measurements apply to one prompt only: every row of the batch gets its own budgets (bits are
        shared by all rows). If a layer's budgets depend on all layers, a measured layer is
        meanwhile compressed to the most that its heads may need (``_bounds``).
        """
        stream = streams[number]
        heads = stream.slots.keys.shape[1]
        shard = Shard.of(heads, self._heads)
        if self.measures_on_prompt and not measurable(stream):
            # a number of slots, which must not be exceeded, or nothing to allocate
            assert self.budget is not None
            return [_Told(number, HeadBudgets([[self.budget] * heads]))]
        alone = self.kind == "tolerance" and self.max_budget is None and self.curves is None
        if self.measures:
            self._measured.take(number, stream, None if alone else shard, self.itemsize)
        if not self.measures_errors:
            return self._apart(number, streams, shard)
        if self.tolerance is not None and self.chooses:
            self._measured.keep_cheapest(number, self.tolerance, shard)
        if alone:
            return [self._alone(number, streams)]
        return self._together(streams, shard)

    def _together(self, streams: Sequence[Stream], shard: Shard) -> list[_Told]:
        """The budgets that follow from the errors of all layers, or bounds until all are
        measured."""
        found, numbers = self._measured, self._measured.layers
        bits = [found.most(n) for n in numbers]
        tokens = streams[numbers[0]].seen
        if len(numbers) < self._layers:
            whole = _by_row([found.rows(n, b, shard) for n, b in zip(numbers, bits, strict=True)])
            return self._bounds(numbers, whole, streams, shard)
        if self.chooses and self.tolerance is None:
            best = choose(found.options(numbers, shard), self.goal.fraction(tokens))
            bits = [found.choices[i] for i in best]
        whole = _by_row([found.rows(n, b, shard) for n, b in zip(numbers, bits, strict=True)])
        prices = [found.price(n, b) for n, b in zip(numbers, bits, strict=True)]
        held = torch.stack([streams[n].held for n in numbers], dim=1)  # [rows, layers, heads]
        told = [
            self.goal.spent(curves, tokens, prices, shard.whole_held(held[row]))
            for row, curves in enumerate(whole)
        ]
        found.forget(numbers)
        for place, n in enumerate(numbers):
            self._note_above(n, [above[place] for _, above in told], shard)
        return [
            _Told(
                n,
                HeadBudgets(
                    [shard.own(each[place]) for each, _ in told],
                    True,
                    self.goal.bound,
                    price=prices[place],
                ),
                self._named(bits[place]),
            )
            for place, n in enumerate(numbers)
        ]

    def _named(self, bits: Bits) -> Bits | None:
        return bits if self.prices else None

    def _alone(self, number: int, streams: Sequence[Stream]) -> _Told:
        """The budgets of a tolerance without a limit, which depend on a single layer."""
        found = self._measured
        bits = found.most(number)
        rows, price = found.rows(number, bits, Shard()), found.price(number, bits)
        found.forget([number])
        told = [self.goal.spent(curves, streams[number].seen, [price]) for curves in rows]
        self._note_above(number, [above[0] for _, above in told])
        own = HeadBudgets([budgets[0] for budgets, _ in told], True, price=price)
        return _Told(number, own, self._named(bits))

    def _apart(self, number: int, streams: Sequence[Stream], shard: Shard) -> list[_Told]:
        """For numbers of slots that do not follow from errors: bits, if they are to be chosen, are
        those with the smallest error if every head pays the average."""
        stream = streams[number]
        together = self.kind != "layer" and self.kind in BY_NEED
        if self.kind in BY_NEED:
            if shard.ranks > 1:
                raise UnsupportedError(
                    f"allocation={self.kind!r} compares the scores of all KV heads, of which this "
                    "process has a part; use 'even' or 'measured' with tensor parallelism"
                )
            self._scores[number] = stream.importance()
            if together and len(self._scores) < self._layers:
                return []
        numbers = sorted(self._scores) if together else [number]
        bits = self._measured.choices[0]
        if self.chooses:
            options = self._measured.options(numbers, shard)
            bits = self._measured.choices[best_at(options, self.goal.fraction(stream.seen))]
            price = self._measured.price(number, bits)
            self._measured.forget(numbers)
        else:
            price = _price(stream, bits, self.itemsize)
        if self.kind in BY_NEED:
            found = self._by_need(numbers, streams, price)
        else:
            if self.curves is not None:
                curves = priced(self.curves, price, stream.seen)
                told, above = self.goal.spent(curves, stream.seen, [price] * self._layers)
                self._note_above(number, [above[number]], shard)
            else:
                told = self._told()
            row = shard.own(told[number])
            measured = self.kind != "even"  # equal budgets are a coincidence
            own = HeadBudgets([row], bound=self.goal.bound, measured=measured, price=price)
            found = [(number, own)]
        return [_Told(n, budgets, self._named(bits)) for n, budgets in found]

    def _by_need(
        self, numbers: list[int], streams: Sequence[Stream], price: Price
    ) -> list[tuple[int, HeadBudgets]]:
        """Budgets by the scores of a layer, or of all."""
        assert self.budget is not None
        stream = streams[numbers[0]]
        method, seen, value = stream.method, stream.seen, self.budget.value
        average = self.budget.slots(seen)
        slots = min(seen, int(float(price.buys(torch.tensor(float(average)))) + 1e-6))
        safeguard = SAFEGUARD if self.kind == "layer" else 0.0
        scores = [self._scores.pop(n) for n in numbers]
        told = []
        for row in range(len(scores[0])):
            own = [s[row] for s in scores]
            if self.kind == "variance":
                told.append(by_variance(own, slots, method.sink + method.recent))
            else:
                told.append(by_need(own, slots, method.sink, method.recent, safeguard))
        return [
            (
                n,
                HeadBudgets(
                    [
                        [Budget(value, x / average) for x in price.cost(found[place]).tolist()]
                        for found in told
                    ],
                    True,
                    price=price,
                ),
            )
            for place, n in enumerate(numbers)
        ]

    def _bounds(
        self, numbers: list[int], whole: list[Curves], streams: Sequence[Stream], shard: Shard
    ) -> list[_Told]:
        """Upper bounds for the layers measured so far: the budgets that keep the peak of the
        prefill, with one more layer exact, at its target."""
        method, tokens = streams[numbers[0]].method, streams[numbers[0]].seen
        if not method.recompresses:
            return []  # tokens in a sketch cannot be compressed again
        kept = self.goal.at_most(len(numbers), self._layers, tokens)
        if kept is None:
            return []
        # The last queries attend to this much more uncompressed, in addition to the bound.
        extra = max(0, (method.window or 0) - method.recent)
        window = min(tokens, method.sink + method.recent + 1)
        shares = [torch.tensor(c.allocate(max(kept, c.least))) * kept for c in whole]
        found = []
        for place, n in enumerate(numbers):
            held = streams[n].held
            bits = self._measured.most(n)
            own = [shard.own(share[place].tolist()) for share in shares]
            paid = torch.tensor(own, dtype=torch.float64) * tokens
            bound = self._measured.price(n, bits).buys(paid).ceil().long()
            slots = (bound.clamp(min=window) + extra).clamp(max=tokens)
            # Head by head, so that a row of the batch does not affect another.
            slots = torch.where(slots > _WORTH * held, held, slots)
            rows = [[Budget(1.0, x / tokens) for x in row] for row in slots.tolist()]
            found.append(_Told(n, HeadBudgets(rows, True), self._named(bits), True))
        return found

    def _note_above(self, number: int, rows: Sequence[Tensor], shard: Shard | None = None) -> None:
        above = torch.stack(list(rows)).any(0)
        if shard is not None:
            above = above.chunk(shard.ranks)[shard.rank]
        self.above[number] = above

    def forget(self, number: int) -> None:
        """Discard measurements of a layer that has changed."""
        self._measured.forget([number])
        self._scores.pop(number, None)
        self.above.pop(number, None)


def _by_row(layers: Sequence[Sequence[Curves]]) -> list[Curves]:
    """Curves of every layer's rows as those of a model, row by row."""
    return [of_layers([rows[i] for rows in layers]) for i in range(len(layers[0]))]


def _price(stream: Stream, bits: Bits, itemsize: int | None) -> Price:
    """The price of a stream's slots in bits that were not measured. Each slot counts with a mass,
    and with a score if the method has one."""
    method, slots = stream.method, stream.slots
    columns = set(slots.tensors()) - {"keys", "values"} | {"mass"}
    columns |= {"score"} if method.requires.queries else set()
    return Price.of(slots, bits, method.sink + method.recent, len(columns), itemsize)
