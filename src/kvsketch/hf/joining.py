"""Joins the caches of two documents that were compressed separately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from kvsketch.budget import Budget
from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.storage import PLAIN
from kvsketch.cache.stream import Stream
from kvsketch.errors import InputError, UnsupportedError
from kvsketch.hf.cache import SketchCache
from kvsketch.hf.layer import SketchLayer
from kvsketch.hf.saving import cache_arguments
from kvsketch.hf.turning import turn_of
from kvsketch.page.quantized import Bits
from kvsketch.slots import Slots

# Arguments of the compression, which may differ between the two.
_FREE = ("seed", "prefill", "keep")


@torch.no_grad()
def join(first: SketchCache, second: SketchCache, model: PreTrainedModel) -> SketchCache:
    """The cache of the first document followed by the second; both caches stay unchanged.

    If the budget is a fraction of the tokens, all slots of both are kept; if it is a number, they
    are compressed to it. The second document's keys are rotated by the number of tokens of the
    first. Unlike in a document that is read as a whole, the second document has not attended to the
    first; ``benchmarks/document_merge.py`` measures the cost. The error of the result is not known.

    Raises:
        InputError: caches that were made with other settings, of other dtypes or numbers of rows,
            or too many tokens for the model's positions.
        UnsupportedError: positions other than plain rotary ones, a streaming sketch, layers that
            are no full attention, or padding.
    """
    _check(first, second, model)
    shift = first.get_seq_length()
    turn = turn_of(model, shift)
    joined = first.fork()
    pairs = zip(joined._sketches(), second._sketches(), strict=True)
    for layer, other in pairs:
        a, b = layer.stream, other.stream
        mine, theirs = (one.scores.of(one.slots) for one in (a, b))
        moved = None if theirs.positions is None else theirs.positions + shift
        theirs = replace(theirs, keys=turn(theirs.keys, shift), positions=moved)
        bits = Bits(*map(max, a.pace.bits, b.pace.bits))
        window = sum(a.pace.window(bits, a.seen + b.seen))
        budget = _budgets(a, b, window) if a.pace.given is None else a.pace.given
        a.adopt(Slots.cat([mine, theirs]), a.seen + b.seen, budget, bits)
    joined._forward.masks.settled = any(x.stream.compressed for x in joined._sketches())
    for number, above in second.plan.above.items():
        known = joined.plan.above.get(number)
        joined.plan.above[number] = above if known is None else known | above
    joined._forward.note_bytes()
    return joined


def _check(first: SketchCache, second: SketchCache, model: PreTrainedModel) -> None:
    mine, theirs = (cache_arguments(cache) for cache in (first, second))
    for name, value in mine.values.items():
        other = theirs.values[name]
        if name not in _FREE and (type(value) is not type(other) or value != other):
            raise InputError(
                f"the two were compressed with different settings: {name}={value!r:.60} and "
                f"{other!r:.60}"
            )
    same = mine.tensors.keys() == theirs.tensors.keys()
    if not same or not all(torch.equal(t, theirs.tensors[n]) for n, t in mine.tensors.items()):
        raise InputError("the two were compressed with different allocations")
    for cache in (first, second):
        for index, layer in enumerate(cache.layers):
            if type(layer) is not SketchLayer:
                raise UnsupportedError(
                    f"layer {index} is a {type(layer).__name__}, of which two cannot be joined; "
                    "read the documents as one"
                )
            if not layer.stream.method.recompresses:
                raise UnsupportedError(
                    f"method={cache.method!r}: the state of a streaming sketch cannot be rotated "
                    "to later positions; use a compressor, such as heavy_merge"
                )
            if layer.stream.pins:
                raise UnsupportedError("a cache with pinned tokens cannot be joined with another")
            if layer.stream.padded:
                raise UnsupportedError("a padded cache cannot be joined with another")
    a, b = first._sketches()[0], second._sketches()[0]
    if (a.token_shape, a.dtype) != (b.token_shape, b.dtype):
        raise InputError(
            f"the two hold tokens {a.token_shape} of {a.dtype} and {b.token_shape} of {b.dtype}"
        )
    given = first.plan.budget
    if a.stream.waits and b.stream.waits and (given is None or given.value != 1.0):
        raise InputError(
            "both documents are too short for their errors to be measured; read them as one"
        )
    total = first.get_seq_length() + second.get_seq_length()
    if first.max_positions is not None and total > first.max_positions:
        raise InputError(
            f"together the documents have {total} tokens, and the model {first.max_positions} "
            "positions; compress less of them (--max-tokens)"
        )


def _budgets(a: Stream, b: Stream, window: int) -> HeadBudgets:
    """The combined budget of every head; a document too short to be measured keeps all tokens.
    ``window``: sinks and recent tokens of the result."""
    budgets = [one.pace.budget for one in (a, b) if one.pace.budget is not None]
    told = budgets[0] if budgets else None
    if told is None:  # all tokens are kept: there was nothing to measure
        return HeadBudgets([[Budget(1.0)] * a.held.shape[1]])
    value, batch = told.value, len(a.held)
    prices = [one.price for one in budgets if one.price.fixed]
    price = max(prices, key=lambda one: one.slot, default=PLAIN)
    rows = [_rows(stream, batch, value, told.heads) for stream in (a, b)]
    weights = (a.seen, b.seen) if isinstance(value, float) else (1, 1)  # slots, or parts of tokens
    given = [[[x.share for x in row] for row in part] for part in rows]
    first, second = torch.tensor(given, dtype=torch.float64, device="cpu")
    shares = (weights[0] * first + weights[1] * second) / sum(weights)
    if price.fixed and isinstance(value, float):  # the cost of the slots of both, with one window
        price = replace(price, window=window)
        held = [_slots(stream, batch, told.heads) for stream in (a, b)]
        shares = price.cost(held[0] + held[1]) / (value * (a.seen + b.seen))
    found = []
    for pairs, own in zip(zip(*rows, strict=True), shares.tolist(), strict=True):
        limits = [
            None if x.limit is None or y.limit is None else x.limit + y.limit
            for x, y in zip(*pairs, strict=True)
        ]
        found.append([Budget(value, *both) for both in zip(own, limits, strict=True)])
    return HeadBudgets(found, True, told.bound, price=price)


def _slots(stream: Stream, batch: int, heads: int) -> torch.Tensor:
    """The slots of a stream's budgets, float64 ``[batch, heads]``."""
    budget = stream.pace.budget
    slots = stream.seen if budget is None else budget.slots(stream.seen, batch)
    return torch.as_tensor(slots, device="cpu").double().expand(batch, heads)


def _rows(stream: Stream, batch: int, value: int | float, heads: int) -> list[Sequence[Budget]]:
    if stream.pace.budget is None:
        share = 1 / value if isinstance(value, float) else 1.0
        return [[Budget(value, share)] * heads] * batch
    rows: list[Sequence[Budget]] = list(stream.pace.budget.rows)
    return rows * batch if len(rows) < batch else rows
