"""Compression of the newest tokens alone: what is not reduced keeps its bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import VOCABULARY, build
from kvsketch import SketchCache, Slots
from kvsketch.cache import compress, together
from kvsketch.cache import stream as stream_module
from kvsketch.estimator import attend
from kvsketch.kernels import cpu, native
from kvsketch.methods.base import Compressor
from kvsketch.methods.h2o import H2O
from kvsketch.methods.heavy_merge import HeavyMerge
from kvsketch.page.exchange import Lowest
from kvsketch.page.page import Page
from kvsketch.page.part import Part
from kvsketch.page.quantized import Bits
from tiny_models import with_buffer


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pages, too."""
    monkeypatch.setattr(compress, "_TOGETHER", 24)
    monkeypatch.setattr(compress, "_SMALL", 1)


def slots_of(generator: torch.Generator, heads: int, n: int, mass: bool, dim: int = 8) -> Slots:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(2, heads, n, *shape, generator=generator)

    masses = random().exp() if mass else None
    return Slots(random(dim), random(dim), mass=masses, score=random().abs())


def rows_of(slots: Slots, head: tuple[int, int]) -> list[tuple[float, ...]]:
    """The live slots of a head, as a sorted list."""
    columns = [slots.keys[head], slots.mean_values()[head], slots.masses()[head].unsqueeze(-1)]
    if slots.score is not None:
        columns.append(slots.score[head].unsqueeze(-1))
    rows = torch.cat([c.double() for c in columns], -1)
    return sorted(tuple(row.tolist()) for row in rows[slots.masses()[head] > 0])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    bits=st.sampled_from([Bits(4, 4), Bits(8, 8), Bits(8, 4)]),
    uneven=st.booleans(),
    mass=st.booleans(),
    others=st.booleans(),
)
def test_the_rest_keeps_its_bits(
    seed: int, bits: Bits, uneven: bool, mass: bool, others: bool
) -> None:
    """The slots of the lowest scores leave, others come, and all the rest are as they were."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 40, (2, 3), generator=generator) if uneven else None
    sizes = None if sizes is None else sizes.clamp(min=20)
    part = Part(slots_of(generator, 3, 40, mass), sizes, 0, bits)
    held = part.held
    count = (torch.rand(2, 3, generator=generator) * (held + 1)).long()
    count[0, 0] = max(1, int(count[0, 0]))
    old = Lowest([part], count)
    new = slots_of(generator, 3, 7, others)
    for tensor in (new.keys, new.values):  # within what the few old ones say
        tensor *= 0.2
    own = torch.randint(0, 8, (2, 3), generator=generator)
    own = torch.maximum(own, (held == count).long())  # no head is empty
    (found,) = old.exchanged(new, own)
    assert found is not None
    assert torch.equal(found.held, held - count + own)
    before, after = part.read(torch.float32), found.read(torch.float32)
    for row in range(2):
        for head in range(3):
            at = (row, head)
            mine, left = rows_of(before, at), int(count[at])
            lowest = sorted(mine, key=lambda r: r[-1])[:left]
            assert rows_of(old.slots, at) == sorted(lowest)
            rest = [r for r in mine if r not in lowest]
            kept = rows_of(after, at)
            assert [r for r in kept if r in rest] == rest
            come = [r for r in kept if r not in rest]
            assert len(come) == int(own[at])
            scores = sorted(r[-1] for r in come)
            expected = new.score[at][: int(own[at])].double().sort().values
            torch.testing.assert_close(torch.tensor(scores).double(), expected)
            masses = sorted(r[-2] for r in come)
            expected = new.masses()[at][: int(own[at])].double().sort().values
            torch.testing.assert_close(torch.tensor(masses).double(), expected)


def test_new_slots_are_rounded_as_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    part = Part(slots_of(generator, 3, 200, True, 16), None, 0, Bits(8, 8))
    new = slots_of(generator, 3, 20, True, 16)
    own = torch.full((2, 3), 20)
    own[1, 1] = 19  # of other sizes: new slots are the last ones
    new = new.only(torch.arange(20) < own.unsqueeze(-1))
    (found,) = Lowest([part], torch.full((2, 3), 20)).exchanged(new, own)
    assert found is not None
    slots = found.read(torch.float32)
    read = slots.narrow(180, 20)
    old, other = (s.map(lambda t: t[1:, 1:2]) for s in (slots.narrow(181, 19), new.narrow(0, 19)))
    torch.testing.assert_close(old.masses(), other.masses())
    read, new = (s.map(lambda t: t[:1]) for s in (read, new))
    assert float((read.keys - new.keys).abs().max()) < 0.03
    assert float((read.mean_values() - new.mean_values()).abs().max()) < 0.2  # u / m, of small m
    torch.testing.assert_close(read.masses(), new.masses())


@pytest.mark.parametrize("side", ["keys", "values"])
def test_what_the_common_unit_cannot_hold_is_said(side: str) -> None:
    generator = torch.Generator().manual_seed(0)
    part = Part(slots_of(generator, 3, 40, False), None, 0, Bits(4, 4))
    new = slots_of(generator, 3, 7, False)
    getattr(new, side)[1, 2, 3, 4] = 1e7
    some = torch.full((2, 3), 7)
    assert Lowest([part], some).exchanged(new, some) == [None]
    own = some.clone()
    own[1, 2] = 3  # the large one is no slot
    assert Lowest([part], some).exchanged(new, own) != [None]


def test_a_channel_that_grew_gets_another_unit() -> None:
    generator = torch.Generator().manual_seed(0)
    part = Part(slots_of(generator, 3, 40, False), None, 0, Bits(4, 4))
    some = torch.full((2, 3), 7)
    for factor, fits in ((1.0, True), (20.0, False)):
        new = slots_of(generator, 3, 7, False)
        new.keys[..., 5] *= factor
        assert (Lowest([part], some).exchanged(new, some) != [None]) == fits


@torch.no_grad()
def decoded(model: Any, cache: SketchCache, tokens: int, padded: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (2, 100 + tokens), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :20] = 0
    given = {"past_key_values": cache}
    out = [model(ids[:, :100], attention_mask=mask[:, :100], **given).logits[:, -1:]]
    for i in range(100, 100 + tokens):
        token = ids[:, i : i + 1]
        out.append(model(token, attention_mask=mask[:, : i + 1], **given).logits)
    return torch.cat(out, 1)


def cache_of(model: Any, method: str, **given: Any) -> SketchCache:
    window = {"sink": 2, "recent": 6}
    cache: SketchCache = with_buffer(SketchCache(model.config, method, **window, **given), 4)
    return cache


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("bits", "budget"), [(8, 48), (8, 0.3), (4, 28), (4, 0.18)])
def test_selection_by_score_is_the_same(
    llama: Any, monkeypatch: pytest.MonkeyPatch, bits: int, budget: float, padded: bool
) -> None:
    """H2O drops the lowest scores: these are among the lowest and the newest."""
    calls = []
    real = compress.lowest_of

    def lowest(*args: Any) -> Any:
        calls.append(0)
        return real(*args)

    monkeypatch.setattr(compress, "lowest_of", lowest)
    cache = cache_of(llama, "h2o", bits=bits, budget=budget)
    found = decoded(llama, cache, 60, padded)
    assert len(calls) > 4
    monkeypatch.setattr(H2O, "local", False)
    other = cache_of(llama, "h2o", bits=bits, budget=budget)
    expected = decoded(llama, other, 60, padded)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert cache.nbytes() == other.nbytes()
    for mine, theirs in zip(cache._sketches(), other._sketches(), strict=True):
        assert torch.equal(mine.stream.held, theirs.stream.held)
        for row in range(2):
            for head in range(2):
                at = (row, head)
                got, wanted = (torch.tensor(rows_of(x.stream.slots, at)) for x in (mine, theirs))
                # Slots are sorted by their channels, and a number between two codes may get either.
                nearest = torch.cdist(got, wanted).argmin(1)
                assert sorted(nearest.tolist()) == list(range(len(wanted)))
                close = torch.isclose(got, wanted[nearest], atol=2e-3, rtol=2e-3)
                assert float(close.double().mean()) > 0.998


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "given", [{"budget": 0.3}, {"budget": 40}, {"budget": 40, "bits": 4, "allocation": "even"}]
)
def test_merging_keeps_every_token_and_every_size(
    llama: Any, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], padded: bool
) -> None:
    cache = cache_of(llama, "heavy_merge", **given)
    decoded(llama, cache, 60, padded)
    monkeypatch.setattr(HeavyMerge, "local", False)
    other = cache_of(llama, "heavy_merge", **given)
    decoded(llama, other, 60, padded)
    for mine, theirs in zip(cache._sketches(), other._sketches(), strict=True):
        assert torch.equal(mine.stream.held, theirs.stream.held)
        tokens, others = (x.stream.slots.masses().sum(-1) for x in (mine, theirs))
        torch.testing.assert_close(tokens, others)  # the fit of the prompt has moved both


@pytest.mark.parametrize("method", ["h2o", "heavy_merge"])
def test_where_nothing_must_go_new_tokens_are_only_added(
    llama: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    cache = cache_of(llama, method, budget=0.5, bits=4)
    decoded(llama, cache, 20)
    streams = [layer.stream for layer in cache._sketches()]
    before = [stream.page.middle for stream in streams]

    def whole(*_: Any, **__: Any) -> Any:
        raise AssertionError("the whole page is read and rounded again")

    monkeypatch.setattr(stream_module, "compress", whole)
    with torch.no_grad():
        for number in range(30):
            llama(torch.full((2, 1), 5 + number), past_key_values=cache)
    for stream, old in zip(streams, before, strict=True):
        new = stream.page.middle
        assert new is not old
        assert stream.seen == int(stream.held.min()) == int(stream.held.max())  # all tokens
        for name, packed in new.packed.items():
            kept = packed.codes[:, :, : old.count]
            assert torch.equal(kept, old.packed[name].codes)
            assert torch.equal(packed.unit, old.packed[name].unit)


def test_a_whole_page_is_scored_where_it_is(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all of it is compressed, the waiting queries go through the compiled kernel before
    slots are turned into floats."""
    if native.library() is None:
        pytest.skip("the kernel is not compiled here")
    cache = cache_of(llama, "heavy_merge", budget=40, bits=16, allocation="even")
    decoded(llama, cache, 0)
    before = [layer.stream.page for layer in cache._sketches()]

    def received(*_: Any) -> Any:
        raise AssertionError("the slots were turned into floats")

    monkeypatch.setattr(cpu, "received", received)
    with torch.no_grad():
        for number in range(30):
            llama(torch.full((2, 1), 5 + number), past_key_values=cache)
    pages = [layer.stream.page for layer in cache._sketches()]
    assert all(now is not page for now, page in zip(pages, before, strict=True))  # compressed


def test_a_page_of_a_run_can_be_saved_and_copied(llama: Any, tmp_path: Any) -> None:
    cache = cache_of(llama, "heavy_merge", budget=0.3)
    decoded(llama, cache, 60)
    twin = cache.fork()
    cache.save(tmp_path / "one.kvs")
    loaded = SketchCache.load(tmp_path / "one.kvs", llama)
    token = torch.full((2, 1), 5)
    with torch.no_grad():
        found = [llama(token, past_key_values=c).logits for c in (cache, twin, loaded)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    cache.batch_select_indices(torch.tensor([1]))
    with torch.no_grad():
        one = llama(token[:1], past_key_values=cache).logits
        two = llama(token, past_key_values=twin).logits
    torch.testing.assert_close(one, two[1:], atol=1e-4, rtol=1e-4)


def after_twelve(
    held: torch.Tensor | None, budget: torch.Tensor, method: Any = None
) -> tuple[Slots, Any, Page | None]:
    """The slots between sinks and recent tokens of a page of at most 400 slots per head with twelve
    tokens more, what becomes of these with a budget, and the next page."""
    slots = slots_of(torch.Generator().manual_seed(0), 3, 400, True)
    page = Page(slots, held, 12, Bits(4, 4), 2, 4)
    more = slots_of(torch.Generator().manual_seed(1), 3, 12, False)
    page.append(Slots(more.keys, more.values, score=more.score))
    middle = Slots.cat([page.middle.slots, page.exact.slots.narrow(2, 12)]).map(torch.clone)
    one = compress.Newest.of(page, budget, around=(2, 4), room=12)
    return middle, one, None if one is None else compress.compress_newest(method or H2O(), [one])[0]


@pytest.mark.parametrize(("budget", "together"), [(400, 72), (376, 72), (350, 124), (268, 288)])
def test_more_slots_are_reduced_where_more_must_go(budget: int, together: int) -> None:
    """Six for each token, twice as many as must go, and at most 24 for each token."""
    _, one, found = after_twelve(None, torch.full((2, 3), budget))
    assert (one.lowest + one.left == together).all()
    assert (found.held == budget).all()
    assert found.room == 12


def test_much_less_is_for_all_slots_together() -> None:
    """Where more than half of what would be reduced must go, the whole page is reduced."""
    assert after_twelve(None, torch.full((2, 3), 267))[1] is None


def test_a_small_head_does_not_make_the_others_be_read() -> None:
    """All of its slots are reduced, however many must go."""
    held = torch.tensor([[20, 400, 400], [400, 16, 400]])
    budget = held.clone()
    budget[0, 0] = 11
    before, one, found = after_twelve(held, budget)
    assert one.lowest.tolist() == [[14, 60, 60], [60, 10, 60]]
    assert one.fewer.tolist() == [[21, 12, 12], [12, 12, 12]]
    assert torch.equal(found.held, budget)
    after = found.middle.slots
    for at in ((0, 0), (1, 1)):
        mine = before.score[at][before.masses()[at] > 0]
        best = mine.topk(int(budget[at]) - 6).values.sort().values
        assert torch.equal(after.score[at][after.masses()[at] > 0].sort().values, best)
    budget[0, 0] = 5  # not even the sinks and the recent tokens
    assert after_twelve(held, budget)[1] is None


@pytest.mark.parametrize("method", [H2O(), HeavyMerge()])
@pytest.mark.parametrize("some", [0, 8])
def test_a_head_of_sinks_and_recent_tokens_alone(method: Any, some: int) -> None:
    """Its new tokens leave, and those of the others are merged with the lowest."""
    held = torch.tensor([[some + 6, 400, 400], [400, 400, 400]])
    budget = held.clone()
    budget[0, 0] = 6
    before, one, found = after_twelve(held, budget, method)
    assert one.lowest.tolist() == [[some, 60, 60], [60, 60, 60]]
    assert torch.equal(found.held, budget)
    after = found.middle.slots
    assert float(after.masses()[0, 0].sum()) == 0
    if method.name == "heavy_merge":
        torch.testing.assert_close(after.masses()[:, 1:].sum(-1), before.masses()[:, 1:].sum(-1))
    queries = torch.randn(2, 3, 1, 8, generator=torch.Generator().manual_seed(2))
    out = attend(queries, found.slots)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("method", [H2O, HeavyMerge])
def test_rows_of_several_layers_with_numbers(method: Any) -> None:
    """Rows of a larger batch have its numbers, as many as one layer has rows. Some heads have room
    for their new tokens."""
    pages = []
    for layer in range(3):
        slots = slots_of(torch.Generator().manual_seed(layer), 3, 400, True)
        page = Page(slots, None, 12, Bits(4, 4), 2, 4)
        more = slots_of(torch.Generator().manual_seed(9), 3, 12, False)
        page.append(Slots(more.keys, more.values, score=more.score))
        pages.append(page)
    budget = torch.tensor([[420, 400, 400], [400, 420, 400]])
    newest = [compress.Newest.of(page, budget, around=(2, 4), room=12) for page in pages]
    numbered = method()
    numbered.number_rows(torch.tensor([3, 9]))
    for page in compress.compress_newest(numbered, newest):
        assert torch.equal(page.held, budget.clamp(max=412))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    uneven=st.lists(st.booleans(), min_size=2, max_size=4),
    same=st.sets(st.integers(0, 3)),
    far=st.booleans(),
)
def test_parts_together_are_as_alone(
    seed: int, uneven: list[bool], same: set[int], far: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (2, 3), generator=generator)

    parts, counts, news, owns = [], [], [], []
    for number, ragged in enumerate(uneven):
        slots = slots_of(generator, 3, 30 + 5 * number, True)
        parts.append(Part(slots, numbers(20, 30) if ragged else None, 0, Bits(4, 4)))
        counts.append(numbers(1, 9))
        new = slots_of(generator, 3, 8, True)
        news.append(new.map(lambda t: 0.2 * t if t.dim() == 4 else t))
        owns.append(counts[-1] if number in same else numbers(1, 9))
    if far:
        news[1].keys[0, 0, 0] = 1e6
    together_ = Lowest(parts, torch.cat(counts))
    cat = Slots(**{n: torch.cat([x.tensors()[n] for x in news]) for n in news[0].tensors()})
    found = together_.exchanged(cat, torch.cat(owns))
    for i, (part, count, new, own) in enumerate(zip(parts, counts, news, owns, strict=True)):
        alone = Lowest([part], count)
        (expected,) = alone.exchanged(new, own)
        mine = together_.slots.map(lambda t, i=i: t[2 * i : 2 * i + 2])
        most = int(count.max())
        for name, tensor in alone.slots.tensors().items():
            real = torch.arange(most) < count.unsqueeze(-1)
            assert torch.equal(getattr(mine, name)[:, :, :most][real], tensor[real])
        got = found[i]
        assert (got is None) == (expected is None) == (far and i == 1)
        if got is None or expected is None:
            continue
        assert torch.equal(got.held, part.held - count + own)
        assert got.layout is None or got.layout.total == expected.layout.total
        for one, other in zip(got.contents(), expected.contents(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "given", [{"budget": 0.3}, {"budget": 0.5}, {"budget": 40}, {"budget": 40, "bits": 8}]
)
def test_layers_together_are_as_alone(
    llama: Any, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    sizes: list[int] = []
    real = together.compress_newest

    def counted(method: Any, some: Any) -> Any:
        sizes.append(len(some))
        return real(method, some)

    monkeypatch.setattr(together, "compress_newest", counted)
    cache = cache_of(llama, "heavy_merge", **given)
    found = decoded(llama, cache, 60)
    assert max(sizes) > 1
    sizes.clear()
    monkeypatch.setattr(together, "_BYTES", 1)
    other = cache_of(llama, "heavy_merge", **given)
    expected = decoded(llama, other, 60)
    assert max(sizes) == 1
    assert torch.equal(found, expected)
    for mine, theirs in zip(cache._sketches(), other._sketches(), strict=True):
        slots = [sketch.stream.slots.tensors() for sketch in (mine, theirs)]
        for one, two in zip(*(some.values() for some in slots), strict=True):
            assert torch.equal(one, two)


def test_a_copy_does_not_share_scores(llama: Any) -> None:
    cache = cache_of(llama, "heavy_merge", budget=0.3)
    decoded(llama, cache, 60)
    twin = cache.fork()
    before = [layer.stream.page.middle.fields["score"].clone() for layer in twin._sketches()]
    with torch.no_grad():
        for number in range(9):
            llama(torch.full((2, 1), 5 + number), past_key_values=cache)
    for layer in cache._sketches():
        layer.stream.scores.fold(layer.stream.page)
    for layer, old in zip(twin._sketches(), before, strict=True):
        assert torch.equal(layer.stream.page.middle.fields["score"], old)


@pytest.mark.parametrize("method", [H2O(), HeavyMerge()])
@pytest.mark.parametrize("mass", [False, True])
def test_masses_are_stored_only_where_slots_have_some(method: Compressor, mass: bool) -> None:
    """Slots of a method that keeps tokens have none, unless those of before have some. A method
    that merges gives some to slots that had none, as in files of one version of kvsketch."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([[60, 50], [40, 60]])
    slots = slots_of(generator, 2, 60, mass).only(torch.arange(60) < sizes.unsqueeze(-1))
    page = Page(slots, sizes, 8, Bits(4, 4), 2, 6)
    page.append(slots_of(generator, 2, 8, False))
    budget = page.held - 8
    newest = compress.Newest.of(page, budget, around=(2, 6), room=8)
    assert newest is not None
    (found,) = compress.compress_newest(method, [newest])
    assert found is not None
    assert ("log_mass" in found.middle.fields) is (mass or not method.keeps_tokens)
    if mass and method.keeps_tokens:  # new tokens alone have a mass of 1
        masses = found.middle.read(torch.float32).masses()
        assert int((masses - 1).abs().lt(1e-6).sum(-1).max()) <= 8
    if not mass and not method.keeps_tokens:  # no token is forgotten
        before = slots.masses().sum(-1) + 8
        total = found.middle.read(torch.float32).masses().sum(-1)
        assert ((total - before).abs() <= 8 + 1e-3).all()
