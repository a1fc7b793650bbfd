"""A cache is compressed once, to a budget smaller than its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvsketch import InputError, SketchCache, UnsupportedError
from kvsketch.hf import accounting
from kvsketch.page.page import Page
from tiny_models import build


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def ids_of(tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (2, tokens), generator=generator)


def read(model: Any, cache: SketchCache, ids: torch.Tensor, each: int | None = None) -> None:
    with torch.no_grad():
        for part in ids.split(each or ids.shape[1], dim=1):
            model(part, past_key_values=cache, use_cache=True)


def held(cache: SketchCache) -> torch.Tensor:
    return torch.stack([layer.stream.held for layer in cache._sketches()]).double()


@pytest.mark.parametrize(
    "given",
    [
        {"budget": 100},
        {"budget": 120, "bits": 16},
        {"budget": 0.4, "bits": 16},
        {"budget": 500},
        pytest.param({"budget": 500, "bits": 16}, marks=pytest.mark.slow),
        pytest.param({"budget": 120, "bits": 16, "prefill": "streaming"}, marks=pytest.mark.slow),
        {"budget": 120, "allocation": "even", "bits": 8},
        pytest.param({"budget": 120, "method": "snapkv"}, marks=pytest.mark.slow),
        pytest.param({"budget": 500, "method": "uniform"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_comes_next_fills_the_budget_again(llama: Any, given: dict[str, Any]) -> None:
    cache = SketchCache(llama.config, **given)
    read(llama, cache, ids_of(300))
    way_back, before = cache.fork(), cache.nbytes()
    found = cache.compact(60)
    assert found["kv_bytes"] == (before, cache.nbytes())
    assert found["slots"][1] == float(held(cache).mean()) < found["slots"][0]
    assert found["error"] is None
    assert cache.get_seq_length() == 300
    if all(layer.stream.pace.bits.keys == 16 for layer in cache._sketches()):
        assert found["slots"][1] == pytest.approx(60, abs=1)
    limit = {0.4: 0.4 * 500, 500: 260}.get(given["budget"], 120)
    for one in (cache, way_back):
        read(llama, one, ids_of(200, seed=3), 100)
        read(llama, one, ids_of(1, seed=4))  # the last part waited for what follows it
    if all(layer.stream.pace.bits.keys == 16 for layer in cache._sketches()):
        assert float(held(cache).mean()) == pytest.approx(limit, abs=4)
    if given["budget"] != 500:
        assert cache.nbytes() == pytest.approx(way_back.nbytes(), rel=0.1)


def test_it_takes_from_the_heads_by_their_scores(llama: Any) -> None:
    for budget in (120, 500):
        cache = SketchCache(llama.config, budget=budget, bits=16)
        read(llama, cache, ids_of(300))
        cache.compact(60)
        sizes = held(cache)[:, 0]
        assert float(sizes.mean()) == pytest.approx(60, abs=1)
        assert float(sizes.max() - sizes.min()) > 5


def test_a_compacted_cache_is_saved_and_goes_on(llama: Any, tmp_path: Any) -> None:
    cache = SketchCache(llama.config, budget=500, keep=["errors"])
    read(llama, cache, ids_of(300))
    cache.compact(0.25)
    cache.save(tmp_path / "cache.kvs")
    loaded = SketchCache.load(tmp_path / "cache.kvs", llama)
    for one in (cache, loaded):
        read(llama, one, ids_of(60, seed=4), 30)
        read(llama, one, ids_of(20, seed=5), 1)
    for mine, theirs in zip(cache._sketches(), loaded._sketches(), strict=True):
        assert torch.equal(mine.stream.slots.keys, theirs.stream.slots.keys)


def test_the_error_is_that_of_the_prompt_s_queries(llama: Any) -> None:
    cache = SketchCache(llama.config, budget=150, keep=["errors"])
    read(llama, cache, ids_of(300))
    least = cache.fork().compact(100)["error"]
    assert 0 < least < cache.compact(45)["error"]


def test_what_it_cannot_do_changes_nothing(llama: Any) -> None:
    cache = SketchCache(llama.config, budget=120)
    with pytest.raises(InputError, match="empty"):
        cache.compact(60)
    cache.pin(50, 60)
    read(llama, cache, ids_of(300))
    slots = held(cache)
    for budget, named in ((28, "pinned tokens are 29"), (0.08, "keeps 24 tokens"), (0, "positive")):
        with pytest.raises(InputError, match=named):
            cache.compact(budget)
    assert torch.equal(held(cache), slots)
    sketch = SketchCache(llama.config, "subgen", budget=100)
    tolerant = SketchCache(llama.config, tolerance=0.3)
    for one, named in ((sketch, "streaming sketch"), (tolerant, "tolerance")):
        read(llama, one, ids_of(200))
        with pytest.raises(UnsupportedError, match=named):
            one.compact(60)


@pytest.mark.parametrize("method", ["h2o", "heavy_merge"])
def test_it_says_which_tokens_it_drops(llama: Any, method: str) -> None:
    cache = SketchCache(llama.config, method, budget=120, keep=["positions"], bits=16)
    ids = ids_of(300)
    read(llama, cache, ids)
    before = _own(cache)
    found = cache.compact(60)["dropped"]
    now = _own(cache)
    assert len(found) == len(ids)
    for row, dropped in enumerate(found):
        assert 20 < len(dropped) < 260
        assert dropped == sorted(before[row] - now[row])
        assert not {0, 1, 2, 3, 298, 299} & set(dropped)
    assert SketchCache(llama.config, budget=120).arguments["keep"] == []


def test_a_token_that_shares_a_slot_has_none_of_its_own(llama: Any) -> None:
    cache = SketchCache(llama.config, budget=60, keep=["positions"], bits=16)
    read(llama, cache, ids_of(5))
    for layer in cache._sketches():
        slots = layer.stream.slots.narrow(0, 3)
        positions = torch.tensor([0.0, 2.0, 4.0]).expand(slots.keys.shape[:3])
        mass = torch.tensor([1.0, 3.0, 1.0]).expand(slots.keys.shape[:3])
        layer.stream.page = Page.of_tokens(replace(slots, positions=positions, mass=mass))
    found = accounting.alone(cache.layers)
    assert found is not None
    assert found.tolist() == [[1.0, 0.0, 0.0, 0.0, 1.0]] * len(found)


def _own(cache: SketchCache) -> list[set[int]]:
    """The tokens of each row whose keys, as they are, are in some head."""
    found: list[set[int]] = []
    for layer in cache._sketches():
        slots = layer.stream.slots
        for row in range(len(slots.keys)):
            whole = (slots.masses()[row] > 0) & (slots.masses()[row] < 1.5)
            places = slots.positions[row][whole]
            own = {int(p) for p in places.tolist() if p == int(p)}
            if len(found) <= row:
                found.append(set())
            found[row] |= own
    return found


@pytest.mark.parametrize("loaded", [False, True])
def test_a_cache_that_kept_all_can_be_compacted(llama: Any, loaded: bool, tmp_path: Any) -> None:
    """With budget=1.0 the model's own kernel runs, but not over what was compacted."""
    found = []
    for budget in (1.0, 0.9999):
        cache = SketchCache(llama.config, "knorm", budget=budget, bits=16)
        read(llama, cache, ids_of(300))
        assert cache.compact(60)["slots"] == (300.0, 60.0)
        if loaded:
            cache.save(tmp_path / "cache.kvs")
            cache = SketchCache.load(tmp_path / "cache.kvs", llama)
        with torch.no_grad():
            steps = ids_of(12, seed=3).split([1, 1, 10], dim=1)
            found.append([llama(one, past_key_values=cache).logits for one in steps])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_what_chooses_by_queries_cannot_compact_a_cache_that_kept_none(llama: Any) -> None:
    for tokens in (300, 17):
        cache = SketchCache(llama.config, budget=1.0)
        read(llama, cache, ids_of(tokens))
        before = cache.nbytes()
        with pytest.raises(InputError, match=r"heavy_merge chooses by queries.*budget below 1"):
            cache.compact(50)
        assert cache.nbytes() == before
        read(llama, cache, ids_of(1))
