"""Slots, the form in which every method of this package keeps tokens.

A slot is a key k, a value-sum u and a mass m. An exact token is the slot (k, v, 1); a sample, a
cluster or a coreset point is a slot with other u and m. ``estimator.attend`` is the attention over
slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsketch.errors import InputError


@dataclass(frozen=True)
class Slots:
    """A weighted set of keys and value sums for every batch row and KV head.

    Attributes:
        keys: ``[batch, num_key_value_heads, slots, head_dim]``.
        values: sums of values u, ``[batch, num_key_value_heads, slots, value_dim]``.
        mass: m, float32 (or float64) ``[batch, num_key_value_heads, slots]``. ``None`` means that
            every slot is one exact token (u = v, m = 1) and takes no memory.
        positions: float32, same shape as mass: the position of the slot in the sequence. Only
            needed by models whose attention adds a distance bias (ALiBi).
        score: float32, same shape as mass: a number that a method stores with each slot between
            compressions (accumulated attention for H2O, insertion distance for k-center).

    A slot with m = 0 and u = 0 is *dead*: padding, so that heads or rows of different lengths fit
    into one tensor. It does not change any attention output.

    Raises:
        InputError: shapes, devices or dtypes do not match.
    """

    keys: Tensor
    values: Tensor
    mass: Tensor | None = None
    positions: Tensor | None = None
    score: Tensor | None = None

    def __post_init__(self) -> None:
        if self.keys.dim() != 4 or self.values.dim() != 4:
            raise InputError(
                "keys and values must be [batch, num_key_value_heads, slots, dim], got "
                f"{tuple(self.keys.shape)} and {tuple(self.values.shape)}"
            )
        if self.keys.shape[:3] != self.values.shape[:3]:
            raise InputError(
                f"keys {tuple(self.keys.shape)} and values {tuple(self.values.shape)} differ in "
                "batch, heads or slots"
            )
        for name in ("mass", "positions", "score"):
            column = getattr(self, name)
            if column is not None and column.shape != self.keys.shape[:3]:
                raise InputError(
                    f"{name} must have shape {tuple(self.keys.shape[:3])}, got "
                    f"{tuple(column.shape)}"
                )

    @property
    def count(self) -> int:
        """Slots per KV head, dead ones included."""
        return self.keys.shape[2]

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are present, by name."""
        fields = {name: getattr(self, name) for name in FIELDS}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}

    def map(self, fn: Callable[[Tensor], Tensor]) -> Slots:
        """Apply ``fn`` to every field that is present (batch, head and slot are axes 0, 1, 2)."""
        return Slots(**{name: fn(tensor) for name, tensor in self.tensors().items()})

    def masses(self) -> Tensor:
        """m as a tensor, float32 (float64 for float64 values), ones where ``mass`` is None."""
        if self.mass is not None:
            return self.mass
        return torch.ones_like(self.keys[..., 0], dtype=compute_dtype(self.values.dtype))

    def mean_values(self) -> Tensor:
        """u / m, the mean value of the tokens of a slot; u where m is 0."""
        if self.mass is None:
            return self.values
        return self.values / torch.where(self.mass > 0, self.mass, 1.0).unsqueeze(-1)

    def live(self) -> Tensor | None:
        """bool ``[batch, heads, slots]``, False for dead slots; None when all are live."""
        if self.mass is None:
            return None
        live = self.mass != 0
        if bool(live.all()):
            return None
        return live | (self.values != 0).any(-1)

    def narrow(self, start: int, length: int) -> Slots:
        """``length`` slots from ``start`` on, as views."""
        return self.map(lambda t: t.narrow(2, start, length))

    def take(self, index: Tensor) -> Slots:
        """Select slots per head. ``index``: int64 ``[batch, heads, kept]``."""
        batch, heads = self.keys.shape[:2]
        head = torch.arange(batch * heads, device=index.device).view(batch, heads, 1)
        places: dict[int, Tensor] = {}

        def some(tensor: Tensor) -> Tensor:
            # Rows of a flat tensor: several times faster than gather with an expanded index.
            flat, step = flat_rows(tensor)
            if step not in places:
                places[step] = (index + step * head).flatten()
            return flat.index_select(0, places[step]).view(*index.shape, *tensor.shape[3:])

        return self.map(some)

    def scaled(self, weight: Tensor) -> Slots:
        """Multiply u and m by ``weight`` ``[batch, heads, slots]``; weight 0 makes a slot dead."""
        mass = self.masses()
        return replace(
            self,
            values=self.values * weight.unsqueeze(-1).to(self.values.dtype),
            mass=mass * weight.to(mass.dtype),
        )

    def only(self, live: Tensor) -> Slots:
        """Make the slots dead where ``live`` (bool, broadcastable to mass) is False."""
        live = live.expand(self.keys.shape[:3])
        return replace(
            self,
            values=self.values * live.unsqueeze(-1).to(self.values.dtype),
            mass=self.masses() * live,
        )

    @staticmethod
    def cat(parts: Sequence[Slots]) -> Slots:
        """Concatenate along the slot axis: attention over the result is attention over all.

        A field that only some parts have is filled with its neutral value (mass 1, others 0).
        """
        parts = [p for p in parts if p.count] or list(parts[:1])
        if len(parts) == 1:
            return parts[0]
        present = {name for part in parts for name in part.tensors()}
        return Slots(
            **{
                name: torch.cat([_field(part, name) for part in parts], dim=2)
                for name in FIELDS
                if name in present
            }
        )


def flat_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """``[batch, heads, n, ...]`` as ``[rows, ...]``, without a copy if strides allow it (those of a
    part of the slots do), and the number of rows from one head to the next."""
    batch, heads, n = tensor.shape[:3]
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tensor.reshape(batch * heads * n, *tensor.shape[3:]), n
    first, step, row = tensor.stride()[:3]
    even = batch == 1 or first == heads * step
    if not even or row == 0 or step % row:
        return tensor.reshape(batch * heads * n, *tensor.shape[3:]), n
    size = ((batch * heads - 1) * (step // row) + n, *tensor.shape[3:])
    return tensor.as_strided(size, tensor.stride()[2:]), step // row


FIELDS = ("keys", "values", "mass", "positions", "score")


def _field(slots: Slots, name: str) -> Tensor:
    tensor: Tensor | None = getattr(slots, name)
    if tensor is not None:
        return tensor
    return slots.masses() if name == "mass" else torch.zeros_like(slots.masses())


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which attention is computed: at least float32."""
    return torch.promote_types(dtype, torch.float32)
