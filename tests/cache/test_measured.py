"""Measured errors, tolerances and budgets by measured errors: the curves, the probe, and
SketchCache with all model families."""

from __future__ import annotations

import copy
import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from families import CONFIGS, VOCABULARY, build
from kvsketch import InputError, Observed, SketchCache, Slots, attend
from kvsketch.budget import Budget
from kvsketch.cache import Curves, Stream, windowed
from kvsketch.cache.curves import MARGIN, pooled
from kvsketch.cache.error import Probe, WindowError, relative_error
from kvsketch.cache.held_out import _rounded, held_out_for, least_tokens, measure_layer
from kvsketch.hf.activations import capture
from kvsketch.methods import METHODS
from kvsketch.observed import causal
from tiny_models import with_buffer

WINDOW = {"sink": 2, "recent": 6}
#: 16 bits, so that slots are as many as budgeted; test_storage.py tests fewer bits
PLAIN = {**WINDOW, "bits": 16}
DOUBLE = {"dtype": torch.float64}


def ids_of(batch, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)


def greedy(model, ids, cache, new=10, **kwargs):
    return model.generate(
        ids,
        attention_mask=kwargs.pop("attention_mask", torch.ones_like(ids)),
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=False,
        **kwargs,
    )


def random_slots(n, batch=1, heads=2, dim=4, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, batch, heads, n, dim, generator=generator, **DOUBLE)
    return Slots(keys, values, **kwargs)


def random_queries(q, batch=1, heads=4, dim=4, seed=1, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, heads, q, dim, generator=generator, **DOUBLE)
    return Observed(queries, dim**-0.5, **kwargs)


@pytest.fixture(scope="module")
def llama():
    return build("llama")


# --- relative errors ------------------------------------------------------------------------------


def test_relative_error_is_per_row_and_kv_head():
    exact, noise = torch.randn(2, 2, 4, 5, 3, generator=torch.Generator().manual_seed(0), **DOUBLE)
    answer = exact + 0.1 * noise
    error = relative_error(exact, answer, heads=2)
    for row, head in itertools.product(range(2), range(2)):
        mine = slice(2 * head, 2 * head + 2)
        wanted = (answer - exact)[row, mine].norm() / exact[row, mine].norm()
        assert float(error[row, head]) == pytest.approx(float(wanted), rel=1e-12)
    assert torch.equal(relative_error(exact * 0, exact * 0, 2), torch.zeros(2, 2, **DOUBLE))


@pytest.mark.parametrize("recent", [0, 3, 50])
def test_window_error_asks_what_the_recent_window_holds(recent):
    """The error is that of the last queries, at most 32 and no more than recent tokens are kept,
    each with a causal mask."""
    n, budget = 60, 20
    tokens, observed = random_slots(n), random_queries(n)
    recent_kept = min(recent, budget - 2)
    kept = METHODS["knorm"]()(tokens, budget, sink=2, recent=recent)
    error = WindowError(tokens, observed, recent_kept).error(kept)
    asked = max(1, min(32, recent_kept))
    wanted = torch.zeros(2, 2, **DOUBLE)  # squared error, squared norm
    for i in range(asked):
        query = observed.queries[:, :, n - 1 - i : n - i]
        exact, answer = (
            attend(query, s.narrow(0, s.count - i), scaling=observed.scaling)
            for s in (tokens, kept)
        )
        for row, part in enumerate((answer - exact, exact)):
            wanted[row] += part.square().view(2, -1).sum(-1)
    wanted = (wanted[0] / wanted[1]).sqrt()
    torch.testing.assert_close(error[0], wanted, rtol=1e-9, atol=0)


@settings(max_examples=30, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    padding=st.integers(0, 5),
    alibi=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_probe_equals_attention_over_everything(chunks, padding, alibi, seed):
    """The error that a probe reports of any slots is the error against attention over all tokens,
    however the stream is cut, with padding and with ALiBi."""
    start, total = 12, 12 + sum(chunks)
    positions = torch.arange(total, **DOUBLE).expand(2, 2, total) if alibi else None
    live = torch.ones(2, 2, total, dtype=torch.bool)
    live[0, :, :padding] = False
    tokens = random_slots(total, batch=2, seed=seed, positions=positions).only(live)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.05], **DOUBLE) if alibi else None
    asked = random_queries(5, batch=2, seed=seed + 1, slopes=slopes)
    probe = Probe(tokens.narrow(0, start), asked)
    at = start
    for chunk in chunks:
        probe.extend(tokens.narrow(at, chunk))
        at += chunk
    rough = tokens.take(torch.arange(0, total, 2).expand(2, 2, -1))
    exact, answer = (
        attend(asked.queries, slots, scaling=asked.scaling, slopes=slopes)
        for slots in (tokens, rough)
    )
    torch.testing.assert_close(
        probe.error(rough), relative_error(exact, answer, 2), rtol=1e-8, atol=1e-12
    )
    assert float(probe.error(tokens).max()) < 1e-10


def test_running_error_of_a_long_stream_is_that_of_its_slots():
    """The running error of a stream is the error of its slots, after a prompt and 300 single tokens
    with many compressions."""
    n, more = 80, 300
    tokens = random_slots(n + more)
    driver = Stream(windowed("cluster_merge", **WINDOW), Budget(40), track_error=True)
    prompt = random_queries(n)
    driver.extend(tokens.narrow(0, n))
    driver.settle(prompt, prefill=True)
    asked = prompt.narrow(n - 32, 32)
    for i in range(more):
        driver.extend(tokens.narrow(n + i, 1))
        if i in (0, 150, more - 1):
            exact, answer = (
                attend(asked.queries, slots, scaling=asked.scaling)
                for slots in (tokens.narrow(0, n + i + 1), driver.slots)
            )
            found = driver.running_error
            torch.testing.assert_close(found, relative_error(exact, answer, 2), rtol=1e-7, atol=0)
        driver.settle(random_queries(1, seed=i), prefill=False)
    held = {id(t) for t in driver.tensors()}
    assert {id(t) for t in driver.errors.tensors()} <= held  # they count as bytes of the cache


# --- curves ---------------------------------------------------------------------------------------


def test_curves_are_the_errors_of_held_out_queries():
    """Curves equal the errors of a plain loop over the held-out queries, in float64; level 1 is
    exact."""
    n, held = 70, 16
    slots, observed = random_slots(n, batch=2), random_queries(n, batch=2)

    def compress(tokens, budget, before):
        assert tokens.count == n - held  # the method does not get the tokens that are held out
        assert before.queries.shape[2] == n - held
        return windowed("snapkv", 2, 6)(tokens, budget, before)

    levels = (0.25, 0.5, 1.0)
    curves = measure_layer(slots, observed, compress, held, 2, 6, levels)
    assert curves.error.shape == curves.relative.shape == (1, 2, 3)
    assert float(curves.error[..., -1].max()) < 1e-24
    before = observed.narrow(0, n - held)
    for number, level in enumerate(levels):
        budget = 8 + round(level * (n - held - 8))
        assert float(curves.kept[number]) == pytest.approx(budget / (n - held))
        kept = windowed("snapkv", 2, 6)(slots.narrow(0, n - held), budget, before)
        wrong, norm = torch.zeros(2, 2, **DOUBLE), torch.zeros(2, 2, **DOUBLE)  # rows, heads
        for i in range(held):
            query = observed.queries[:, :, n - held + i : n - held + i + 1]
            tail = slots.narrow(n - held, i + 1)
            plain = Slots(kept.keys, kept.values, kept.mass)
            answer = attend(query, Slots.cat([plain, tail]), scaling=0.5)
            exact = attend(query, slots.narrow(0, n - held + i + 1), scaling=0.5)
            wrong += (answer - exact).square().view(2, 2, -1).sum(-1)
            norm += exact.square().view(2, 2, -1).sum(-1)
        torch.testing.assert_close(
            curves.error[0, :, number],
            (wrong / norm.sum(1, keepdim=True)).mean(0),  # the mean over rows
            rtol=1e-5,  # errors have 17 bits
            atol=1e-20,
        )
        held_out = (wrong / norm).sqrt().amax(0)
        assert bool((curves.relative[0, :, number] >= (1 - 1e-5) * held_out).all())


def test_errors_that_differ_by_the_rounding_of_sums_are_equal():
    errors = torch.tensor([0.0, 3.1e-9, 0.36939018964, 0.5, 7.3], **DOUBLE)
    found = _rounded(errors)
    assert torch.equal(found, _rounded(errors * (1 + 3e-9)))
    torch.testing.assert_close(found, errors, rtol=2.0**-17, atol=0)


@pytest.mark.parametrize("method", ["heavy_merge", "tova", "uniform"])
def test_curves_of_slots_scored_once_are_the_same(method):
    """Curves of tokens that are scored once equal those of tokens that are scored for each
    level."""
    slots, observed = random_slots(150, batch=2), random_queries(150, batch=2)
    seen = []

    def observe(tokens, before):
        seen.append(before.queries.shape[2])
        return windowed(method, 2, 6).observe(tokens, before)

    def compress(tokens, budget, before, scored=True):
        assert not scored or method == "uniform" or tokens.score is not None
        return windowed(method, 2, 6)(tokens, budget, before, scored=scored)

    once = measure_layer(slots, observed, compress, 32, 2, 6, observe=observe)
    every = measure_layer(slots, observed, lambda *a: compress(*a, scored=False), 32, 2, 6)
    assert seen == [118]
    assert torch.equal(once.error, every.error)
    assert torch.equal(once.relative, every.relative)


@st.composite
def made_curves(draw):
    layers, heads, levels = draw(st.integers(1, 2)), draw(st.integers(1, 2)), 4
    numbers = st.floats(0, 1, allow_nan=False)
    count = layers * heads * levels
    error = torch.tensor(draw(st.lists(numbers, min_size=count, max_size=count)), **DOUBLE)
    error = error.view(layers, heads, levels).sort(-1, descending=True).values
    error[..., -1] = 0.0
    return Curves(error, torch.tensor([0.1, 0.2, 0.5, 1.0], **DOUBLE), error.sqrt())


@settings(max_examples=60, deadline=None)
@given(made_curves(), st.floats(0.1, 1.0))
def test_allocation_spends_the_budget_and_never_more(curves, budget):
    shares = torch.tensor(curves.allocate(budget), **DOUBLE)
    assert shares.shape == curves.error.shape[:2]
    kept = shares * budget
    assert float(kept.mean()) == pytest.approx(budget, rel=1e-6)
    assert float(kept.max()) <= 1 + 1e-9
    assert float(kept.min()) >= 0.1 - 1e-9


@settings(max_examples=60, deadline=None)
@given(made_curves(), st.floats(0.1, 1.0))
def test_greedy_is_within_one_step_of_the_best(curves, budget):
    """Of all allocations of levels, none for a budget smaller by one step has less error (no greedy
    choice can promise more, since steps are not divisible)."""
    level = curves._greedy(budget)
    rows = curves.error.shape[0] * curves.error.shape[1]
    error = curves.error.reshape(rows, -1)
    mine = float(error.gather(1, level.reshape(rows, 1)).sum())
    smaller = budget * rows - 0.9  # less by the largest step
    best = math.inf
    for choice in itertools.product(range(4), repeat=rows):
        cost = float(curves.kept[torch.tensor(choice)].sum())
        if cost <= smaller + 1e-9:
            best = min(best, sum(float(error[i, c]) for i, c in enumerate(choice)))
    assert mine <= best + 1e-9
    assert float(curves.kept[level].mean()) <= budget + 1e-9


@settings(max_examples=60, deadline=None)
@given(made_curves(), st.floats(0.01, 0.99), st.floats(0.1, 1.0))
def test_a_tolerance_takes_the_fewest_slots_that_hold_it(curves, tolerance, most):
    kept, above = curves.within(tolerance)
    assert not bool(above.any())
    for layer, head in itertools.product(*map(range, kept.shape)):
        good = [
            all(float(x) <= MARGIN * tolerance for x in curves.relative[layer, head, i:-1])
            for i in range(4)
        ]
        assert float(kept[layer, head]) == float(curves.kept[good.index(True)])
    bounded, above = curves.within(tolerance, most)
    assert bool((bounded <= kept).all())
    assert float(bounded.mean()) <= most + 1e-9
    assert torch.equal(above, bounded < kept)
    if float(kept.mean()) <= most:
        assert torch.equal(bounded, kept)


def test_pooling_takes_the_mean_error_and_the_worst_relative_one():
    kept = torch.tensor([0.5, 1.0], **DOUBLE)
    one, two = (
        Curves(torch.tensor([[[x, 0.0]]], **DOUBLE), kept, torch.tensor([[[x, 0.0]]], **DOUBLE))
        for x in (0.2, 0.4)
    )
    together = pooled([one, two])
    assert float(together.error[0, 0, 0]) == pytest.approx(0.3)
    assert float(together.relative[0, 0, 0]) == pytest.approx(0.4)


def test_curves_survive_a_file(tmp_path):
    g = torch.Generator().manual_seed(0)
    error, relative = torch.rand(2, 3, 4, generator=g, **DOUBLE), torch.rand(2, 3, 4, generator=g)
    curves = Curves(error, torch.tensor([0.1, 0.2, 0.5, 1.0]), relative)
    path = tmp_path / "curves.json"
    curves.save(path)
    again = Curves.load(path)
    assert torch.equal(again.error, curves.error)
    assert torch.equal(again.relative.float(), curves.relative)
    text = path.read_text()
    for damaged, word in (
        (text[: len(text) // 2], "JSON"),
        ("{}", "not a file of curves"),
        ("[1, 2]", "not a file of curves"),
        (json.dumps({**json.loads(text), "error": [[1.0], [2.0, 3.0]]}), "damaged"),
        (json.dumps({**json.loads(text), "kept": None}), "damaged"),
        (json.dumps({**json.loads(text), "kept": [1.0]}), "kept"),
    ):
        path.write_text(damaged)
        with pytest.raises(InputError, match=word):
            Curves.load(path)
    with pytest.raises(InputError, match="cannot be read"):
        Curves.load(tmp_path / "missing.json")
    with pytest.raises(InputError, match="cannot be written"):
        curves.save(tmp_path / "no" / "such" / "folder.json")


def test_bad_curves_and_goals_are_named():
    error, kept = torch.zeros(1, 2, 3), torch.tensor([0.1, 0.5, 1.0])
    with pytest.raises(InputError, match="error must be"):
        Curves(error[0], kept)
    with pytest.raises(InputError, match="relative"):
        Curves(error, kept, error[..., :2])
    with pytest.raises(InputError, match="not finite"):
        Curves(error + torch.nan, kept)
    with pytest.raises(InputError, match=r"budget=0\.05"):
        Curves(error, kept).allocate(0.05)
    with pytest.raises(InputError, match="tolerance=0"):
        Curves(error, kept, error).within(0)
    with pytest.raises(InputError, match="no relative errors"):
        Curves(error, kept).within(0.1)


def test_held_out_queries_leave_enough_to_compress():
    for tokens in range(1, 2000, 7):
        held = held_out_for(tokens, 4, 32)
        assert held == 0 or 16 <= held <= 128
        assert (held > 0) == (tokens >= least_tokens(4, 32))


# --- SketchCache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("padding", [[0], [30, 0, 3]])
@pytest.mark.parametrize(
    "goal",
    [
        {"budget": 0.5, "allocation": "measured"},
        {"budget": 60, "allocation": "measured"},
        {"tolerance": 0.3},
        {"tolerance": 0.05, "budget": 0.5},
    ],
    ids=str,
)
def test_every_family_generates(family, padding, goal):
    """Every family generates with padding, within the budget, and heads listed as exact have error
    0."""
    model = build(family)
    tokens, new = 140, 12
    ids = ids_of(len(padding), tokens)
    mask = torch.ones_like(ids)
    for row, width in enumerate(padding):
        ids[row, :width] = mask[row, :width] = 0
    cache = SketchCache(model.config, "heavy_merge", **goal, **PLAIN)
    out = greedy(model, ids, cache, new, attention_mask=mask)
    assert out.shape == (len(padding), tokens + new)
    assert cache.get_seq_length() == tokens + new - 1
    summary, errors = cache.summary(), cache.error()
    limit = goal.get("budget", 1.0)
    most = limit if isinstance(limit, int) else limit * (tokens + new)
    assert summary["slots"] <= most + 2
    assert errors
    for row in errors:
        for head, error in enumerate(row["prompt"]):
            assert 0 <= error < 5
            if head in summary["layers"][row["layer"]]["exact_heads"]:
                assert error < 1e-5  # from rounding


@pytest.mark.parametrize("family", ["llama", "gemma2", "mpt"])
def test_a_tolerance_that_nothing_meets_stays_exact(family):
    """If only exact heads meet the tolerance, the answer is DynamicCache's, every head is listed as
    exact and its error is 0."""
    model, ids = build(family), ids_of(2, 120)
    exact = greedy(model, ids, DynamicCache(config=model.config))
    cache = SketchCache(model.config, "uniform", tolerance=1e-9, **PLAIN)
    assert torch.equal(greedy(model, ids, cache), exact)
    for row in cache.error():
        heads = len(row["prompt"])
        assert row["prompt"] == [0.0] * heads
        assert cache.summary()["layers"][row["layer"]]["exact_heads"] == list(range(heads))


def test_a_wide_tolerance_takes_the_lowest_level(llama):
    cache = SketchCache(llama.config, "heavy_merge", tolerance=0.999, **PLAIN)
    with torch.no_grad():
        llama(ids_of(1, 200), past_key_values=cache, use_cache=True)
    summary = cache.summary()
    assert summary["slots"] < 200
    assert summary["tolerance"] == 0.999
    assert all(not layer["above_tolerance"] for layer in summary["layers"])


def test_max_budget_wins_and_says_who_pays(llama):
    caches = []
    for most in (None, 0.3, 70):
        cache = SketchCache(llama.config, tolerance=0.02, budget=most, **PLAIN)
        with torch.no_grad():
            llama(ids_of(1, 200), past_key_values=cache, use_cache=True)
        caches.append(cache.summary())
    free, bounded, fixed = caches
    assert free["slots"] > 100  # heads of random weights need most of their tokens
    assert bounded["slots"] <= 0.3 * 200 + 1
    assert 65 <= fixed["slots"] <= 70
    assert not any(layer["above_tolerance"] for layer in free["layers"])
    assert any(layer["above_tolerance"] for layer in bounded["layers"])


def test_an_int_max_budget_holds_however_long_the_answer(llama):
    cache = with_buffer(SketchCache(llama.config, tolerance=0.02, budget=70, **PLAIN), 2)
    greedy(llama, ids_of(1, 200), cache, new=150)
    assert cache.get_seq_length() == 349
    assert cache.summary()["slots"] <= 70 + 2


def test_errors_are_those_of_the_activations(llama):
    """cache.error() equals the error computed from captured activations and the cache's slots."""
    ids = ids_of(1, 150)
    cache = SketchCache(llama.config, "snapkv", budget=40, allocation="even", sink=2, recent=10)
    with torch.no_grad():
        llama(ids, past_key_values=cache, use_cache=True)
    for row, caught in zip(cache.error(), capture(llama, ids), strict=True):
        kept = cache.layers[row["layer"]].stream.slots
        queries = caught.queries[:, :, -10:]
        answers = [
            attend(queries, slots, scaling=caught.scaling, mask=causal(10, slots.count, "cpu"))
            for slots in (Slots(caught.keys, caught.values), Slots(kept.keys, kept.values))
        ]
        wanted = relative_error(*answers, heads=2)[0]
        assert row["prompt"] == pytest.approx(wanted.tolist(), rel=1e-4)
        assert row["now"] is None


def test_the_measured_allocation_lowers_the_error_it_measures(llama):
    """With the same total the measured allocation has less error than the even one, on text that
    the model generated."""
    ids = llama.generate(ids_of(1, 8), max_new_tokens=300, do_sample=True, top_k=0)
    errors = {}
    for allocation in ("even", "measured"):
        cache = SketchCache(llama.config, budget=0.3, allocation=allocation, **PLAIN)
        with torch.no_grad():
            llama(ids, past_key_values=cache, use_cache=True)
        assert cache.summary()["slots"] == pytest.approx(0.3 * ids.shape[1], rel=0.02)
        errors[allocation] = torch.tensor([row["prompt"] for row in cache.error()]).square().sum()
    assert errors["measured"] < errors["even"]


def test_running_errors_come_with_the_cache(llama):
    cache = SketchCache(llama.config, budget=0.3, keep=["errors"], **PLAIN)
    plain = SketchCache(llama.config, budget=0.3, **PLAIN)
    for held in (cache, plain):
        greedy(llama, ids_of(1, 150), held, new=60)
    assert cache.nbytes() > plain.nbytes()  # the probe is counted
    for row in cache.error():
        assert all(0 < x < 2 for x in row["now"])


def test_curves_given_beforehand_need_no_second_measurement(llama, tmp_path):
    """Curves as an object and as a file give the same; they serve short prompts, too, and layers
    are compressed one by one during the prefill."""
    from kvsketch import measure_curves

    curves = measure_curves(llama, [ids_of(1, 200)], "heavy_merge", follow=32, **WINDOW)
    curves.save(tmp_path / "curves.json")
    held = []
    for allocation in (curves, tmp_path / "curves.json", str(tmp_path / "curves.json")):
        cache = SketchCache(llama.config, budget=0.4, allocation=allocation, **PLAIN)
        out = greedy(llama, ids_of(1, 60), cache)
        held.append((out.tolist(), cache.summary()["kv_bytes"]))
        full = cache.exact_nbytes()
        assert cache.summary()["peak_kv_bytes"] < full
    assert held[0] == held[1] == held[2]


def test_short_prompts_wait_and_ints_do_not(llama):
    """A share of a short prompt waits, over several turns, until there are enough tokens to measure
    on; a number of slots may not be exceeded, so it is allocated evenly at once."""
    share = SketchCache(llama.config, budget=0.5, **PLAIN)
    number = SketchCache(llama.config, budget=20, **PLAIN)
    said = [greedy(llama, ids_of(1, 40), cache, new=4) for cache in (share, number)]
    assert share.summary()["slots"] == 43
    assert number.summary()["slots"] <= 21
    ids = torch.cat([said[0], ids_of(1, 60, seed=1)], dim=1)
    greedy(llama, ids, share, new=4)
    assert share.summary()["slots"] <= 0.5 * 108 + 2
    assert share.summary()["layers"][0]["compressed"]


def test_a_budget_in_few_bits_is_spent(llama):
    """Slots pay for masses only where they are stored. The pages of an engine have them always, and
    what streams holds as many slots as these."""
    slots = {}
    for method in ("snapkv", "knorm", "heavy_merge"):
        for prefill in ("exact", "streaming"):
            settings = {"allocation": "even", "bits": 4, "prefill": prefill, "recent": 8}
            cache = SketchCache(llama.config, method, budget=80, **settings)
            with torch.no_grad():
                llama(ids_of(1, 500), past_key_values=cache, use_cache=True)
            page = cache.layers[0].stream.page
            heads, width = (cache.layers[0].stream.slots.keys.shape[i] for i in (1, 3))
            slots[method, prefill] = page.middle.count
            if prefill == "exact":
                few = [t for one in page.middle.packed.values() for t in one.tensors()]
                own = [t for part in page.open() for t in part.fields.values()]
                spent = sum(t.nbytes for t in few + own) / heads
                assert 0.96 < spent / (80 * 2 * width * 4) < 1.01
    assert slots["knorm", "exact"] > slots["snapkv", "exact"] > slots["heavy_merge", "exact"]
    assert slots["snapkv", "streaming"] == slots["heavy_merge", "streaming"]


def test_decoding_alone_reaches_the_plan(llama):
    for goal in ({"budget": 0.5}, {"budget": 90}, {"tolerance": 0.5}):
        cache = SketchCache(llama.config, **goal, **PLAIN)
        greedy(llama, ids_of(1, 5), cache, new=150)
        assert cache.get_seq_length() == 154
        assert not cache.layers[0].stream.waits
        limit = {0.5: 0.5 * 154 + 2, 90: 92}.get(goal.get("budget"), 154)
        assert cache.summary()["slots"] <= limit


def test_reset_copy_crop_and_beams(llama):
    ids = ids_of(1, 150)
    cache = SketchCache(llama.config, budget=0.4, **PLAIN)
    first = greedy(llama, ids, cache)
    assert not cache.layers[0].stream.waits
    cache.reset()
    assert cache.layers[0].stream.waits
    assert cache.nbytes() == 0
    twin = copy.deepcopy(cache)
    assert torch.equal(greedy(llama, ids, cache), first)
    assert twin.get_seq_length() == 0
    assert twin.layers[0].stream.waits
    assert torch.equal(greedy(llama, ids, twin), first)
    with torch.no_grad():  # cropped before there was a budget: measured on the remaining tokens
        short = SketchCache(llama.config, budget=0.4, **PLAIN)
        llama(ids[:, :60], past_key_values=short, use_cache=True)
        short.crop(-10)
        llama(ids[:, 50:], past_key_values=short, use_cache=True)
    assert short.get_seq_length() == 150
    assert short.summary()["slots"] <= 62
    beams = SketchCache(llama.config, budget=0.4, **PLAIN)
    out = greedy(llama, ids, beams, num_beams=3)
    assert out.shape == (1, 160)


def test_chunks_of_an_exact_prompt_wait_for_its_end(llama):
    ids = ids_of(1, 150)
    whole = SketchCache(llama.config, budget=0.4, **PLAIN)
    chunked = SketchCache(llama.config, budget=0.4, prefill=150, **PLAIN)
    one = greedy(llama, ids, whole)
    assert torch.equal(greedy(llama, ids, chunked, prefill_chunk_size=40), one)


def test_a_long_prompt_in_chunks_is_measured_as_at_once(llama):
    """However long a prompt is, enough of its queries are there to measure on at its end."""
    settings = {"budget": 0.4, "allocation": "measured", "prefill": 400, **PLAIN}
    held = []
    for chunk in (400, 100):
        cache = SketchCache(llama.config, "knorm", **settings)
        with torch.no_grad():
            for ids in ids_of(1, 400).split(chunk, dim=1):
                llama(ids, past_key_values=cache, use_cache=True)
        assert cache.summary()["slots"] == pytest.approx(0.4 * 400, rel=0.02)
        held.append([layer.stream.held.tolist() for layer in cache.layers])
    assert held[0] == held[1]


def test_a_failed_prompt_leaves_nothing_behind(llama):
    """After non-finite keys in the last layer the curves of the first layer are dropped, too."""
    ids = ids_of(1, 150)
    cache = SketchCache(llama.config, budget=0.4, **PLAIN)
    weight = llama.model.layers[1].self_attn.k_proj.weight
    saved = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.fill_(torch.nan)
        with pytest.raises(InputError, match="not finite"), torch.no_grad():
            llama(ids, past_key_values=cache, use_cache=True)
    finally:
        with torch.no_grad():
            weight.copy_(saved)
    assert cache.get_seq_length() == 0
    fresh = SketchCache(llama.config, budget=0.4, **PLAIN)
    assert torch.equal(greedy(llama, ids, cache), greedy(llama, ids, fresh))


@pytest.mark.parametrize("method", ["h2o", "uniform", "cluster_merge", "subgen", "pyramidkv"])
def test_any_method_can_be_planned(llama, method):
    cache = SketchCache(llama.config, method, budget=0.5, allocation="measured", **PLAIN)
    greedy(llama, ids_of(2, 150), cache)
    assert cache.layers[0].stream.compressed
    again = SketchCache(llama.config, method, tolerance=0.2, **PLAIN)
    greedy(llama, ids_of(2, 150), again)
    assert again.get_seq_length() == 159


@pytest.mark.parametrize("bits", [8, 4])
def test_planned_slots_in_fewer_bits(llama, bits):
    plain = SketchCache(llama.config, budget=0.4, **PLAIN)
    small = SketchCache(llama.config, budget=0.4, bits=bits, **WINDOW)
    for cache in (plain, small):
        greedy(llama, ids_of(1, 200), cache)
    assert small.nbytes() < 1.05 * plain.nbytes()
    assert small.summary()["slots"] > 1.3 * plain.summary()["slots"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"tolerance": 0}, "tolerance=0"),
        ({"tolerance": 1.0}, r"tolerance=1\.0"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"tolerance": "tight"}, "tolerance='tight'"),
        ({"tolerance": True}, "tolerance=True"),
        ({"tolerance": 0.1, "prefill": "streaming"}, "prefill"),
        ({"tolerance": 0.1, "budget": 0}, "budget=0"),
        ({"tolerance": 0.1, "budget": 7}, "budget=7"),
        ({"tolerance": 0.1, "max_budget": 0.5}, "max_budget=0.5 is no argument any more: beside"),
        ({"schedule": [1.0, 1.0]}, "schedule=.* is no argument any more: allocation"),
        ({"budgets": 0.5}, "argument='budgets' is unknown; did you mean 'budget'"),
        (
            {"keep": "decoded"},
            "keep='decoded' must be a list of some of decoded, positions, errors",
        ),
        ({"keep": ["answers"]}, "keep=.*answers.* must be a list"),
        ({"allocation": "uneven"}, "allocation='uneven'"),
        ({"allocation": 3}, "allocation=3"),
        ({"tolerance": 0.1, "allocation": [1.0, 1.0]}, "allocation=.*tolerance=0.1"),
        (
            {"allocation": Curves(torch.zeros(3, 2, 2), torch.tensor([0.5, 1.0]))},
            "3 layers x 2 KV heads",
        ),
        ({"allocation": "measured", "bits": 5}, "bits"),
        ({"buffer": 8}, "buffer=8 is no argument any more"),
        ({"tolerance": 0.1, "options": {"share": 2}}, "share"),
    ],
)
def test_bad_arguments_are_named_before_anything_changes(llama, arguments, word):
    before = llama.config._attn_implementation
    with pytest.raises(InputError, match=word):
        SketchCache(llama.config, "heavy_merge", **{**WINDOW, **arguments})
    assert llama.config._attn_implementation == before


def test_a_max_budget_with_room_for_nothing_is_spent_evenly(llama):
    """A max_budget below sinks, recent tokens and the lowest level is allocated evenly, and all
    heads are listed as above the tolerance."""
    cache = SketchCache(llama.config, tolerance=0.001, budget=0.05, sink=20, recent=20)
    with torch.no_grad():
        llama(ids_of(1, 150), past_key_values=cache, use_cache=True)
    summary = cache.summary()
    assert summary["slots"] == math.ceil(0.05 * 150)
    assert all(layer["above_tolerance"] == [0, 1] for layer in summary["layers"])
