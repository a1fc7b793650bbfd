"""A short part of a text waits until it is known what follows it. If tokens are decoded after it,
it is a question, whose tokens are kept while it is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch import SketchCache, UnsupportedError
from kvsketch.cache.pace import Pace
from kvsketch.cache.scores import MARK
from kvsketch.cache.stream import Stream
from tiny_models import build

BUDGET, QUESTION = 100, 30
SETTINGS: list[dict[str, Any]] = [{"bits": 16}, {"bits": 4}, {"allocation": "even", "bits": 8}]


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def ids_of(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 60, (1, tokens), generator=torch.Generator().manual_seed(seed))


def read(model: Any, cache: SketchCache, *texts: torch.Tensor) -> Any:
    with torch.no_grad():
        for ids in texts:
            out = model(ids, past_key_values=cache, use_cache=True)
    return out.logits[:, -1]


def asked(llama: Any, **given: Any) -> SketchCache:
    """A cache that has read a document and a question."""
    cache = SketchCache(llama.config, **{"budget": BUDGET, **given})
    read(llama, cache, ids_of(380), ids_of(QUESTION, 1))
    return cache


def streams(cache: SketchCache) -> list[Stream]:
    return [layer.stream for layer in cache._sketches()]


def slots(cache: SketchCache) -> float:
    return float(torch.stack([s.held for s in streams(cache)]).double().mean())


def marked(cache: SketchCache) -> list[torch.Tensor]:
    """How many slots of each head are marked, by layer."""
    return [(s.page.read().score >= MARK).sum(-1) for s in streams(cache)]


@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_a_question_is_kept_while_it_is_answered(llama: Any, given: dict[str, Any]) -> None:
    cache = asked(llama, **given)
    waiting = slots(cache)
    exact = [s.parted.newest(QUESTION) for s in streams(cache)]
    token = ids_of(1, 2)
    for new in range(30):
        read(llama, cache, token)
        if not new:
            assert slots(cache) < waiting, "the first decoded token compresses it"
        for stream, count, tokens in zip(streams(cache), marked(cache), exact, strict=True):
            assert bool((count == QUESTION).all())
            found = stream.page.read()
            near = torch.cdist(tokens.keys, found.keys).amin(-1) / tokens.keys.norm(dim=-1)
            most = 0.01 if stream.pace.bits.keys == 16 else 0.3
            assert float((near < most).double().mean()) > 0.9


@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_a_document_that_another_follows_is_compressed_as_at_once(
    llama: Any, given: dict[str, Any], monkeypatch: Any
) -> None:
    after = ids_of(QUESTION, 3)
    waited = asked(llama, **given)
    late = read(llama, waited, after)
    assert not any(bool(count.any()) for count in marked(waited))
    monkeypatch.setattr(Pace, "may_wait", lambda *_: False)
    soon = read(llama, at_once := asked(llama, **given), after)
    assert torch.equal(late, soon)
    assert slots(at_once) < slots(waited), "the last part of the other one waits"


def test_the_next_part_ends_the_marks(llama: Any) -> None:
    cache = asked(llama)
    read(llama, cache, ids_of(1, 2), ids_of(QUESTION, 3))
    assert all(bool((count == QUESTION).all()) for count in marked(cache)), "the last forward waits"
    read(llama, cache, ids_of(20, 4))
    assert not any(bool(count.any()) for count in marked(cache))
    read(llama, cache, ids_of(1, 5))
    assert all(bool((count == 20).all()) for count in marked(cache)), "of the newest part"
    cache.compact(60)
    assert not any(bool(count.any()) for count in marked(cache))


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"bits": 16}, 80),
        ({"prefill": "streaming"}, 30),
        ({"method": "h2o"}, 30),
        ({"budget": 60}, 120),
    ],
    ids=str,
)
def test_what_cannot_wait_is_compressed_at_once(
    llama: Any, given: dict[str, Any], tokens: int
) -> None:
    """More than half of the slots, a prompt that is compressed while it is read, and a method whose
    queries are not asked again."""
    cache = SketchCache(llama.config, **{"budget": BUDGET, **given})
    read(llama, cache, ids_of(380))
    before = slots(cache)
    read(llama, cache, ids_of(tokens, 1))
    assert slots(cache) < before + tokens
    assert not cache._forward.part_waits


def test_whatever_comes_between_sees_the_same(llama: Any, tmp_path: Path) -> None:
    """Saving compresses what waits as a document; a fork, beams and a copy leave a question one."""
    expected = read(llama, asked(llama, bits=4), ids_of(1, 2))
    cache = asked(llama, bits=4)
    size = cache.nbytes()
    assert torch.equal(read(llama, cache.fork(), ids_of(1, 2)), expected)
    assert cache.nbytes() == size
    for change in (
        lambda c: c.batch_repeat_interleave(2),
        lambda c: c.reorder_cache(torch.tensor([0, 0])),
        lambda c: c.batch_select_indices(torch.tensor([0, 0])),
    ):
        change(twin := cache.fork())
        assert not twin._forward.part_waits
        found = read(llama, twin, ids_of(1, 2).repeat(2, 1))
        torch.testing.assert_close(found, expected.repeat(2, 1))
    (ended := cache.fork()).settle()
    assert not ended._forward.part_waits
    assert ended.nbytes() < size
    cache.save(tmp_path / "cache.kvs")
    assert cache.nbytes() == ended.nbytes() < size
    loaded = SketchCache.load(tmp_path / "cache.kvs", llama)
    late = [read(llama, one, ids_of(1, 2)) for one in (cache, loaded, ended)]
    assert torch.equal(late[0], late[1])
    assert torch.equal(late[0], late[2])
    assert not any(bool(count.any()) for count in marked(cache))
    cache = asked(llama)
    cache.reset()
    assert not cache._forward.part_waits
    assert torch.equal(
        read(llama, cache, ids_of(9)), read(llama, SketchCache(llama.config), ids_of(9))
    )


def test_a_forward_that_fails_leaves_no_part(llama: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Some layers have read the part then, and others have not: the cache has to be reset."""
    cache = SketchCache(llama.config, budget=BUDGET)
    read(llama, cache, ids_of(380))

    def fails(*_: Any) -> None:
        raise UnsupportedError("as a mask that cannot be applied")

    monkeypatch.setattr(cache._sketches()[1], "check_queries", fails)
    with pytest.raises(UnsupportedError, match="as a mask"):
        read(llama, cache, ids_of(QUESTION, 1))
    assert not cache._forward.part_waits
    with pytest.raises(UnsupportedError):
        cache.save(tmp_path / "cache.kvs")
    monkeypatch.undo()
    cache.reset()
    assert torch.equal(
        read(llama, cache, ids_of(9)), read(llama, SketchCache(llama.config), ids_of(9))
    )
