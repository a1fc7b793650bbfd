"""Slots exchanged by the compiled kernel are those that torch exchanges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch.kernels import exchange, native
from kvsketch.kernels.native import build
from kvsketch.page.exchange import Lowest
from kvsketch.page.part import Part
from kvsketch.page.quantized import Bits
from kvsketch.slots import Slots

#: of processors, from the least to what this one has
LEVELS = range(4)
#: the scores of slots that come are greater
_NEW = 1000.0

if build.compiler() is None:
    pytest.skip("there is no C++ compiler", allow_module_level=True)


@pytest.fixture(autouse=True)
def _whole():
    assert native.library() is not None, native.kernel()
    yield
    native.library().kvsketch_limit(len(LEVELS))


shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "parts": st.integers(1, 3),
        "batch": st.integers(1, 2),
        "heads": st.integers(1, 3),
        "n": st.sampled_from([1, 2, 33, 130]),
        "new": st.sampled_from([1, 2, 20]),
        "dims": st.sampled_from([(8, 8), (5, 7), (32, 32), (80, 100), (128, 130), (256, 1)]),
        "bits": st.sampled_from([(8, 8), (4, 4), (8, 4), (4, 8)]),
        "uneven": st.booleans(),
        "mass": st.booleans(),
        "positions": st.booleans(),
        "others": st.booleans(),
        "as_many": st.booleans(),
        "far": st.booleans(),
    }
)


def made(s):
    """Parts, how many slots of each head leave, the slots that come, and how many of each head."""
    g = torch.Generator().manual_seed(s["seed"])
    batch, heads = s["batch"], s["heads"]

    def slots(rows, n, mass):
        def drawn(*shape):
            return torch.randn(rows, heads, n, *shape, generator=g)

        key_dim, value_dim = s["dims"]
        positions = drawn().abs() if s["positions"] else None
        masses = drawn().exp() if mass else None
        values = drawn(value_dim) * (1 if masses is None else masses.unsqueeze(-1))
        keys = drawn(key_dim) * torch.linspace(0.2, 3, key_dim)  # channels have different units
        return Slots(keys, values, masses, positions, drawn().abs())

    parts = []
    for _ in range(s["parts"]):
        held, sizes = slots(batch, s["n"], s["mass"]), None
        if s["uneven"]:
            sizes = torch.randint((s["n"] + 1) // 2, s["n"] + 1, (batch, heads), generator=g)
            sizes[0, 0] = s["n"]
            held = held.only(torch.arange(s["n"]) < sizes.unsqueeze(-1))
        parts.append(Part(held, sizes, 0, Bits(*s["bits"])))
    held = torch.cat([part.held for part in parts])
    count = (torch.rand(held.shape, generator=g) * (held + 1)).long()
    new = slots(len(held), s["new"], s["others"])
    new.keys.mul_(0.2), new.values.mul_(0.2), new.score.add_(_NEW)
    if s["far"]:
        new.keys[-1, -1, 0, -1] = 1e6
    sizes = torch.randint(0, s["new"] + 1, held.shape, generator=g)
    if s["as_many"]:
        count = count.clamp(max=s["new"])
        sizes = count.clone()
    sizes[held == count] = sizes[held == count].clamp(min=1)  # no head is empty
    return parts, count, new, sizes


def same(found, wanted, live):
    """``found`` equals ``wanted`` but for the order of sums, which decides the last digit of a
    scale in float16, and between two codes that are equally near."""
    for name in ("keys", "values", "mass", "positions", "score"):
        one, two = getattr(found, name), getattr(wanted, name)
        assert (one is None) == (two is None)
        if one is not None:
            one, two = one[live], two[live]
            close = torch.isclose(one, two, rtol=2e-3, atol=2e-3)
            assert close.double().mean() > 0.99 or one.numel() < 200
            assert bool((close | ((one - two).abs() < 0.5 * (1 + two.abs()))).all())


def check(s):
    parts, count, new, sizes = made(s)
    one, two = exchange.lowest(parts, count), Lowest(parts, count)
    assert isinstance(one, exchange.CompiledLowest)
    same(one.slots, two.slots, torch.arange(one.slots.count) < count.unsqueeze(-1))
    if one.slots.mass is not None:
        torch.testing.assert_close(one.slots.mass, two.slots.mass)
    before = [part.read(torch.float32) for part in parts]
    found, wanted = one.exchanged(new, sizes), two.exchanged(new, sizes)
    assert [part is None for part in found] == [part is None for part in wanted]
    for mine, theirs, part, was in zip(found, wanted, parts, before, strict=True):
        now = part.read(torch.float32)  # nothing was written into it
        assert torch.equal(now.keys, was.keys)
        assert torch.equal(now.score, was.score)
        if mine is None:
            continue
        assert torch.equal(mine.held, theirs.held)
        assert mine.count == theirs.count
        assert (mine.sizes is None) == (theirs.sizes is None)
        slots, others = mine.read(torch.float32), theirs.read(torch.float32)
        live = others.live()
        assert torch.equal(slots.masses() > 0, others.masses() > 0)
        same(slots, others, torch.ones_like(slots.score).bool() if live is None else live)
        old = (theirs.fields["score"] < _NEW).flatten()
        if mine.blocks is not None:
            live = mine.blocks.live(0).flatten()
            old &= live
            if "log_mass" in mine.fields:  # kernels read whole blocks
                assert bool((mine.fields["log_mass"].flatten()[~live] < -1e29).all())
        assert torch.equal(
            mine.fields["score"].flatten()[old], theirs.fields["score"].flatten()[old]
        )
        for name, packed in mine.packed.items():
            for tensor in ("codes", "step"):
                kept, those = (getattr(p, tensor) for p in (packed, theirs.packed[name]))
                assert torch.equal(kept.flatten(0, -2)[old], those.flatten(0, -2)[old])


@settings(deadline=None, max_examples=200)
@given(shapes, st.sampled_from(LEVELS))
def test_slots_are_those_that_torch_exchanges(s, level):
    native.library().kvsketch_limit(level)
    check(s)


def fuzz(count):
    """Shapes at random, as ``test_cpu.fuzz``."""
    g = torch.Generator().manual_seed(0)

    def one(values):
        return values[int(torch.randint(len(values), (), generator=g))]

    for number in range(count):
        names = ("uneven", "mass", "positions", "others", "as_many", "far")
        s = {name: one([False, True]) for name in names}
        s |= {"seed": number, "parts": one([1, 2]), "batch": one([1, 2]), "heads": one([1, 3])}
        s |= {"n": one([1, 33, 130]), "new": one([1, 20]), "bits": one([(8, 4), (4, 8), (4, 4)])}
        native.library().kvsketch_limit(one(LEVELS))
        check({**s, "dims": one([(5, 7), (32, 32), (80, 100), (128, 130), (256, 1)])})
