"""Operations on a cache in any order: copies and files are the cache itself, what is done to one
does not show in another, what is refused changes nothing, and the same operations give the same
slots."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch import METHODS, InputError, KVSketchError, SketchCache
from tiny_models import build

FAMILIES = ("llama", "qwen3", "gpt2", "bloom", "gemma2")
#: What is done to a cache, and how often, relative to the others.
OFTEN = {
    "read": 4,
    "decode": 5,
    "fork": 2,
    "copy": 1,
    "save": 2,
    "compact": 1.5,
    "pin": 1,
    "select": 1,
    "repeat": 0.7,
    "reorder": 0.7,
    "crop": 0.5,
}
MOST = 420  # tokens of a cache

Done = Callable[[SketchCache], Any]


class Kept:
    """A cache with all that was done to it."""

    def __init__(self, cache: SketchCache, done: list[Done], rows: int, seen: int) -> None:
        self.cache, self.done, self.rows, self.seen = cache, done, rows, seen

    def twin(self, cache: SketchCache) -> Kept:
        return Kept(cache, list(self.done), self.rows, self.seen)

    def do(self, action: Done) -> None:
        action(self.cache)
        self.done.append(action)


def slots_of(cache: SketchCache) -> list[dict[str, torch.Tensor]]:
    streams = [layer.stream for layer in cache._sketches()]
    held = [stream.slots.tensors() for stream in streams if stream.seen]
    return [{name: tensor.clone() for name, tensor in one.items()} for one in held]


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def settings_of(draw: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"budget": draw.choice([0.1, 0.25, 0.5, 0.9, 1.0, 40, 60, 80, 150])}
    found["method"] = draw.choice([*METHODS, *["heavy_merge"] * 10])
    for name, odds, values in (
        ("bits", 0.6, (16, 8, 4)),
        ("allocation", 0.3, ("even", "global", "layer", "measured")),
        ("prefill", 0.3, ("exact", "streaming", 64)),
        ("keep", 0.3, (["errors"], ["positions"], ["errors", "positions"])),
        ("sink", 0.3, (0, 2, 4)),
        ("recent", 0.3, (4, 8, 16)),
    ):
        if draw.random() < odds:
            found[name] = draw.choice(values)
    return found


def read(model: Any, ids: torch.Tensor, inference: bool, cache: SketchCache) -> None:
    with torch.inference_mode() if inference else torch.no_grad():
        found = model(ids, past_key_values=cache, use_cache=True)
    assert bool(torch.isfinite(found.logits).all())


def change(draw: random.Random, what: str, kept: Kept) -> None:
    """Something that may be refused."""
    if what == "compact":
        budget = draw.choice([0.05, 0.1, 0.3, 30, 50])
        kept.do(lambda cache: cache.compact(budget))
    elif what == "pin":
        start = draw.randrange(kept.seen + 10)
        end = start + draw.randint(1, 8)
        kept.do(lambda cache: cache.pin(start, end))
    elif what == "crop":
        tokens = draw.randint(1, 5)
        kept.do(lambda cache: cache.crop(-tokens))
        kept.seen -= tokens
    elif what == "repeat" and kept.rows < 3:
        kept.do(lambda cache: cache.batch_repeat_interleave(2))
        kept.rows *= 2
    else:
        count = draw.randint(1, kept.rows) if what == "select" else kept.rows
        rows = torch.tensor([draw.randrange(kept.rows) for _ in range(count)])
        if what == "reorder":
            kept.do(lambda cache: cache.reorder_cache(rows))
        else:
            kept.do(lambda cache: cache.batch_select_indices(rows))
        kept.rows = count


@pytest.mark.filterwarnings("ignore:SketchCache.prefill='exact'. gets a prompt in chunks")
# One in six is in the default run, see ``conftest.SPREAD``.
@pytest.mark.parametrize("seed", range(60))
def test_operations_in_any_order(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
    model, settings = build(draw.choice(FAMILIES), dtype=dtype), settings_of(draw)
    make = partial(SketchCache, model.config, seed=seed, **settings)
    try:
        caches = [Kept(make(), [], draw.choice([1, 1, 2, 3]), 0)]
    except InputError:
        pytest.skip("such a cache is refused")
    for _ in range(draw.randint(4, 14)):
        kept = draw.choice(caches)
        others = [(one, slots_of(one.cache)) for one in caches if one is not kept]
        what = draw.choices(list(OFTEN), list(OFTEN.values()))[0] if kept.seen else "read"
        if what in ("read", "decode"):
            first = draw.choice([20, 60, 120, 200, 260])
            size = 1 if what == "decode" else draw.choice([2, 17, 40, 130]) if kept.seen else first
            for _ in range(draw.choice([1, 3, 20, 45]) if what == "decode" else 1):
                if kept.seen + size > MOST:
                    break
                generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
                ids = torch.randint(3, 60, (kept.rows, size), generator=generator)
                kept.do(partial(read, model, ids, draw.random() < 0.2))
                kept.seen += size
        elif what in ("fork", "copy", "save"):
            if what == "save":
                path = tmp_path / "cache.kvs"
                # The file ends a part of the text that waits for what follows it.
                kept.do(lambda cache, path=path: cache.save(path))
                twin = SketchCache.load(path, model)
            else:
                twin = kept.cache.fork() if what == "fork" else copy.deepcopy(kept.cache)
            assert same(slots_of(twin), slots_of(kept.cache))
            caches = [*caches, kept.twin(twin)][-4:]
        else:
            before = slots_of(kept.cache)
            try:
                change(draw, what, kept)
            except KVSketchError:
                assert same(slots_of(kept.cache), before)
        assert kept.cache.get_seq_length() == kept.seen
        for one, slots in others:
            assert same(slots_of(one.cache), slots), f"{what} changed another cache"
    for kept in caches:
        again = make()
        for action in kept.done:
            action(again)
        assert same(slots_of(again), slots_of(kept.cache))
