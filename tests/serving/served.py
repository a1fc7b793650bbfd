"""Requests that are served from pages, and the reference of their outputs, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kvsketch.cache.window import windowed
from kvsketch.estimator import attend
from kvsketch.observed import Observed
from kvsketch.page.layout import Layout
from kvsketch.page.quantized import Bits
from kvsketch.page.schedule import Rhythm
from kvsketch.slots import Slots
from kvsketch.vllm.pages import Counts, Pages, compress_all
from kvsketch.vllm.rounds import Copies, rounds
from kvsketch.vllm.states import KnownPages

DIM, KV, GROUP = 8, 2, 2
#: attention sinks: none, and of every query head
SINKS = [None, torch.tensor([1.0, -1.0, 0.0, 2.0])]
METHODS = ["streaming_llm", "heavy_merge", "cluster_merge", "h2o", "tova", "snapkv", "keydiff"]
CPU = torch.device("cpu")


def drawn(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, KV * GROUP, DIM, generator=g)
    k, v = torch.randn(2, tokens, KV, DIM, generator=g)
    return q, k, v


def alone(
    method: str | None,
    rhythm: Rhythm,
    kept: int,
    request: Any,
    softcap: float | None,
    budget: int | torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs of a request read token by token, ``[tokens, heads, dim]`` in float64. ``kept``: the
    number of queries kept; ``budget``: slots of each head, int64 ``[1, heads]``, or the page's."""
    q, k, v = (t.double() for t in request)
    sinks = None if sinks is None else sinks.double()
    slots: Slots | None = None
    made = None if method is None else windowed(method, 2, 6)
    found, waiting, buffer = [], [], rhythm.every
    budget = rhythm.slots - buffer if budget is None else budget
    for at in range(len(q)):
        new = Slots(k[at : at + 1].transpose(0, 1)[None], v[at : at + 1].transpose(0, 1)[None])
        if made is not None:
            ones = torch.ones(1, KV, 1, dtype=torch.float64)
            new = Slots(
                new.keys, new.values, ones, score=0 * ones if made.requires.queries else None
            )
        slots = new if slots is None else Slots.cat([slots, new])
        one = q[at : at + 1].transpose(0, 1)[None]
        found.append(attend(one, slots, scaling=0.5, softcap=softcap, sinks=sinks)[0, :, 0])
        waiting.append(one)
        if made is not None and at + 1 >= rhythm.slots and (at + 1 - rhythm.slots) % buffer == 0:
            last = torch.cat(waiting[len(waiting) - kept :], dim=2)
            observed = Observed(last, 0.5, softcap, sinks=sinks)
            if made.requires.queries:
                slots = made.observe(slots, observed)
            slots = made(slots, budget, observed, scored=True, decoding=True)
            mass = slots.masses()
            order = (mass != 0).long().argsort(dim=-1, stable=True)
            slots = slots.take(order)  # dead slots before the others
            waiting = []
    return torch.stack(found)


class Served:
    """The pages of one layer, for requests that are read in chunks."""

    def __init__(
        self,
        method: str | None,
        rhythm: Rhythm,
        queries: int,
        softcap: float | None = None,
        dtype: torch.dtype = torch.float32,
        middle: tuple[tuple[int, ...], Bits] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """``middle``: the slots of each head in the middle of a page, and their bits; None: a page
        in one part."""
        made = None if method is None else windowed(method, 2, 6)
        scored = made is not None and made.requires.queries
        shape = (KV, GROUP, rhythm.slots, DIM, DIM, queries, scored, dtype)
        layout = Layout(*shape, *(middle or ()))
        # as left by earlier requests
        generator = torch.Generator().manual_seed(0)
        raw = torch.randint(0, 256, (9, layout.bytes), generator=generator, dtype=torch.uint8)
        self.layout, self.held = layout, layout.views(raw)
        self.rhythm, self.counts, self.queries = rhythm, Counts(), queries
        self.middle = max(layout.middle, default=0)
        self.pages = Pages(layout, made, rhythm, 0.5, softcap, self.counts, sinks)
        self.blocks = KnownPages()

    def parts(self) -> list[torch.Tensor]:
        """The tensors of all pages."""
        page, queries = self.held
        return [queries, *(t for part in page.open() for t in part.contents())]

    def step(
        self,
        parts: list[tuple[int, int, Any]],
        copies: Copies | None = None,
        pieces: list[int] | None = None,
    ) -> list[torch.Tensor]:
        """Outputs of one step; ``parts``: page, tokens seen and new tokens of each request;
        ``pieces``: as for ``rounds``."""
        sizes = [len(request[0]) for _, _, request in parts]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        seen, pages = (np.array([p[i] for p in parts], dtype=np.int64) for i in (1, 0))
        states = self.blocks.states(pages, seen, self.rhythm)
        given = self.rhythm, self.queries, CPU, copies, self.middle, states
        todo = rounds(starts, seen, pages, *given, None if pieces is None else np.array(pieces))
        self.blocks.put(pages, seen + np.array(sizes), states.last)
        q, k, v = (torch.cat([part[2][i] for part in parts]) for i in range(3))
        out = torch.full_like(q, torch.nan)
        compress_all(self.pages.attend(q, k, v, self.held, todo, out))
        return list(out.split(sizes))


def queries_of(method: str | None, rhythm: Rhythm) -> int:
    if method is None:
        return 0
    made = windowed(method, 2, 6)
    return min(rhythm.every, made.window or rhythm.every) if made.requires.queries else 1


def run(
    served: Served,
    requests: list[Any],
    pages: list[int],
    data: Any,
    chunk: int,
    prompts: list[int] | None = None,
    piece: int = 0,
) -> list[torch.Tensor]:
    """The outputs of requests that are read in chunks of any size, several at once, in any
    order. With ``prompts``, the chunks of so many tokens of each request are those of
    ``PageScheduler``."""
    seen, out = [0] * len(requests), [[] for _ in requests]
    sizes = [len(request[0]) for request in requests]
    while any(seen[i] < sizes[i] for i in range(len(sizes))):
        left = [i for i in range(len(sizes)) if seen[i] < sizes[i]]
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        parts = []
        for i in chosen:
            most = min(chunk, sizes[i] - seen[i])
            if prompts is not None and seen[i] < prompts[i]:
                ends = [*range((seen[i] // piece + 1) * piece, prompts[i], piece), prompts[i]]
                size = data.draw(st.sampled_from(ends)) - seen[i]
            else:
                size = data.draw(st.integers(1, most))
            parts.append((pages[i], seen[i], [t[seen[i] : seen[i] + size] for t in requests[i]]))
            seen[i] += size
        before = [at for _, at, _ in parts]
        reading = [
            piece * (prompts is not None and at < prompts[i])
            for i, at in zip(chosen, before, strict=True)
        ]
        for i, found in zip(chosen, served.step(parts, pieces=reading), strict=True):
            out[i].append(found)
    return [torch.cat(parts) for parts in out]
