"""Two caches are joined: keys of the second are rotated on by the model's rotary embedding, or the
join is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import tiny_models
from families import CONFIGS, build
from kvsketch import Curves, InputError, KVSketchError, SketchCache, UnsupportedError
from kvsketch.budget import Budget
from kvsketch.cache.budgets import HeadBudgets
from kvsketch.hf.joining import _budgets, join
from kvsketch.hf.turning import turn_of
from kvsketch.page.quantized import Bits

WINDOW: dict[str, Any] = {"sink": 2, "recent": 6}


def ids_of(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 90, (1, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, cache: Any, **more: Any) -> torch.Tensor:
    found: torch.Tensor = model(ids, past_key_values=cache, use_cache=True, **more).logits
    return found


def llama(layers: int = 2, **more: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**{**CONFIGS["llama"]().to_dict(), "num_hidden_layers": layers, **more})
    return AutoModelForCausalLM.from_config(config).eval()


SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "linear", "yarn", "glm4", "stablelm", "cohere"])
def test_keys_are_turned_on_as_the_model_would_have_them(kind: str) -> None:
    if kind in SCALED:
        model = llama(rope_parameters=SCALED[kind])
    else:
        model = build(kind) if kind in CONFIGS else tiny_models.build(kind)
    ids, by = ids_of(1), 37
    turn = turn_of(model, by)
    here, there = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for cache, position in ((here, 5), (there, 5 + by)):
        forward(model, ids, cache, position_ids=torch.tensor([[position]]))
    for one, two in zip(here.layers, there.layers, strict=True):
        torch.testing.assert_close(turn(one.keys, by), two.keys, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(one.keys, two.keys, atol=1e-3)


@pytest.mark.parametrize("family", ["opt", "mpt", "bloom", "gpt2"])
def test_other_positions_are_refused_by_name(family: str) -> None:
    model = build(family) if family in CONFIGS else tiny_models.build(family)
    with pytest.raises(UnsupportedError, match="no plain rotary positions"):
        turn_of(model, 37)


def test_frequencies_that_change_are_refused() -> None:
    scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedError, match="rope_type='dynamic'"):
        turn_of(llama(rope_parameters=scaled), 37)
    with pytest.raises(UnsupportedError, match="no plain rotary positions"):
        turn_of(build("gemma3"), 37)  # its layers have two rotary embeddings


@pytest.mark.parametrize("bits", [16, 8])
def test_where_keys_do_not_depend_on_other_tokens_nothing_is_lost(bits: int) -> None:
    """In a model of one layer two joined caches equal the cache of both texts."""
    model, ids = llama(layers=1), ids_of(120)
    settings: dict[str, Any] = {"budget": 1.0, "bits": bits, **WINDOW}
    first, second, whole = (SketchCache(model.config, "snapkv", **settings) for _ in range(3))
    forward(model, ids[:, :70], first)
    forward(model, ids[:, 70:], second)
    forward(model, ids, whole)
    joined = join(first, second, model)
    assert joined.get_seq_length() == 120
    exact = 1e-4 if bits == 16 else 0.05
    for token in range(5):
        one, two = (forward(model, ids_of(1, token), cache) for cache in (joined, whole))
        torch.testing.assert_close(one, two, rtol=exact, atol=exact)


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": 0.4},
        {"budget": 0.4, "bits": 16},
        {"budget": 0.15, "method": "snapkv", "bits": 8},
        {"budget": 0.4, "method": "kcenter", "allocation": [[1.5, 0.5], [0.6, 1.4]]},
        {"budget": 60, "method": "snapkv"},
        {"tolerance": 0.3},
        {"budget": 200, "method": "snapkv"},
        {"budget": 1.0, "bits": 16},
    ],
)
def test_slots_of_both_are_kept_within_the_budget(settings: dict[str, Any], tmp_path: Path) -> None:
    model = build("llama")
    first, second = (SketchCache(model.config, **settings, **WINDOW) for _ in range(2))
    forward(model, ids_of(150, 1), first)
    forward(model, ids_of(130, 2), second)
    before = [cache.summary() for cache in (first, second)]
    joined = join(first, second, model)
    assert [cache.summary() for cache in (first, second)] == before
    summary = joined.summary()
    assert summary["tokens"] == 280
    most = settings["budget"] if isinstance(settings.get("budget"), int) else None
    both = sum(part["slots"] for part in before)
    assert summary["slots"] == pytest.approx(both if most is None else most, rel=0.05)
    joined.save(tmp_path / "joined.kvs")
    loaded = SketchCache.load(tmp_path / "joined.kvs", model)
    for token in range(40):  # with several compressions
        one, two = (forward(model, ids_of(1, token), cache) for cache in (joined, loaded))
        assert torch.equal(one, two)
    assert joined.summary()["slots"] < 1.15 * summary["slots"] + 40


def test_what_both_say_of_their_slots_is_put_together() -> None:
    model = build("llama")
    first, second = (
        SketchCache(model.config, budget=0.4, keep=["positions"], **WINDOW) for _ in range(2)
    )
    forward(model, ids_of(200, 1), first)
    forward(model, ids_of(120, 2), second)
    for cache, bits in ((first, Bits(4, 8)), (second, Bits(8, 4))):
        for layer in cache._sketches():
            layer.stream.pace.bits = bits
    first.plan.above = {0: torch.tensor([True, False])}
    second.plan.above = {0: torch.tensor([False, False]), 1: torch.tensor([False, True])}
    joined = join(first, second, model)
    for layer in joined._sketches():
        assert layer.stream.pace.bits == Bits(8, 8)  # the more precise of both
        positions = layer.stream.slots.positions
        assert positions is not None
        assert float(positions.max()) == 319
    above = {number: heads.tolist() for number, heads in joined.plan.above.items()}
    assert above == {0: [True, False], 1: [False, True]}


def test_a_budget_is_the_mean_over_the_tokens_of_both() -> None:
    class Read:
        def __init__(self, seen: int, *shares: float) -> None:
            self.seen, self.held = seen, torch.zeros(1, len(shares))
            budget = HeadBudgets([[Budget(0.4, share) for share in shares]], True)
            self.pace = SimpleNamespace(budget=budget)

    budgets: Any = _budgets
    (row,) = budgets(Read(300, 1.5, 0.5), Read(100, 0.5, 1.5), 36).rows
    assert [budget.share for budget in row] == [1.25, 0.75]


def test_what_does_not_fit_together_is_refused() -> None:
    model = build("llama")

    def read(tokens: int = 150, **settings: Any) -> SketchCache:
        cache = SketchCache(model.config, **{"budget": 0.4, **WINDOW, **settings})
        forward(model, ids_of(tokens), cache)
        return cache

    plain = read()
    cases: list[tuple[SketchCache, SketchCache, str]] = [
        (plain, read(budget=0.5), "budget=0.4 and 0.5"),
        (plain, read(method="snapkv"), "method='heavy_merge' and 'snapkv'"),
        (read(method="subgen"), read(method="subgen"), "streaming sketch cannot be rotated"),
        (read(60), read(60), "too short"),
        (read(300), read(300), "600 tokens, and the model 512 positions"),
    ]
    for first, second, says in cases:
        with pytest.raises(KVSketchError, match=says):
            join(first, second, model)
    gemma = build("gemma3")
    sliding = SketchCache(gemma.config, budget=0.4, **WINDOW)
    forward(gemma, ids_of(150), sliding)
    with pytest.raises(UnsupportedError, match="layer 0 is a DynamicSlidingWindowLayer"):
        join(sliding, sliding, gemma)
    padded = SketchCache(model.config, budget=0.4, **WINDOW)
    mask = torch.ones(1, 150, dtype=torch.int64)
    mask[:, :20] = 0
    forward(model, ids_of(150), padded, attention_mask=mask)
    with pytest.raises(UnsupportedError, match="padded"):
        join(padded, padded, model)
    error = torch.tensor([[[0.9, 0.1, 0.0]] * 2] * 2, dtype=torch.float64)
    kept = torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64)
    one, two = (read(allocation=Curves(error * x, kept), method="snapkv") for x in (1, 2))
    with pytest.raises(InputError, match="different allocations"):
        join(one, two, model)
