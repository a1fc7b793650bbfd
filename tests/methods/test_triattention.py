"""TriAttention equals the paper's formula, computed in float64 from queries and keys before RoPE;
where its frequencies come from."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, SmolLM3Config

from families import CONFIGS, VOCABULARY, build
from kvsketch import InputError, Observed, SketchCache, Slots, UnsupportedError
from kvsketch.hf import interface
from kvsketch.methods.rotation import Turn
from kvsketch.methods.triattention import TriAttention

BATCH, HEADS = 2, 2
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


def rotated(x, frequencies, position, neighbours):
    """One vector at a position, pair by pair."""
    pairs, out = len(frequencies), x.clone()
    for f in range(pairs):
        i, j = (2 * f, 2 * f + 1) if neighbours else (f, f + pairs)
        turn = torch.polar(torch.ones((), dtype=torch.float64), frequencies[f] * position)
        both = torch.complex(x[i], x[j]) * turn
        out[i], out[j] = both.real, both.imag
    return out


def paired(x, pairs, neighbours):
    """The complex numbers of a vector, and the channels that are not rotated."""
    turned = x[: 2 * pairs]
    if neighbours:
        return torch.complex(turned[0::2], turned[1::2]), x[2 * pairs :]
    return torch.complex(turned[:pairs], turned[pairs:]), x[2 * pairs :]


def case(seed, n, group, padding=0, rest=0, gaps=False):
    """Queries and keys before RoPE in float64, and frequencies. Row 0 begins with padding; with
    ``gaps`` there is some between tokens, too, as between the turns of a chat."""
    g = torch.Generator().manual_seed(seed)
    dim = 6 + rest
    before = torch.randn(BATCH, group * HEADS, n, dim, generator=g, dtype=torch.float64)
    before += torch.randn(BATCH, group * HEADS, 1, dim, generator=g, dtype=torch.float64)
    keys = torch.randn(BATCH, HEADS, n, dim, generator=g, dtype=torch.float64)
    frequencies = torch.tensor([1.0, 0.13, 0.004], dtype=torch.float64)
    live = torch.ones(BATCH, n, dtype=torch.bool)
    live[0, :padding] = False
    if gaps:
        live[:, :-1] &= torch.rand(BATCH, n - 1, generator=g) < 0.7
    return before, keys, frequencies, live


def after_rope(before, keys, frequencies, live, neighbours):
    """Both after RoPE, where padding has no position."""
    at = (live.long().cumsum(-1) - 1).clamp(min=0)
    queries, rotated_keys = before.clone(), keys.clone()
    for x in (queries, rotated_keys):
        for row in range(BATCH):
            for head in range(x.shape[1]):
                for i in range(x.shape[2]):
                    place = at[row, i].double()
                    x[row, head, i] = rotated(x[row, head, i], frequencies, place, neighbours)
    return queries, rotated_keys


def formula(before, keys, frequencies, live, q, method, neighbours):
    """The score of every live token: sum_f |E q_f| |k_f| cos(w_f d + phi_f) + (E |q_f| - |E q_f|)
    |k_f|, of the last q queries at most."""
    pairs, n = len(frequencies), keys.shape[2]
    group = before.shape[1] // HEADS
    out = torch.zeros(BATCH, HEADS, n, dtype=torch.float64)
    steps, step = [], 1
    while step <= method.farthest:
        steps, step = [*steps, step], 2 * step
    for row in range(BATCH):
        tokens = live[row].nonzero().flatten().tolist()
        asked = [i for i in tokens if i >= n - q][-method.window :]
        end = len(tokens)  # the position of the next token
        for kv in range(HEADS):
            every = []
            for head in range(kv * group, (kv + 1) * group):
                parts = [paired(before[row, head, i], pairs, neighbours) for i in asked]
                mean = torch.stack([a for a, _ in parts]).mean(0)
                length = torch.stack([a.abs() for a, _ in parts]).mean(0)
                flat = torch.stack([b for _, b in parts])
                scores = []
                for place, i in enumerate(tokens):
                    k, other = paired(keys[row, kv, i], pairs, neighbours)
                    phi = mean.angle() - k.angle()
                    met = []
                    for step in steps:
                        d = end - place + step
                        terms = mean.abs() * k.abs() * torch.cos(frequencies * d + phi)
                        met.append(terms.sum() + (flat.mean(0) * other).sum())
                    met = torch.stack(met)
                    trig = met.mean() if method.aggregation == "mean" else met.max()
                    spread = ((length - mean.abs()) * k.abs()).sum()
                    spread += ((flat.abs().mean(0) - flat.mean(0).abs()) * other.abs()).sum()
                    scores.append(trig + spread)
                scores = torch.stack(scores)
                deviation = scores.std(correction=0).clamp(min=1e-6)
                every.append((scores - scores.mean()) / deviation)
            out[row, kv, tokens] = torch.stack(every).max(0).values
    return out


def turned(frequencies, neighbours=False):
    return Turn(frequencies, neighbours)


CASES = {
    "seed": st.integers(0, 999),
    "n": st.integers(2, 16),
    "group": st.integers(1, 3),
    "padding": st.integers(0, 5),
    "gaps": st.booleans(),
    "rest": st.sampled_from([0, 3]),
    "neighbours": st.booleans(),
    "window": st.integers(1, 9),
    "farthest": st.sampled_from([1, 9, 65536]),
    "aggregation": st.sampled_from(["mean", "max"]),
}


@settings(max_examples=40, deadline=None)
@given(data=st.data(), **CASES)
def test_it_is_the_formula_of_the_paper(
    seed, n, group, padding, gaps, rest, neighbours, window, farthest, aggregation, data
):
    q = data.draw(st.integers(1, n))
    padding = min(padding, n - 1)
    before, keys, frequencies, live = case(seed, n, group, padding, rest, gaps)
    queries, after = after_rope(before, keys, frequencies, live, neighbours)
    slots = Slots(after.float(), after.float())
    if not bool(live.all()):
        slots = slots.only(live[:, None])
    method = TriAttention(window, farthest, aggregation)
    method.turn = turned(frequencies, neighbours)
    observed = Observed(queries[:, :, n - q :].float(), 0.3, live=live[:, n - q :])
    found = method.observe(slots, observed).score
    assert found.dtype == torch.float32
    expected = formula(before, keys, frequencies, live, q, method, neighbours)
    there = live[:, None].expand_as(expected)
    torch.testing.assert_close(found.double()[there], expected[there], **TOLERANCE)


def test_positions_of_the_text_play_no_part():
    """Scores depend on how far the keys are, not on where the text begins."""
    before, keys, frequencies, _ = case(0, 30, 2)
    turn, found = turned(frequencies), []
    for start in (0, 1000):
        at = torch.arange(start, start + 30)
        slots = Slots(turn(keys, at), keys)
        method = TriAttention(window=9)
        method.turn = turn
        found.append(method.observe(slots, Observed(turn(before, at), 1.0)).score)
    torch.testing.assert_close(found[0], found[1])


def test_later_queries_update_the_score_in_proportion():
    """With three new queries and a window of 10, 0.9^3 of an old slot's score stays; the three new
    slots have no earlier score and get the new one."""
    before, keys, frequencies, live = case(0, 12, 2)
    queries, after = after_rope(before, keys, frequencies, live, neighbours=False)
    old = torch.rand(BATCH, HEADS, 12, generator=torch.Generator().manual_seed(1))
    method = TriAttention(window=10)
    method.turn = turned(frequencies)
    new = formula(before, keys, frequencies, live, 3, method, neighbours=False)
    expected = 0.9**3 * old.double() + (1 - 0.9**3) * new
    expected[..., 9:] = new[..., 9:]
    slots = Slots(after.float(), after.float(), score=old)
    found = method.observe(slots, Observed(queries[:, :, 9:].float(), 1.0)).score
    torch.testing.assert_close(found.double(), expected, **TOLERANCE)
    nobody = torch.zeros(BATCH, 3, dtype=torch.bool)
    same = method.observe(slots, Observed(queries[:, :, 9:].float(), 1.0, live=nobody)).score
    torch.testing.assert_close(same[..., :9], old[..., :9])


def test_the_highest_are_kept():
    before, keys, frequencies, live = case(0, 40, 2)
    queries, after = after_rope(before, keys, frequencies, live, neighbours=False)
    slots = Slots(after, after, positions=torch.arange(40).float().expand(BATCH, HEADS, 40))
    method = TriAttention()
    method.turn = turned(frequencies)
    kept = method.compress(slots, 10, Observed(queries, 1.0))
    expected = formula(before, keys, frequencies, live, 40, method, neighbours=False)
    chosen = expected.topk(10).indices.sort(-1).values
    assert torch.equal(kept.positions.long(), chosen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"farthest": 0}, "farthest=0"),
        ({"farthest": 2.5}, r"farthest=2\.5"),
        ({"aggregation": "sum"}, "aggregation='sum' must be one of"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        TriAttention(**arguments)


def test_frequencies_are_required_and_have_to_fit():
    before, keys, frequencies, _ = case(0, 20, 2)
    slots, observed = Slots(keys, keys), Observed(before, 1.0)
    method = TriAttention()
    with pytest.raises(InputError, match="needs the frequencies of the model's rotary embedding"):
        method.compress(slots, 9, observed)
    method.turn = turned(torch.ones(4))
    with pytest.raises(InputError, match="4 frequencies, which do not fit keys of 6"):
        method.compress(slots, 9, observed)
    method.turn = turned(frequencies)
    with pytest.raises(InputError, match="triattention needs queries"):
        method.compress(slots, 9)


# --- models ---------------------------------------------------------------------------------------


def ids_of(batch, n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, n), generator=g)


@torch.no_grad()
def read(model, n=40, **settings):
    settings = {"budget": 20, "sink": 2, "recent": 4, **settings}
    cache = SketchCache(model.config, "triattention", **settings)
    model(ids_of(2, n), past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_model_passes_its_frequencies(family: str) -> None:
    """The scores of a prompt are those of the formula, for queries and keys that are rotated back
    by the model's own rotary embedding."""
    model, seen = build(family), {}

    def look(
        kernel: Callable[..., Any], module: Any, query: Any, key: Any, *rest: Any, **more: Any
    ) -> Any:
        seen[module.layer_idx] = query, key
        return kernel(module, query, key, *rest, **more)

    with torch.no_grad(), interface.watched(model, look):
        model(ids_of(2, 24))
    cache = read(model, 24, budget=1000, sink=0, recent=0, bits=16)
    live = torch.ones(2, 24, dtype=torch.bool)
    for number, layer in enumerate(cache.layers):
        if not hasattr(layer, "stream"):
            continue
        method = layer.stream.method
        turn = method.turn
        assert len(turn.frequencies) == 8
        back = -torch.arange(24)
        query, key = (turn(x.double(), back) for x in seen[number])
        score = layer.stream.scores.of(layer.stream.slots).score
        expected = formula(
            query, key, turn.frequencies.double(), live, 24, method, neighbours=False
        )
        torch.testing.assert_close(score.double(), expected, **TOLERANCE)


def test_copies_and_restored_caches_go_on() -> None:
    model = build("llama")
    cache = read(model)
    stored = io.BytesIO()
    torch.save(cache, stored)
    stored.seek(0)
    others = [copy.deepcopy(cache), torch.load(stored, weights_only=False)]
    with torch.no_grad():
        expected = [model(ids_of(2, 1, i), past_key_values=cache).logits for i in range(30)]
        for other in others:
            for i, logits in enumerate(expected):
                torch.testing.assert_close(
                    model(ids_of(2, 1, i), past_key_values=other).logits, logits
                )


@pytest.mark.parametrize(
    ("family", "change", "what"),
    [
        ("opt", {}, "'opt' models"),
        ("mpt", {}, "'mpt' models"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "'llama' models with rope_type='dynamic'",
        ),
    ],
)
def test_models_with_other_positions_are_refused_by_name(family, change, what) -> None:
    config = CONFIGS[family]()
    config = type(config)(**{**config.to_dict(), **change})
    message = (
        f"method='triattention' needs the frequencies of a rotary position embedding, and {what}"
    )
    with pytest.raises(UnsupportedError, match=message):
        SketchCache(config, "triattention")
    SketchCache(config, "expected_attention")


def test_a_layer_that_does_not_rotate_is_refused_and_leaves_the_cache_as_it_was() -> None:
    sizes = {k: v for k, v in CONFIGS["llama"]().to_dict().items() if k in (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
    )}  # fmt: skip
    config = SmolLM3Config(
        **sizes, vocab_size=VOCABULARY, num_hidden_layers=2, no_rope_layers=[1, 0], pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = SketchCache(config, "triattention", budget=20, sink=2, recent=4)
    with pytest.raises(UnsupportedError, match=r"transformers\.models\.smollm3\.\S+ have none"):
        model(ids_of(1, 40), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_compiled_graph_shows_the_frequencies() -> None:
    model = build("llama")
    compiled = torch.compile(model, backend="eager")
    cache = SketchCache(model.config, "triattention", budget=20, sink=2, recent=4)
    with torch.no_grad():
        compiled(ids_of(2, 40), past_key_values=cache)
        found = compiled(ids_of(2, 1), past_key_values=cache).logits
        expected = model(ids_of(2, 1), past_key_values=read(model)).logits
    torch.testing.assert_close(found, expected)


# --- rotations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("neighbours", [False, True])
def test_each_is_rotated_by_its_own_number(neighbours: bool) -> None:
    _, keys, frequencies, _ = case(0, 9, 1, rest=3)
    turn = turned(frequencies, neighbours)
    by = torch.arange(9) - 4
    together = turn(keys, by)
    for i in range(9):
        torch.testing.assert_close(together[:, :, i], turn(keys[:, :, i], i - 4))
        alone = rotated(keys[0, 0, i], frequencies, torch.tensor(i - 4.0).double(), neighbours)
        torch.testing.assert_close(together[0, 0, i], alone)
    torch.testing.assert_close(turn.norms(together), turn.norms(keys))
    assert turn.norms(keys).shape[-1] == 6
    torch.testing.assert_close(turn.norms(keys).square().sum(-1), keys.square().sum(-1))
    assert turn(keys.bfloat16(), 3).dtype == torch.bfloat16


def test_many_are_rotated_in_pieces() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3, 5003, 10, generator=generator)[:, :, 2:].bfloat16()
    turn = Turn(torch.tensor([1.0, 0.3, 0.02]), neighbours=False)
    assert torch.equal(turn(keys, 7), turn(keys, torch.full(keys.shape[:3], 7)))
    assert turn(keys[:, :, :0], 7).shape == (2, 3, 0, 10)
