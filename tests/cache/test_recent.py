"""Recent tokens beside slots in few bits: an eighth of a budget at most, unless they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from families import VOCABULARY, build
from kvsketch import SketchCache
from kvsketch.hf.joining import join
from kvsketch.page.schedule import recent_beside


def ids_of(tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, tokens), generator=generator)


def read(cache: SketchCache, tokens: int, llama: Any, seed: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return llama(ids_of(tokens, seed), past_key_values=cache).logits[:, -1]


def exact_at_the_end(cache: SketchCache) -> set[int]:
    """How many slots of a head after its middle are in full precision, of every layer."""
    pages = [layer.stream.page for layer in cache._sketches()]
    return {int(page.exact.held.max()) - 4 - page.appended for page in pages}


def test_an_eighth_of_the_budget() -> None:
    assert [recent_beside(32, budget) for budget in (0, 7, 80, 255, 256, 4000)] == [
        0,
        0,
        10,
        31,
        32,
        32,
    ]
    assert recent_beside(6, 80) == 6


@pytest.mark.parametrize(
    ("given", "recent"),
    [
        ({"budget": 80, "bits": 4}, 10),
        ({"budget": 0.2}, 10),
        ({"budget": 0.2, "method": "h2o", "bits": 8}, 10),
        ({"budget": 80, "bits": 4, "allocation": "even"}, 10),
        ({"budget": 0.2, "bits": 4, "allocation": "measured"}, 10),
        ({"budget": 80, "bits": 4, "recent": 32}, 32),
        ({"budget": 80, "bits": 4, "recent": 50}, 50),
        ({"budget": 80, "bits": 4, "prefill": "streaming"}, 32),
    ],
    ids=str,
)
def test_fewer_recent_tokens_stay_exact_beside_few_bits(
    given: dict[str, Any], recent: int, tmp_path: Path
) -> None:
    llama = build("llama")
    cache = SketchCache(llama.config, **{"method": "heavy_merge", **given})
    read(cache, 400, llama)
    assert exact_at_the_end(cache) == {recent}
    assert cache.nbytes() <= 1.15 * cache.exact_nbytes() * 0.2
    price = cache._first.stream.pace.budget.price
    assert price.window == 4 + recent
    cache.save(tmp_path / "cache.kvs")
    loaded = SketchCache.load(tmp_path / "cache.kvs", llama)
    for token in range(60):
        one, two = (read(some, 1, llama, token) for some in (cache, loaded))
        assert torch.equal(one, two)
    grown = 11 if isinstance(given["budget"], float) else recent
    assert exact_at_the_end(cache) == {grown}


def test_slots_in_full_precision_are_around_all_recent_tokens() -> None:
    llama = build("llama")
    cache = SketchCache(llama.config, budget=80, bits=16)
    read(cache, 400, llama)
    assert cache._first.stream.around == (4, 32)


def test_two_caches_have_one_window_together() -> None:
    llama = build("llama")
    caches = [SketchCache(llama.config, budget=0.2) for _ in range(2)]
    for number, cache in enumerate(caches):
        read(cache, 200, llama, number)
    assert caches[0]._first.stream.around == (4, 5)
    joined = join(*caches, llama)
    assert joined._first.stream.around == (4, 10)
    assert joined._first.stream.pace.budget.price.window == 14
    slots = [cache.summary()["slots"] for cache in (*caches, joined)]
    assert slots[2] == pytest.approx(slots[0] + slots[1], rel=0.05)
    assert joined.nbytes() <= 1.1 * sum(cache.nbytes() for cache in caches)
