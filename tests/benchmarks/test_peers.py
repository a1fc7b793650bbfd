"""Our methods keep the tokens that the peers' own code keeps; missing peers give a reason.

Comparisons run where the peer is installed (``make peers``) and skip with the reason elsewhere."""

from __future__ import annotations

import copy
import itertools
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks import attention_error
from benchmarks.equal_bytes import Fit
from benchmarks.peers import (
    attention_matching,
    balancekv,
    exchange,
    goodpoints,
    kvpress,
    quantized_cache,
    rkv,
    setup,
    thinformer,
    triattention,
)
from benchmarks.peers.exchange import PeerError
from benchmarks.peers.kvpress import Job
from kvsketch import InputError, Observed, Slots, attend
from kvsketch.hf.activations import Activations
from kvsketch.methods import METHODS, pyramid_shares
from kvsketch.methods.registry import ALL_METHODS
from kvsketch.methods.rotation import Turn

#: batch, query heads, KV heads, tokens, head_dim, kept: equal heads, GQA, MQA, odd numbers
SHAPES = [
    (1, 4, 4, 64, 16, 20),
    (2, 8, 2, 97, 8, 31),
    (1, 6, 1, 200, 32, 100),
    (3, 6, 3, 41, 10, 29),
]
#: by method: sink and recent as in kvpress, our arguments, those of kvpress
SETTINGS = {
    "streaming_llm": (4, 0, {}, {}),
    "snapkv": (0, 16, {"window": 16}, {"window_size": 16}),
    "knorm": (0, 0, {}, {}),
    "keydiff": (0, 0, {}, {}),
    "tova": (0, 1, {}, {}),
    "observed_attention": (0, 0, {}, {}),
}
#: by shape the chunk and the window, which begins with a chunk
CHUNKS = dict(zip(SHAPES, [(8, 16), (9, 16), (10, 20), (5, 6)], strict=True))
#: by shape sink, lag and tokens kept of each part but the last; the last shape has one part
LAGS = {
    **dict(zip(SHAPES, [(4, 12, 3), (4, 10, 2), (4, 32, 9), (1, 10, 6)], strict=True)),
    (2, 4, 2, 70, 8, 20): (4, 34, 0),
}
#: by shape the block, whole blocks of which are between the first 8 and the last 4 tokens
BLOCKS = dict(zip(SHAPES, [26, 17, 47, 29], strict=True))
CRITICAL = {
    "critical": {},
    "critical_third": {"first_stage_ratio": 0.3, "epsilon": 0.01},
    "critical_products": {"first_stage_ratio": 0.0},
}
PYRAMID = {"beta": 4, "window_size": 5, "kernel_size": 7}
LAYERS = 3


def tensors(shape, seed=0):
    """Queries, keys and values with structure, so that scores are neither flat nor one-hot."""
    batch, heads, kv_heads, n, dim, _ = shape
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(batch, kv_heads, 1, dim, generator=g)
    keys = torch.randn(batch, kv_heads, n, dim, generator=g) + mean
    queries = 1.5 * torch.randn(batch, heads, n, dim, generator=g)
    queries += 0.5 * mean.repeat_interleave(heads // kv_heads, dim=1)
    return queries, keys, torch.randn(batch, kv_heads, n, dim, generator=g)


def ours(compressor, shape, sink, recent, budget):
    """The positions of the tokens that our method keeps, in order."""
    queries, keys, values = tensors(shape)
    positions = torch.arange(shape[3], dtype=torch.float32).expand(keys.shape[:3])
    observed = Observed(queries, shape[4] ** -0.5)
    slots = Slots(keys, values, positions=positions)
    kept = compressor(slots, budget, observed, sink=sink, recent=recent)
    return kept.positions.long()


def critical_kept(shape):
    """The number of tokens kept: an odd one, so that its half is rounded down."""
    return shape[-1] | 1


def projection(shape):
    """The weight of an output projection after which values have other norms than before."""
    heads, dim = shape[1], shape[4]
    g = torch.Generator().manual_seed(9)
    weight = torch.randn(heads, dim, heads * dim, generator=g)
    return weight * torch.rand(heads, dim, 1, generator=g) ** 3


def lag_kept(shape):
    """The number of tokens kept: sinks, as many of every part, and all after the last part
    compared."""
    sink, lag, each = LAGS[shape]
    parts = (shape[3] - sink) // lag
    return sink + each * (parts - 1) + shape[3] - sink - (parts - 1) * lag if parts > 1 else 20


@pytest.fixture(scope="module")
def theirs():
    """What kvpress keeps, for every method, shape and layer of this file, from one process."""
    reason = kvpress.available()
    if reason is not None:
        pytest.skip(f"kvpress: {reason}")
    jobs = {}
    for shape in SHAPES:
        for method, (_, _, _, options) in SETTINGS.items():
            jobs[method, shape, 0] = Job(method, *tensors(shape), shape[-1], options)
        for layer in range(LAYERS):
            job = Job("pyramidkv", *tensors(shape), shape[-1], PYRAMID, layer, LAYERS)
            jobs["pyramidkv", shape, layer] = job
        chunk, window = CHUNKS[shape]
        for row in range(shape[0]):  # kvpress keeps the chunks of the first row in all rows
            parts = (t[row : row + 1] for t in tensors(shape))
            inner = {"window_size": window, "kernel_size": 3}
            job = Job(
                "chunkkv", *parts, shape[3] // 2, {"chunk_length": chunk}, inner_options=inner
            )
            jobs["chunkkv", shape, row] = job
        for critical, options in CRITICAL.items():
            found = (*tensors(shape), critical_kept(shape))
            inner = {"window_size": 5, "kernel_size": 3}
            job = Job("criticalkv", *found, options, 0, 1, inner, projection(shape))
            jobs[critical, shape, 0] = job
        for row in range(shape[0]):  # kvpress standardises scores over the batch
            queries, keys, values = (t[row : row + 1] for t in tensors(shape))
            queries = queries * shape[4] ** -0.5  # kvpress does not scale
            options = {"chunk_size": BLOCKS[shape], "sketch_dimension": 6, "blending": 0.7}
            job = Job("compactor", queries, keys, values, shape[-1], options)
            jobs["compactor", shape, row] = job
    for shape, (sink, lag, _) in LAGS.items():
        job = Job("lagkv", *tensors(shape), lag_kept(shape), {"n_sink": sink, "lag_size": lag})
        jobs["lagkv", shape, 0] = job
    return dict(zip(jobs, kvpress.kept_many(list(jobs.values())), strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", SETTINGS)
def test_kept_tokens_are_those_of_kvpress(theirs, method, shape):
    sink, recent, arguments, _ = SETTINGS[method]
    compressor = METHODS[method](**arguments)
    kept = ours(compressor, shape, sink, recent, shape[-1])
    assert kept.shape == (shape[0], shape[2], shape[-1])
    assert torch.equal(kept, theirs[method, shape, 0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pyramidkv_keeps_the_tokens_of_kvpress_in_every_layer(theirs, shape):
    *_, n, _, budget = shape
    shares = pyramid_shares(LAYERS, PYRAMID["beta"], budget=budget, tokens=n, window=5)
    counts = [round(share * budget) for share in shares]
    for layer, count in enumerate(counts):
        compressor = METHODS["pyramidkv"](window=5, kernel_size=7)
        kept = ours(compressor, shape, 0, 5, count)
        assert torch.equal(kept, theirs["pyramidkv", shape, layer])
    assert counts[0] > counts[-1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunkkv_keeps_the_chunks_of_kvpress(theirs, shape):
    chunk, window = CHUNKS[shape]
    budgets = {theirs["chunkkv", shape, row].shape[-1] for row in range(shape[0])}
    for budget in budgets:
        assert window + chunk <= budget < shape[3] - chunk
        compressor = METHODS["chunkkv"](chunk=chunk, window=window, kernel_size=3)
        kept = ours(compressor, shape, 0, window, budget)
        for row in range(shape[0]):
            if theirs["chunkkv", shape, row].shape[-1] == budget:
                assert torch.equal(kept[row : row + 1], theirs["chunkkv", shape, row])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("critical", CRITICAL)
def test_criticalkv_keeps_the_tokens_of_kvpress(theirs, critical, shape):
    names = {"first_stage_ratio": "first_stage", "epsilon": "epsilon"}
    options = {names[name]: value for name, value in CRITICAL[critical].items()}
    compressor = ALL_METHODS["criticalkv"](window=5, kernel_size=3, **options)
    compressor.output = projection(shape)
    kept = ours(compressor, shape, 0, 5, critical_kept(shape))
    assert torch.equal(kept, theirs[critical, shape, 0])
    plain = ours(METHODS["snapkv"](window=5, kernel_size=3), shape, 0, 5, critical_kept(shape))
    assert not torch.equal(kept, plain)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compactor_keeps_the_tokens_of_kvpress(theirs, monkeypatch, shape):
    """Compactor keeps the tokens of kvpress if it draws the same random numbers; keys have no
    RoPE."""

    def gaussian(self, keys):
        torch.manual_seed(0)
        return torch.randn(1, *keys.shape[1::2], 6) / 6**0.5

    monkeypatch.setattr(METHODS["compactor"], "_gaussian", gaussian)
    compressor = METHODS["compactor"](chunk=BLOCKS[shape], sketch=6, blending=0.7)
    for row in range(shape[0]):
        queries, keys, values = (t[row : row + 1] for t in tensors(shape))
        positions = torch.arange(shape[3], dtype=torch.float32).expand(keys.shape[:3])
        observed = Observed(queries, shape[4] ** -0.5)
        kept = compressor(Slots(keys, values, positions=positions), shape[-1], observed)
        assert torch.equal(kept.positions.long(), theirs["compactor", shape, row])


@pytest.mark.parametrize("shape", LAGS, ids=str)
def test_lagkv_keeps_the_tokens_of_kvpress(theirs, shape):
    sink, lag, each = LAGS[shape]
    kept = ours(METHODS["lagkv"](lag=lag), shape, sink, 0, lag_kept(shape))
    assert torch.equal(kept, theirs["lagkv", shape, 0])
    parts = torch.bincount(((kept - sink).clamp(min=0) // lag).flatten())
    if each:  # as many tokens of every part, and not the same ones in every head
        assert len(set(parts[1:-2].tolist())) <= 1
        assert kept.flatten(0, 1).unique(dim=0).shape[0] == shape[0] * shape[2]


def test_pyramid_shares_are_the_budgets_of_kvpress():
    """Every layer has the number of slots of kvpress in each case: a plain pyramid, a first layer
    limited by the prompt, a layer smaller than the window. (kvpress gives a model's only layer the
    first layer's budget, above the average; ours gets the average.)"""
    reason = kvpress.available()
    if reason is not None:
        pytest.skip(f"kvpress: {reason}")
    n, shape = 120, (1, 1, 1, 120, 2, 0)
    cases = [
        (budget, window, beta, layers)
        for budget, window, beta, layers in itertools.product(
            (12, 30, 60, 90), (1, 4, 20), (1, 2, 20), (2, 5)
        )
    ]
    jobs = [
        Job("pyramidkv", *tensors(shape), budget, options, layer, layers)
        for budget, window, beta, layers in cases
        for options in [{"window_size": window, "beta": beta}]
        for layer in range(layers)
    ]
    counts = iter([found.shape[-1] for found in kvpress.kept_many(jobs)])
    flat = 0
    for budget, window, beta, layers in cases:
        shares = pyramid_shares(layers, beta, budget=budget, tokens=n, window=window)
        expected = [next(counts) for _ in range(layers)]
        assert [round(share * budget) for share in shares] == expected, (budget, window, beta)
        flat += len(set(expected)) == 1
    assert 0 < flat < len(cases)


def test_h2o_is_not_observed_attention():
    """H2O keeps other tokens than ``observed_attention``, kvpress's variant, which divides scores
    by the number of queries."""
    shape = SHAPES[0]
    plain = ours(METHODS["h2o"](), shape, 0, 0, 20)
    averaged = ours(METHODS["observed_attention"](), shape, 0, 0, 20)
    assert not torch.equal(plain, averaged)
    assert float(plain.float().mean()) < float(averaged.float().mean())  # h2o keeps older tokens


# --- peers that halve -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [128, 512])
@pytest.mark.parametrize("peer", [balancekv, thinformer, goodpoints])
def test_their_halving_keeps_exact_tokens_of_the_right_mass(peer, n):
    """A half and a quarter of the tokens are kept, each at most once, with mass 2^rounds. Attention
    over them is closer to the exact one than over the first tokens, since values drift along the
    prompt."""
    reason = peer.available()
    if reason is not None:
        pytest.skip(reason)
    if peer is goodpoints and n > 128:
        pytest.skip("goodpoints takes a Python step per pair of tokens")
    queries, keys, values = tensors((2, 4, 2, n, 8, 0))
    whole = Slots(keys, values + torch.linspace(-2, 2, n)[:, None])
    exact = attend(0.3 * queries, whole)
    for rounds in (1, 2):
        out = peer.halved(whole.keys, whole.values, rounds, seed=3)
        assert out.count == n >> rounds
        gap, at = torch.cdist(out.keys.double(), keys.double()).min(-1)
        assert float(gap.max()) < 1e-5
        assert all(len(set(row)) == out.count for row in at.flatten(0, 1).tolist())
        torch.testing.assert_close(out.mass, torch.full_like(out.mass, 2.0**rounds))
        weight = out.values / whole.take(at).values
        torch.testing.assert_close(weight, weight[..., :1].expand_as(weight), rtol=1e-3, atol=1e-3)
        # the walk ends when one side has n/2 tokens; later tokens have weight 1
        allowed = {2.0**i for i in range(rounds + 1)} if peer is balancekv else {2.0**rounds}
        assert set(weight.round(decimals=2).flatten().tolist()) <= allowed
        first = attend(0.3 * queries, whole.narrow(0, n >> rounds))
        assert (attend(0.3 * queries, out) - exact).norm() < 0.5 * (first - exact).norm()
        assert torch.equal(out.keys, peer.halved(whole.keys, whole.values, rounds, seed=3).keys)


@pytest.mark.parametrize("peer", [balancekv, thinformer, goodpoints])
def test_impossible_halvings_are_refused_before_the_peer_is_asked(peer):
    _, keys, values = tensors((1, 1, 1, 10, 4, 0))
    for rounds in (0, 4, 1.5):
        with pytest.raises(InputError, match="rounds="):
            peer.halved(keys, values, rounds)


def test_thinformer_wants_whole_halves():
    _, keys, values = tensors((1, 1, 1, 10, 4, 0))
    with pytest.raises(InputError, match=r"n=10 .* multiple of 2\^rounds=4"):
        thinformer.halved(keys, values, 2)


# --- rows of the attention error benchmark --------------------------------------------------------


def layers_of(shape, follow, count=2):
    """Layers as in the benchmark, with ``follow`` tokens held out."""
    layers = []
    for seed in range(count):
        queries, keys, values = tensors(shape, seed)
        caught = Activations(seed, queries, keys, values, shape[4] ** -0.5)
        layers.append(attention_error.layer_of(caught, follow))
    return layers


class EveryOther:
    """A peer that keeps every 2^rounds-th token."""

    @staticmethod
    def halved(keys, values, rounds, seed=0):
        assert keys.shape[2] % 2**rounds == 0
        kept = Slots(keys[:, :, :: 2**rounds], values[:, :, :: 2**rounds])
        return kept.scaled(kept.masses() * 2.0**rounds)


@pytest.mark.parametrize("n", [300, 333, 368])
@pytest.mark.parametrize("kept", [1 / 2, 1 / 4, 1 / 8, 1 / 16])
def test_halving_peers_hold_the_bytes_of_plain_tokens(n, kept):
    """With the bytes of their masses, halving peers get fewer slots: the most that fit, with masses
    that add up to the tokens."""
    sink, recent, follow = 4, 16, 20
    layers = layers_of((1, 4, 2, n + follow, 16, 0), follow)
    tokens = sink + recent + round(kept * (n - sink - recent))
    compress = attention_error.halved(EveryOther, sink, recent)
    budget, held = Fit()(lambda b: compress(layers, b, 0), tokens, sink + recent + 1, n)
    assert budget == int(tokens * 64 / 68)
    assert tokens * 64 - 68 < held.bytes == budget * 68 <= tokens * 64
    for slots, layer in zip(held.what, layers, strict=True):
        assert float(slots.mass.sum(-1).unique()) == n
        assert torch.equal(slots.keys[:, :, :sink], layer.slots.keys[:, :, :sink])
        assert torch.equal(slots.keys[:, :, -recent:], layer.slots.keys[:, :, -recent:])


@pytest.mark.parametrize(("heads", "dim", "over"), [(2, 16, 1), (1, 8, 3), (2, 32, 0)])
def test_quantized_cache_gets_whole_groups_and_the_rest_is_counted(monkeypatch, heads, dim, over):
    """Sinks, recent window and the tokens that fill no group of 64 numbers stay exact."""
    sink, recent, follow, n = 4, 16, 20, 143
    layers = layers_of((1, heads, heads, n + follow, dim, 0), follow)
    asked = []

    def roundtrips(parts, bits):
        asked.extend(parts)
        return [(0 * keys, 0 * values, 1000 * bits) for keys, values in parts]

    monkeypatch.setattr(quantized_cache, "roundtrips", roundtrips)
    held = attention_error.their_cache(2, sink, recent)(layers, n, 0)
    assert len(asked) == len(layers)
    for keys, values in asked:
        assert keys.dtype == values.dtype == torch.bfloat16
        assert keys.shape[2] == 123 - over
        assert keys.numel() % 64 == 0
    assert held.bytes == 2000 / heads + (sink + recent + over) * 4 * dim
    for slots, layer in zip(held.what, layers, strict=True):
        assert slots.count == n
        same = (slots.keys == layer.slots.keys).all(-1).all(1)[0]
        assert same.sum() == sink + recent + over
        assert not same[sink + over : n - recent].any()


def test_quantized_cache_reads_layers_in_one_process():
    """Layers read in one process equal layers read one by one; 4 bits have less error than 2, and
    the bytes are those of the codes and scales."""
    reason = quantized_cache.available(4)
    if reason is not None:
        pytest.skip(reason)
    g = torch.Generator().manual_seed(0)
    layers = [tuple(torch.randn(2, 1, 2, 64, 16, generator=g).bfloat16()) for _ in range(3)]
    error = {}
    for bits in (4, 2):
        found = quantized_cache.roundtrips(layers, bits)
        assert [size for *_, size in found] == [2 * 2 * 64 * 16 * (bits / 8 + 4 / 64)] * 3
        error[bits] = float((found[1][0] - layers[1][0]).float().norm())
    assert 0 < error[4] < 0.5 * error[2]
    alone = quantized_cache.roundtrip(*layers[2], 2)
    assert all(torch.equal(a, b) for a, b in zip(alone[:2], found[2][:2], strict=True))


# --- missing, wrong, failing ----------------------------------------------------------------------


def fake_python(folder, script):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_missing_environment_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(exchange.VARIABLE, str(tmp_path / "nowhere"))
    reason = kvpress.available()
    assert "nowhere is not there" in reason
    assert "make peers" in reason
    with pytest.raises(PeerError, match="nowhere"):
        kvpress.kept("knorm", *tensors(SHAPES[0]), 5)
    shown = setup.table()
    assert list(shown.columns[0].cells) == list(setup.PEERS)
    assert "nowhere" in next(iter(shown.columns[2].cells))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 1", "kvpress is not installed"),
        ("echo 0.4.0", r"kvpress 0\.4\.0 is installed .* 0\.5\.5"),
    ],
)
def test_a_peer_of_another_version_is_refused(monkeypatch, tmp_path, script, message):
    monkeypatch.setenv(exchange.VARIABLE, str(fake_python(tmp_path, script)))
    with pytest.raises(PeerError, match=message):
        kvpress.kept("knorm", *tensors(SHAPES[0]), 5)


def test_what_a_failing_peer_wrote_is_passed_on(monkeypatch, tmp_path):
    script = 'case "$1" in -c) echo 0.5.5;; *) echo "no such press today" >&2; exit 3;; esac'
    monkeypatch.setenv(exchange.VARIABLE, str(fake_python(tmp_path, script)))
    assert kvpress.available() is None
    with pytest.raises(PeerError, match="no such press today"):
        kvpress.kept("knorm", *tensors(SHAPES[0]), 5)


THEIRS = """
import torch
from .base import compacted

class HighestAttentionKeysCompaction:
    def __init__(self, score_method, nnls_iters, nnls_lower_bound, nnls_upper_bound, c2_method):
        assert (score_method, nnls_iters, c2_method) == ("rms", 2, "lsq")

    def compute_compacted_cache(self, K, V, queries, t):
        return compacted(K, V, queries, t)
"""
BESIDE = """
import torch

def compacted(K, V, queries, t):
    index = list(range(t))[::-1]  # not in the order of the tokens
    beta = torch.arange(t) / t + queries.mean() / K.shape[-1] ** 0.5
    return K[index], beta, 2 * V[index], index
"""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_matching_is_attended_to_as_by_its_authors(monkeypatch, tmp_path, shape):
    """Softmax of scores plus beta, over their values; here with code in the place of theirs."""
    *_, file, _, _ = attention_matching._WHERE
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(THEIRS)
    (tmp_path / file).with_name("base.py").write_text(BESIDE)
    monkeypatch.setenv(attention_matching.VARIABLE, str(tmp_path))
    assert attention_matching.available() is None
    batch, heads, kv_heads, _, dim, count = shape
    queries, keys, values = tensors(shape)
    asked = Observed(queries, 0.3, after=True)
    slots = Slots(keys, values, score=torch.rand(keys.shape[:3]))
    method = attention_matching.AttentionMatching()
    kept = method.compress(slots, count, asked, scored=True)
    later = torch.randn(batch, heads, 5, dim, generator=torch.Generator().manual_seed(1))
    found = attend(later, kept, scaling=0.3)
    of_head = queries.reshape(batch, kv_heads, -1)
    shift = 0.3 * of_head.mean(-1)
    beta = torch.arange(count).flip(0) / count + shift[..., None]
    repeat = heads // kv_heads
    chosen = keys[:, :, :count].repeat_interleave(repeat, 1)
    scores = 0.3 * later @ chosen.mT + beta.repeat_interleave(repeat, 1).unsqueeze(2)
    expected = scores.softmax(-1) @ (2 * values[:, :, :count]).repeat_interleave(repeat, 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="needs queries"):
        attention_matching.AttentionMatching().reduce(slots, count, True)


@pytest.mark.parametrize("peer", [attention_matching, balancekv, thinformer, rkv, triattention])
def test_a_folder_that_is_not_the_peer_is_named(monkeypatch, tmp_path, peer):
    *_, file, function, _ = peer._WHERE
    monkeypatch.delenv(peer.VARIABLE, raising=False)
    assert f"{peer.VARIABLE} is not set" in peer.available()
    monkeypatch.setenv(peer.VARIABLE, str(tmp_path))
    assert "is not there" in peer.available()
    for number, (text, message) in enumerate(
        [
            ("import nothing_of_the_kind", "does not import"),
            ("other = 1", f"has no function {function}"),
            (f"def {function}(key): ...", "another version"),
        ]
    ):
        path = tmp_path / str(number) / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
        monkeypatch.setenv(peer.VARIABLE, str(tmp_path / str(number)))
        assert message in peer.available()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"press": "snapkw"}, "did you mean 'snapkv'"),
        ({"kept": 0}, "kept=0"),
        ({"kept": 64}, "below n=64"),
        ({"press": "snapkv"}, "window_size=64 must be below the prompt's 64 tokens"),
        ({"press": "pyramidkv", "options": {"window_size": 70}}, "window_size=70"),
        ({"layer": 1}, "layer=1"),
        ({"queries": torch.zeros(1, 4, 60, 16)}, "60 tokens, keys for 64"),
        ({"queries": torch.zeros(1, 3, 64, 16)}, "multiple of num_key_value_heads=4"),
        ({"values": torch.zeros(1, 4, 64, 8)}, "same shape"),
    ],
)
def test_bad_jobs_are_named_before_work_starts(changes, message):
    queries, keys, values = tensors(SHAPES[0])
    job = {"press": "knorm", "queries": queries, "keys": keys, "values": values, "kept": 5}
    with pytest.raises(InputError, match=message):
        Job(**{**job, **changes})


#: window, kernel size and weight of the importance
JOINT = [(8, 7, 0.1), (4, 3, 0.5), (5, 1, 0.9), (8, 7, 0.0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("setting", JOINT, ids=str)
def test_rkv_keeps_the_tokens_of_its_authors(setting, shape):
    """Whether the cache keeps the window as its recent tokens or leaves it to the method."""
    reason = rkv.available()
    if reason is not None:
        pytest.skip(reason)
    window, kernel, mix = setting
    queries, keys, _ = tensors(shape)
    theirs = rkv.kept(queries, keys, shape[-1], window=window, kernel_size=kernel, mix=mix)
    for recent in (0, window):
        compressor = METHODS["rkv"](window=window, kernel_size=kernel, mix=mix)
        assert torch.equal(ours(compressor, shape, 0, recent, shape[-1]), theirs)


def test_rkv_keeps_the_tokens_of_its_authors_while_decoding():
    """Of what is held and 16 new tokens, twelve times; both get the tokens in their order."""
    reason = rkv.available()
    if reason is not None:
        pytest.skip(reason)
    queries, keys, values = tensors((2, 8, 2, 256, 32, 0))
    places = torch.arange(256.0).expand(keys.shape[:3])
    every, method = Slots(keys, values, positions=places), METHODS["rkv"]()
    held, seen = every.narrow(0, 0), 0
    for end in range(64, 257, 16):
        held = Slots.cat([held, every.narrow(seen, end - seen)])
        theirs = rkv.kept(queries[:, :, end - 8 : end], held.keys, 48)
        observed = Observed(queries[:, :, seen:end], 32**-0.5)
        expected = held.positions.gather(-1, theirs)
        held, seen = method.compress(held, 48, observed, sink=0, recent=8), end
        assert torch.equal(held.positions, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("aggregation", ["mean", "max"])
def test_triattention_keeps_the_tokens_of_its_authors(aggregation, scaled, shape):
    """Given statistics of the same queries, with plain RoPE and with YaRN, which also scales. Their
    float32 phases of up to 65,536 positions may exchange tokens of almost equal scores."""
    reason = triattention.available()
    if reason is not None:
        pytest.skip(reason)
    heads, n, dim = shape[1], shape[3], shape[4]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = LlamaConfig(hidden_size=heads * dim, num_attention_heads=heads, head_dim=dim)
    config.rope_parameters |= yarn if scaled else {}
    rotary = LlamaRotaryEmbedding(config)
    turn = Turn(rotary.inv_freq, neighbours=False)
    queries, keys, values = tensors(shape)
    here = torch.arange(n)
    slots = Slots(rotary.attention_scaling * turn(keys, here), values)
    observed = Observed(rotary.attention_scaling * turn(queries, here), 0.1)
    assert (rotary.attention_scaling != 1) == scaled
    for farthest, window in [(65536, 512), (1, 20), (100, 20)]:
        compressor = ALL_METHODS["triattention"](window, farthest, aggregation)
        compressor.turn = turn
        scored = compressor.observe(slots, observed)
        kept = compressor.compress(
            replace(scored, positions=here.expand(scored.score.shape).float()),
            shape[-1],
            observed,
            scored=True,
        )
        theirs = triattention.kept(
            queries[:, :, -window:],
            slots.keys,
            shape[-1],
            rotary,
            farthest=farthest,
            aggregation=aggregation,
        )
        own, other = kept.score, scored.score.gather(-1, theirs)
        torch.testing.assert_close(own.sort(-1).values, other.sort(-1).values, atol=1e-4, rtol=0)
        same = (kept.positions.long() == theirs).all(-1)
        assert float(same.float().mean()) > 0.8


def cam_case(shape, neighbours):
    """Slots whose heads have the same accumulated attention, since CAMPress gives all heads one
    score."""
    _, keys, values = tensors(shape)
    g = torch.Generator().manual_seed(3)
    attention = 0.2 + torch.rand(shape[0], 1, shape[3], generator=g)
    slots = Slots(keys, values, score=attention.expand(keys.shape[:3]))
    compressor = ALL_METHODS["cam"](neighbours=neighbours, seed=4)
    numbers = copy.deepcopy(compressor).random(keys.shape[:3], keys.device)
    # all but the tokens of highest attention are dropped
    order = attention.topk(shape[3] - shape[-1], dim=-1, largest=False).indices.sort(-1).values
    uniform = numbers.gather(-1, order.expand(-1, keys.shape[1], -1))
    return slots, compressor, uniform.float()


@pytest.mark.parametrize("neighbours", [1, 5, 32])
def test_cam_merges_as_kvpress_does_by_the_same_random_numbers(neighbours):
    reason = kvpress.available()
    if reason is not None:
        pytest.skip(f"kvpress: {reason}")
    cases = [cam_case(shape, neighbours) for shape in SHAPES]
    given, request = {}, []
    for i, (slots, _, uniform) in enumerate(cases):
        fields = {"keys": slots.keys, "values": slots.values, "attention": slots.score}
        for name, tensor in {**fields, "uniform": uniform}.items():
            given[f"{name}.{i}"] = tensor.clone().contiguous()
        request.append({"kept": SHAPES[i][-1], "merge_budget": neighbours})
    runner = Path(kvpress.__file__).with_name("kvpress_cam_runner.py")
    found = exchange.call(runner, given, request)
    for i, (slots, compressor, _) in enumerate(cases):
        kept = compressor(slots, SHAPES[i][-1], scored=True, decoding=True)
        assert torch.equal(kept.keys, found[f"keys.{i}"])
        torch.testing.assert_close(kept.values, found[f"values.{i}"], rtol=1e-5, atol=1e-5)
        plain = compressor(slots, SHAPES[i][-1], scored=True)
        assert not torch.allclose(kept.values, plain.values, atol=1e-3)
