"""Compressors that need queries, and those that use only keys, equal their definitions, computed
term by term in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvsketch import InputError, Observed, Slots, estimator
from kvsketch.budget import Budget
from kvsketch.methods import METHODS, make, pyramid_shares

BATCH, HEADS, DIM = 2, 2, 5
QUERY_AWARE = ["snapkv", "pyramidkv", "tova", "observed_attention", "expected_attention"]
TOLERANCE = {"rtol": 1e-3, "atol": 1e-6}


def case(seed, n, q, group=1, weighted=False, padding=0, softcap=None, alibi=False):
    """Slots, and the queries of the newest q tokens. Row 0 starts with ``padding`` dead tokens;
    weighted slots have masses 0 (and values: a sample of the numerator), 1 and 2.5."""
    g = torch.Generator().manual_seed(seed)
    mass = None
    if weighted:
        mass = torch.tensor([0.0, 1.0, 2.5])[torch.randint(3, (BATCH, HEADS, n), generator=g)]
        mass[..., -1] = 1.0  # every query sees some mass
    slots = Slots(
        torch.randn(BATCH, HEADS, n, DIM, generator=g),
        torch.randn(BATCH, HEADS, n, DIM, generator=g),
        mass,
        torch.arange(n).float().expand(BATCH, HEADS, n) if alibi else None,
    )
    live = None
    if padding:
        real = torch.ones(BATCH, n, dtype=torch.bool)
        real[0, :padding] = False
        slots = slots.only(real[:, None])
        live = real[:, n - q :]
    queries = 1.5 * torch.randn(BATCH, group * HEADS, q, DIM, generator=g)
    slopes = torch.rand(group * HEADS, generator=g) if alibi else None
    return slots, Observed(queries, 0.4, softcap, slopes, live)


def attention(slots, observed):
    """Attention, float64 ``[batch, num_key_value_heads, group, q, n]``, one query at a time."""
    queries = observed.queries.double().unflatten(1, (HEADS, -1))
    mass = slots.masses().double()
    n, q = slots.count, queries.shape[3]
    out = torch.zeros(*queries.shape[:4], n, dtype=torch.float64)
    scores = torch.einsum("bhgqd,bhnd->bhgqn", queries, slots.keys.double()) * observed.scaling
    if observed.softcap is not None:
        scores = observed.softcap * torch.tanh(scores / observed.softcap)
    if observed.slopes is not None:
        slopes = observed.slopes.double().view(1, HEADS, -1, 1, 1)
        scores = scores + slopes * slots.positions.double()[:, :, None, None]
    for i in range(q):
        seen = slice(0, n - q + i + 1)
        share = mass[:, :, None, seen] * scores[:, :, :, i, seen].exp()
        total = share.sum(-1, keepdim=True)
        out[:, :, :, i, seen] = torch.where(total > 0, share / total.clamp(min=1e-300), 0.0)
    return out


def live_queries(observed, row):
    q = observed.queries.shape[2]
    return [i for i in range(q) if observed.live is None or bool(observed.live[row, i])]


def pooled(row, width):
    """Zero-padded mean over ``width`` neighbours."""
    half, n = width // 2, len(row)
    return [sum(row[max(0, j - half) : j + half + 1]) / width for j in range(n)]


def snapkv_score(slots, observed, window, kernel, before=None):
    matrix = attention(slots, observed).mean(2)
    n = slots.count
    out = torch.zeros(BATCH, HEADS, n, dtype=torch.float64)
    cut = max(0, n - window)
    for b in range(BATCH):
        live = live_queries(observed, b)
        for h in range(HEADS):
            score = torch.zeros(n, dtype=torch.float64) if before is None else before[b, h].double()
            if len(live) >= window:
                fold = [(0.0, torch.stack([matrix[b, h, i] for i in live[-window:]]).mean(0))]
            else:
                fold = [(1 - 1 / window, matrix[b, h, i] / window) for i in live]
            for fade, received in fold:
                row = received.tolist()
                smooth = pooled(row[:cut], kernel) + pooled(row[cut:], kernel)
                score = fade * score + torch.tensor(smooth, dtype=torch.float64)
            out[b, h] = score
    return out


def tova_score(slots, observed):
    matrix = attention(slots, observed).mean((1, 2))
    rows = [matrix[b, live_queries(observed, b)[-1]] for b in range(BATCH)]
    return torch.stack(rows)[:, None].expand(BATCH, HEADS, -1)


def averaged_score(slots, observed):
    """The score if the queries of all n tokens were observed."""
    matrix = attention(slots, observed).mean(2)
    out = torch.zeros(BATCH, HEADS, slots.count, dtype=torch.float64)
    for b in range(BATCH):
        live = live_queries(observed, b)
        for j in live:
            out[b, :, j] = sum(matrix[b, :, i, j] for i in live) / len([i for i in live if i >= j])
    return out


def expected_score(slots, observed, window):
    """The score from the mean vector and the covariance matrix of the queries."""
    out = torch.zeros(BATCH, HEADS, slots.count, dtype=torch.float64)
    queries = observed.queries.double() * observed.scaling
    group = queries.shape[1] // HEADS
    for b in range(BATCH):
        chosen = live_queries(observed, b)[-window:]
        for h in range(HEADS):
            for head in range(h * group, (h + 1) * group):
                some = queries[b, head, chosen]
                mean = some.mean(0)
                covariance = (some - mean).T @ (some - mean) / len(chosen)
                keys = slots.keys[b, h].double()
                expected = (keys @ mean + ((keys @ covariance) * keys).sum(-1) / 2).exp()
                total = (expected * slots.masses()[b, h].double()).sum()
                out[b, h] += expected / total * slots.values[b, h].double().norm(dim=-1) / group
    return out


def newest(slots, observed, start, stop):
    """The slots and queries of an observation of tokens ``start`` to ``stop``."""
    live = None if observed.live is None else observed.live[:, start:stop]
    part = replace(observed, queries=observed.queries[:, :, start:stop], live=live)
    return slots.narrow(0, stop), part


def streamed(compressor, slots, observed, cuts):
    """The score after the queries of all tokens were observed in chunks that end at ``cuts``."""
    score, start = None, 0
    for stop in sorted({*cuts, slots.count}):
        seen, part = newest(slots, observed, start, stop)
        if score is not None:
            fresh = score.new_zeros(*score.shape[:2], stop - start)
            seen = replace(seen, score=torch.cat([score, fresh], dim=-1))
        score = compressor.observe(seen, part).score
        start = stop
    return score


CASES = {
    "seed": st.integers(0, 999),
    "n": st.integers(2, 24),
    "group": st.integers(1, 3),
    "weighted": st.booleans(),
    "padding": st.integers(0, 5),
    "data": st.data(),
}


def drawn(seed, n, group, weighted, padding, data, whole=False, **extra):
    padding = min(padding, n - 1)
    q = n if whole else data.draw(st.integers(1, n), label="queries")
    if not whole:
        padding = min(padding, n - q)  # a row's newest tokens are real, older ones may not be
    return case(seed, n, q, group, weighted, padding, **extra)


@settings(max_examples=60, deadline=None)
@given(window=st.integers(1, 12), kernel=st.sampled_from([1, 3, 5]), **CASES)
def test_snapkv_is_its_definition(window, kernel, data, **drawing):
    slots, observed = drawn(data=data, whole=data.draw(st.booleans()), **drawing)
    before = None
    if data.draw(st.booleans(), label="scored before"):
        before = torch.rand(slots.keys.shape[:3], generator=torch.Generator().manual_seed(1))
    compressor = METHODS["snapkv"](window=window, kernel_size=kernel)
    actual = compressor.observe(replace(slots, score=before), observed).score
    expected = snapkv_score(slots, observed, window, kernel, before)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, **TOLERANCE)


@settings(max_examples=40, deadline=None)
@given(**CASES)
def test_tova_is_its_definition(data, **drawing):
    slots, observed = drawn(data=data, **drawing)
    # earlier scores have no effect
    seen = replace(slots, score=torch.ones(slots.keys.shape[:3]))
    actual = make("tova").observe(seen, observed).score
    torch.testing.assert_close(actual.double(), tova_score(slots, observed), **TOLERANCE)


@settings(max_examples=40, deadline=None)
@given(**CASES)
def test_observed_attention_is_its_definition(data, **drawing):
    drawing["weighted"] = False  # the score is divided by numbers of tokens, not by masses
    slots, observed = drawn(data=data, whole=True, **drawing)
    # there is padding between tokens, too, as between the turns of a chat
    g = torch.Generator().manual_seed(drawing["seed"])
    real = torch.rand(BATCH, slots.count, generator=g) < 0.7
    real[:, -1] = True
    if observed.live is not None:
        real &= observed.live
    slots, observed = slots.only(real[:, None]), replace(observed, live=real)
    actual = make("observed_attention").observe(slots, observed).score
    torch.testing.assert_close(actual.double(), averaged_score(slots, observed), **TOLERANCE)


@settings(max_examples=40, deadline=None)
@given(window=st.integers(1, 30), **CASES)
def test_expected_attention_is_its_definition(window, data, **drawing):
    slots, observed = drawn(data=data, whole=data.draw(st.booleans()), **drawing)
    actual = METHODS["expected_attention"](window=window).observe(slots, observed).score
    expected = expected_score(slots, observed, window)
    torch.testing.assert_close(actual.double(), expected, **TOLERANCE)


def test_later_queries_update_an_expected_score_in_proportion():
    """With three new queries and a window of 10, 0.9^3 of an old slot's score stays; the three new
    slots have no earlier score and get the new one."""
    slots, observed = case(0, 12, 3, group=2)
    old = torch.rand(BATCH, HEADS, 12, generator=torch.Generator().manual_seed(1))
    compressor = METHODS["expected_attention"](window=10)
    new = expected_score(slots, observed, 10)
    expected = 0.9**3 * old.double() + (1 - 0.9**3) * new
    expected[..., 9:] = new[..., 9:]
    actual = compressor.observe(replace(slots, score=old), observed).score
    torch.testing.assert_close(actual.double(), expected, **TOLERANCE)


@pytest.mark.parametrize("setting", [{"softcap": 2.0}, {"alibi": True}])
def test_soft_capping_and_alibi(setting):
    slots, observed = case(3, 14, 14, group=2, padding=3, **setting)
    actual = METHODS["snapkv"](window=4).observe(slots, observed).score
    torch.testing.assert_close(actual.double(), snapkv_score(slots, observed, 4, 5), **TOLERANCE)
    actual = make("tova").observe(slots, observed).score
    torch.testing.assert_close(actual.double(), tova_score(slots, observed), **TOLERANCE)
    actual = make("observed_attention").observe(slots, observed).score
    torch.testing.assert_close(actual.double(), averaged_score(slots, observed), **TOLERANCE)


@pytest.mark.parametrize("setting", [{"softcap": 2.0}, {"alibi": True}])
def test_expected_attention_takes_moments_of_the_scores_attention_has(setting):
    slots, observed = case(3, 14, 14, group=2, **setting)
    queries = observed.queries.double().unflatten(1, (HEADS, -1))
    scores = torch.einsum("bhgqd,bhnd->bhgqn", queries, slots.keys.double()) * 0.4
    if observed.softcap is not None:
        scores = 2.0 * torch.tanh(scores / 2.0)
    else:
        slopes = observed.slopes.double().view(1, HEADS, -1, 1, 1)
        scores = scores + slopes * slots.positions.double()[:, :, None, None]
    exponent = scores.mean(3) + scores.var(3, correction=0) / 2
    expected = exponent.softmax(-1).mean(2) * slots.values.double().norm(dim=-1)
    actual = make("expected_attention").observe(slots, observed).score
    torch.testing.assert_close(actual.double(), expected, **TOLERANCE)


# --- streams --------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 999),
    n=st.integers(4, 24),
    padding=st.integers(0, 5),
    cuts=st.sets(st.integers(1, 23), max_size=6),
    method=st.sampled_from(["tova", "observed_attention"]),
)
def test_folding_a_stream_equals_one_look(seed, n, padding, cuts, method):
    slots, observed = case(seed, n, n, 2, padding=min(padding, n - 1))
    cuts = [cut for cut in cuts if cut < n]
    whole = make(method).observe(slots, observed).score
    torch.testing.assert_close(streamed(make(method), slots, observed, cuts), whole, **TOLERANCE)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 999),
    window=st.integers(1, 6),
    prompt=st.integers(6, 14),
    sizes=st.lists(st.integers(1, 5), max_size=4),
    cuts=st.sets(st.integers(1, 13), max_size=4),
)
def test_snapkv_folds_a_prompt_and_then_tokens_in_any_groups(seed, window, prompt, sizes, cuts):
    """Chunks of a prompt give the score of the whole prompt if the last one contains the window;
    decoded tokens give the same score in groups smaller than the window as one by one. This is
    without pooling, since in a stream neighbours can be on different sides of the window's edge."""
    compressor = METHODS["snapkv"](window=window, kernel_size=1)
    sizes = [size for size in sizes if size < window]
    n = prompt + sum(sizes)
    slots, observed = case(seed, n, n, 2)
    first = [cut for cut in cuts if cut <= prompt - window]
    grouped = [prompt + sum(sizes[: i + 1]) for i in range(len(sizes))]
    single = list(range(prompt, n + 1))
    by_group = streamed(compressor, slots, observed, [*first, prompt, *grouped])
    by_token = streamed(compressor, slots, observed, [prompt, *single])
    torch.testing.assert_close(by_group, by_token, **TOLERANCE)


def test_snapkv_does_not_look_at_older_queries():
    slots, observed = case(0, 20, 20, group=2)
    compressor = METHODS["snapkv"](window=6)
    score = compressor.observe(slots, observed).score
    other = observed.queries.clone()
    other[:, :, :14] = 100.0
    assert torch.equal(compressor.observe(slots, replace(observed, queries=other)).score, score)
    other[:, :, 14] = 100.0
    assert not torch.equal(compressor.observe(slots, replace(observed, queries=other)).score, score)


@pytest.mark.parametrize("method", QUERY_AWARE)
def test_blocks_of_queries_change_nothing(method, monkeypatch):
    slots, observed = case(0, 30, 30, group=2, weighted=True, padding=4)
    whole = make(method).observe(slots, observed).score
    monkeypatch.setattr(estimator, "_BLOCK_SCORES", 8 * 30 * 3)
    torch.testing.assert_close(make(method).observe(slots, observed).score, whole, **TOLERANCE)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns, views included."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        found = operation(*arguments, **(options or {}))
        for result in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(result, torch.Tensor):
                self.size = max(self.size, result.numel())
        return found


@pytest.mark.parametrize("method", QUERY_AWARE)
def test_no_matrix_of_queries_times_slots(method, monkeypatch):
    """No operation returns a tensor that is larger than a block of scores may be."""
    slots, observed = case(0, 300, 300, group=2)
    allowed = 8 * 300 * 16  # 16 of 300 queries, for 4 query heads of 2 rows
    monkeypatch.setattr(estimator, "_BLOCK_SCORES", allowed)
    with Largest() as largest:
        make(method).observe(slots, observed)
    assert 0 < largest.size <= allowed


@pytest.mark.parametrize("method", QUERY_AWARE)
def test_padding_changes_no_score(method):
    """The live tokens of a padded row get the scores that they get without the padding."""
    slots, observed = case(4, 40, 40, group=2, padding=9)
    padded = make(method).observe(slots, observed).score[:1, :, 9:]
    alone, queries = slots.narrow(9, 31), observed.queries[:, :, 9:]
    alone = Slots(alone.keys, alone.values)
    score = make(method).observe(alone, Observed(queries, 0.4)).score[:1]
    torch.testing.assert_close(padded, score, **TOLERANCE)


@pytest.mark.parametrize("method", QUERY_AWARE)
def test_a_row_of_padding_alone_keeps_its_scores(method):
    slots, observed = case(4, 20, 2, group=2)
    old = torch.rand(BATCH, HEADS, 20, generator=torch.Generator().manual_seed(1))
    live = torch.tensor([[False, False], [True, True]])
    dead = torch.ones(BATCH, 1, 20, dtype=torch.bool)
    dead[0, :, 18:] = False
    seen = replace(slots.only(dead), score=old)
    score = make(method).observe(seen, replace(observed, live=live)).score
    torch.testing.assert_close(score[0, :, :18], old[0, :, :18])
    assert not torch.allclose(score[1, :, :18], old[1, :, :18])


@pytest.mark.parametrize("method", QUERY_AWARE)
def test_highest_scores_are_kept(method):
    slots, observed = case(5, 40, 40, group=2)
    score = make(method).observe(slots, observed).score.clone()
    score[..., :2] = score[..., -5:] = torch.inf
    index = score.topk(15, -1).indices.sort(-1).values
    out = make(method)(slots, 15, observed, sink=2, recent=5)
    assert torch.equal(out.keys, slots.take(index).keys)


@pytest.mark.parametrize("method", QUERY_AWARE)
def test_without_queries_they_are_refused(method):
    slots, _ = case(0, 9, 1)
    with pytest.raises(InputError, match=f"{method} needs queries"):
        make(method)(slots, 4)
    with pytest.raises(InputError, match=f"{method} needs queries"):
        make(method).reduce(slots, 4, None)


# --- keys only ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    n=st.integers(2, 20),
    weighted=st.booleans(),
    padding=st.integers(0, 4),
    data=st.data(),
)
def test_knorm_and_keydiff_are_their_definitions(seed, n, weighted, padding, data):
    slots, _ = case(seed, n, 1, 1, weighted, min(padding, n - 1))
    budget = data.draw(st.integers(1, n - 1))
    live = slots.live()
    alive = torch.ones(BATCH, HEADS, n, dtype=torch.bool) if live is None else live
    norms = make("knorm").compress(slots, budget)
    unlike = make("keydiff").compress(slots, budget)
    for b in range(BATCH):
        for h in range(HEADS):
            at = alive[b, h].nonzero().flatten().tolist()
            keys = slots.keys[b, h].double()
            direction = keys / keys.norm(dim=-1, keepdim=True)
            anchor = (slots.masses()[b, h].double()[:, None] * direction).sum(0)
            by_norm = sorted(at, key=lambda i: float(keys[i].norm()))[:budget]
            dead = budget - len(by_norm)  # padding comes first, and is kept if live slots are few
            assert torch.equal(norms.keys[b, h, dead:], slots.keys[b, h, sorted(by_norm)])
            least = (direction[at] @ anchor).sort().values[:budget]
            held = unlike.keys[b, h, dead:].double()  # two keys always tie: compare cosines
            cosines = (held / held.norm(dim=-1, keepdim=True)) @ anchor
            torch.testing.assert_close(cosines.sort().values, least, atol=1e-5, rtol=1e-5)
            assert {tuple(row) for row in held.tolist()} <= {tuple(row) for row in keys.tolist()}


@pytest.mark.parametrize("method", ["knorm", "keydiff"])
def test_bfloat16_keys_are_ranked_in_float32(method):
    """Keys whose norms or cosines would be equal in bfloat16 are ranked as in float32."""
    g = torch.Generator().manual_seed(0)
    keys = (torch.randn(1, 1, 400, 16, generator=g) * 0.05 + 1).bfloat16()
    low, high = (Slots(k, k) for k in (keys, keys.float()))
    kept = make(method).compress(low, 100)
    assert kept.keys.dtype == torch.bfloat16
    assert torch.equal(kept.keys.float(), make(method).compress(high, 100).keys)


# --- arguments and shares -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("snapkv", {"window": 0}, "window=0"),
        ("snapkv", {"window": 2.5}, r"window=2\.5"),
        ("pyramidkv", {"window": True}, "window=True"),
        ("snapkv", {"kernel_size": 4}, "kernel_size=4 must be odd"),
        ("snapkv", {"kernel_size": -1}, "kernel_size=-1"),
        ("expected_attention", {"window": -3}, "window=-3"),
    ],
)
def test_bad_arguments_are_named(method, arguments, message):
    with pytest.raises(InputError, match=message):
        METHODS[method](**arguments)


@settings(max_examples=80, deadline=None)
@given(
    layers=st.integers(1, 40),
    beta=st.floats(1, 50),
    budget=st.none() | st.integers(1, 500),
    spare=st.none() | st.integers(0, 500),
    window=st.integers(1, 64),
)
def test_pyramid_shares_fall_and_average_one(layers, beta, budget, spare, window):
    tokens = None if budget is None or spare is None else budget + spare
    shares = pyramid_shares(layers, beta, budget=budget, tokens=tokens, window=window)
    assert len(shares) == layers
    assert sum(shares) / layers == pytest.approx(1)
    assert all(a >= b - 1e-9 for a, b in pairwise(shares))
    if budget is not None and len(set(shares)) > 1:
        assert min(shares) * budget >= window - 1e-6
        if tokens is not None:
            assert max(shares) * budget <= tokens - window + 1e-6


def test_pyramid_shares_by_hand():
    assert pyramid_shares(3, 2) == [1.5, 1.0, 0.5]
    assert pyramid_shares(3, 2, budget=100, window=50) == [1.5, 1.0, 0.5]
    assert pyramid_shares(3, 2, budget=100, window=51) == [1.0, 1.0, 1.0]
    cut = pyramid_shares(3, 2, budget=100, tokens=130, window=10)
    assert cut == pytest.approx([1.2, 1.0, 0.8])
    shares = METHODS["pyramidkv"].shares
    assert shares(3, Budget(2000), 32) == pytest.approx([1.95, 1.0, 0.05])
    assert shares(3, Budget(400), 32) == [1.0, 1.0, 1.0]  # 400 / 20 is below the window
    assert shares(3, Budget(0.8), 32) == pytest.approx([1.25, 1.0, 0.75])  # at most all tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"beta": 0.5}, r"beta=0\.5"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"budget": 0}, "budget=0"),
        ({"tokens": 9}, "tokens=9"),
        ({"budget": 10, "tokens": 9}, "tokens=9"),
        ({"budget": 10, "window": 0}, "window=0"),
    ],
)
def test_bad_shares_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        pyramid_shares(**{"num_layers": 3, **arguments})
