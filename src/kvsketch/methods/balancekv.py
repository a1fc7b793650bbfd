"""BalanceKV: SoftmaxBalance (Algorithm 2) and the block-parallel form of its experiments."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.methods.balance import Lifted, walk, walk_threshold
from kvsketch.methods.halving import Half, Halving, flat
from kvsketch.random_numbers import derived, uniform
from kvsketch.slots import Slots

ON_FAIL = ("record", "raise")


class SoftmaxBalance(Halving):
    """SoftmaxBalance, Algorithm 2 of BalanceKV as written: the self-balancing walk on
    phi(k) (x) u, of which the smaller of the two sides is kept.

    It balances u alone, or m in a head whose u are all 0 (the denominator: values of 1), like the
    paper's separate instances. Theorem 3.2 holds for the value dimension s if ``delta`` is delta/s
    (as in its proof, but not in the algorithm's text). Keeping the smaller side makes the kept
    mass, 2|C'|, a little too small on average, by at most the theorem's error.

    Args:
        seed: of the walk.
        scaling: of the scores, default 1/sqrt(head_dim).
        r_key: bound on ``|k|``; None: the largest norm in the call.
        r_value: bound on ``|u|``; None: the largest norm in the call.
        delta: failure probability of a call, in (0, 1).
        constant: c = constant log(n/delta); the paper's 30 makes the signs almost fair coins.
        on_fail: what happens if ``|y^T eta| > c R^2`` (line 7), or if a norm exceeds r_key or
            r_value. "record": the walk continues with probabilities clamped to [0, 1], and the call
            is counted as failed. "raise": InputError.

    Raises:
        InputError: an argument out of range.
    """

    name = "softmax_balance"
    paper = "Han et al., BalanceKV Algorithm 2 (2502.07861)"

    def __init__(
        self,
        seed: int = 0,
        scaling: float | None = None,
        r_key: float | None = None,
        r_value: float | None = None,
        delta: float = 0.01,
        constant: float = 30.0,
        on_fail: str = "record",
    ) -> None:
        super().__init__(seed, scaling)
        walk_threshold(1, delta, constant)  # checks both
        for name, radius in (("r_key", r_key), ("r_value", r_value)):
            if radius is not None and not 0 < radius < float("inf"):
                raise InputError(f"{name}={radius!r} must be a finite number > 0, or None")
        if on_fail not in ON_FAIL:
            raise InputError(f"on_fail={on_fail!r} must be one of {', '.join(ON_FAIL)}")
        self.r_key, self.r_value = r_key, r_value
        self.delta, self.constant, self.on_fail = delta, constant, on_fail

    def half(self, slots: Slots, streams: Tensor | None = None) -> Half:
        signs, failed = self.signs(slots, self.streams_for(slots) if streams is None else streams)
        n = slots.count
        up = signs > 0
        live = slots.live()
        there = torch.ones_like(up) if live is None else live
        smaller = (up & there).sum(-1, keepdim=True) <= (~up & there).sum(-1, keepdim=True)
        kept = torch.where(smaller, up, ~up) & there
        # The kept slots come first, in their order. They are at most n // 2 by construction.
        index = kept.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., : n // 2]
        return Half(index, kept.gather(-1, index), failed)

    def signs(
        self, slots: Slots, streams: Tensor, groups: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The signs of the walk, ``[batch, heads, n]``, and whether it failed, bool ``[batch,
        heads]``. ``streams`` is as for ``half``.

        Args:
            groups: int64 ``[batch, heads, n]``. Groups are balanced separately. The r_value of a
                group is the largest norm in it, unless it was given.
        """
        batch, heads, n = slots.keys.shape[:3]
        keys, values, mass = flat(slots)
        without = (values == 0).flatten(1).all(1)[:, None, None]
        vectors = torch.cat([values, mass * without], dim=-1)
        key_norm = keys.norm(dim=-1).amax(-1)
        value_norm = vectors.norm(dim=-1).amax(-1)
        r_key = key_norm if self.r_key is None else torch.full_like(key_norm, self.r_key)
        r_value = value_norm if self.r_value is None else torch.full_like(value_norm, self.r_value)
        beyond = (key_norm > r_key * (1 + 1e-6)) | (value_norm > r_value * (1 + 1e-6))
        if self.on_fail == "raise" and bool(beyond.any()):
            raise InputError(
                f"norms exceed the stated radius: |k| up to {float(key_norm.max()):.6g} with "
                f"r_key={self.r_key}, |u| up to {float(value_norm.max()):.6g} with "
                f"r_value={self.r_value}"
            )
        scaling = self.scale(slots)
        shift = scaling * r_key.square()  # R^2 = exp(shift) r_value^2, without the exponential
        bound = r_value.square()
        if groups is not None:
            groups = groups.flatten(0, 1)
            if self.r_value is None:
                bound = _largest(vectors.norm(dim=-1), groups).square()
        signs, failed = walk(
            Lifted(keys, vectors, scaling, shift, groups),
            walk_threshold(n, self.delta, self.constant),
            bound,
            uniform(streams.flatten(), n),
        )
        if self.on_fail == "raise" and bool(failed.any()):
            raise InputError(
                f"the walk failed: |y^T eta| exceeded c R^2 (Algorithm 2, line 7); delta="
                f"{self.delta} and constant={self.constant} allow this, on_fail='record' goes on"
            )
        return signs.view(batch, heads, n), (failed | beyond).view(batch, heads)


def _largest(norms: Tensor, groups: Tensor) -> Tensor:
    """For each vector, the largest norm in its group, ``[R, n]``."""
    number = groups - groups.amin()
    most = norms.new_zeros(len(norms), int(number.max()) + 1)
    return most.scatter_reduce(1, number, norms, "amax").gather(1, number)


class BalanceKV(SoftmaxBalance):
    """BalanceKV as in its experiments (section 4): blocks of ``block`` tokens are balanced in
    parallel, and each round keeps exactly half of the tokens.

    Block c contains every (n/block)-th token from the c-th on (the paper reshapes n x d into
    block x n/block x d, and an n that is not divisible is padded with zeros). After the signs,
    exactly n/2 tokens are kept: tokens of sign +1, or all of them and as many others as needed,
    chosen at random. The kept tokens serve for numerator and denominator, with u and m doubled.

    The other arguments are those of ``SoftmaxBalance``.

    Args:
        block: tokens per block, >= 2.
    """

    name = "balancekv"
    paper = "Han et al., BalanceKV section 4 (2502.07861)"

    def __init__(
        self,
        seed: int = 0,
        scaling: float | None = None,
        block: int = 256,
        delta: float = 0.01,
        constant: float = 30.0,
    ) -> None:
        super().__init__(seed, scaling, delta=delta, constant=constant)
        if isinstance(block, bool) or not isinstance(block, int) or block < 2:
            raise InputError(f"block={block!r} must be an int >= 2 (tokens)")
        self.block = block

    def half(self, slots: Slots, streams: Tensor | None = None) -> Half:
        batch, heads, n = slots.keys.shape[:3]
        streams = self.streams_for(slots) if streams is None else streams
        live = slots.live()
        there = torch.ones_like(slots.keys[..., 0], dtype=torch.bool) if live is None else live
        # Live slot i of a head goes to place i // own of block i % own, where own is the number of
        # blocks that the head needs.
        number = there.cumsum(-1) - 1
        own = (there.sum(-1, keepdim=True) - 1).clamp(min=0) // self.block + 1
        blocks = int(own.max())
        place = (number % own * self.block + number // own).masked_fill(~there, blocks * self.block)
        column = torch.arange(n, device=place.device).expand_as(place)
        source = place.new_full((batch, heads, blocks * self.block + 1), n)
        source = source.scatter(-1, place, column)[..., :-1]
        padded = slots.take(source.clamp(max=n - 1))
        if n != blocks * self.block or live is not None:
            padded = padded.only(source < n)
        # Each block of a head is treated as a head by the walk.
        split = padded.map(lambda t: t.reshape(batch, heads * blocks, self.block, *t.shape[3:]))
        each = derived(streams.unsqueeze(-1), torch.arange(blocks, device=place.device))
        signs, failed = self.signs(split, each.flatten(1))
        signs = signs.reshape(batch, heads, -1).gather(-1, place.clamp(max=blocks * self.block - 1))
        if live is not None:  # dead slots are dropped first
            signs = signs.masked_fill(~live, -2.0)
        tie = uniform(derived(streams, -1), n)
        kept = (signs + 0.5 * tie).topk(n // 2, dim=-1).indices
        real = torch.ones_like(kept, dtype=torch.bool)
        if live is not None:  # half of the live slots of a head
            column = torch.arange(n // 2, device=kept.device)
            real = column < (live.sum(-1, keepdim=True) + 1) // 2
        kept, order = kept.sort(dim=-1)
        return Half(kept, real.gather(-1, order), failed.view(batch, heads, blocks).any(-1))
