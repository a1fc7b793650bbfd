"""The ways to divide a budget among layers and KV heads, one class for each. Those that follow from
measured errors are in ``by_errors``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvsketch.budget import SAFEGUARD, Budget, Schedule, scheduled
from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.curves import Curves
from kvsketch.cache.goal import WORTH, Goal
from kvsketch.cache.measure import Measurements
from kvsketch.cache.needs import by_need, by_variance, competing
from kvsketch.cache.retrieval_heads import RetrievalHeads
from kvsketch.cache.shard import Shard
from kvsketch.cache.storage import PLAIN, Price
from kvsketch.cache.stream import Stream
from kvsketch.errors import UnsupportedError
from kvsketch.page.quantized import FULL, Bits


class LayerBudgets(NamedTuple):
    """What a layer gets.

    Attributes:
        layer: its number.
        budgets: of its heads.
        bits: of its slots.
        above: heads above the tolerance in any row, bool ``[heads]``; None: there is none.
        provisional: the budgets are upper bounds that will be replaced.
    """

    layer: int
    budgets: HeadBudgets
    bits: Bits
    above: Tensor | None = None
    provisional: bool = False


class Prompt(NamedTuple):
    """What a solver may look at, now that a layer has its prompt.

    Attributes:
        number: of the layer.
        streams: of all layers.
        shard: the heads of this process.
        layers, heads: of the model.
        measured: the measurements of this prompt.
        itemsize: bytes of a number of a token, of which a budget is a share; None: those of the
            keys.
    """

    number: int
    streams: Sequence[Stream]
    shard: Shard
    layers: int
    heads: int
    measured: Measurements
    itemsize: int | None = None

    @property
    def stream(self) -> Stream:
        """Of the layer."""
        return self.streams[self.number]


class Solver(ABC):
    """A way to divide a budget.

    Attributes:
        name: as ``SketchCache.summary`` shows it.
        goal: the budget, or a tolerance.
        curves: errors measured beforehand; None: there are none.
        retrieval: the scores of retrieval heads; None: there are none.
        needs_prompt: whether the budgets follow from a prompt.
        measures: whether they follow from errors that are measured on it.
        compares: whether they follow from the scores of a method, compared over heads.
    """

    name: str
    curves: Curves | None = None
    retrieval: RetrievalHeads | None = None
    needs_prompt: ClassVar[bool] = True
    measures: ClassVar[bool] = False
    compares: ClassVar[bool] = False

    def __init__(self, goal: Goal) -> None:
        self.goal = goal

    @property
    def alone(self) -> bool:
        """Whether the budgets of a layer do not depend on the heads of other processes."""
        return False

    def check(self, layers: int, heads: int, model: str | None) -> None:
        """Raise InputError if what was measured beforehand is of another model."""
        return

    def prefer(self, shares: Schedule | None) -> None:
        """Take shares that a method has of its own, unless others were given."""
        return

    def before(self, layers: int, heads: int, window: int) -> list[list[Budget]] | None:
        """The budgets of every layer's heads, if they are known before the first token and slots
        have the model's dtype. ``window``: sinks and recent tokens."""
        return None

    @abstractmethod
    def solve(self, prompt: Prompt) -> list[LayerBudgets]:
        """What layers get now; nothing if the budgets follow from later layers, too."""

    @property
    def waiting(self) -> bool:
        """Whether it knows scores of layers that wait for others."""
        return False

    def forget(self, number: int) -> None:
        """Discard what is known of a layer that has changed."""
        return

    def _stored(self, prompt: Prompt, numbers: Sequence[int]) -> tuple[Bits, Price]:
        """The bits of some layers and the price of their slots. Bits that are to be chosen are the
        most in which every token fits the budget, or the fewest if none does: what is merged or
        dropped harms later queries more than rounding does."""
        assert self.goal.budget is not None
        return fitting(self.goal.budget, prompt.measured.choices, prompt.stream, prompt.itemsize)


class Shares(Solver):
    """The same budget for every head, or shares of it, given per layer or per layer and head."""

    needs_prompt = False

    def __init__(self, budget: Budget, schedule: Schedule | None = None) -> None:
        super().__init__(Goal(budget))
        self.budget, self.schedule = budget, schedule
        self.name = "even" if schedule is None else "schedule"

    def prefer(self, shares: Schedule | None) -> None:
        if self.name == "even":
            self.schedule = shares

    def before(self, layers: int, heads: int, window: int) -> list[list[Budget]]:
        return scheduled(self.budget, self.schedule, layers, [heads] * layers)

    def solve(self, prompt: Prompt) -> list[LayerBudgets]:
        bits, price = self._stored(prompt, [prompt.number])
        row = prompt.shard.own(self.before(prompt.layers, prompt.heads, 0)[prompt.number])
        # equal budgets of given shares are a coincidence
        own = HeadBudgets([row], measured=self.name != "even", price=price)
        return [LayerBudgets(prompt.number, own, bits)]


class Heads(Solver):
    """All tokens for a fraction of the heads, sinks and recent window for the others."""

    name = "heads"

    def __init__(self, share: Budget, retrieval: RetrievalHeads) -> None:
        super().__init__(Goal(share))
        self.share, self.retrieval = share, retrieval

    def solve(self, prompt: Prompt) -> list[LayerBudgets]:
        raise AssertionError("the budgets are known before the first token")


class ByScores(Solver):
    """By the method's scores, compared among the heads of a layer (AdaKV, "layer") or of the model
    (KVzip, "global"); or more in the layers whose scores vary less (D2O, "variance")."""

    compares = True

    def __init__(self, name: str, budget: Budget) -> None:
        super().__init__(Goal(budget))
        self.name, self.budget = name, budget
        self._scores: dict[int, Tensor] = {}  # by layer, [batch, heads, n]

    @property
    def waiting(self) -> bool:
        return bool(self._scores)

    def forget(self, number: int) -> None:
        self._scores.pop(number, None)

    def solve(self, prompt: Prompt) -> list[LayerBudgets]:
        if prompt.shard.ranks > 1:
            raise UnsupportedError(
                f"allocation={self.name!r} compares the scores of all KV heads, of which this "
                "process has a part; use 'even' or 'measured' with tensor parallelism"
            )
        self._scores[prompt.number] = prompt.stream.scores.importance(prompt.stream.slots)
        numbers = sorted(self._scores)
        if self.name == "layer":
            numbers = [prompt.number]
        elif len(numbers) < prompt.layers:
            return self._bounds(numbers, prompt)
        bits, price = self._stored(prompt, numbers)
        average = self.budget.slots(prompt.stream.seen)
        scores = [self._scores.pop(n) for n in numbers]
        told = self._slots(scores, prompt, bits, price, average)
        costs = torch.stack([price.cost(torch.stack(rows)) for rows in told]).double()
        if isinstance(self.budget.value, int):  # what is left serves the tokens that follow
            costs += (average - costs.mean((0, 2), keepdim=True)).floor().clamp(min=0)
        given = []
        for n, shares in zip(numbers, (costs / average).tolist(), strict=True):
            own = [[Budget(self.budget.value, x) for x in row] for row in shares]
            given.append(LayerBudgets(n, HeadBudgets(own, True, price=price), bits))
        return given

    def _slots(
        self, scores: Sequence[Tensor], prompt: Prompt, bits: Bits, price: Price, average: int
    ) -> list[list[Tensor]]:
        """The slots of every head, int64 ``[heads]`` of each layer and row, for an average cost."""
        seen = prompt.stream.seen
        sink, recent = prompt.stream.pace.window(bits, seen)
        slots = min(seen, int(price.buys_on_average(average) + 1e-6))
        safeguard = SAFEGUARD if self.name == "layer" else 0.0
        told = []
        for row in range(len(scores[0])):
            own = [s[row] for s in scores]
            if self.name == "variance":
                told.append(by_variance(own, slots, sink + recent))
            else:
                told.append(by_need(own, slots, sink, recent, safeguard))
        return [list(rows) for rows in zip(*told, strict=True)]

    def _bounds(self, numbers: list[int], prompt: Prompt) -> list[LayerBudgets]:
        """Upper bounds for the layers scored so far, as those of ``ByErrors``, after an echo.
        Without one, methods compress once, as they were published."""
        stream, tokens = prompt.stream, prompt.stream.seen
        kept = self.goal.at_most(len(numbers), prompt.layers, tokens)
        if kept is None or not stream.scores.asked_again:
            return []
        bits, price = self._stored(prompt, numbers)
        average = max(1, int(kept * tokens))
        if price.buys_on_average(average) >= tokens:  # every slot, in few bits
            every = [[Budget(1.0)] * stream.heads] * len(self._scores[prompt.number])
            bound = HeadBudgets(every, True)
            rest = [n for n in numbers if not prompt.streams[n].compressed]
            return [LayerBudgets(n, bound, bits, provisional=True) for n in rest]
        scores = [self._scores[n] for n in numbers]
        told, given = self._slots(scores, prompt, bits, price, average), []
        sink, recent = stream.pace.window(bits, tokens)
        for n, rows in zip(numbers, told, strict=True):
            slots = torch.stack([row.cpu() for row in rows])
            held = prompt.streams[n].held
            few = WORTH * held.sum(-1, keepdim=True).double()
            idle = slots.sum(-1, keepdim=True) > few  # row by row
            limits = torch.where(idle, held, slots).tolist()
            own = HeadBudgets([[Budget(1.0, x / tokens) for x in row] for row in limits], True)
            if not bool(idle.all()) or (bits != FULL and not prompt.streams[n].compressed):
                given.append(LayerBudgets(n, own, bits, provisional=True))
            # What a head cannot keep any more, besides sinks and recent window, is no need of it.
            between = competing(self._scores[n], sink, recent)
            ranks = between.argsort(-1, descending=True).argsort(-1)
            gone = ranks >= (slots - sink - recent).to(ranks.device).unsqueeze(-1)
            gone &= between > -torch.inf
            self._scores[n] = self._scores[n].masked_fill(gone, -torch.inf)
        return given


def fitting(
    budget: Budget, choices: Sequence[Bits], stream: Stream, itemsize: int | None
) -> tuple[Bits, Price]:
    """The most bits in which all tokens fit a budget, or the fewest, and the price of a slot."""
    for bits in choices:
        price = price_of(stream, bits, itemsize)
        if price.buys_on_average(int(budget.slots(stream.seen))) >= stream.seen:
            break
    return bits, price


def price_of(stream: Stream, bits: Bits, itemsize: int | None) -> Price:
    """The price of a stream's slots in bits that were not measured. Each slot counts with a score
    if the method has one, and with a mass unless it keeps tokens as they are; if the prefill
    streams, always, as in the pages of an engine."""
    if bits == FULL:
        return PLAIN
    slots, window = stream.parted.newest(1), stream.pace.window(bits, stream.seen)
    columns = set(slots.tensors()) - {"keys", "values"}
    method = stream.compressor
    if method is None or not method.keeps_tokens or stream.pace.streaming:
        columns |= {"mass"}
    columns |= {"score"} if stream.method.requires.queries else set()
    return Price.of(slots, bits, sum(window), len(columns), itemsize)
