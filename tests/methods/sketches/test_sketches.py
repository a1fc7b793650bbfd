"""Extending, merging, saving and loading every streaming sketch, and its slots."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from scipy import stats

from kvsketch import InputError, Slots, attend
from kvsketch.methods.registry import SKETCHES
from kvsketch.methods.sketches import BalanceKVStreaming, MergeReduce

BATCH, HEADS = 2, 3


def width(name):
    return 1 if name == "one_dimensional" else 4


def tokens(name, seed, n, dtype=torch.float32, **shape):
    g = torch.Generator().manual_seed(seed)
    full = (shape.get("batch", BATCH), shape.get("heads", HEADS), n, shape.get("dim", width(name)))
    return Slots(torch.randn(full, generator=g).to(dtype), torch.randn(full, generator=g).to(dtype))


#: the papers' own schedules, which have no budget
AS_WRITTEN = {
    "algorithm_1": lambda seed: BalanceKVStreaming(batch_size=10, seed=seed),
    "algorithm_3": lambda seed: MergeReduce(batch_size=10, seed=seed),
}
NAMES = [*SKETCHES, *AS_WRITTEN]


def build(name, seed=0):
    if name in AS_WRITTEN:
        return AS_WRITTEN[name](seed)
    return SKETCHES[name].for_budget(40, seed=seed)


def filled(name, seed=0, n=200):
    sketch = build(name, seed)
    sketch.extend(tokens(name, 1, n))
    return sketch


def same(one, other):
    return set(one.state) == set(other.state) and all(
        torch.equal(tensor, other.state[key]) for key, tensor in one.state.items()
    )


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_bytes_and_another_seed_other_ones(name):
    assert same(filled(name, seed=3), filled(name, seed=3))
    if name != "sliding_window":  # the one without randomness
        assert not same(filled(name, seed=3), filled(name, seed=4))


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_it_goes_on_as_if_nothing_happened(name, tmp_path):
    sketch = filled(name)
    sketch.save(tmp_path / "sketch")
    loaded = type(sketch).load(tmp_path / "sketch")
    assert loaded.seen == 200
    for one in (sketch, loaded):
        one.extend(tokens(name, 2, 77))
        one.merge(filled(name, seed=9, n=50))
    assert same(sketch, loaded)
    assert [p.name for p in tmp_path.iterdir()] == ["sketch"]


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_sketch_can_be_saved_and_merged(name, tmp_path):
    empty = build(name)
    empty.save(tmp_path / "sketch")
    loaded = type(empty).load(tmp_path / "sketch")
    loaded.merge(empty)
    assert loaded.seen == 0
    with pytest.raises(InputError, match="empty"):
        _ = loaded.slots
    loaded.merge(filled(name))
    assert loaded.seen == 200
    before = copy.deepcopy(loaded)
    loaded.merge(empty)
    assert same(loaded, before)


@pytest.mark.parametrize("name", NAMES)
def test_merge_leaves_the_other_alone(name):
    left, right = filled(name, 1), filled(name, 2)
    before = copy.deepcopy(right)
    left.merge(right)
    left.extend(tokens(name, 5, 300))
    assert same(right, before)
    assert left.seen == 700


@pytest.mark.parametrize("name", NAMES)
def test_slots_are_finite_and_answer(name):
    sketch = build(name)
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(BATCH, HEADS, 2, width(name), generator=generator)
    for n in (1, 1, 30, 513):
        sketch.extend(tokens(name, n, n))
        out = attend(queries, sketch.slots)
        assert bool(torch.isfinite(out).all())
    copied = copy.deepcopy(sketch)
    copied.extend(tokens(name, 7, 64))
    assert copied.seen == sketch.seen + 64
    assert sketch.nbytes() > 0


@pytest.mark.parametrize("name", NAMES)
def test_batch_rows_can_be_chosen(name):
    sketch = filled(name)
    before = sketch.slots
    sketch.map_batch(lambda t: t[[1, 0, 1]])
    assert torch.equal(sketch.slots.keys[0], before.keys[1])
    assert torch.equal(sketch.slots.values[2], before.values[1])
    sketch.extend(tokens(name, 3, 5, batch=3))
    with pytest.raises(InputError, match="do not fit"):
        sketch.extend(tokens(name, 3, 5))


@pytest.mark.parametrize("name", NAMES)
def test_bad_tokens_leave_the_sketch_as_it_was(name):
    sketch = filled(name)
    before = copy.deepcopy(sketch)
    good = tokens(name, 2, 6)
    spoiled = good.keys.clone()
    spoiled[0, 0, 3] = float("nan")
    infinite = good.values.clone()
    infinite[1, 2, 0] = float("inf")
    for bad, says in (
        (Slots(spoiled, good.values), "keys are not finite"),
        (Slots(good.keys, infinite), "values are not finite"),
        (tokens(name, 2, 6, heads=2), "do not fit"),
        (tokens(name, 2, 6, batch=1), "do not fit"),
        (tokens(name, 2, 6, dim=width(name) + 1), "do not fit"),
        (tokens(name, 2, 6, dtype=torch.float64), "do not fit"),
        (Slots(good.keys.long(), good.values), "floating point"),
        (Slots(good.keys, good.values, torch.full((BATCH, HEADS, 6), 2.0)), "mass must be 1"),
    ):
        with pytest.raises(InputError, match=says):
            sketch.extend(bad)
    assert same(sketch, before)
    assert sketch.seen == 200
    for one in (sketch, before):
        one.extend(good)
    assert same(sketch, before)


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_is_not_merged(name):
    sketch = filled(name)
    before = copy.deepcopy(sketch)
    other = next(cls for key, cls in SKETCHES.items() if key != name).for_budget(40)
    narrow = build(name)
    narrow.extend(tokens(name, 1, 9, heads=2))
    strict = name in AS_WRITTEN
    larger = type(sketch)(batch_size=400) if strict else SKETCHES[name].for_budget(400)
    larger.extend(tokens(name, 1, 9))
    for wrong, says in (
        (other, "cannot be merged into"),
        (sketch, "itself"),
        (narrow, "holds tokens"),
        (larger, "differs"),
    ):
        with pytest.raises(InputError, match=says):
            sketch.merge(wrong)
    assert same(sketch, before)


@pytest.mark.parametrize("name", NAMES)
def test_bad_files_are_refused_by_name(name, tmp_path):
    cls = type(build(name))
    path = tmp_path / "sketch"
    filled(name).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="damaged"):
        cls.load(path)
    path.write_bytes(b"not a sketch")
    with pytest.raises(InputError, match="is not a kvsketch file"):
        cls.load(path)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(InputError, match="kvsketch did not write"):
        cls.load(path)
    header = {"version": 99, "sketch": name, "parameters": {}, "seed": 0, "seen": 0, "meta": {}}
    generator = torch.Generator().get_state()
    save_file({"generator": generator}, path, metadata={"kvsketch": json.dumps(header)})
    with pytest.raises(InputError, match="version 99"):
        cls.load(path)
    with pytest.raises(InputError, match="is not a file"):
        cls.load(tmp_path / "missing")
    with pytest.raises(InputError, match="cannot be written"):
        filled(name).save(tmp_path / "no" / "folder")
    another = next(cls for key, cls in SKETCHES.items() if key != name).for_budget(40)
    another.save(path)
    with pytest.raises(InputError, match="holds a"):
        cls.load(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_failed_save_keeps_the_older_file(name, tmp_path, monkeypatch):
    path = tmp_path / "sketch"
    sketch = filled(name)
    sketch.save(path)
    old = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match="No space left"):
        sketch.save(path)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["sketch"]


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_streams(name):
    sketch = build(name)
    sketch.extend(tokens(name, 0, 300, dtype=torch.bfloat16))
    slots = sketch.slots
    assert slots.keys.dtype == torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(BATCH, HEADS, 2, width(name), generator=generator)
    assert bool(torch.isfinite(attend(queries.bfloat16(), slots)).all())


@pytest.mark.parametrize("name", NAMES)
def test_equal_seeds_are_not_merged(name):
    """Randomised sketches with equal seeds make the same choices: when merged, they drew one of 8
    tokens twice as often as they should."""
    sketch = filled(name, seed=0)
    if not sketch.randomised:
        sketch.merge(filled(name, seed=0))
        return
    before = copy.deepcopy(sketch)
    with pytest.raises(InputError, match="seed=0"):
        sketch.merge(filled(name, seed=0))
    assert same(sketch, before)


def test_merge_uses_numbers_neither_sketch_used():
    """If two sketches of five tokens are merged into an empty one with the seed of the first, each
    of the nine tokens outside the window is drawn equally often (chi-square test at 1e-3 over 4,000
    heads)."""
    heads = 4000
    value = torch.arange(10.0).view(1, 1, 10, 1).expand(1, heads, 10, 1).contiguous()
    slots = Slots(torch.zeros_like(value), value)
    cls = SKETCHES["sliding_window_sampled"]
    whole = cls(window=1, samples=1, seed=0)
    for seed, start in ((0, 0), (1, 5)):
        part = cls(window=1, samples=1, seed=seed)
        for i in range(start, start + 5):
            part.extend(slots.narrow(i, 1))
        whole.merge(part)
    held = whole.slots
    drawn = (held.values / held.mass.unsqueeze(-1))[..., 0][held.mass > 1].round().long()
    assert drawn.numel() == heads
    assert stats.chisquare(torch.bincount(drawn, minlength=9)).pvalue > 1e-3
