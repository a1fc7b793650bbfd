"""The base class of streaming sketches: extend, slots, merge, save and load."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from kvsketch import random_numbers
from kvsketch.errors import InputError
from kvsketch.files.format import read, write
from kvsketch.methods.requirements import Requirements
from kvsketch.methods.sketches import checks
from kvsketch.slots import FIELDS, Slots
from kvsketch.state import Reader, State
from kvsketch.writing import path_of

S = TypeVar("S", bound="Sketch")


class Sketch(random_numbers.Seeded, ABC):
    """Base class of the streaming sketches: one object holds every batch row and KV head.

    Its operations are: ``extend`` with tokens, read ``slots`` (for ``kvsketch.attend``), ``merge``
    a sketch of another stream into this one, ``save`` and ``load``.

    A subclass keeps all its tensors in ``state``, each with axes ``[batch, heads, ...]``, and all
    other state in ``meta`` (JSON values). Copying, saving, batch selection and byte counting then
    need no further code. Heads may have different numbers of slots (ragged), filled up by dead
    slots. As long as something can fail, ``_extend`` and ``_merge`` replace entries of ``state``
    instead of writing into tensors that are in use, so that an error leaves the sketch unchanged.

    The state of a row of the batch depends on its own tokens, its number in the batch, the seed and
    the sizes of the chunks. It does not depend on the contents or the number of other rows, except
    for the rounding of products that are computed together.

    Args:
        seed: seeds the object's own ``torch.Generator``; the same seed gives the same bytes.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    #: what is proved about the output, in one line; "": nothing
    guarantee: ClassVar[str] = ""
    #: what it requires from what calls it: nothing but tokens
    requires: ClassVar[Requirements] = Requirements()
    #: constructor arguments but the seed, read back from attributes of the same name by ``save``
    parameters: ClassVar[tuple[str, ...]] = ()
    #: whether it uses random numbers
    randomised: ClassVar[bool] = True
    #: the smallest number of slots for ``for_budget``
    least_slots: ClassVar[int] = 1
    #: whether slots that it has compressed can be compressed again, to any size
    recompresses: ClassVar[bool] = False
    #: whether ``widen`` makes it larger
    grows: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.parameters = tuple(p for p in inspect.signature(cls).parameters if p != "seed")

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.reset()

    def reset(self) -> None:
        """Remove all tokens; parameters are kept and the random stream starts again."""
        self.generator = random_numbers.generator(self.seed)
        self.seen = 0
        self.state: dict[str, Tensor] = {}
        self.meta: dict[str, Any] = {}
        # Of one call: the number that its random numbers come from, and each head's next stream.
        self._number, self._next = 0, torch.zeros(0, 0, dtype=torch.int64, device="cpu")

    @classmethod
    @abstractmethod
    def for_budget(cls, slots: int, seed: int = 0, **options: Any) -> Sketch:
        """A sketch of at most ``slots`` slots per KV head; ``options`` go to the constructor."""

    @property
    @abstractmethod
    def slots(self) -> Slots:
        """The slots for attention: ``[batch, num_key_value_heads, slots, ...]``.

        Raises:
            InputError: the sketch is empty.
        """

    def most_bytes(self, token: Slots) -> int | None:
        """Upper bound on the bytes of ``state`` per KV head, for any stream.

        Args:
            token: example tokens; their number does not matter.

        Returns:
            None if it depends on the stream.
        """
        return None

    def widen(self, like: Sketch) -> None:
        """Take over the size of a sketch that ``for_budget`` made for more slots, with the same
        options. Dropped tokens are not restored. A sketch of fixed size is not changed."""

    def _check(self) -> None:
        """Raise InputError if a state that was read would cause an endless loop."""

    @abstractmethod
    def _extend(self, new: Slots, live: Tensor | None) -> None:
        """Add checked tokens; those where ``live`` is False are ignored."""

    @abstractmethod
    def _merge(self: S, other: S) -> None:
        """Add a checked sketch; ``other`` must not be changed."""

    def extend(self, new: Slots) -> None:
        """Append exact tokens.

        Args:
            new: ``[batch, num_key_value_heads, q, ...]``, floating point; dead ones (m = 0, u = 0:
                padding) are ignored. Any number of tokens at a time; chunks give the same
                distribution as single tokens.

        Raises:
            InputError: not floating point or not finite, weighted (m not 0 or 1), or another
                shape, dtype or device than before. The sketch is unchanged then.
        """
        live = checks.check_tokens(new, self.meta["token"] if self.state else None)
        if new.count == 0:
            return
        before = self._snapshot()
        try:
            if not self.state:
                self.meta["token"] = checks.token_layout(new)
            self._renew()
            self._extend(new, live)
        except Exception:
            self._restore(before)
            raise
        self.seen += new.count

    def merge(self: S, other: S) -> None:
        """Make this the sketch of its own stream followed by that of ``other`` (unchanged).

        Sketches of the same seed make the same random choices, so their merge would not have the
        distribution of a single sketch: use different seeds.

        Raises:
            InputError: another kind of sketch, other parameters, shapes, dtypes or devices, or the
                same seed. The sketch is unchanged then.
        """
        checks.check_merge(self, other)
        if not other.seen:
            return
        before = self._snapshot()
        try:
            # Neither's next numbers: the other one may have used, or will use, those.
            self.generator.manual_seed(_mixed(self.generator, other.generator))
            if self.state:
                self._renew()
                self._merge(other)
            else:
                self.state = {name: tensor.clone() for name, tensor in other.state.items()}
                self.meta = dict(other.meta)
        except Exception:
            self._restore(before)
            raise
        self.seen += other.seen

    def save(self, path: str | Path) -> None:
        """Write the sketch, including the state of the random stream, to one safetensors file with
        a JSON header (``kvsketch.files.format``). The file is written atomically.

        Raises:
            InputError: the file cannot be written.
        """
        write(path_of(path, "path"), self.name, {}, self.to_state())

    @classmethod
    def load(cls: type[S], path: str | Path, device: str | torch.device = "cpu") -> S:
        """Read a file that ``save`` wrote; the loaded sketch continues as the saved one would have.

        Raises:
            InputError: missing, truncated, damaged or foreign file, another kind of sketch, or a
                version this one cannot read.
        """
        _, state = read(path_of(path, "path"), cls.name)
        try:
            return cls.from_state(Reader(state, device=device))
        except InputError as error:
            raise InputError(f"{str(path)!r}: {error}") from error

    def to_state(self) -> State:
        """The complete state, including that of the random stream."""
        parameters = {name: getattr(self, name) for name in self.parameters}
        values = {"seed": self.seed, "seen": self.seen, "meta": self.meta}
        state = State(values={**values, "parameters": parameters})
        state.keep(**self.state)
        state.put("generator", random_numbers.generator_state(self.generator, self.seed))
        return state

    @classmethod
    def from_state(cls: type[S], reader: Reader, token: Slots | None = None) -> S:
        """Restore the result of ``to_state``.

        Args:
            token: example tokens, if known.

        Raises:
            InputError: parameters that the class does not accept, or inconsistent tensors. The
                sketch must return its slots and accept a token.
        """
        parameters, seed = reader.anything("parameters"), reader.whole("seed", -(1 << 63), 1 << 63)
        if not isinstance(parameters, dict) or set(parameters) != set(cls.parameters):
            raise reader.wrong("parameters", parameters, f"those of {cls.name}")
        try:
            sketch = cls(**parameters, seed=seed)
        except TypeError as error:
            raise InputError(f"parameters of {cls.name}: {error}") from error
        sketch.seen = reader.whole("seen")
        random_numbers.restore_generator(sketch.generator, reader)
        meta, state = reader.anything("meta"), reader.rest()
        reader.close()
        checks.check_state(cls.name, meta, state, token)
        sketch.state, sketch.meta = state, meta
        if not state:
            return sketch
        checks.try_state(sketch, meta["token"])
        sketch.state = {name: tensor.to(reader.device) for name, tensor in state.items()}
        meta["token"] = {**meta["token"], "device": str(torch.device(reader.device))}
        return sketch

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn`` (which acts on axis 0, the batch) to all tensors: beam search, repeating or
        selecting rows. Rows are renumbered: 0, 1, 2 and so on."""
        self.state = {name: fn(tensor).contiguous() for name, tensor in self.state.items()}
        self.meta.pop("rows", None)
        if self.state:
            batch = next(iter(self.state.values())).shape[0]
            self.meta["token"] = {**self.meta["token"], "batch": batch}

    def number_rows(self, rows: Tensor) -> None:
        """Declare which rows of a larger batch these are (int64 ``[batch]``): from now on they
        evolve as they would there."""
        self.meta["rows"] = rows.tolist()

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        return list(self.state.values())

    def nbytes(self) -> int:
        """Bytes of all tensors, including allocated but unused memory."""
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in self.tensors())}
        return sum(storages.values())

    def random(self, *shape: int, where: Tensor | None = None) -> Tensor:
        """Uniform float64 numbers in [0, 1), ``[batch, heads, *shape]``; ``where`` as for
        ``streams``."""
        return random_numbers.uniform(self.streams(where), *shape)

    def streams(self, where: Tensor | None = None) -> Tensor:
        """A new random stream for every row and head: keys, int64 ``[batch, heads]``.

        It is the head's next one within this ``extend`` or ``merge``, so that it does not depend on
        the streams that other heads use.

        Args:
            where: bool ``[batch, heads]``, the heads that use one, which may depend only on their
                own state; the streams of the others are undefined. None: all.
        """
        found = random_numbers.derived(torch.tensor(self._number, device="cpu"), self._next)
        self._next = self._next + (1 if where is None else where)
        return found

    def _renew(self) -> None:
        """Make random streams for the next call, by one number of the object's generator."""
        if not self.randomised:
            return
        token = self.meta["token"]
        rows = torch.tensor(self.meta.get("rows", range(token["batch"])), device=token["device"])
        self._number = random_numbers.drawn(self.generator)
        self._next = random_numbers.places(rows, token["heads"])

    def put(self, prefix: str, slots: Slots) -> None:
        """Store slots in ``state`` as ``prefix.keys``, ``prefix.values`` and so on."""
        for name in FIELDS:
            self.state.pop(f"{prefix}.{name}", None)
        self.state.update({f"{prefix}.{name}": t for name, t in slots.tensors().items()})

    def get(self, prefix: str) -> Slots:
        """The slots stored by ``put``."""
        return Slots(
            **{
                name: self.state[f"{prefix}.{name}"]
                for name in FIELDS
                if f"{prefix}.{name}" in self.state
            }
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Sketch:
        """Copies continue the random stream from the same state."""
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        twin.generator = self.generator.clone_state()
        twin.state = {name: tensor.clone() for name, tensor in self.state.items()}
        twin.meta = dict(self.meta)
        return twin

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
        return dict(self.state), dict(self.meta), self.generator.get_state()

    def _restore(self, snapshot: tuple[dict[str, Tensor], dict[str, Any], Tensor]) -> None:
        self.state, self.meta = snapshot[0], snapshot[1]
        self.generator.set_state(snapshot[2])

    def _require_tokens(self) -> None:
        if not self.state:
            raise InputError("the sketch is empty: extend() it first")


def _mixed(*generators: torch.Generator) -> int:
    """A seed that depends on all of their states."""
    digest = blake2b(digest_size=7)
    for generator in generators:
        digest.update(generator.get_state().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def token_bytes(token: Slots) -> int:
    """Bytes of one token, kept unchanged, per KV head."""
    columns = 0 if token.positions is None else token.positions.element_size()
    return columns + sum(t.shape[-1] * t.element_size() for t in (token.keys, token.values))


def lengthened(tensor: Tensor, extra: int) -> Tensor:
    """``[batch, heads, slots, ...]`` with zeros for ``extra`` more slots at the end."""
    shape = (*tensor.shape[:2], extra, *tensor.shape[3:])
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=2)
