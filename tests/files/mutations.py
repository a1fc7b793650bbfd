"""Broken files: bytes changed or cut off, and content changed under a valid checksum."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvsketch.files.container import place_of_checksum

_WILD: list[Any] = [
    *(-1, 0, 1, 2, 3, 255, 1 << 31, 1 << 62, 0.0, -0.5, 1.5, 1e300, True, False, None),
    *("", "float32", "float16", "../../etc/passwd", "page", "heavy_merge", [], {}, [1], [16, 16]),
]


def parts(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The table of a file and its data."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def signed(table: dict[str, Any], data: bytes) -> bytes:
    """A file of a table and data, with a valid checksum."""
    table["__metadata__"]["sha256"] = "0" * 64
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    place = place_of_checksum(raw)
    digest = hashlib.sha256(raw + data).hexdigest().encode()
    return raw[:place] + digest + raw[place + 64 :] + data


def with_header(raw: bytes, change: Any) -> bytes:
    """A file whose header is changed, with a valid checksum."""
    table, data = parts(raw)
    header = json.loads(table["__metadata__"]["kvsketch"])
    change(header)
    table["__metadata__"]["kvsketch"] = json.dumps(header)
    return signed(table, data)


def blind(raw: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut off, removed or added, without regard to the format."""
    kind = rng.randrange(6)
    at = rng.randrange(len(raw)) if rng.random() < 0.5 else rng.randrange(min(3000, len(raw)))
    if kind == 0:
        return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]
    if kind == 1:
        return raw[:at] + rng.randbytes(rng.randrange(1, 9)) + raw[at + 8 :]
    if kind == 2:
        return raw[:at]
    if kind == 3:
        return raw[:at] + raw[at + rng.randrange(1, 100) :]
    if kind == 4:
        return raw + rng.randbytes(rng.randrange(1, 100))
    return rng.randbytes(8) + raw[8:]


def knowing(raw: bytes, rng: random.Random) -> bytes:
    """One change in the header, the table or the data, with a valid checksum."""
    table, data = parts(raw)
    kind = rng.randrange(4)
    names = [name for name in table if name != "__metadata__"]
    if kind <= 1:
        header = json.loads(table["__metadata__"]["kvsketch"])
        state = header["state"]
        _change(state if rng.random() < 0.9 else header, rng)
        table["__metadata__"]["kvsketch"] = json.dumps(header)
    elif kind == 2:
        name = rng.choice(names)
        entry = table[name]
        what = rng.randrange(4)
        if what == 0:
            table[rng.choice(["x", f"{name}x", "../../x"])] = table.pop(name)
        elif what == 1:
            entry["shape"] = entry["shape"][::-1]
        elif what == 2:
            entry["shape"] = [1, *entry["shape"]]
        else:
            entry["dtype"] = rng.choice(["F32", "I64", "U8", "BF16", "BOOL", "F64", "F16", "?"])
    else:
        start, end = table[rng.choice(names)]["data_offsets"]
        new = bytearray(data)
        if end > start:
            width = min(8, end - start)
            at = start + rng.randrange((end - start) // width) * width
            wild = [rng.randbytes(8), b"\xff" * 8, np.float32([np.nan] * 2).tobytes()]
            wild += [np.int64([1 << 40]).tobytes(), np.float32([np.inf] * 2).tobytes()]
            new[at : at + width] = rng.choice(wild)[:width]
        data = bytes(new)
    return signed(table, data)


def _change(values: Any, rng: random.Random) -> None:
    """Change, drop or add one value at any depth."""
    while True:
        keys: list[Any] = list(values) if isinstance(values, dict) else list(range(len(values)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(values[key], (dict, list)) and values[key] and rng.random() < 0.9:
            values = values[key]
            continue
        kind = rng.randrange(5)
        if kind == 0 and isinstance(values, dict):
            del values[key]
        elif kind == 1 and isinstance(values, dict):
            values["new"] = rng.choice(_WILD)
        elif kind == 2 and type(values[key]) is int:
            values[key] += rng.choice([-1, 1, 7, 1000])
        else:
            values[key] = copy.deepcopy(rng.choice(_WILD))
        return


def mutants(path: Path, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Broken versions of a file, half of them with a valid checksum."""
    raw, rng = path.read_bytes(), random.Random(seed)
    for number in range(count):
        if number % 2:
            yield "knowing", knowing(raw, rng)
        else:
            yield "blind", blind(raw, rng)
