"""A kvsketch file: safetensors, with a JSON header and a checksum in its metadata.

``[8 bytes: length of the table][table, JSON][data]``, as safetensors has it; any safetensors reader
opens one. Nothing here imports torch. What is read may come from anywhere: every length is held
against the size of the file before it is believed, and the checksum is over every byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvsketch.errors import InputError

#: of the layout of what is in a file; 4 is the first in which slots have no zero points
VERSION = 4
#: the table of a file is at most so long: tables of a hundred layers take a tenth of it
MOST_TABLE = 1 << 22
_OTHER = "read it with the kvsketch that wrote it, or compress its document again"
HEADER, CHECKSUM = "kvsketch", "sha256"
#: regular expression of the first bytes of every file: the length of the table, and its first names
BEGINS = rb'.{8}\{"__metadata__":\{"kvsketch":'
#: bytes of an element, by safetensors' names of dtypes
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}

_UNKNOWN = "0" * 64
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: safetensors' name of its dtype, its shape, and where its bytes are in the
    data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Table:
    """
    Attributes:
        header: what the file says of itself: ``version``, ``kind`` and what its kind needs.
        entries: in the order of the data, which they cover.
        checksum: as the file has it.
        raw: the first bytes of the file, up to the data, without the checksum.
    """

    header: dict[str, Any]
    entries: list[Entry]
    checksum: str
    raw: bytes


def make_table(header: dict[str, Any], tensors: list[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The first bytes of a file, its checksum unknown.

    Args:
        header: what JSON can hold.
        tensors: name, dtype and shape of each, in the order of the data.

    Raises:
        InputError: the header is not JSON, or too long.
    """
    try:
        text = json.dumps(header, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InputError(f"the header cannot be represented in JSON: {error}") from error
    table: dict[str, Any] = {"__metadata__": {HEADER: text, CHECKSUM: _UNKNOWN}}
    start = 0
    for name, dtype, shape in tensors:
        end = start + size_of(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    raw = json.dumps(table, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MOST_TABLE:
        raise InputError(f"the header of {len(raw)} bytes is longer than {MOST_TABLE}")
    return len(raw).to_bytes(8, "little") + raw


def place_of_checksum(raw: bytes) -> int:
    """Where the checksum is among the first bytes of a file.

    Raises:
        InputError: nowhere, or in more than one place.
    """
    mark = f'"{CHECKSUM}":"'.encode()
    if raw.count(mark) != 1:
        raise InputError("it has no checksum, or more than one")
    return raw.index(mark) + len(mark)


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    size = SIZES[dtype]
    for length in shape:
        size *= length
    return size


@contextmanager
def opened(path: Path, kind: str) -> Iterator[tuple[BinaryIO, Table]]:
    """A file whose table has been checked, to read its data from.

    Args:
        kind: what it should hold: "cache" or a sketch's name.

    Raises:
        InputError: no such file, not a kvsketch file, truncated, damaged, another version or kind.
    """
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)  # opening a pipe would wait for a writer
    except (OSError, ValueError):
        regular = False
    if not regular:
        raise InputError(f"path={str(path)!r} is not a file")
    try:
        with path.open("rb") as file:
            yield file, _read_table(file, path, kind)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error


def _read_table(file: BinaryIO, path: Path, kind: str) -> Table:
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")  # of text, a number of 19 digits
    if not 2 <= length <= min(size - 8, MOST_TABLE):
        raise InputError(f"{str(path)!r} is not a kvsketch file, or a truncated one")
    raw = start + file.read(length)
    try:
        table = _strict_json(raw[8:])
        metadata = table.pop("__metadata__", {})
        if not isinstance(metadata, dict) or HEADER not in metadata:
            raise InputError(f"{str(path)!r} is a safetensors file that kvsketch did not write")
        header = _strict_json(metadata[HEADER].encode())
        version, found = header.get("version"), header.get("kind")
        entries = _entries(table, size - 8 - length)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else f"{error}"
        raise InputError(
            f"{str(path)!r} is not a kvsketch file, or a damaged one: {reason:.200}"
        ) from error
    if version != VERSION or type(version) is not int:
        raise InputError(
            f"{str(path)!r} has version {version!r:.40} of the file format, and this kvsketch "
            f"reads version {VERSION}: {_OTHER}"
        )
    if found != kind:
        raise InputError(f"{str(path)!r} holds a {found!r:.60}, not a {kind!r}")
    try:
        place = place_of_checksum(raw)
    except InputError as error:
        raise InputError(f"{str(path)!r}: {error}") from error
    checksum = raw[place : place + 64].decode("ascii", "replace")
    raw = raw[:place] + _UNKNOWN.encode() + raw[place + 64 :]
    return Table(header, entries, checksum, raw)


def verify(file: BinaryIO, table: Table, path: Path) -> None:
    """Read all data and hold it against the checksum.

    Raises:
        InputError: it is another.
    """
    digest = hashlib.sha256(table.raw)
    while block := file.read(_BLOCK):
        digest.update(block)
    check_digest(digest.hexdigest(), table, path)


def check_digest(digest: str, table: Table, path: Path) -> None:
    """Raise InputError unless this is the file's checksum."""
    if digest != table.checksum:
        raise InputError(
            f"{str(path)!r} is damaged: its checksum is {digest[:16]}..., it says "
            f"{table.checksum[:16]!r}..."
        )


def _strict_json(text: bytes) -> dict[str, Any]:
    """An object; no name twice, no NaN, no numbers beyond 64 bits."""
    found = json.loads(
        text.decode("utf-8"),
        object_pairs_hook=_unique,
        parse_constant=_no_constant,
        parse_int=_small_int,
    )
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _small_int(digits: str) -> int:
    if len(digits) > 19:
        raise ValueError(f"{digits[:19]}... is too large a number")
    return int(digits)


def _entries(table: dict[str, Any], size: int) -> list[Entry]:
    """The tensors, whose bytes must cover the data, one after the other."""
    entries = []
    for name, entry in table.items():
        shape, (start, end) = entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, end]
        if len(entry) != 3 or not all(type(x) is int and x >= 0 for x in numbers):
            raise ValueError(f"{name!r:.60} is no tensor")
        if size_of(entry["dtype"], tuple(shape)) != end - start:
            raise ValueError(f"{name!r:.60} does not fill its bytes")
        entries.append(Entry(name, entry["dtype"], tuple(shape), start, end))
    entries.sort(key=lambda entry: (entry.start, entry.end))
    at = 0
    for entry in entries:
        if entry.start != at:
            raise ValueError(f"the bytes before {entry.name!r:.60} are no tensor's")
        at = entry.end
    if at != size:
        raise ValueError(f"it has {size} bytes of data, and {at} belong to its tensors")
    return entries
