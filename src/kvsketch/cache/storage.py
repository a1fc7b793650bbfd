"""The bits in which a layer stores its slots: their cost, and the choice with the smallest
error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsketch.cache.curves import Curves
from kvsketch.errors import InputError
from kvsketch.page.quantized import FULL, Bits, check_bits, slot_bytes
from kvsketch.slots import Slots

#: The name of bits that are chosen by measured errors.
MEASURED = "measured"
# Number of bisection steps for the price of an error.
_HALVINGS = 60


#: The choices if not all tokens fit in the model's dtype, from most to fewest bits. The error of
#: keys in 8 bits is small compared with what more slots save. In heads that attend to a few tokens,
#: the error of keys in 4 bits is large.
CHOICES = (Bits(8, 8), Bits(8, 4), Bits(4, 4))


def bits_of(bits: object) -> Bits | None:
    """The value of ``bits``; None if it is "measured".

    Raises:
        InputError: neither that nor 16, 8 or 4.
    """
    if isinstance(bits, Bits):
        return bits
    if bits == MEASURED:
        return None
    try:
        one = check_bits(bits)
    except InputError as error:
        raise InputError(f"{error}, or {MEASURED!r}") from None
    return Bits(one, one)


@dataclass(frozen=True)
class Price:
    """The cost of a head's slots in 8 or 4 bits. The unit is the cost of the keys and values of all
    its tokens in the model's own dtype, so that a budget of 0.1 is a tenth of these bytes in any
    number of bits.

    The default is the price of slots in the model's own dtype: a token costs a token, and masses
    and scores, which few methods need, come on top. In 8 or 4 bits they are part of the cost.

    Attributes:
        slot: bytes of a slot in 8 or 4 bits, over those of a token.
        fixed: bytes of a head's centres and units, over those of a token; > 0 in 8 or 4 bits.
        window: slots that stay as given: sinks and recent tokens.
        whole: bytes of one of these, over those of a token.
    """

    slot: float = 1.0
    fixed: float = 0.0
    window: int = 0
    whole: float = 1.0

    @staticmethod
    def of(
        slots: Slots,
        bits: Bits,
        window: int,
        columns: int | None = None,
        itemsize: int | None = None,
    ) -> Price:
        """The price of slots like these.

        Args:
            slots: with keys and values of the model's dtype.
            columns: number of masses, scores and positions of a slot; None: those of ``slots``.
            itemsize: bytes of a number of a token; None: those of the keys.
        """
        if bits == FULL:
            return PLAIN
        if columns is None:
            columns = len(slots.tensors()) - 2
        widths = [slots.keys.shape[-1], slots.values.shape[-1]]
        token = (itemsize or slots.keys.element_size()) * sum(widths)
        small = sum(map(slot_bytes, widths, bits)) + 4 * columns
        fixed = (8 * widths[0] + 4) / token
        return Price(small / token, fixed, window, 1 + 4 * columns / token)

    def cost(self, slots: Tensor) -> Tensor:
        """The cost of a head's slots, in tokens."""
        if not self.fixed:
            return slots
        middle = (slots.double() - self.window).clamp(min=0)
        few = torch.where(middle > 0, middle * self.slot + self.fixed, 0.0)
        return (slots - middle) * self.whole + few

    def buys(self, tokens: Tensor) -> Tensor:
        """The number of slots, not rounded, that a head gets for the cost of so many tokens."""
        if not self.fixed:
            return tokens
        paid, window = tokens.double(), self.window * self.whole
        middle = ((paid - window - self.fixed) / self.slot).clamp(min=0)
        return paid.clamp(max=window) / self.whole + middle

    def buys_on_average(self, tokens: int) -> float:
        """The same for one head."""
        return float(self.buys(torch.tensor(tokens, dtype=torch.float64, device="cpu")))


#: The price of slots in the model's own dtype.
PLAIN = Price()


def priced(curves: Curves, price: Price, tokens: int) -> Curves:
    """Curves with the cost of every level as ``kept``, for slots of this price."""
    return replace(curves, kept=price.cost(curves.kept * tokens) / tokens)


def choose(options: Sequence[Sequence[Curves]], budget: float) -> list[int]:
    """For every layer, the option that minimises the summed error of all layers at an average cost
    of ``budget`` per head. With one price of the error for all heads, every head takes the cheapest
    level, and every layer the cheapest option.

    Args:
        options: curves of one layer each, ``[layers][options]``; their ``kept`` is a cost. The
            last option costs least.
        budget: the average.

    Returns:
        The number of an option for every layer.
    """
    # [layers, options, heads, levels] and [layers, options, 1, levels]
    error = torch.stack([torch.cat([c.error for c in layer]) for layer in options]).double()
    error = error.cummin(-1).values
    cost = torch.stack([torch.stack([c.kept.reshape(-1) for c in layer]) for layer in options])
    cost = cost.double().unsqueeze(2)
    best = torch.full((len(options),), len(options[0]) - 1, device="cpu")
    low, high = -60.0, 60.0  # the binary logarithm of the price
    for _ in range(_HALVINGS):
        price = (low + high) / 2
        total, level = (error + 2**price * cost).min(-1)
        taken = total.sum(-1).argmin(1)  # [layers]
        spent = cost.expand_as(error).gather(-1, level.unsqueeze(-1)).squeeze(-1)
        paid = spent[torch.arange(len(options), device="cpu"), taken].mean()
        if float(paid) <= budget:
            best, high = taken, price
        else:
            low = price
    return best.tolist()


def best_at(options: Sequence[Sequence[Curves]], budget: float) -> int:
    """The option with the smallest error, summed over layers, if every head costs ``budget``.

    Args:
        options: as for ``choose``.
    """
    totals = [
        sum(_error_at(layer[number], budget) for layer in options)
        for number in range(len(options[0]))
    ]
    return min(range(len(totals)), key=totals.__getitem__)


def _error_at(curves: Curves, budget: float) -> float:
    """The summed error at a cost, interpolated between levels over the logarithm of the cost. Below
    the lowest level, the error is extrapolated as inversely proportional to the cost."""
    error = curves.error.double().cummin(-1).values.sum((0, 1)).tolist()
    at = curves.kept.reshape(-1).double().tolist()
    if budget <= at[0]:
        return float(error[0] * at[0] / budget)
    after = next((i for i, cost in enumerate(at) if cost >= budget), None)
    if after is None:
        return float(error[-1])
    part = math.log(budget / at[after - 1]) / math.log(at[after] / at[after - 1])
    return float(error[after - 1] + part * (error[after] - error[after - 1]))
