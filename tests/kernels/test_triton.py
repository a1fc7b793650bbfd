"""The Triton kernels equal ``estimator.attend`` in float64.

They run on CUDA tensors where there is a GPU, else in Triton's interpreter on the CPU. The
interpreter accepts more than the compiler, so that the kernels are also compiled, which needs no
GPU.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.estimator import attend, attention_scores
from kvsketch.kernels import triton_support
from kvsketch.observed import Observed
from kvsketch.page.part import Part
from kvsketch.page.quantized import Bits, Quantized, quantize
from kvsketch.partial import NOTHING, log_mass
from kvsketch.slots import Slots

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXAMPLES = 12 if DEVICE == "cuda" else 20  # each of which is compiled for seconds there
INTERPRET = {} if DEVICE == "cuda" else {"TRITON_INTERPRET": "1"}

# Triton reads the variable when it is imported; other tests should not find it set.
with pytest.MonkeyPatch.context() as patch:
    for name, value in INTERPRET.items():
        patch.setenv(name, value)
    decode_module = importlib.import_module("kvsketch.kernels.triton_decode")
    pieces_module = importlib.import_module("kvsketch.kernels.triton_pieces")
    prefill_module = importlib.import_module("kvsketch.kernels.triton_prefill")
    shares_module = importlib.import_module("kvsketch.kernels.triton_shares")
decode, prefill = decode_module.decode, prefill_module.prefill
assert triton_support.available(DEVICE), "Triton was imported before, without its interpreter"

# Logarithms of 0 and maxima of NaN are intended; on a GPU there is no warning.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

#: largest error of an output, relative to the largest value, by rounding it and the weights
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in INTERPRET.items():
        monkeypatch.setenv(name, value)


def on(tensor: Tensor) -> Tensor:
    return tensor.to(DEVICE)


@dataclass
class Page:
    """A flat page whose heads have slots in any order, with gaps between them."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    mass: Tensor | None
    start: Tensor
    count: Tensor
    extras: dict[str, Any]

    @property
    def arguments(self) -> tuple[Any, ...]:
        log = None if self.mass is None else log_mass(self.mass)  # as a page stores it
        return (self.queries, self.keys, self.values, log, self.start, self.count)

    def head(self, row: int, head: int) -> Slots:
        """The slots of a head, in float64."""
        first, number = int(self.start[row, head]), int(self.count[row, head])
        part = slice(first, first + number)
        mass = torch.ones(number) if self.mass is None else self.mass[row, part].cpu()
        mass = mass.double()
        positions = self.extras.get("positions")
        return Slots(
            self.keys[row, part].cpu().double()[None, None],
            (self.values[row, part].cpu().double() * mass[:, None])[None, None],
            mass[None, None],
            None if positions is None else positions[row, part].cpu().double()[None, None],
        )


def page(
    *counts: list[int],
    seed: int = 0,
    queries: int = 1,
    group: int = 2,
    head_dim: int = 8,
    value_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    mass: bool = True,
    strided: bool = False,
    index: torch.dtype = torch.int64,
    **extras: Any,
) -> Page:
    """A page; ``counts`` are the slots of each head, row by row. Extras that are True are drawn."""
    random = torch.Generator().manual_seed(seed)
    batch, kv_heads = len(counts), len(counts[0])
    heads = kv_heads * group

    def normal(*shape: int) -> Tensor:
        if strided:  # the last axis is not the dense one, and there are gaps
            shape = (*shape[:-2], shape[-1], 2 * shape[-2])
            made = torch.randn(shape, generator=random).to(dtype)
            return on(made).transpose(-1, -2)[..., ::2, :]
        return on(torch.randn(shape, generator=random).to(dtype))

    start, total = torch.zeros(batch, kv_heads, dtype=index), 0
    for row in range(batch):
        place = 0
        for head in torch.randperm(kv_heads, generator=random).tolist():
            place += int(torch.randint(3, (), generator=random))
            start[row, head] = place
            place += counts[row][head]
        total = max(total, place + 1)
    masses = None
    if mass:
        masses = torch.rand(batch, total, generator=random) * 4
        masses = on(masses.masked_fill(torch.rand(batch, total, generator=random) < 0.2, 0.0))
    if extras.get("slopes"):
        extras["slopes"] = on(torch.rand(heads, generator=random) / 4)
        order = torch.rand(batch, total, generator=random).argsort(1)
        extras["positions"] = on(order.to(extras.pop("position_dtype", torch.float32)))
    if extras.get("sinks"):
        extras["sinks"] = on(torch.randn(heads, generator=random).to(dtype))
    return Page(
        normal(batch, heads, queries, head_dim),
        normal(batch, total, head_dim),
        normal(batch, total, value_dim),
        masses,
        on(start),
        on(torch.tensor(counts, dtype=index)),
        {"scaling": 0.7, **extras},
    )


def reference(
    given: Page, news: list[list[Slots]] | None = None, here: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``attend`` and its denominator's logarithm in float64, head by head. ``here``: positions of
    the queries ``[batch, q]``, from which ALiBi counts in the logarithm."""
    queries = given.queries.cpu().double()
    batch, heads, number, _ = queries.shape
    group = heads // given.start.shape[1]
    out = torch.zeros(batch, heads, number, given.values.shape[-1], dtype=torch.float64)
    log = torch.full((batch, heads, number), -torch.inf, dtype=torch.float64)
    scaling, softcap = given.extras["scaling"], given.extras.get("softcap")
    for row in range(batch):
        for head in range(given.start.shape[1]):
            mine = slice(head * group, (head + 1) * group)
            slopes, sinks = (
                given.extras[name].cpu().double()[mine] if name in given.extras else None
                for name in ("slopes", "sinks")
            )
            slots, mask = given.head(row, head), None
            if news is not None:
                old = slots.count
                slots = Slots.cat([slots, news[row][head]]) if old else news[row][head]
                column = torch.arange(slots.count)
                mask = (column <= old + torch.arange(number)[:, None])[None, None]
            if sinks is not None:
                log[row, mine] = sinks[:, None]
            if slots.count == 0:
                continue
            q = queries[row : row + 1, mine]
            bias = torch.zeros(group, max(1, number), dtype=torch.float64)
            if slopes is not None:  # attend() counts positions from the newest slot
                assert slots.positions is not None
                at = slots.positions[0, 0, -1].expand(number) if here is None else here[row].cpu()
                bias = slopes[:, None] * (slots.positions.max() - at)
            # A sink has no position: with slopes, attend() needs another sink for each query.
            alone = slopes is not None and sinks is not None
            for part in [slice(i, i + 1) for i in range(number)] if alone else [slice(number)]:
                out[row, mine, part] = attend(
                    q[:, :, part],
                    slots,
                    scaling=scaling,
                    softcap=softcap,
                    mask=None if mask is None else mask[:, :, part],
                    slopes=slopes,
                    sinks=None if sinks is None else sinks - bias[:, part.stop - 1],
                )[0]
            scores = attention_scores(q, slots, scaling, softcap, mask, slopes)[0, 0]
            scores += bias[:, :, None] + slots.masses()[0, 0].log()
            log[row, mine] = torch.logaddexp(log[row, mine], scores.logsumexp(-1))
    return out, log


def close(given: Page, got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Check that output and logarithm are those wanted, up to rounding."""
    assert got[0].dtype == given.queries.dtype
    assert got[1].dtype == torch.float32
    part = TOLERANCE[given.queries.dtype]
    size = max(1.0, float(given.values.abs().max())) if given.values.numel() else 1.0
    torch.testing.assert_close(got[0].cpu().double(), wanted[0], rtol=0, atol=part * size)
    torch.testing.assert_close(got[1].cpu().double(), wanted[1], rtol=1e-5, atol=2e-5)


ROWS = st.integers(1, 2).flatmap(
    lambda kv: st.lists(
        st.lists(st.integers(0, 40), min_size=kv, max_size=kv), min_size=1, max_size=2
    )
)
SHAPES: dict[str, Any] = {
    "seed": st.integers(0, 99),
    "group": st.sampled_from([1, 2, 3, 17]),
    "head_dim": st.integers(1, 40),
    "value_dim": st.integers(1, 40),
    "dtype": st.sampled_from(list(TOLERANCE)),
    "mass": st.booleans(),
    "strided": st.booleans(),
    "index": st.sampled_from([torch.int32, torch.int64]),
    "softcap": st.sampled_from([None, 0.5, 30.0]),
    "sinks": st.booleans(),
    "slopes": st.booleans(),
    "position_dtype": st.sampled_from([torch.float32, torch.int32, torch.int64]),
}


def made(counts: list[list[int]], shape: dict[str, Any], **more: Any) -> Page:
    shape = {name: value for name, value in shape.items() if value is not None}
    if not shape["slopes"]:
        del shape["position_dtype"]
    for name in ("sinks", "slopes"):
        if not shape[name]:
            del shape[name]
    return page(*counts, **shape, **more)


@settings(max_examples=EXAMPLES)
@given(
    counts=ROWS,
    shape=st.fixed_dictionaries(SHAPES),
    splits=st.integers(1, 4),
    block=st.sampled_from([16, 32]),
    most=st.sampled_from([None, 0, 3, 10**6]),
)
def test_decode_is_attend(
    counts: list[list[int]], shape: dict[str, Any], splits: int, block: int, most: int | None
) -> None:
    given = made(counts, shape)
    here = None
    if shape["slopes"] and shape["sinks"]:
        here = torch.full((len(counts),), 200, dtype=shape["position_dtype"])
        given.extras["query_positions"] = on(here)
    got = decode(*given.arguments, **given.extras, splits=splits, block=block, most=most)
    close(given, got, reference(given, here=None if here is None else here[:, None]))


def test_decode_as_it_is_called() -> None:
    # With default sizes there are several pieces and several tiles in each.
    given = page([600, 30], [0, 513], head_dim=16, value_dim=16)
    close(given, decode(*given.arguments, **given.extras), reference(given))
    assert pieces_module.splits_for(2, 2, 600) == 3


OLD = importlib.metadata.version("triton") < "3.7"


@pytest.mark.skipif(OLD and DEVICE == "cuda", reason="Triton 3.6 loses arguments of some tuples")
def test_rows_that_share_pages_or_take_them_in_any_order() -> None:
    given = page([20, 5], [0, 33], slopes=True, sinks=True, position_dtype=torch.int64)
    here = on(torch.tensor([100, 7]))
    pair, more, _ = new_tokens(given, 0, True, True)
    order = on(torch.tensor([3, 0]))

    def moved(stored: Tensor) -> Tensor:  # rows 0 and 1 become 3 and 0, among others
        found = torch.full_like(stored[:1], 7).repeat(5, *[1] * (stored.dim() - 1))
        return found.index_copy(0, order, stored)

    assert given.mass is not None
    keys, values, mass = map(moved, (given.keys, given.values, log_mass(given.mass)))
    others = dict(given.extras, positions=moved(given.extras["positions"]))
    others.update(pages=order)
    arguments = (given.queries, keys, values, mass)
    arguments += (given.start, given.count)
    for splits in (1, 2):
        got = decode(*arguments, **others, query_positions=here, splits=splits, block=16)
        close(given, got, reference(given, here=here[:, None]))
    wanted = prefill(*given.arguments, *pair, **given.extras, **more, rows=16, block=16)
    got = prefill(*arguments, *pair, **others, **more, rows=16, block=16)
    torch.testing.assert_close(got, wanted)


def test_a_sink_that_takes_nothing() -> None:
    given = page([20, 0], [0, 3], sinks=True)
    given.extras["sinks"][1:3] = -torch.inf
    for splits in (1, 2):
        got = decode(*given.arguments, **given.extras, splits=splits, block=16)
        close(given, got, reference(given))
    pair, more, _ = new_tokens(given, 0, False, False)
    more["new_log_mass"] = on(torch.full((2, 2, 1), -torch.inf))
    got = prefill(*given.arguments, *pair, **given.extras, **more, rows=16, block=16)
    close(given, got, reference(given))


@pytest.mark.slow
def test_a_group_of_several_tiles() -> None:
    given = page([20, 5], [0, 33], group=70, sinks=True)
    for splits in (1, 2):
        got = decode(*given.arguments, **given.extras, splits=splits, block=16)
        close(given, got, reference(given))


def test_positions_of_queries_shift_the_logarithm() -> None:
    given = page([20, 5], [0, 40], slopes=True, sinks=True, position_dtype=torch.int64)
    here = on(torch.tensor([100, 7]))
    got = decode(*given.arguments, **given.extras, query_positions=here, splits=2, block=16)
    close(given, got, reference(given, here=here[:, None]))


def test_softcap_keeps_small_scores() -> None:
    # tanh from exp alone would lose scores of 1e-3 beside a cap of 1e6.
    given = page([40], head_dim=4, softcap=1e6)
    given.extras["scaling"] = 1.0
    close(given, decode(*given.arguments, **given.extras, block=16), reference(given))


def test_scores_far_from_zero() -> None:
    given = page([40, 1], [3, 17])
    given.queries *= 300
    close(given, decode(*given.arguments, **given.extras, splits=3, block=16), reference(given))


def test_a_dead_slot_cannot_raise_the_shift() -> None:
    given = page([2], group=1, head_dim=1, value_dim=1, mass=False)
    given.queries[:] = given.extras["scaling"] = 1.0
    first = int(given.start[0, 0])
    given.keys[0, first : first + 2] = on(torch.tensor([[500.0], [0.0]]))
    given.mass = on(torch.ones(given.keys.shape[:2]))
    given.mass[0, first] = 0.0
    out, log = decode(*given.arguments, **given.extras, block=16)
    assert torch.equal(out.flatten(), given.values[0, first + 1])
    assert float(log) == 0.0


def test_nothing_to_attend_to() -> None:
    given = page([0, 4], mass=False)
    out, log = decode(*given.arguments, **given.extras, splits=3, block=16)
    assert torch.equal(out[:, :2], torch.zeros_like(out[:, :2]))
    assert torch.isneginf(log[:, :2]).all()
    assert torch.isfinite(log[:, 2:]).all()
    dead = replace(given, mass=on(torch.zeros(given.keys.shape[:2])))
    out, log = decode(*dead.arguments, **dead.extras, splits=2, block=16)
    assert not out.any()
    assert torch.isneginf(log).all()
    empty = replace(given, keys=given.keys[:, :0], values=given.values[:, :0], mass=None)
    empty.start, empty.count = torch.zeros_like(given.start), torch.zeros_like(given.count)
    out, log = decode(*empty.arguments, **empty.extras)
    assert not out.any()
    assert torch.isneginf(log).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("start", -1), ("count", -1), ("start", 10**12), ("count", 2**62), ("count", 41)],
)
@pytest.mark.parametrize("splits", [1, 2])
def test_slots_outside_the_page_are_not_a_number(name: str, value: int, splits: int) -> None:
    given = page([40, 4])
    good = decode(*given.arguments, **given.extras, splits=splits, block=16)
    getattr(given, name)[0, 0] = value if value != 41 else given.keys.shape[1] + 1
    out, log = decode(*given.arguments, **given.extras, splits=splits, block=16)
    assert out[:, :2].isnan().all()
    assert log[:, :2].isnan().all()
    assert torch.equal(out[:, 2:], good[0][:, 2:])


def test_a_mass_that_is_not_a_number_shows() -> None:
    given = page([40])
    assert given.mass is not None
    given.mass[0, int(given.start[0, 0]) + 20] = torch.nan
    for splits in (1, 3):
        out, log = decode(*given.arguments, **given.extras, splits=splits, block=16)
        assert out.isnan().all()
        assert log.isnan().all()


def test_what_is_given_is_written_and_nothing_made(monkeypatch: pytest.MonkeyPatch) -> None:
    given = page([70, 9], [1, 33], sinks=True)
    wanted = reference(given)
    out, log = torch.empty_like(given.queries), on(torch.empty(2, 4, 1))
    scratch = pieces_module.scratch_for(given.queries, 8, 3)
    for part in scratch:
        part.fill_(torch.nan)  # the output would be NaN if this were read
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", None)
        got = decode(
            *given.arguments,
            **given.extras,
            splits=3,
            block=16,
            out=out,
            log_total=log,
            scratch=scratch,
        )
    assert got[0] is out
    assert got[1] is log
    close(given, got, wanted)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_decode_in_a_cuda_graph() -> None:
    given = page([70, 9], [1, 33])
    decode(*given.arguments, **given.extras, most=70)  # compiled and tuned before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode(*given.arguments, **given.extras, most=70)
    given.count.copy_(torch.tensor([[60, 2], [0, 20]]))
    given.queries.mul_(2)
    graph.replay()
    close(given, got, reference(given))


def test_offsets_beyond_int32() -> None:
    # Pages of more than 2^31 elements, stored slot by slot and channel by channel. Memory that is
    # never written takes no space on the CPU.
    total, dim = 2**27 + 40, 18
    by_slot = torch.empty(1, total, dim, dtype=torch.float16, device=DEVICE)
    by_channel = torch.empty(1, dim, total, dtype=torch.float16, device=DEVICE).transpose(1, 2)
    small = page([33], head_dim=dim, value_dim=dim, dtype=torch.float16, mass=False)
    first = int(small.start[0, 0])
    for keys, values in ((by_slot, by_channel), (by_channel, by_slot)):
        keys[0, -33:] = small.keys[0, first : first + 33]
        values[0, -33:] = small.values[0, first : first + 33]
        start = torch.full_like(small.start, total - 33)
        given = replace(small, keys=keys, values=values, start=start)
        wanted = reference(small)
        got = decode(*given.arguments, **given.extras, most=33, block=16, splits=2)
        close(small, got, wanted)
        new = on(torch.zeros(1, 1, 1, dim, dtype=torch.float16))
        dead = on(torch.full((1, 1, 1), NOTHING))
        more = {**given.extras, "new_log_mass": dead}
        got = prefill(*given.arguments, new, new, **more, rows=16, block=16)
        close(small, got, wanted)


# Quantised pages ----------------------------------------------------------------------------------


def flattened(held: Quantized) -> Quantized:
    """The slots of all heads, which have equal sizes, one head after another."""
    return held.map_slots(lambda tensor: tensor.flatten(1, 2))


def quantised(
    seed: int, bits: int, head_dim: int, value_dim: int, dtype: torch.dtype, **extras: Any
) -> tuple[Page, tuple[Any, ...]]:
    """A page of the numbers read from codes, and the arguments of a call with the codes."""
    batch, kv_heads, slots = 2, 2, 20
    random = torch.Generator().manual_seed(seed)
    kept = [[20, 7], [0, 13]]
    given = page(*kept, seed=seed, head_dim=head_dim, value_dim=value_dim, dtype=dtype, **extras)
    given.start = on(torch.arange(kv_heads).mul(slots).expand(batch, -1).contiguous())
    given.mass = on(torch.rand(batch, kv_heads * slots, generator=random))
    flat = []
    for name, dim, per_channel in (("keys", head_dim, True), ("values", value_dim, False)):
        rows = torch.randn(batch, kv_heads, slots, dim, generator=random)
        rows *= torch.rand(dim, generator=random) * 3
        held = quantize(on(rows + 0.5 * per_channel), bits, per_channel=per_channel)
        read = torch.empty(batch, kv_heads, slots, dim, device=DEVICE)
        held.read(read)
        setattr(given, name, read.flatten(1, 2))
        flat.append(flattened(held))
    return given, (given.queries, *flat, log_mass(given.mass), given.start, given.count)


@settings(max_examples=EXAMPLES // 3)
@given(
    seed=st.integers(0, 99),
    bits=st.sampled_from([8, 4]),
    head_dim=st.one_of(st.integers(1, 40), st.sampled_from([64, 65, 130])),
    value_dim=st.one_of(st.integers(1, 40), st.sampled_from([64, 67, 129])),
    splits=st.integers(1, 2),
    softcap=st.sampled_from([None, 2.0]),
)
def test_decode_of_quantised_slots(
    seed: int, bits: int, head_dim: int, value_dim: int, splits: int, softcap: float | None
) -> None:
    given, arguments = quantised(seed, bits, head_dim, value_dim, torch.float32)
    given.extras |= {"softcap": softcap, "scaling": head_dim**-0.5}
    got = decode(*arguments, **given.extras, splits=splits, block=16)
    close(given, got, reference(given))
    # Here only the values are quantised.
    mixed = (arguments[0], given.keys, *arguments[2:])
    close(given, decode(*mixed, **given.extras, block=32), reference(given))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_slots_with_16_bit_queries(bits: int, dtype: torch.dtype) -> None:
    # Tiles are rounded to the dtype of the queries, as a page of that dtype would be.
    given, arguments = quantised(1, bits, 66, 24, dtype)
    given.extras["scaling"] = 66**-0.5
    wanted = reference(given)[0]
    part = 4 * TOLERANCE[dtype] * float(given.values.abs().max())
    new = [on(torch.zeros(2, 2, 1, dim, dtype=dtype)) for dim in (66, 24)]
    dead = on(torch.full((2, 2, 1), NOTHING))
    for got, _ in (
        decode(*arguments, **given.extras, splits=2, block=16),
        prefill(*arguments, *new, **given.extras, new_log_mass=dead, block=16),
    ):
        torch.testing.assert_close(got.cpu().double(), wanted, rtol=0, atol=part)


# Shares -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("q", "n", "dim"), [(1, 1, 3), (70, 130, 24), (129, 65, 64)])
def test_largest_shares_are_those_of_all_scores(
    q: int, n: int, dim: int, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(q)
    queries = torch.randn(2, q, dim, generator=random).to(dtype)
    keys = torch.randn(2, n, dim, generator=random).to(dtype)
    found = shares_module.largest_shares(on(queries), on(keys), 0.9)
    exact = (0.9 * queries.double() @ keys.double().mT).log_softmax(-1).amax(1)
    torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-5, atol=1e-4)


# Prefill ------------------------------------------------------------------------------------------


def new_tokens(
    given: Page, seed: int, mass: bool, strided: bool
) -> tuple[tuple[Tensor, Tensor], dict[str, Any], list[list[Slots]]]:
    """Keys and values of new tokens, their other arguments, and each head's tokens as slots."""
    random = torch.Generator().manual_seed(seed)
    batch, kv_heads = given.start.shape
    number = given.queries.shape[2]
    pair = []
    for dim in (given.queries.shape[3], given.values.shape[2]):
        new = torch.randn(batch, number, kv_heads, dim, generator=random).to(given.queries.dtype)
        new = on(new).transpose(1, 2)
        pair.append(new if strided else new.contiguous())
    more: dict[str, Any] = {}
    masses = torch.ones(batch, kv_heads, number)
    if mass:  # padding is the same in all heads of a row
        masses = (torch.rand(batch, 1, number, generator=random) < 0.8).float()
        masses = masses.expand(batch, kv_heads, number)
        more["new_log_mass"] = on(log_mass(masses))
    positions = None
    if "positions" in given.extras:
        positions = 100 + torch.arange(number).expand(batch, number)
        more["new_positions"] = on(positions.to(given.extras["positions"].dtype))
    heads = [
        [
            Slots(
                pair[0][row, head].cpu().double()[None, None],
                (pair[1][row, head].cpu().double() * masses[row, head, :, None])[None, None],
                masses[row, head].double()[None, None],
                None if positions is None else positions[row].double()[None, None],
            )
            for head in range(kv_heads)
        ]
        for row in range(batch)
    ]
    return (pair[0], pair[1]), more, heads


@settings(max_examples=EXAMPLES // 2)
@given(
    counts=ROWS,
    shape=st.fixed_dictionaries({**SHAPES, "group": st.sampled_from([1, 2, 5])}),
    number=st.integers(1, 40),
    padding=st.booleans(),
    rows=st.sampled_from([16, 32]),
    block=st.sampled_from([16, 32]),
)
def test_prefill_is_attend(
    counts: list[list[int]],
    shape: dict[str, Any],
    number: int,
    padding: bool,
    rows: int,
    block: int,
) -> None:
    given = made(counts, shape, queries=number)
    pair, more, heads = new_tokens(given, shape["seed"], padding, shape["strided"])
    got = prefill(*given.arguments, *pair, **given.extras, **more, rows=rows, block=block)
    here = more.get("new_positions")
    close(given, got, reference(given, heads, here))


def test_prefill_of_quantised_slots() -> None:
    for bits, head_dim in ((8, 70), (4, 20)):
        given, arguments = quantised(2, bits, head_dim, 24, torch.float32, queries=11, sinks=True)
        given.extras["scaling"] = head_dim**-0.5
        pair, _, heads = new_tokens(given, 3, False, False)
        got = prefill(*arguments, *pair, **given.extras, rows=16, block=16)
        close(given, got, reference(given, heads))


def test_prefill_as_it_is_called() -> None:
    given = page([100, 3], [0, 70], queries=70, group=3)
    pair, _, heads = new_tokens(given, 0, False, False)
    out, log = torch.empty_like(given.queries), on(torch.empty(given.queries.shape[:3]))
    got = prefill(*given.arguments, *pair, **given.extras, out=out, log_total=log)
    assert got[0] is out
    assert got[1] is log
    close(given, got, reference(given, heads))


def test_prefill_outside_the_page_is_not_a_number() -> None:
    given = page([10, 4], queries=3)
    pair, _, _ = new_tokens(given, 0, False, False)
    given.count[0, 1] = 100
    out, log = prefill(*given.arguments, *pair, **given.extras, rows=16, block=16)
    assert out[:, 2:].isnan().all()
    assert log[:, 2:].isnan().all()
    assert torch.isfinite(out[:, :2]).all()


def test_no_query() -> None:
    given = page([10, 4], queries=0)
    pair, _, _ = new_tokens(given, 0, False, False)
    for out, log in (
        decode(*given.arguments, **given.extras),
        prefill(*given.arguments, *pair, **given.extras),
    ):
        assert out.shape == (1, 4, 0, 8)
        assert log.shape == (1, 4, 0)


# What is refused ----------------------------------------------------------------------------------


def wrong(**changes: Any) -> dict[str, Any]:
    return changes


BOTH: list[tuple[dict[str, Any], type[Exception], str]] = [
    (wrong(queries=torch.zeros(4, 1, 8)), InputError, "queries must be"),
    (wrong(queries=torch.zeros(1, 4, 1, 7)), InputError, "head_dim"),
    (wrong(queries=torch.zeros(1, 3, 1, 8)), InputError, "multiple"),
    (wrong(queries=torch.zeros(1, 0, 1, 8)), InputError, "num_attention_heads=0"),
    (wrong(queries=torch.zeros(2, 4, 1, 8)), InputError, "batch=2"),
    (wrong(queries=torch.zeros(1, 4, 1, 8).double()), UnsupportedError, "queries is float64"),
    (wrong(queries=torch.zeros(1, 4, 1, 8).int()), InputError, "queries must be float32"),
    (wrong(queries=torch.zeros(1, 4, 1, 8, requires_grad=True)), UnsupportedError, "backward"),
    (wrong(queries=torch.zeros(1, 4, 1, 8, device="meta")), InputError, "one device"),
    (wrong(keys=torch.zeros(1, 9, 8).double()), UnsupportedError, "keys is float64"),
    (wrong(keys=torch.zeros(1, 2, 9, 8)), InputError, "keys must be"),
    (wrong(keys=torch.zeros(1, 8, 8)), InputError, "total"),
    (wrong(values=torch.zeros(1, 9, 8).long()), InputError, "values must be float32"),
    (wrong(values=torch.zeros(1, 9, 0)), InputError, "value_dim=0"),
    (wrong(values=torch.zeros(1, 9, 1025)), UnsupportedError, "value_dim=1025"),
    (wrong(log_mass=torch.zeros(1, 2, 9)), InputError, "log_mass must have shape"),
    (wrong(log_mass=torch.zeros(1, 9).double()), InputError, "log_mass must be float32"),
    (wrong(start=torch.zeros(1, 3).long()), InputError, "start and count"),
    (wrong(count=torch.zeros(1, 2)), InputError, "count must be int32"),
    (wrong(softcap=0.0), InputError, "softcap=0.0"),
    (wrong(softcap=-1.0), InputError, "softcap=-1.0"),
    (wrong(softcap=math.nan), InputError, "softcap=nan"),
    (wrong(scaling=math.inf), InputError, "scaling=inf"),
    (wrong(sinks=torch.zeros(2)), InputError, r"sinks must have shape \(4,\)"),
    (wrong(sinks=torch.zeros(4).double()), InputError, "sinks must be float32"),
    (wrong(slopes=torch.zeros(4)), InputError, "need positions"),
    (wrong(slopes=torch.zeros(3), positions=torch.zeros(1, 9)), InputError, "slopes"),
    (wrong(slopes=torch.zeros(4), positions=torch.zeros(9)), InputError, "positions"),
    (wrong(block=24), InputError, "block=24"),
    (wrong(block=8), InputError, "block=8"),
    (wrong(out=torch.zeros(1, 4, 1, 9)), InputError, "out must be"),
    (wrong(out=torch.zeros(1, 4, 1, 8).half()), InputError, "out must be"),
    (wrong(log_total=torch.zeros(1, 4)), InputError, "log_total must be"),
]


def call(kernel: Any, changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "queries": torch.zeros(1, 4, 1, 8),
        "keys": torch.zeros(1, 9, 8),
        "values": torch.zeros(1, 9, 8),
        "log_mass": None,
        "start": torch.zeros(1, 2, dtype=torch.int64),
        "count": torch.ones(1, 2, dtype=torch.int64),
        "scaling": 1.0,
    }
    if kernel is prefill:
        arguments |= {"new_keys": torch.zeros(1, 2, 1, 8), "new_values": torch.zeros(1, 2, 1, 8)}
    arguments |= changes
    kernel(
        **{
            name: on(value) if isinstance(value, Tensor) and not value.is_meta else value
            for name, value in arguments.items()
        }
    )


@pytest.mark.parametrize("kernel", [decode, prefill], ids=["decode", "prefill"])
def test_refused_by_both(kernel: Any) -> None:
    call(kernel, {})
    for changes, error, message in BOTH:
        with pytest.raises(error, match=message):
            call(kernel, changes)


def test_refused_by_one() -> None:
    positions = {"positions": torch.zeros(1, 9)}
    for changes, message in [
        (wrong(queries=torch.zeros(1, 4, 2, 8)), "decode takes one"),
        (wrong(most=-1), "most=-1"),
        (wrong(pages=torch.zeros(2).long()), "pages must have shape"),
        (wrong(pages=torch.zeros(1)), "pages must be int32, int64"),
        (wrong(splits=0), "splits=0"),
        (wrong(query_positions=torch.zeros(1)), "need positions"),
        (wrong(sinks=torch.ones(4), slopes=torch.ones(4), **positions), "need query_positions"),
        (wrong(query_positions=torch.zeros(1).long(), **positions), "query_positions must be"),
        (wrong(splits=2, scratch=(torch.zeros(1), torch.zeros(1))), r"scratch\[0\]"),
    ]:
        with pytest.raises(InputError, match=message):
            call(decode, changes)
    for changes, message in [
        (wrong(new_keys=torch.zeros(1, 2, 2, 8)), "new_keys must have shape"),
        (wrong(new_values=torch.zeros(1, 2, 1, 8).int()), "new_values must be float32"),
        (wrong(new_log_mass=torch.zeros(1, 1)), "new_log_mass must have shape"),
        (wrong(slopes=torch.zeros(4), **positions), "need new_positions"),
        (wrong(precision="tf32"), "precision='tf32'"),
        (wrong(rows=3), "rows=3"),
    ]:
        with pytest.raises(InputError, match=message):
            call(prefill, changes)
    long = torch.zeros(1, 1, 1).expand(1, 2**30 + 1, 1)
    with pytest.raises(UnsupportedError, match=r"2\^30 slots"):
        call(decode, wrong(queries=torch.zeros(1, 4, 1, 1), keys=long, values=long))


def test_refused_codes() -> None:
    keys = torch.randn(1, 2, 5, 70, generator=torch.Generator().manual_seed(0))
    held = flattened(quantize(keys, 4, per_channel=True))
    values = torch.zeros(1, 10, 70)
    for changes, message in [
        ({"bits": 3}, "keys.bits=3"),
        ({"codes": held.codes.int()}, "keys.codes must be uint8"),
        ({"step": held.step[:, :4]}, "keys.step must be"),
        ({"step": held.step.double()}, "keys.step must be float16"),
        ({"step": held.step[..., :1].repeat(1, 1, 5)}, "keys.codes do not divide"),
        ({"dim": 80}, "keys.dim=80"),
        ({"unit": held.unit[..., :2]}, "keys.unit must be"),
        ({"unit": held.unit[:, :1]}, "keys.unit must be"),
        ({"unit": held.unit.half()}, "keys.unit must be float32"),
        ({"offset": held.unit[..., :1]}, "keys.offset must be"),
    ]:
        queries = torch.zeros(1, 4, 1, changes.get("dim", 70))
        given = {"queries": queries, "keys": replace(held, **changes), "values": values}
        with pytest.raises(InputError, match=message):
            call(decode, given)
    given = {"queries": torch.zeros(1, 4, 1, 70), "keys": values, "values": held}
    with pytest.raises(InputError, match=r"values\.offset must be None"):
        call(decode, given)


@pytest.mark.skipif(DEVICE == "cuda", reason="only the CPU is refused")
def test_refused_without_an_interpreter_or_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(triton_support, "interpreted", lambda: False)
        with pytest.raises(UnsupportedError, match="CUDA device, got cpu"):
            call(decode, {})
        assert not triton_support.available("cpu")
        assert triton_support.available("cuda")
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not triton_support.available("cuda")
    with pytest.raises(UnsupportedError, match=r"kvsketch\[triton\]"):
        triton_support.require(torch.zeros(1))


# Launches -----------------------------------------------------------------------------------------


class Recorded:
    """A kernel, or what compiling it gives, that records its calls."""

    def __init__(self, gives: object = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.gives = gives

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*arguments: Any, **constants: Any) -> object:
            self.calls.append((grid, arguments, constants))
            return self.gives

        return call


LIKE = torch.zeros(4, 8)
ELSE = {
    "dtype": LIKE.double(),
    "strides": torch.zeros(8, 4).T,
    "alignment": torch.zeros(33)[1:].view(4, 8),
    "shape": torch.zeros(4, 9),
    "device": LIKE.to("meta"),
}


def test_a_second_launch_calls_the_compiled_kernel_with_every_argument() -> None:
    compiled, launch = Recorded(), triton_support.Launches()
    kernel = Recorded(compiled)
    other = torch.zeros(4, 8)
    for tensor in (LIKE, other):
        launch(kernel, (2, 3), [tensor], (tensor, 5), {"A": 1, "B": 2}, {"num_warps": 4})
    constants = {"A": 1, "B": 2, "num_warps": 4, "enable_fp_fusion": True}
    assert kernel.calls == [((2, 3), (LIKE, 5), constants)]
    assert compiled.calls == [((2, 3, 1), (other, 5, 1, 2), {})]


@pytest.mark.parametrize("what", ELSE)
def test_a_launch_with_other_tensors_is_compiled_anew(what: str) -> None:
    kernel, launch = Recorded(Recorded()), triton_support.Launches()
    for tensor in (LIKE, ELSE[what]):
        launch(kernel, (1,), [tensor], (tensor,), {})
    assert len(kernel.calls) == 2


def test_what_is_kept_of_a_part_is_of_its_tensors_and_the_queries() -> None:
    gpu = importlib.import_module("kvsketch.kernels.gpu")
    random = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 12, 8, generator=random)
    part, other = (Part(Slots(on(k), on(v))) for k, v in ((keys, values), (values, keys)))
    for scale, group, held in ((0.3, 2, part), (0.6, 2, part), (0.3, 3, part), (0.3, 3, other)):
        if held is other:  # as if it had become another part
            other.for_kernel = part.for_kernel
        asked = Observed(on(torch.randn(1, 2 * group, 1, 8, generator=random)), scale)
        found, _ = gpu.attend(asked, [held])
        wanted = attend(
            asked.queries.double().cpu(), held.slots.map(lambda t: t.double().cpu()), scaling=scale
        )
        torch.testing.assert_close(found.double().cpu(), wanted, rtol=0, atol=1e-5)
        before = held.for_kernel
        gpu.attend(asked, [held])
        assert held.for_kernel is before
    with pytest.raises(UnsupportedError, match="no backward pass"):
        gpu.attend(replace(asked, queries=asked.queries.requires_grad_()), [held])


def test_a_prepared_launch_follows_the_tokens_that_are_appended() -> None:
    """Over slots in few bits and the tokens since, while tokens are appended: as without."""
    gpu = importlib.import_module("kvsketch.kernels.gpu")
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return on(torch.randn(1, *shape, generator=random))

    few = Part(Slots(drawn(2, 60, 16), drawn(2, 60, 16)), bits=Bits(8, 4))
    newest = Part(Slots(drawn(2, 5, 16), drawn(2, 5, 16)), room=6)
    for parts in ([few, newest], [newest]):
        first = Observed(drawn(4, 1, 16), 0.3)
        prepared = gpu.PreparedLaunches(first, parts)
        for _ in range(3):
            newest.put(drawn(2, 1, 16), drawn(2, 1, 16))
            asked = Observed(drawn(4, 1, 16), 0.3)
            found = prepared.attend(asked)
            wanted, _ = gpu.attend(asked, parts)
            assert torch.equal(found, wanted)
            whole = [part.slots.map(lambda t: t.double().cpu()) for part in parts]
            exact = attend(asked.queries.double().cpu(), Slots.cat(whole), scaling=0.3)
            torch.testing.assert_close(found.double().cpu(), exact, rtol=0, atol=1e-5)
        for other in (
            replace(asked, scaling=0.4),
            replace(asked, softcap=5.0),
            replace(asked, queries=asked.queries.bfloat16()),
            replace(asked, queries=drawn(6, 1, 16)),
            replace(asked, sinks=on(torch.zeros(4))),
        ):
            assert prepared.attend(other) is None


# Imports and the compiler -------------------------------------------------------------------------


def run(program: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = str(Path(__file__).parents[2] / "src")
    path = os.pathsep.join([source, kept.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        env={**kept, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_importing_kvsketch_does_not_import_triton() -> None:
    run(
        """
        import sys
        import kvsketch, kvsketch.kernels
        from kvsketch.kernels import flat_page, triton_support
        assert triton_support.available("cuda")
        assert "triton" not in sys.modules
        """
    )


COMPILE = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Driver:  # of a GPU that is not there: enough to compile for it
    def get_current_target(self): return GPUTarget("cuda", int(sys.argv[1]), 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0

triton.runtime.driver.set_active(Driver())
launch = JITFunction.run
def compiled(self, *args, grid, warmup, **kwargs):
    assembled = launch(self, *args, grid=grid, warmup=True, **kwargs).asm["ptx"]
    products = "wgmma" if "wgmma" in assembled else "mma" if "mma.sync" in assembled else ""
    print(self.fn.__name__, products)
JITFunction.run = compiled

from kvsketch.page.quantized import quantize
from kvsketch.kernels import triton_support
from kvsketch.page.quantized import Bits, Quantized, quantize
from kvsketch.partial import NOTHING, log_mass
triton_support._missing = lambda device: None
from kvsketch.kernels.triton_decode import decode
from kvsketch.kernels.triton_prefill import prefill
from kvsketch.kernels.triton_shares import largest_shares

def normal(*shape): return torch.randn(shape, dtype=torch.bfloat16)
start = torch.zeros(2, 2, dtype=torch.int64)
slots = (torch.rand(2, 64), start, start.int())
plain = (normal(2, 64, 128), normal(2, 64, 72), *slots)
extras = dict(scaling=0.1, softcap=30.0, sinks=torch.ones(8), slopes=torch.ones(8),
              positions=torch.zeros(2, 64, dtype=torch.int64), block=64)
def codes(dim, keys):
    held = quantize(torch.randn(2, 2, 32, dim), 4, per_channel=keys)
    return held.map_slots(lambda tensor: tensor.flatten(1, 2))

decode(normal(2, 8, 1, 128), *plain, **extras, splits=2,
       query_positions=torch.zeros(2, dtype=torch.int64))
decode(normal(2, 8, 1, 128), codes(128, True), codes(128, False), *slots, scaling=0.1, block=32)
prefill(normal(2, 8, 70, 128), *plain, normal(2, 2, 70, 128), normal(2, 2, 70, 72), **extras,
        new_positions=torch.zeros(2, 70, dtype=torch.int64),
        new_log_mass=torch.zeros(2, 2, 70), rows=64)
largest_shares(normal(2, 70, 128), normal(2, 64, 128), 0.1)
paged = dict(pages=torch.zeros(2, dtype=torch.int64), scaling=0.1, block=64)
decode(normal(2, 8, 1, 128), *plain, **paged)
prefill(normal(2, 8, 70, 128), *plain, normal(2, 2, 70, 128), normal(2, 2, 70, 72), **paged,
        rows=64)
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", [90, 80])
def test_kernels_compile(target: int, tmp_path: Path) -> None:
    program = COMPILE.replace("sys.argv[1]", str(target))
    lines = run(program, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    large = "wgmma" if target == 90 else "mma"
    assert [line.strip() for line in lines] == [
        "_attend_piece mma",
        "combine",
        "_attend_piece mma",
        f"_attend_rows {large}",
        f"_totals {large}",
        f"_largest {large}",
        "_attend_piece mma",
        f"_attend_rows {large}",
    ]
