"""The state of an object as plain data: tensors by name, and values that JSON can represent.

Every part of a cache (pages, streams, methods, sketches) returns its state as a ``State`` and is
restored from a ``Reader``. The reader checks every name, shape, dtype and number before anything is
built, because a file may come from anywhere. ``kvsketch.files.format`` converts a state to a file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsketch.errors import InputError

#: The dtypes that tokens may have, by their name in a state.
FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass
class State:
    """
    Attributes:
        tensors: by name; the names of a part's tensors begin with the part's name and a dot.
        values: values that JSON can represent; those of a part are under its name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def put(self, name: str, part: State | None) -> None:
        """Add the state of a part, if there is one."""
        if part is None:
            return
        self.values[name] = part.values
        self.tensors.update({f"{name}.{key}": tensor for key, tensor in part.tensors.items()})

    def keep(self, **tensors: Tensor | None) -> None:
        """Add the tensors that are not None."""
        self.tensors.update({n: t.detach() for n, t in tensors.items() if t is not None})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class Reader:
    """Reads a state, one name at a time; ``close`` checks that nothing is left.

    Args:
        state: the state; reading empties it.
        where: prefix of its names, for messages.
        device: where tensors go.
    """

    def __init__(self, state: State, where: str = "", device: str | torch.device = "cpu") -> None:
        self._tensors, self._values = dict(state.tensors), state.values
        self._where, self.device = where, device
        if not isinstance(self._values, dict):
            raise InputError(f"{where or 'the state'}: {self._values!r:.60} must be an object")
        self._values = dict(self._values)

    def wrong(self, name: str, found: object, allowed: str) -> InputError:
        """The error for an invalid value."""
        return InputError(f"{self._where}{name}={found!r:.60} must be {allowed}")

    def has(self, name: str) -> bool:
        """Whether there is a value, a part or a tensor of this name."""
        return name in self._values or name in self._tensors

    def whole(self, name: str, least: int = 0, most: int = 1 << 40) -> int:
        """An int within bounds."""
        found = self._value(name)
        if type(found) is not int or not least <= found <= most:
            raise self.wrong(name, found, f"an int from {least} to {most}")
        return found

    def number(self, name: str) -> float:
        """A finite float."""
        found = self._value(name)
        if type(found) not in (int, float) or not math.isfinite(found):
            raise self.wrong(name, found, "a finite number")
        return float(found)

    def flag(self, name: str) -> bool:
        """True or False."""
        found = self._value(name)
        if type(found) is not bool:
            raise self.wrong(name, found, "true or false")
        return found

    def word(self, name: str, allowed: Collection[str] | None = None) -> str:
        """A string, optionally one of a few."""
        found = self._value(name)
        if type(found) is not str or (allowed is not None and found not in allowed):
            said = "a string" if allowed is None else f"one of {', '.join(allowed)}"
            raise self.wrong(name, found, said)
        return found

    def dtype(self, name: str) -> torch.dtype:
        """A floating point dtype."""
        return FLOATS[self.word(name, FLOATS)]

    def anything(self, name: str) -> Any:
        """A value that the caller checks."""
        return self._value(name)

    def tensor(
        self,
        name: str,
        shape: Sequence[int | None],
        *dtypes: torch.dtype,
        allow: Collection[str] = (),
    ) -> Tensor:
        """A tensor of a shape (None: any length) and of one of some dtypes. Floating-point tensors
        must be finite, except for what ``allow`` names ("inf", "nan")."""
        if name not in self._tensors:
            raise InputError(f"{self._where}{name} is missing")
        tensor = self._tensors.pop(name)
        fits = tensor.dim() == len(shape) and all(
            wanted in (None, length) for wanted, length in zip(shape, tensor.shape, strict=True)
        )
        if not fits or tensor.dtype not in dtypes:
            wanted = ", ".join("any" if length is None else str(length) for length in shape)
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise InputError(
                f"{self._where}{name} is {str(tensor.dtype).removeprefix('torch.')} "
                f"{list(tensor.shape)}, must be {kinds} [{wanted}]"
            )
        if tensor.is_floating_point():
            bad = ("nan" not in allow and bool(tensor.isnan().any())) or (
                "inf" not in allow and bool(tensor.isinf().any())
            )
            if bad:
                raise InputError(f"{self._where}{name} is not finite (NaN or infinity)")
        return tensor.to(self.device)

    def axes(self, name: str) -> int:
        """How many axes a tensor has; 1 if there is none of this name."""
        return max(1, self._tensors[name].dim()) if name in self._tensors else 1

    def integers(self, name: str, shape: Sequence[int | None], least: int, most: int) -> Tensor:
        """An int64 tensor whose numbers are within bounds."""
        tensor = self.tensor(name, shape, torch.int64)
        if tensor.numel() and not least <= int(tensor.min()) <= int(tensor.max()) <= most:
            raise InputError(f"{self._where}{name}: numbers must be from {least} to {most}")
        return tensor

    def rest(self) -> dict[str, Tensor]:
        """All tensors that have not been read."""
        rest, self._tensors = self._tensors, {}
        return rest

    def part(self, name: str) -> Reader:
        """The state of a part."""
        values = self._value(name)
        start = f"{name}."
        own = [key for key in self._tensors if key.startswith(start)]
        tensors = {key[len(start) :]: self._tensors.pop(key) for key in own}
        return Reader(State(tensors, values), f"{self._where}{start}", self.device)

    def parts(self, name: str, count: int) -> list[Reader]:
        """The parts that ``numbered`` joined."""
        together = self.part(name)
        found = [together.part(str(number)) for number in range(count)]
        together.close()
        return found

    def close(self) -> None:
        """Raise InputError if anything has not been read."""
        left = [*self._values, *self._tensors]
        if left:
            raise InputError(f"{self._where}{left[0]!s:.60} is not known")

    def _value(self, name: str) -> Any:
        if name not in self._values:
            raise InputError(f"{self._where}{name} is missing")
        return self._values.pop(name)


def numbered(parts: Sequence[State]) -> State:
    """Parts under the names 0, 1, 2 and so on."""
    together = State()
    for number, part in enumerate(parts):
        together.put(str(number), part)
    return together


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in a state."""
    return str(dtype).removeprefix("torch.")
