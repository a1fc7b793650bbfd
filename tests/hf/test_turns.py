"""More of a prompt, read after a compression or after a first prompt that fits: its queries are
asked again after it, and the budget is divided anew by the scores of all slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsketch import SketchCache
from kvsketch.cache.scores import Scores
from kvsketch.cache.stream import Stream
from kvsketch.page.quantized import FULL
from tiny_models import build

BUDGET = 80


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def ids_of(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (rows, tokens), generator=generator)


def read(model: Any, cache: SketchCache, *texts: torch.Tensor) -> SketchCache:
    with torch.no_grad():
        for ids in texts:
            model(ids, past_key_values=cache, use_cache=True)
    return cache


def streams(cache: SketchCache) -> list[Stream]:
    return [layer.stream for layer in cache._sketches()]


def shares(cache: SketchCache) -> torch.Tensor:
    """Of the layers and heads of the first row."""
    found = [[b.share for b in stream.pace.budget.rows[0]] for stream in streams(cache)]
    return torch.tensor(found, dtype=torch.float64)


def test_the_budget_follows_from_all_that_was_read(llama: Any) -> None:
    cache = SketchCache(llama.config, budget=BUDGET, bits=16)
    read(llama, cache, ids_of(1, 200))
    before = shares(cache)
    assert cache.plan.kind == "global"
    read(llama, cache, ids_of(1, 90, seed=5))
    after = shares(cache)
    assert not torch.equal(before, after)
    for found in (before, after):
        assert float(found.mean()) == pytest.approx(1, abs=0.01)
    held = torch.stack([stream.held for stream in streams(cache)]).double()
    assert float(held.mean()) <= BUDGET + 1
    given = SketchCache(llama.config, budget=BUDGET, bits=16, allocation=before.tolist())
    read(llama, given, ids_of(1, 200), ids_of(1, 90, seed=5))
    assert torch.equal(shares(given), before)


def test_scores_are_the_largest_of_all_parts(llama: Any, monkeypatch: Any) -> None:
    """Those of the first part are still there, and those of the second are an echo's, although it
    is compressed while it decodes no token."""
    asked: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    ask = Scores.ask_piece_again

    def noted(self: Scores, page: Any, *given: Any) -> None:
        held = page.read().score
        ask(self, page, *given)
        asked.append((page.read().score, held))

    monkeypatch.setattr(Scores, "ask_piece_again", noted)
    cache = SketchCache(llama.config, budget=BUDGET, bits=16)
    read(llama, cache, ids_of(1, 200))
    assert not asked, "a first prompt is asked at once"
    read(llama, cache, ids_of(1, 90, seed=5))
    assert len(asked) == len(streams(cache))
    for score, before in asked:
        assert before is not None
        assert bool((score >= before).all())
        assert bool((score[..., -90:] > 0).all()), "every new token was asked for by some query"
    read(llama, cache, ids_of(1, 1, seed=6))
    assert len(asked) == len(streams(cache)), "a decoded token is no part of a prompt"


def test_attention_never_lowers_a_score(llama: Any) -> None:
    cache = SketchCache(llama.config, budget=400)
    read(llama, cache, ids_of(1, 300))
    before = [stream.page.read().score for stream in streams(cache)]
    for token in ids_of(1, 60, seed=7)[0]:
        read(llama, cache, token.view(1, 1))
    for stream, score in zip(streams(cache), before, strict=True):
        stream.scores.fold(stream.page)
        assert not stream.compressed
        assert bool((stream.page.read().score[..., :300] >= score).all())


def test_a_first_prompt_that_fits_is_asked_again_too(llama: Any) -> None:
    """When more comes, its tokens compete by the same kind of scores."""
    cache = SketchCache(llama.config, budget=150, bits=16)
    first, second = ids_of(1, 120), ids_of(1, 90, seed=5)
    read(llama, cache, first)
    kept = [stream.page.read().score for stream in streams(cache)]
    assert all(score is not None and bool((score > 0).any()) for score in kept)
    assert all(stream.waits and not stream.scores.queries.count for stream in streams(cache))
    read(llama, cache, second)
    assert cache.plan.kind == "global"
    held = torch.stack([stream.held for stream in streams(cache)]).double()
    assert float(held.mean()) == pytest.approx(150, abs=1)
    assert bool((held.amax(-1) > held.amin(-1)).any()), "heads differ"


@pytest.mark.parametrize("bits", ["measured", 16])
def test_decoding_beyond_the_budget_spends_it_by_score(llama: Any, bits: Any) -> None:
    cache = SketchCache(llama.config, budget=150, bits=bits)
    read(llama, cache, ids_of(1, 140))
    for token in ids_of(1, 60, seed=7)[0]:
        read(llama, cache, token.view(1, 1))
    assert cache.plan.kind == "global"
    assert all(stream.compressed for stream in streams(cache))
    few = {stream.pace.bits != FULL for stream in streams(cache)}
    assert few == {bits == "measured"}
    if bits == 16:
        held = torch.stack([stream.held for stream in streams(cache)])
        assert int(held.max()) > int(held.min()) + 5, "heads differ"
    assert float(shares(cache).mean()) == pytest.approx(1, abs=0.01)


def test_bits_of_a_prompt_that_fitted_are_few_where_none_can_be_measured(llama: Any) -> None:
    """Too few queries wait to measure errors on, and most bits would drop tokens."""
    cache = SketchCache(llama.config, budget=150, allocation="even")
    read(llama, cache, ids_of(1, 140))
    for token in ids_of(1, 20, seed=7)[0]:
        read(llama, cache, token.view(1, 1))
    assert all(stream.pace.bits != FULL and stream.compressed for stream in streams(cache))
    assert min(int(stream.held.min()) for stream in streams(cache)) == 160, "nothing is dropped"


def test_rows_of_a_batch_are_those_of_one(llama: Any) -> None:
    first, second = ids_of(2, 200), ids_of(2, 90, seed=5)
    both = read(llama, SketchCache(llama.config, budget=BUDGET, bits=16), first, second)
    for row in range(2):
        own = SketchCache(llama.config, budget=BUDGET, bits=16)
        read(llama, own, first[row : row + 1], second[row : row + 1])
        for one, two in zip(streams(own), streams(both), strict=True):
            assert torch.equal(one.held[0], two.held[row])
            ours, theirs = (float(s.slots.masses()[r].sum()) for s, r in ((one, 0), (two, row)))
            assert ours == pytest.approx(theirs, rel=1e-3)


def test_a_saved_session_goes_on_as_one_that_was_not(llama: Any, tmp_path: Any) -> None:
    for tokens, bits in ((120, 16), (120, "measured"), (200, "measured")):  # which fit, or do not
        cache = SketchCache(llama.config, budget=150, bits=bits)
        read(llama, cache, ids_of(1, tokens))
        cache.save(tmp_path / "cache.kvs")
        loaded = SketchCache.load(tmp_path / "cache.kvs", llama)
        more = [ids_of(1, 90, seed=5), ids_of(1, 1), ids_of(1, 40, seed=6)]
        decoded = [ids_of(1, 1, seed=i) for i in range(40)]
        for after in (more, decoded):
            twins = [twin.fork() for twin in (cache, loaded)]
            slots = [streams(read(llama, twin, *after)) for twin in twins]
            for mine, theirs in zip(*slots, strict=True):
                assert torch.equal(mine.slots.keys, theirs.slots.keys)
                assert torch.equal(mine.held, theirs.held)


def test_chunks_of_a_prompt_divide_a_streaming_budget_anew(llama: Any) -> None:
    """With an allocation by scores; one that is even is not divided at all, and one forward is one
    piece, since all layers have to be compared."""
    given = {"budget": BUDGET, "bits": 16, "prefill": "streaming", "allocation": "global"}
    cache = SketchCache(llama.config, **given)
    for stream in streams(cache):
        stream.pace.piece = 64
    read(llama, cache, ids_of(1, 150))
    before = shares(cache)
    read(llama, cache, ids_of(1, 150, seed=3))
    assert not torch.equal(before, shares(cache))
    assert all(stream.seen == 300 for stream in streams(cache))
    held = torch.stack([stream.held for stream in streams(cache)]).double()
    assert float(held.mean()) == pytest.approx(BUDGET, abs=1)
