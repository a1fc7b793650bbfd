"""The compiled kernel for CPUs equals ``estimator.attend`` in float64."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch.attention import attend_to
from kvsketch.errors import InputError
from kvsketch.estimator import attend, attention_received
from kvsketch.kernels import cpu, native
from kvsketch.kernels.native import build
from kvsketch.observed import Observed, causal
from kvsketch.page.memory import rows_of
from kvsketch.page.page import Page
from kvsketch.page.part import Part
from kvsketch.page.quantized import Bits
from kvsketch.page.rows import Rows
from kvsketch.slots import Slots, compute_dtype

if build.compiler() is None:
    pytest.skip("there is no C++ compiler", allow_module_level=True)

#: largest error, relative to the largest output: of float32 sums, and of rounding the output
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
#: of processors, from the least to what this one has
LEVELS = range(4)


@pytest.fixture(autouse=True)
def _whole():
    assert native.library() is not None, native.kernel()
    yield
    native.library().kvsketch_limit(len(LEVELS))


shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "level": st.sampled_from(LEVELS),
        "batch": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "group": st.integers(1, 9),
        "n": st.sampled_from([1, 2, 3, 17, 31, 32, 33, 129, 300]),
        "q": st.sampled_from([1, 1, 2, 3]),
        "dim": st.sampled_from([1, 5, 8, 16, 32, 64, 80, 96, 100, 128, 192, 256]),
        "wider": st.sampled_from([0, 0, 3, -1]),
        "bits": st.sampled_from([(16, 16), (8, 8), (4, 4), (8, 4), (4, 8)]),
        "ragged": st.booleans(),
        "weighted": st.booleans(),
        "sinks": st.booleans(),
        "bent": st.sampled_from(["", "softcap", "alibi"]),
        "dtype": st.sampled_from(list(TOLERANCE)),
    }
)


def made(s):
    """A page with q appended tokens, and their queries."""
    g = torch.Generator().manual_seed(s["seed"])
    batch, heads, n, q, dim, dtype = (
        s[name] for name in ("batch", "heads", "n", "q", "dim", "dtype")
    )
    value_dim = min(256, max(1, dim + s["wider"]))

    def drawn(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    positions = torch.arange(n).float().expand(batch, heads, n) if s["bent"] == "alibi" else None
    slots = Slots(drawn(batch, heads, n, dim), drawn(batch, heads, n, value_dim), None, positions)
    sizes = None
    if s["weighted"]:
        mass = torch.rand(batch, heads, n, generator=g) * 5 + 0.1
        wide = slots.values.to(compute_dtype(dtype)) * mass.unsqueeze(-1)
        slots = replace(slots, values=wide, mass=mass)
    if s["ragged"]:
        sizes = torch.randint(1, n + 1, (batch, heads), generator=g)
        sizes[0, 0] = n
        slots = slots.only(torch.arange(n) < sizes.unsqueeze(-1))
    page = Page(slots, sizes, q + 1, Bits(*s["bits"]), 2, 3)
    new = Slots(drawn(batch, heads, q, dim), drawn(batch, heads, q, value_dim))
    if positions is not None:
        new = replace(new, positions=torch.arange(n, n + q).float().expand(batch, heads, q))
    page.append(new)
    count = heads * s["group"]
    asked = Observed(
        drawn(batch, count, q, dim),
        dim**-0.5,
        softcap=2.0 if s["bent"] == "softcap" else None,
        slopes=torch.rand(count, generator=g) / 10 if s["bent"] == "alibi" else None,
        sinks=torch.randn(count, generator=g) if s["sinks"] else None,
    )
    return page, asked


def reference(page, asked, q):
    """In float64, over what the page says."""
    slots = page.read(exactly=True).map(torch.Tensor.double)
    mask = causal(q, slots.count, slots.keys.device)
    wide = {n: getattr(asked, n) for n in ("sinks", "slopes")}
    wide = {n: None if t is None else t.double() for n, t in wide.items()}
    given = {"scaling": asked.scaling, "softcap": asked.softcap, "mask": mask}
    return attend(asked.queries.double(), slots, **given, **wide)


def close(found, wanted, tolerance):
    error = (found.double() - wanted).abs().max()
    assert error <= tolerance * wanted.abs().max().clamp(min=1.0), float(error)


@settings(deadline=None, max_examples=200)
@given(shapes)
def test_the_kernel_equals_the_reference(s):
    """Any bits of keys and values, masses, heads of different size, sinks, a soft-cap or ALiBi,
    one token or a few, with the vector instructions of any processor."""
    native.library().kvsketch_limit(s["level"])
    page, asked = made(s)
    q = s["q"]
    each = s["group"] * q
    if s["bent"] == "alibi" and q > 1:
        asked = asked.narrow(q - 1, 1)  # of one token only
        q, each = 1, s["group"]
    last = None if asked.slopes is None else torch.full((s["batch"],), s["n"] + s["q"] - 1.0)
    found = cpu.attend(asked, page.open(), newest=q, last=last, totals=True)
    if each > cpu.MOST_QUERIES:
        assert found is None
        return
    assert found is not None
    close(found[0], reference(page, asked, q), TOLERANCE[s["dtype"]])
    # What attention is computed with is this kernel, and torch's kernels say the same.
    assert torch.equal(attend_to(asked, page.open()), found[0])
    with native.switched(False):
        close(attend_to(asked, page.open()), reference(page, asked, q), 3 * TOLERANCE[s["dtype"]])


@settings(deadline=None, max_examples=40)
@given(shapes, st.integers(2, 4))
def test_totals_join_what_is_computed_apart(s, parts):
    """The logs of the summed weights: attention over parts, joined, is that over all."""
    page, asked = made({**s, "q": 1, "bent": "", "sinks": False, "dtype": torch.float32})
    whole = cpu.attend(asked, page.open(), totals=True)
    each = [cpu.attend(asked, [part], totals=True) for part in page.open() for _ in range(parts)]
    outs, totals = (torch.stack(found) for found in zip(*each, strict=True))
    weights = totals.softmax(0).unsqueeze(-1)
    close((outs * weights).sum(0), whole[0].double(), 1e-5)
    joined = totals.logsumexp(0) - torch.log(torch.tensor(float(parts)))
    torch.testing.assert_close(joined, whole[1], rtol=1e-5, atol=1e-4)


@settings(deadline=None, max_examples=60)
@given(shapes)
def test_scores_receive_attention_where_they_are(s):
    """As from the reference's own attention over slots."""
    check_received({**s, "bent": "softcap" if s["bent"] else ""})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [(16, 16), (4, 8)])
def test_scores_of_more_queries_than_are_kept_at_once(level, bits):
    """360 queries of a KV head, and more scores than ``HEARD`` of attention.cpp."""
    many = {"q": 40, "group": 9, "n": 2000, "heads": 1, "bits": bits, "sinks": True}
    check_received(plain(level=level, weighted=True, **many))
    check_received(plain(level=level, batch=2, ragged=True, **{**many, "heads": 2, "q": 33}))


def check_received(s):
    native.library().kvsketch_limit(s["level"])
    page, asked = made(s)
    q, batch, heads = s["q"], s["batch"], s["heads"]
    slots = page.read(exactly=True).map(torch.Tensor.double)
    before = torch.rand(batch, heads, slots.count) ** 8
    page.set_score(before)
    weights = torch.rand(q)
    assert cpu.receive(asked, page.scored(), weights)
    found = page.read().score
    wide = replace(
        asked,
        queries=asked.queries.double(),
        sinks=None if asked.sinks is None else asked.sinks.double(),
    )
    received = attention_received(slots, wide, weights.double().expand(batch, q))
    live = slots.live()
    wanted = torch.maximum(before, received.to(before.dtype))
    if live is not None:
        found, wanted = (torch.where(live, t, 0.0) for t in (found, wanted))
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-4, atol=1e-5)


def plain(**changes):
    s = {"seed": 0, "batch": 1, "heads": 2, "group": 2, "n": 50, "q": 1, "dim": 32, "wider": 0}
    s |= {"bits": (16, 16), "ragged": False, "weighted": False, "sinks": False, "bent": ""}
    return {**s, "dtype": torch.float32, **changes}


@settings(deadline=None, max_examples=60)
@given(shapes, st.sampled_from([1, 2, 5, 20]), st.booleans())
def test_queries_after_all_slots_attend_to_every_one(s, q, compiled):
    """Those of a second reading, over a page and over slots."""
    page, asked = made({**s, "q": q})
    with native.switched(compiled):
        found = attend_to(replace(asked, after=True), page.open(), None, True)
    slots = page.read(exactly=True).map(torch.Tensor.double)
    wide = {n: getattr(asked, n) for n in ("sinks", "slopes")}
    wide = {n: None if t is None else t.double() for n, t in wide.items()}
    given_ = {"scaling": asked.scaling, "softcap": asked.softcap, **wide}
    wanted = attend(asked.queries.double(), slots, **given_)
    close(found, wanted, TOLERANCE[s["dtype"]])
    wide = {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in vars(asked).items()}
    over_slots = attend_to(Observed(**{**wide, "after": True}), slots)
    torch.testing.assert_close(over_slots, wanted)


@pytest.mark.parametrize("bits", [(16, 16), (4, 4)])
def test_several_threads_say_what_one_says(bits):
    """Heads are then split into pieces, which are joined."""
    page, asked = made(plain(n=4000, dim=64, bits=bits, weighted=True, ragged=True, batch=2))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, alone = cpu.attend(asked, page.open(), totals=True)
        torch.set_num_threads(3)
        for _ in range(20):
            many, together = cpu.attend(asked, page.open(), totals=True)
            torch.testing.assert_close(many, one, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_a_forked_process_does_not_wait_for_threads_of_its_parent():
    code = """
import os, sys, torch
from test_cpu import made, plain, cpu
torch.set_num_threads(3)
page, asked = made(plain(n=4000, dim=64))
found = cpu.attend(asked, page.open())[0]
child = os.fork()
if child == 0:
    os._exit(0 if torch.allclose(cpu.attend(asked, page.open())[0], found, atol=1e-5) else 1)
sys.exit(os.waitpid(child, 0)[1])
"""
    folder = os.path.dirname(__file__)
    path = os.pathsep.join([folder, *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, timeout=120
    )
    assert done.returncode == 0


@pytest.mark.parametrize("padded", [False, True])
def test_dead_slots_and_empty_heads(padded):
    """Where no slot is live the output is zero if there may be padding, and never NaN."""
    slots = Slots(torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16), torch.ones(2, 2, 40))
    live = torch.ones(2, 2, 40, dtype=torch.bool)
    live[0, 1] = False
    live[1, 0, 7:] = False
    page = Page(slots.only(live))
    asked = Observed(torch.randn(2, 4, 1, 16), 0.25)
    out = cpu.attend(asked, page.open(), padded)[0]
    assert torch.isfinite(out).all()
    wanted = attend(asked.queries.double(), slots.only(live).map(torch.Tensor.double), scaling=0.25)
    live_heads = torch.tensor([[True, True, False, False], [True] * 4])
    close(out[live_heads], wanted[live_heads], 1e-5)
    if padded:
        assert (out[~live_heads] == 0).all()
    for part in page.open():  # what padding holds has values
        part.fields["values"] = torch.ones_like(part.fields["values"])
    out = cpu.attend(asked, page.open(), padded)[0]
    assert (out[~live_heads] == (0 if padded else 1)).all()


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([(16, 16), (8, 4)]), st.booleans(), st.booleans(), st.integers(0, 100))
def test_rows_of_an_engine_s_pages_are_read_where_they_are(bits, ragged, compressed, seed):
    """Some pages, and of each window some slots: as if these rows were pages of their own."""
    g = torch.Generator().manual_seed(seed)
    s = plain(batch=5, heads=3, n=60, bits=bits, weighted=True, seed=seed)
    page, _ = made(s)
    if ragged and page.middle is not None:
        sizes = torch.tensor([[5, 40, 54]]).expand(5, -1)
        slots = page.middle.slots.only(torch.arange(page.middle.count) < sizes.unsqueeze(-1))
        page.middle = Part(slots, sizes, 0, Bits(*bits))
    window = page.exact.grown(0)
    pages = torch.tensor([0, 2, 3])
    reads = torch.randint(1, window.count + 1, (3,), generator=g)
    rows = Rows(pages, [slice(0, 1, 1), slice(2, 4, 1)], reads, int(reads.max()))
    live = torch.arange(window.count) < reads.view(-1, 1, 1)
    mass = torch.where(live, window.of_heads().get("log_mass", torch.zeros(5, 3, 1))[pages], -1e30)
    parts = [page.middle, window] if compressed and page.middle is not None else [window]
    asked = Observed(torch.randn(3, 6, 1, 32, generator=g), 0.2)
    found = attend_to(asked, parts, rows=rows)
    own = rows_of(window, pages)
    own.fields["log_mass"] = mass.expand(3, 3, -1).contiguous()
    alone = [rows_of(part, pages) for part in parts[:-1]] + [own]
    close(found, cpu.attend(asked, alone)[0].double(), 1e-5)
    assert cpu.attend(asked, parts, rows=rows) is not None
    with native.switched(False):
        window.fields.setdefault("log_mass", torch.zeros(window.fields["keys"].shape[:-1]))
        for row, page_number in enumerate(pages.tolist()):
            window.fields["log_mass"][page_number, :, int(reads[row]) :] = -1e30
        close(attend_to(asked, parts, rows=rows), found.double(), 1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"keys": lambda t: t.double()},
        {"keys": lambda t: t.to(torch.int8)},
        dict.fromkeys(("keys", "values"), lambda t: t.mT.contiguous().mT),
        {"log_mass": lambda t: t.new_zeros(t.shape[0], t.shape[1], 99)[:, :, : t.shape[2]]},
        {"values": lambda t: t.clone().requires_grad_()},
    ],
)
def test_what_it_cannot_read_is_left_to_torch(change):
    page, asked = made(plain(weighted="log_mass" in change))
    assert cpu.attend(asked, page.open()) is not None
    for name, fn in change.items():
        page.exact.fields[name] = fn(page.exact.fields[name])
    assert cpu.attend(asked, page.open()) is None


def test_queries_that_it_cannot_take_are_left_to_torch():
    page, asked = made(plain())
    for queries in (
        asked.queries.double(),
        asked.queries.clone().requires_grad_(),
        asked.queries.repeat(1, cpu.MOST_QUERIES, 1, 1),
    ):
        assert cpu.attend(replace(asked, queries=queries), page.open()) is None
    wide = Page(Slots(torch.randn(1, 1, 4, 257), torch.randn(1, 1, 4, 8)))
    assert cpu.attend(Observed(torch.randn(1, 1, 1, 257), 1.0), wide.open()) is None


@pytest.mark.parametrize("where", ["queries", "keys", "values"])
@pytest.mark.parametrize("n", [1, 50, 4000])
def test_what_is_no_number_does_not_become_one(where, n):
    """A model whose numbers overflow shows it, on one thread or several; other heads are not
    affected."""
    page, asked = made(plain(n=n, dim=64))
    if where == "queries":
        asked.queries[:, :2] = torch.nan
    else:
        page.exact.fields[where][:, 0, 0] = torch.nan
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        out, totals = cpu.attend(asked, page.open(), padded=True, totals=True)
    finally:
        torch.set_num_threads(before)
    assert out[:, :2].isnan().all()
    assert totals[:, :2].isnan().all() == (where != "values")
    assert out[:, 2:].isfinite().all()


def test_strides_that_views_have_are_followed():
    """Rows of a larger batch, every second head, queries that are not contiguous."""
    keys, values = torch.randn(6, 4, 50, 64), torch.randn(6, 4, 50, 64)
    asked = Observed(torch.randn(1, 3, 4, 64).transpose(1, 2).expand(3, -1, -1, -1)[:, :, :1], 0.2)
    some = slice(1, 6, 2), slice(None, None, 2)
    part = Part.over({"keys": keys[some], "values": values[some]}, {}, (3, 2, 50))
    found = cpu.attend(asked, [part])
    slots = Slots(keys[some].double(), values[some].double())
    close(found[0], attend(asked.queries.double(), slots, scaling=0.2), 1e-5)


def test_a_part_that_changes_is_described_anew():
    page, asked = made(plain(weighted=True))
    before = cpu.attend(asked, page.open())[0]
    assert torch.equal(cpu.attend(asked, page.open())[0], before)
    page.exact.fields["values"] = page.exact.fields["values"] * 2
    torch.testing.assert_close(cpu.attend(asked, page.open())[0], before * 2)
    page.exact.fields.pop("log_mass")
    close(cpu.attend(asked, page.open())[0], reference(page, asked, 1), 1e-5)
    page.drop(1)
    close(cpu.attend(asked, page.open())[0], reference(page, asked, 1), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["address,undefined"])
def test_sanitizers_find_nothing(flag, tmp_path):
    """Reads beyond a buffer and undefined behaviour end the process."""
    library = tmp_path / "attention.so"
    wrong = build.build(library, (f"-fsanitize={flag}", "-fno-sanitize-recover", "-O1", "-g"))
    if wrong is not None:
        pytest.skip(f"the compiler has no sanitizers: {wrong[-200:]}")
    compiler = build.compiler()
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    code = f"""
from pathlib import Path
from kvsketch.kernels.native import build
build.LIBRARY = Path({str(library)!r})
import test_cpu
test_cpu.fuzz(60)
import test_pairs
test_pairs.fuzz(30)
import test_shares
test_shares.fuzz(40)
import test_exchange
test_exchange.fuzz(60)
print("sane")
"""
    folder = os.path.dirname(__file__)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([folder, *sys.path]),
        "LD_PRELOAD": found.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.strip().endswith("sane"), done.stderr[-3000:]


def fuzz(count):
    """Shapes at random, in memory whose end is the end of what was allocated."""
    g = torch.Generator().manual_seed(0)

    def one(values):
        return values[int(torch.randint(len(values), (), generator=g))]

    for number in range(count):
        s = plain(
            seed=number,
            batch=one([1, 2]),
            group=one([1, 2, 3, 5]),
            n=one([1, 31, 33, 300]),
            q=one([1, 3]),
            dim=one([1, 5, 16, 80, 100, 128]),
            wider=one([0, 3]),
            bits=one([(16, 16), (8, 4), (4, 8)]),
            ragged=one([True, False]),
            weighted=one([True, False]),
            dtype=one(list(TOLERANCE)),
        )
        native.library().kvsketch_limit(one(list(LEVELS)))
        page, asked = made(s)
        assert cpu.attend(asked, page.open(), newest=s["q"]) is not None


def test_the_library_is_that_of_the_source(monkeypatch, tmp_path):
    """Another source, a missing library, or a wrong setting: said, and torch's kernels run."""
    fresh = native.loaded.__wrapped__
    assert fresh()[0] is not None
    monkeypatch.setenv("KVSKETCH_NATIVE", "off")
    assert fresh() == (None, "KVSKETCH_NATIVE=off")
    monkeypatch.setenv("KVSKETCH_NATIVE", "fast")
    with pytest.raises(InputError, match="KVSKETCH_NATIVE='fast' must be off, plain, avx2, avx512"):
        fresh()
    monkeypatch.delenv("KVSKETCH_NATIVE")
    monkeypatch.setattr(build, "mark", lambda: "other")
    assert "older than its source" in fresh()[1]
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "attention.so")
    assert "was not compiled" in fresh()[1]
    (tmp_path / "attention.so").write_bytes(b"nothing")
    assert "cannot be loaded" in fresh()[1]


def test_without_a_compiler_the_reason_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert "no C++ compiler" in build.build(tmp_path / "attention.so")
    assert not list(tmp_path.iterdir())


def test_the_numbers_of_a_part_are_those_of_the_source():
    assert ctypes.sizeof(ctypes.c_int64 * native.PART) == native.library().kvsketch_layout() >> 32
