"""The ways to divide a budget by measured errors: those of other prompts, or of this one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsketch.budget import Budget
from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.curves import Curves, of_layers
from kvsketch.cache.goal import WORTH, Goal
from kvsketch.cache.shard import Shard
from kvsketch.cache.solvers import LayerBudgets, Prompt, Solver, price_of
from kvsketch.cache.storage import Price, best_at, choose, priced
from kvsketch.page.quantized import Bits


class ByCurves(Solver):
    """Where errors fall most, or as a tolerance asks, by errors measured on other prompts."""

    needs_prompt = False

    def __init__(self, goal: Goal, curves: Curves) -> None:
        super().__init__(goal)
        self.curves: Curves = curves
        self.name = "curves" if goal.tolerance is None else "tolerance"

    def check(self, layers: int, heads: int, model: str | None) -> None:
        self.curves.check_model(layers, heads, model)

    def _stored(self, prompt: Prompt, numbers: Sequence[int]) -> tuple[Bits, Price]:
        """Bits that are to be chosen are those with the smallest error on this prompt if every head
        pays the average."""
        found = prompt.measured
        if len(found.choices) == 1:
            return found.choices[0], price_of(prompt.stream, found.choices[0], prompt.itemsize)
        options = found.options(numbers, prompt.shard)
        bits = found.choices[best_at(options, self.goal.fraction(prompt.stream.seen))]
        price = found.price(prompt.number, bits)
        found.forget(numbers)
        return bits, price

    def solve(self, prompt: Prompt) -> list[LayerBudgets]:
        number, tokens = prompt.number, prompt.stream.seen
        bits, price = self._stored(prompt, [number])
        curves = priced(self.curves, price, tokens)
        told, above = self.goal.spent(curves, tokens, [price] * prompt.layers)
        row = prompt.shard.own(told[number])
        own = HeadBudgets([row], bound=self.goal.bound, measured=True, price=price)
        return [LayerBudgets(number, own, bits, _own_above([above[number]], prompt.shard))]


class ByErrors(Solver):
    """Where errors fall most, or the fewest slots that keep every head's error within a tolerance,
    by errors measured on this prompt.

    Every row of the batch gets its own budgets (bits are shared by all rows). If a layer's budgets
    depend on all layers, a measured layer is meanwhile compressed to the most that its heads may
    need.
    """

    measures = True

    def __init__(self, goal: Goal) -> None:
        super().__init__(goal)
        self.name = "measured" if goal.tolerance is None else "tolerance"

    @property
    def alone(self) -> bool:
        return self.goal.tolerance is not None and self.goal.max_budget is None

    def solve(self, prompt: Prompt) -> list[LayerBudgets]:
        measured, tolerance = prompt.measured, self.goal.tolerance
        if tolerance is not None and len(measured.choices) > 1:
            measured.keep_cheapest(prompt.number, tolerance, prompt.shard)
        if self.alone:
            return [self._of_layer(prompt)]
        numbers = measured.layers
        if len(numbers) == prompt.layers:
            return self._of_all(numbers, prompt)
        return self._bounds(numbers, prompt)

    def _of_layer(self, prompt: Prompt) -> LayerBudgets:
        """The budgets of a tolerance without a limit, which depend on a single layer."""
        found, number = prompt.measured, prompt.number
        bits = found.most(number)
        rows, price = found.rows(number, bits, Shard()), found.price(number, bits)
        found.forget([number])
        told = [self.goal.spent(curves, prompt.stream.seen, [price]) for curves in rows]
        above = _own_above([above[0] for _, above in told])
        own = HeadBudgets([budgets[0] for budgets, _ in told], True, price=price)
        return LayerBudgets(number, own, bits, above)

    def _of_all(self, numbers: list[int], prompt: Prompt) -> list[LayerBudgets]:
        """The budgets that follow from the errors of all layers."""
        found, shard, streams = prompt.measured, prompt.shard, prompt.streams
        bits = [found.most(n) for n in numbers]
        tokens = streams[numbers[0]].seen
        if len(found.choices) > 1 and self.goal.tolerance is None:
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
        return [
            LayerBudgets(
                n,
                HeadBudgets(
                    [shard.own(each[place]) for each, _ in told],
                    True,
                    self.goal.bound,
                    price=prices[place],
                ),
                bits[place],
                _own_above([above[place] for _, above in told], shard),
            )
            for place, n in enumerate(numbers)
        ]

    def _bounds(self, numbers: list[int], prompt: Prompt) -> list[LayerBudgets]:
        """Upper bounds for the layers measured so far: the budgets that keep the peak of the
        prefill, with one more layer exact, at its target."""
        found, shard, streams = prompt.measured, prompt.shard, prompt.streams
        stream = streams[numbers[0]]
        method, tokens = stream.method, stream.seen
        if not method.recompresses:
            return []
        kept = self.goal.at_most(len(numbers), prompt.layers, tokens)
        if kept is None:
            return []
        whole = _by_row([found.rows(n, found.most(n), shard) for n in numbers])
        # The last queries attend to this much more uncompressed, in addition to the bound.
        sink, recent = stream.pace.window(found.most(numbers[0]), tokens)
        extra = max(0, (method.window or 0) - recent)
        window = min(tokens, sink + recent + 1)
        told = [c.allocate(max(kept, c.least)) for c in whole]
        shares = [kept * torch.tensor(each, dtype=torch.float32, device="cpu") for each in told]
        given = []
        for place, n in enumerate(numbers):
            held = streams[n].held
            bits = found.most(n)
            own = [shard.own(share[place].tolist()) for share in shares]
            paid = torch.tensor(own, dtype=torch.float64, device="cpu") * tokens
            bound = found.price(n, bits).buys(paid).ceil().long()
            slots = (bound.clamp(min=window) + extra).clamp(max=tokens)
            # Head by head, so that a row of the batch does not affect another.
            slots = torch.where(slots > WORTH * held.double(), held, slots)
            rows = [[Budget(1.0, x / tokens) for x in row] for row in slots.tolist()]
            given.append(LayerBudgets(n, HeadBudgets(rows, True), bits, provisional=True))
        return given


def _by_row(layers: Sequence[Sequence[Curves]]) -> list[Curves]:
    """Curves of every layer's rows as those of a model, row by row."""
    return [of_layers([rows[i] for rows in layers]) for i in range(len(layers[0]))]


def _own_above(rows: Sequence[Tensor], shard: Shard | None = None) -> Tensor:
    """Which of this process's heads are above the tolerance in any row."""
    above = torch.stack(list(rows)).any(0)
    return above if shard is None else above.chunk(shard.ranks)[shard.rank]
