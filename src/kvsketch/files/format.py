"""States as files: written whole or not at all, read back byte by byte or refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.files import container
from kvsketch.state import State
from kvsketch.writing import whole

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write(path: Path, kind: str, header: dict[str, Any], state: State, new: bool = False) -> None:
    """Write a state to a file, as ``writing.whole`` does.

    Args:
        kind: what ``read`` must ask for.
        header: what the file says of itself, beside the state.
        new: no file is replaced.

    Raises:
        InputError: it cannot be written (a full disk, no such folder), or holds what JSON cannot.
            An older file is untouched.
        UnsupportedError: a tensor of another dtype than ``container.SIZES`` has.
    """
    for name, tensor in state.tensors.items():
        if tensor.dtype not in _NAMES:
            raise UnsupportedError(f"{name} is {tensor.dtype}, which kvsketch's files do not hold")
    named = sorted(state.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    table = [(name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in named]
    version = {"version": container.VERSION, "kind": kind}
    raw = container.make_table({**header, **version, "state": state.values}, table)
    with whole(path, repr(str(path)), new) as file:
        _write_to(file, raw, [tensor for _, tensor in named])


def _write_to(file: BinaryIO, raw: bytes, tensors: list[Tensor]) -> None:
    digest = hashlib.sha256(raw)
    file.write(raw)
    for tensor in tensors:  # one at a time: a device's memory is not copied as a whole
        flat = tensor.detach().contiguous().cpu().flatten()
        data = _bytes_of(flat.view(torch.uint8)) if flat.numel() else memoryview(b"")
        digest.update(data)
        file.write(data)
    file.seek(container.place_of_checksum(raw))
    file.write(digest.hexdigest().encode())


def read(path: Path, kind: str) -> tuple[dict[str, Any], State]:
    """The header and the state of a file, on the CPU. The memory taken is that of its tensors.

    Raises:
        InputError: as ``container.opened``, or the file is damaged.
    """
    with container.opened(path, kind) as (file, table):
        digest = hashlib.sha256(table.raw)
        tensors = {}
        for entry in table.entries:
            flat = torch.empty(entry.end - entry.start, dtype=torch.uint8, device="cpu")
            if flat.numel():
                data = _bytes_of(flat)
                if file.readinto(data) != len(data):  # type: ignore[attr-defined]
                    raise InputError(f"{str(path)!r} is truncated")
                digest.update(data)
            tensors[entry.name] = flat.view(_DTYPES[entry.dtype]).view(entry.shape)
        container.check_digest(digest.hexdigest(), table, path)
    header = dict(table.header)
    values = header.pop("state", None)
    if not isinstance(values, dict):
        raise InputError(f"{str(path)!r} was not written by kvsketch: it has no state")
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise InputError(f"{str(path)!r}: {name} holds what is neither true nor false")
    return header, State(tensors, values)


def _bytes_of(flat: Tensor) -> memoryview:
    """The memory of a tensor of bytes."""
    array: Any = flat.numpy()
    return memoryview(array)
