"""Counter-based uniform numbers: number i of a stream depends only on the stream's key and i.

With a sequential generator, the numbers of a batch row would depend on the other rows. Here an
object's ``torch.Generator`` gives one 64-bit number per call (``drawn``). From it every row and
head gets the key of its own stream (``streams``), in which numbers are found by their coordinates
(``uniform``), the same on every device.

This is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014; constants as in Vigna's splitmix64.c): number i of key k is mix(k + (i + 1) gamma), mix being
Stafford's 13th variant of MurmurHash3's finaliser. Keys of further streams take MurmurHash3's own
finaliser instead, so that they differ from the stream's own numbers. All arithmetic is modulo 2^64,
as in int64 tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvsketch.errors import InputError, check_seed
from kvsketch.state import Reader, State

# Numbers made at a time: 256 kB.
_BLOCK = 1 << 15

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
#: a finaliser: shift right and xor, multiply, and again; then shift right and xor
_Mix = tuple[int, int, int, int, int]
_NUMBERS: _Mix = (30, 0xBF58476D1CE4E5B9 - (1 << 64), 27, 0x94D049BB133111EB - (1 << 64), 31)
_KEYS: _Mix = (33, 0xFF51AFD7ED558CCD - (1 << 64), 33, 0xC4CEB9FE1A85EC53 - (1 << 64), 33)


def generator(seed: int) -> torch.Generator:
    """A generator on the CPU, so that a seed gives the same numbers for keys on any device.

    Raises:
        InputError: the seed is no whole number of 64 bits.
    """
    check_seed(seed)
    return torch.Generator().manual_seed(int(seed))


def drawn(generator: torch.Generator) -> int:
    """A 64-bit number (signed). The generator advances by the same amount in every call."""
    return int(torch.randint(-(1 << 63), (1 << 63) - 1, (), generator=generator, device="cpu"))


class Seeded:
    """An object with a ``generator``, which is pickled as bytes: torch hands it to a new process as
    a tensor that is gone before the process begins."""

    generator: torch.Generator

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "generator": self.generator.get_state().numpy().tobytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.generator = torch.Generator()
        self.generator.set_state(torch.frombuffer(bytearray(state["generator"]), dtype=torch.uint8))


def generator_state(generator: torch.Generator, seed: int) -> State | None:
    """The state of a generator; None if no number was drawn since ``manual_seed``."""
    found = generator.get_state()
    if torch.equal(found, torch.Generator().manual_seed(seed).get_state()):
        return None
    return State({"bytes": found})


def restore_generator(generator: torch.Generator, reader: Reader) -> None:
    """Restore the part "generator" of a state, if there is one.

    Raises:
        InputError: it is not the state of a generator.
    """
    if not reader.has("generator"):
        return
    part = reader.part("generator")
    found = part.tensor("bytes", (len(generator.get_state()),), torch.uint8).cpu()
    part.close()
    try:
        generator.set_state(found)
    except RuntimeError as error:
        raise InputError(f"generator: {error}") from error


def streams(number: int, rows: Tensor, heads: int) -> Tensor:
    """Keys of independent streams, int64 ``[batch, heads]``.

    Args:
        number: the number that they are derived from, see ``drawn``.
        rows: numbers of the rows, int64 ``[batch]``; equal ones get equal streams.
        heads: how many there are in each.
    """
    return derived(torch.tensor(number, device="cpu"), places(rows, heads))


def places(rows: Tensor, heads: int) -> Tensor:
    """A number for every row and head, int64 ``[batch, heads]``, at least 2^20 apart, so that a
    head can have as many streams. For fewer than 2^23 rows and 2^20 heads."""
    return (rows.unsqueeze(1) << 40) + (torch.arange(heads, device=rows.device) << 20)


def derived(keys: Tensor, numbers: Tensor | int) -> Tensor:
    """Keys of further streams, one for each key and number (int64, broadcast together)."""
    return _mixed(torch.as_tensor(numbers + 1, device=keys.device) * _GAMMA + keys, _KEYS)


def uniform(keys: Tensor, *shape: int) -> Tensor:
    """The first numbers of every stream, float64 in [0, 1), ``[*keys.shape, *shape]``.

    The number at (i, j, ...) is the one at its place in the row-major order of ``shape``: it does
    not depend on the size of the first axis, but on that of the others.
    """
    count = math.prod(shape)
    flat = keys.reshape(-1, 1)
    place = torch.arange(1, count + 1, device=keys.device).mul_(_GAMMA)
    numbers = torch.empty(len(flat), count, dtype=torch.float64, device=keys.device)
    for rows, columns in _blocks(len(flat), count):
        # The upper 53 bits: as many as float64 holds.
        numbers[rows, columns] = _shifted(_mixed(flat[rows] + place[columns], _NUMBERS), 11)
    return numbers.mul_(2.0**-53).view(*keys.shape, *shape)


def _blocks(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Parts of a table, small enough for the cache: twice as fast as all of it, pass by pass."""
    width = max(1, min(columns, _BLOCK))
    height = _BLOCK // width
    for start in range(0, rows, height):
        for first in range(0, columns, width):
            yield slice(start, start + height), slice(first, first + width)


def _mixed(x: Tensor, mix: _Mix) -> Tensor:
    """``x``, which is overwritten, mixed: a bijection that lets every bit depend on all."""
    first, factor, second, other, third = mix
    x ^= _shifted(x, first)
    x *= factor
    x ^= _shifted(x, second)
    x *= other
    x ^= _shifted(x, third)
    return x


def _shifted(x: Tensor, by: int) -> Tensor:
    """``x`` as an unsigned number shifted to the right; torch's own shift repeats the sign."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)
