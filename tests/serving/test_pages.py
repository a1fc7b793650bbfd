"""Pages of several requests at once, against one request after the other, token by token, in
float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch.cache.window import windowed
from kvsketch.serving.layout import Layout
from kvsketch.serving.pages import Counts, Pages
from kvsketch.serving.rhythm import Rhythm, rounds
from kvsketch.slots import Observed, Slots, attend

DIM, KV, GROUP = 8, 2, 2
METHODS = ["streaming_llm", "heavy_merge", "cluster_merge", "h2o", "tova", "snapkv", "keydiff"]
CPU = torch.device("cpu")


def drawn(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, KV * GROUP, DIM, generator=g)
    k, v = torch.randn(2, tokens, KV, DIM, generator=g)
    return q, k, v


def alone(
    method: str | None, rhythm: Rhythm, kept: int, request: Any, softcap: float | None
) -> torch.Tensor:
    """What each token sees, one at a time: ``[tokens, heads, dim]`` in float64."""
    q, k, v = (t.double() for t in request)
    slots: Slots | None = None
    made = None if method is None else windowed(method, 2, 6)
    found, waiting = [], []
    for at in range(len(q)):
        new = Slots(k[at : at + 1].transpose(0, 1)[None], v[at : at + 1].transpose(0, 1)[None])
        if made is not None:
            ones = torch.ones(1, KV, 1, dtype=torch.float64)
            new = Slots(new.keys, new.values, ones, score=0 * ones if made.needs_queries else None)
        slots = new if slots is None else Slots.cat([slots, new])
        one = q[at : at + 1].transpose(0, 1)[None]
        found.append(attend(one, slots, scaling=0.5, softcap=softcap)[0, :, 0])
        waiting.append(one)
        if made is not None and slots.count == rhythm.slots:
            last = torch.cat(waiting[len(waiting) - kept :], dim=2)
            observed = Observed(last, 0.5, softcap)
            if made.needs_queries:
                slots = made.observe(slots, observed)
            less = rhythm.slots - rhythm.buffer
            slots = made(slots, less, observed, scored=True, fit=False)
            waiting = []
    return torch.stack(found)


class Served:
    """Pages of a layer, and requests that come in chunks."""

    def __init__(
        self,
        method: str | None,
        rhythm: Rhythm,
        queries: int,
        softcap: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        made = None if method is None else windowed(method, 2, 6)
        scored = made is not None and made.needs_queries
        layout = Layout(KV, GROUP, rhythm.slots, DIM, DIM, queries, scored, dtype)
        # what others have left there
        raw = torch.randint(0, 256, (9, layout.bytes), dtype=torch.uint8)
        self.fields = layout.fields(raw)
        self.rhythm, self.counts, self.queries = rhythm, Counts(), queries
        self.pages = Pages(made, rhythm, 0.5, softcap, self.counts)

    def step(self, parts: list[tuple[int, int, Any]]) -> list[torch.Tensor]:
        """``parts``: page, tokens seen and new tokens of each request."""
        sizes = [len(request[0]) for _, _, request in parts]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        seen, pages = (np.array([p[i] for p in parts], dtype=np.int64) for i in (1, 0))
        todo = rounds(starts, seen, pages, self.rhythm, self.queries, CPU)
        q, k, v = (torch.cat([part[2][i] for part in parts]) for i in range(3))
        out = torch.full_like(q, torch.nan)
        self.pages.attend(q, k, v, self.fields, todo, out)
        return list(out.split(sizes))


def queries_of(method: str | None, rhythm: Rhythm) -> int:
    if method is None:
        return 0
    made = windowed(method, 2, 6)
    return min(rhythm.buffer, made.window or rhythm.buffer) if made.needs_queries else 1


@pytest.mark.parametrize("method", [None, *METHODS])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    chunk=st.integers(1, 60),
    buffer=st.integers(1, 12),
    softcap=st.sampled_from([None, 4.0]),
    data=st.data(),
)
def test_a_batch_is_its_requests_alone(method, seed, sizes, chunk, buffer, softcap, data):
    """Whatever the chunks, the neighbours and the order: what every token sees is what it sees when
    its request is the only one, in float64, token by token."""
    rhythm = Rhythm(100 if method is None else 24, buffer)
    kept = queries_of(method, rhythm)
    served = Served(method, rhythm, kept, softcap)
    requests = [drawn(seed + number, size) for number, size in enumerate(sizes)]
    pages = data.draw(st.permutations(range(1, 9)))[: len(sizes)]
    seen, out = [0] * len(sizes), [[] for _ in sizes]
    while any(seen[i] < sizes[i] for i in range(len(sizes))):
        left = [i for i in range(len(sizes)) if seen[i] < sizes[i]]
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        parts = []
        for i in chosen:
            size = data.draw(st.integers(1, min(chunk, sizes[i] - seen[i])))
            parts.append((pages[i], seen[i], [t[seen[i] : seen[i] + size] for t in requests[i]]))
            seen[i] += size
        for i, found in zip(chosen, served.step(parts), strict=True):
            out[i].append(found)
    for i, request in enumerate(requests):
        expected = alone(method, rhythm, kept, request, softcap)
        torch.testing.assert_close(torch.cat(out[i]).double(), expected, rtol=2e-3, atol=2e-4)


def test_a_page_that_is_freed_and_claimed_again_starts_anew():
    """Preempted: the second request reads from its first token, over what the first has left."""
    rhythm = Rhythm(24, 4)
    served = Served("heavy_merge", rhythm, 4)
    first, second = drawn(1, 70), drawn(2, 70)
    served.step([(3, 0, first)])
    (found,) = served.step([(3, 0, second)])
    fresh = Served("heavy_merge", rhythm, 4)
    (expected,) = fresh.step([(5, 0, second)])
    assert torch.equal(found, expected)


def test_other_pages_are_not_touched():
    rhythm = Rhythm(24, 4)
    served = Served("heavy_merge", rhythm, 4)
    before = [t.clone() for t in vars(served.fields).values()]
    served.step([(3, 0, drawn(1, 70))])
    for was, now in zip(before, vars(served.fields).values(), strict=True):
        others = [page for page in range(9) if page != 3]
        assert torch.equal(was[others].view(torch.uint8), now[others].view(torch.uint8))


def test_compressions_and_their_errors_are_counted():
    rhythm = Rhythm(24, 4)
    served = Served("streaming_llm", rhythm, 1)
    served.step([(3, 0, drawn(1, 24)), (4, 0, drawn(2, 23))])
    assert served.counts.compressions == 1
    q, k, v = (t.double() for t in drawn(1, 24))
    slots = Slots(k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    one = q[-1:].transpose(0, 1)[None]
    was = attend(one, slots, scaling=0.5)
    some = torch.cat([torch.arange(2), torch.arange(6, 24)]).expand(1, KV, -1)
    now = attend(one, slots.take(some), scaling=0.5)
    error = ((now - was).norm(dim=-1) / was.norm(dim=-1)).mean()
    assert served.counts.errors == pytest.approx(float(error), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    rhythm = Rhythm(40, 8)
    served = Served("heavy_merge", rhythm, 8, dtype=dtype)
    request = [t.to(dtype) for t in drawn(3, 120)]
    (found,) = served.step([(2, 0, request)])
    expected = alone("heavy_merge", rhythm, 8, request, None)
    error = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < 0.02  # groups may differ where costs are as good as equal


@given(slots=st.integers(2, 50), buffer=st.integers(1, 50), seen=st.integers(0, 300))
def test_slots_follow_from_tokens(slots, buffer, seen):
    """Against one token at a time."""
    buffer = min(buffer, slots)
    rhythm, held = Rhythm(slots, buffer), 0
    for _ in range(seen):
        held += 1
        if held == slots:
            held -= buffer
    assert rhythm.held(np.array([seen])) == held
    assert rhythm.left(np.array([seen])) == slots - held


def test_a_page_s_parts_do_not_overlap():
    layout = Layout(3, 2, 10, 5, 5, 4, True, torch.bfloat16)
    raw = torch.zeros(2, layout.bytes, dtype=torch.uint8)
    fields = layout.fields(raw)
    sizes = 0
    for number, part in enumerate(vars(fields).values(), start=1):
        part[1] = number
        sizes += part[1].nbytes
    assert sizes <= layout.bytes < sizes + 5 * 64
    for number, part in enumerate(vars(fields).values(), start=1):
        assert bool((part[1] == number).all())
        assert bool((part[0] == 0).all())
