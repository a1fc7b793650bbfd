"""Random inputs for the tests of methods, and checks that hold for every method."""

from __future__ import annotations

import torch

from kvsketch import Observed, Slots
from kvsketch.budget import Budget
from kvsketch.cache import Stream, windowed

BATCH, HEADS, DIM = 2, 2, 4


def case(seed, n, padding=0, weighted=False):
    """Slots in float64 whose values have one number more than the keys, the tokens that are live
    (the first row starts with padding), and the queries of two heads for each KV head."""
    g = torch.Generator().manual_seed(seed)
    mass = 1 + torch.randint(3, (BATCH, HEADS, n), generator=g).double() if weighted else None
    slots = Slots(
        torch.randn(BATCH, HEADS, n, DIM, generator=g).double(),
        torch.randn(BATCH, HEADS, n, DIM + 1, generator=g).double(),
        mass,
        torch.arange(n).float().expand(BATCH, HEADS, n),
    )
    live = torch.ones(BATCH, n, dtype=torch.bool)
    live[0, :padding] = False
    if padding:
        slots = slots.only(live[:, None])
    queries = 1.5 * torch.randn(BATCH, 2 * HEADS, n, DIM, generator=g).double()
    return slots, live, Observed(queries, 0.4, live=live)


def streamed(method, slots, observed, options=None):
    """Yield the slots of a stream after a prompt of 30 tokens and after each decoded token. The
    budget is 20 slots and the buffer 4; the first two tokens and the newest must be kept."""
    stream = Stream(windowed(method, 2, 4, options=options), Budget(20), 4)
    for start, count in ((0, 30), *((i, 1) for i in range(30, slots.count))):
        stream.extend(slots.narrow(start, count))
        part = Observed(observed.queries[:, :, start : start + count], 0.4)
        stream.settle(part, prefill=count > 1)
        held = stream.slots
        assert held.count <= 24 + (start == 0) * 6
        assert torch.equal(held.positions[0, 0, :2], torch.tensor([0.0, 1.0]))
        assert float(held.positions[0, 0, -1]) == start + count - 1
        yield held


def check_stream(method, slots, observed, options=None):
    """Run ``streamed``, with its checks, over all tokens."""
    for _ in streamed(method, slots, observed, options):
        pass
