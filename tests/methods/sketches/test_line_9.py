"""Line 9 of BalanceKV's Algorithm 1 when sketches are merged; failures, which it never erases."""

from __future__ import annotations

import pytest
import torch

from kvsketch import Slots
from kvsketch.methods.sketches import BalanceKVStreaming, MergeReduce
from kvsketch.methods.sketches.balancekv_bounded import BalanceKVBounded

KINDS = [BalanceKVStreaming, BalanceKVBounded]


def build(kind, seed=0, batch_size=8, **options):
    size = {"capacity": 64} if kind is BalanceKVBounded else {}
    return kind(batch_size=batch_size, seed=seed, **size, **options)


def tokens(norms, key_norms=0.0):
    """Tokens of one head, with values of the given norms."""
    n = len(norms)
    keys = torch.ones(n) * torch.as_tensor(key_norms)
    return Slots(keys.view(1, 1, n, 1) * torch.eye(4)[0], torch.tensor(norms).view(1, 1, n, 1))


def numerator(sketch):
    held = sketch.slots
    return sorted(held.values[held.values > 0].tolist())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("larger_first", [False, True])
def test_a_merge_erases_what_one_stream_would_have(kind, larger_first):
    """With eps/(2n) = 1/4 and keys of 0, a value of norm 4 erases the buckets up to 2^i = 1 of both
    sketches."""
    small, large = build(kind, 1, eps=1.0, max_tokens=2), build(kind, 2, eps=1.0, max_tokens=2)
    small.extend(tokens([0.3, 0.9, 1.5]))
    large.extend(tokens([4.0, 1.2]))
    one, other = (large, small) if larger_first else (small, large)
    one.merge(other)
    assert numerator(one) == pytest.approx([1.2, 1.5, 4.0])
    assert float(one.slots.masses().sum()) == 5
    # the largest norm is merged, too: 0.9 is erased from now on
    one.extend(tokens([0.9]))
    assert numerator(one) == pytest.approx([1.2, 1.5, 4.0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_takes_over_the_longest_key(kind):
    """With r = None and a key of norm 2 (d = 4), the bound is 4 e^-2/4 = 0.14, and 0.3 stays."""
    small, large = build(kind, 1, eps=1.0, max_tokens=2), build(kind, 2, eps=1.0, max_tokens=2)
    small.extend(tokens([0.3]))
    large.extend(tokens([4.0], 2.0))
    small.merge(large)
    assert numerator(small) == pytest.approx([0.3, 4.0])


@pytest.mark.parametrize("kind", KINDS)
def test_scaling_decides_what_is_small_and_padding_does_not(kind):
    """With scaling = 2 and |k| = 1 the bound, which has the factor e^(-scaling r^2), is 0.034 for
    norm 1; a padding key of norm 9 would make it 0."""
    sketch = build(kind, eps=1.0, max_tokens=2, scaling=2.0)
    slots = tokens([0.0, 0.02, 0.04, 1.0], torch.tensor([9.0, 1.0, 1.0, 1.0]))
    mass = torch.tensor([[[0.0, 1.0, 1.0, 1.0]]])
    sketch.extend(Slots(slots.keys, slots.values, mass))
    assert numerator(sketch) == pytest.approx([0.04, 1.0])
    exact = build(kind, r=1.5, eps=1.0, max_tokens=2, scaling=2.0)  # 2^-6 > e^-4.5/4 = 0.0028
    exact.extend(tokens([0.02, 1.0], 1.0))
    assert numerator(exact) == pytest.approx([0.02, 1.0])


def test_an_erased_bucket_is_empty_at_every_level_and_may_fill_again():
    """A large value erases the smaller buckets of its head at every level; those of another head
    stay. With r=None a longer key lets smaller values in again, but erased ones do not come
    back."""
    sketch = build(BalanceKVStreaming, eps=1.0, max_tokens=2, batch_size=2)

    def extend(norms, others, key_norm=0.0):
        one, other = tokens(norms, key_norm), tokens(others, key_norm)
        pairs = (one.keys, other.keys), (one.values, other.values)
        sketch.extend(Slots(*(torch.cat(pair, dim=1) for pair in pairs)))

    def first():
        """The values of the first head's numerator."""
        values = sketch.slots.values[0, 0]
        return sorted(values[values > 0].tolist())

    def used():
        """The number of levels that hold slots of norm 0.3, in each of the two heads."""
        held, bucket = sketch._levels("numerator"), -1 - sketch.meta["lowest"]
        fills = [sketch._split(held.fill(level))[0, :, bucket] for level in range(held.depth)]
        return (torch.stack(fills) > 0).sum(0).tolist()

    extend([0.3] * 13, [0.3] * 13)
    extend([1.5], [0.3])
    assert first()[-1] == 1.5
    assert used() == [3, 3]
    extend([8.0], [0.3])  # bound 2: buckets up to [1, 2) go
    assert first() == [8.0]
    assert used() == [0, 4]
    extend([0.3], [0.3], 3.0)
    assert first() == pytest.approx([0.3, 8.0])
    assert used() == [1, 1]  # the 16 tokens of the second head are in the fifth level


def test_failures_of_erased_buckets_and_of_merged_sketches_are_not_forgotten():
    options = {"eps": 1.0, "max_tokens": 2, "constant": 1e-3, "delta": 0.5}
    sketch, other = (build(BalanceKVStreaming, seed, **options) for seed in (1, 2))
    sketch.extend(tokens([0.3] * 64))
    before = int(sketch.failures.sum())
    assert before > int(sketch._levels("denominator").failed.sum()) > 0
    sketch.extend(tokens([40.0]))
    assert numerator(sketch) == [40.0]
    assert int(sketch.failures.sum()) == before
    other.extend(tokens([30.0] * 8))
    theirs = int(other.failures.sum())
    assert theirs > 0
    sketch.merge(other)
    assert int(sketch.failures.sum()) >= before + theirs  # merging halves batches, too


def test_failures_add_up_in_a_merge():
    for build_one, name in (
        (lambda seed: MergeReduce("softmax_balance", 16, seed=seed), "level.failed"),
        (lambda seed: BalanceKVBounded(24, 8, seed=seed), "failed"),
    ):
        one, other = build_one(1), build_one(2)
        one.extend(tokens([1.0] * 40))
        other.extend(tokens([1.0] * 40))
        one.state[name] = one.state[name] + 3
        other.state[name] = other.state[name] + 40
        assert int(one.failures.sum()) == 3  # with the printed constant no walk fails
        one.merge(other)
        assert int(one.failures.sum()) == 43
