"""Measures the errors of a layer that waits for its budget, on its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvsketch.cache.curves import Curves, pooled
from kvsketch.cache.held_out import Store, held_out_for, least_tokens, measure_rows
from kvsketch.cache.shard import Shard
from kvsketch.cache.storage import PLAIN, Price, priced
from kvsketch.cache.stream import Stream
from kvsketch.observed import Observed
from kvsketch.page.page import Page
from kvsketch.page.quantized import FULL, Bits
from kvsketch.slots import Slots

# The largest number of tokens on which errors are measured.
_MEASURED_TOKENS = 4096
# The weight of an error from fewer slots relative to one from fewer bits. Rounding errors are
# similar for all queries, while later queries may need just the tokens that were merged or dropped,
# unlike the measured queries.
_UNSEEN = 4.0


def measurable(stream: Stream) -> bool:
    """Whether there are enough tokens and queries to measure errors. Queries that were read after
    the prompt are all that there will be."""
    queries = stream.scores.queries
    enough = stream.seen >= least_tokens(*stream.around)
    return enough and queries.count >= (2 if queries.after else min(stream.seen, 64))


def measure(
    stream: Stream,
    shard: Shard | None,
    choices: Sequence[Bits] = (FULL,),
    itemsize: int | None = None,
) -> tuple[dict[Bits, list[Curves]], dict[Bits, Price]]:
    """A layer's curves on the tokens it holds, one per row, and what slots cost, for each choice of
    bits; ``Curves.kept`` is a cost. For a long prompt, they are measured on its sinks and last
    tokens: errors at equal fractions change little with length, while the time to measure them
    grows. For a shard: its heads' part of the error of the whole layer. ``itemsize``: as for
    ``Price.of``."""
    method = stream.method
    sink, recent = stream.pace.window(choices[0], stream.seen)
    slots, observed = stream.slots, stream.scores.queries.all()
    assert observed is not None
    if slots.count > _MEASURED_TOKENS:
        last = _MEASURED_TOKENS - sink
        slots = Slots.cat([slots.narrow(0, sink), slots.narrow(slots.count - last, last)])
        queries = min(observed.queries.shape[2], last)
        observed = observed.narrow(observed.queries.shape[2] - queries, queries)
    held_out = held_out_for(slots.count, sink, recent)
    held_out = min(held_out, observed.queries.shape[2] // 2)
    total = None if shard is None else shard.summed
    made: list[Slots] = []

    def compress(slots: Slots, budget: int, before: Observed) -> Slots:
        fresh = method.fresh()
        fresh.around = sink, recent
        made.append(fresh(slots, budget, before, scored=True))
        return made.pop() if len(made) > 1 else made[0]

    def store(bits: Bits) -> Store:
        return lambda slots, room: Page(slots, None, room, bits, sink, recent)

    measured = measure_rows(
        slots,
        observed,
        compress,
        held_out,
        sink,
        recent,
        total=total,
        observe=method.observe,
        stores=[store(bits) for bits in choices],
    )
    # Of the fewest slots: where all are kept, they have no masses.
    some = replace(made[0], keys=made[0].keys.to(slots.keys.dtype))
    curves, prices = {}, {}
    for bits, rows in zip(choices, measured, strict=True):
        price = PLAIN
        if bits != FULL:
            price = Price.of(some, bits, sink + recent, itemsize=itemsize)
        prices[bits] = price
        curves[bits] = [priced(row, price, stream.seen) for row in rows]
    if len(choices) > 1:
        curves = {bits: _weighed(rows, curves[choices[0]]) for bits, rows in curves.items()}
    return curves, prices


def _weighed(rows: list[Curves], most: list[Curves]) -> list[Curves]:
    """Curves of slots in 8 or 4 bits with the part of the error that is due to fewer slots, as the
    curves of most bits tell it, ``_UNSEEN`` times as large."""
    return [
        replace(row, error=row.error + (_UNSEEN - 1) * (wide.error - wide.error[..., -1:]).clamp(0))
        for row, wide in zip(rows, most, strict=True)
    ]


class Measurements:
    """The measurements of waiting layers, until they get their budgets.

    Args:
        choices: bits to choose from, in decreasing order.
    """

    def __init__(self, choices: Sequence[Bits]) -> None:
        self.choices = choices
        self._curves: dict[int, dict[Bits, list[Curves]]] = {}
        self._prices: dict[int, dict[Bits, Price]] = {}

    def take(
        self, layer: int, stream: Stream, shard: Shard | None, itemsize: int | None = None
    ) -> None:
        """Measure a layer, see ``measure``."""
        self._curves[layer], self._prices[layer] = measure(stream, shard, self.choices, itemsize)

    @property
    def layers(self) -> list[int]:
        """The measured layers."""
        return sorted(self._curves)

    def most(self, layer: int) -> Bits:
        """The most bits that a layer may get."""
        return next(iter(self._curves[layer]))

    def price(self, layer: int, bits: Bits) -> Price:
        """The cost of the layer's slots."""
        return self._prices[layer][bits]

    def rows(self, layer: int, bits: Bits, shard: Shard) -> list[Curves]:
        """A layer's curves with all its heads, row by row."""
        return [shard.whole(row) for row in self._curves[layer][bits]]

    def options(self, layers: Sequence[int], shard: Shard) -> list[list[Curves]]:
        """Curves of each layer for every choice, all rows pooled."""
        return [[pooled(self.rows(n, b, shard)) for b in self.choices] for n in layers]

    def keep_cheapest(self, layer: int, tolerance: float, shard: Shard) -> None:
        """Keep only the cheapest choice of a layer that meets a tolerance: 16 bits, if with fewer
        bits the error of a head is too large even if it keeps all its tokens. All heads of the
        layer count, including those of other processes."""
        costs = {}
        for bits in self._curves[layer]:
            rows = self.rows(layer, bits, shard)
            if bits == FULL or all(row.rounds_within(tolerance) for row in rows):
                costs[bits] = sum(float(row.within(tolerance)[0].mean()) for row in rows)
        best = min(costs, key=lambda bits: costs[bits])
        self._curves[layer] = {best: self._curves[layer][best]}

    def forget(self, layers: Sequence[int]) -> None:
        for layer in layers:
            self._curves.pop(layer, None)
            self._prices.pop(layer, None)
