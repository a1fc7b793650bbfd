"""Sketches on disk: one safetensors file, its JSON header versioned."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ...errors import InputError

_VERSION = 1
_HEADER = "kvsketch"
_GENERATOR = "generator"


def write_sketch(
    path: Path, header: dict[str, Any], state: dict[str, Tensor], generator: Tensor
) -> None:
    """Write to a temporary file beside ``path``, then move it there.

    Raises:
        InputError: the file cannot be written; an older file at ``path`` is untouched.
    """
    tensors = {f"state.{name}": tensor.contiguous().cpu() for name, tensor in state.items()}
    tensors[_GENERATOR] = generator
    text = json.dumps({"version": _VERSION, **header}, allow_nan=False, sort_keys=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(save(tensors, metadata={_HEADER: text}))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"cannot write the sketch to {str(path)!r}: {error}") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_sketch(
    path: Path, name: str, device: str | torch.device
) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """Header, state and generator state of a saved sketch.

    Raises:
        InputError: missing, truncated or foreign file, another kind of sketch, a newer version.
    """
    if not path.is_file():
        raise InputError(f"path={str(path)!r} is not a file")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{str(path)!r} is not a readable safetensors file (truncated?): {error}"
        ) from error
    try:
        header = json.loads(metadata[_HEADER])
        version, kind = header["version"], header["sketch"]
        fields = {key: header[key] for key in ("parameters", "seed", "seen", "meta")}
        generator = tensors.pop(_GENERATOR).cpu()
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{str(path)!r} was not written by kvsketch: {error!r}") from error
    if version != _VERSION:
        raise InputError(f"{str(path)!r} has version {version}; this kvsketch reads {_VERSION}")
    if kind != name:
        raise InputError(f"{str(path)!r} holds a {kind!r} sketch, not {name!r}")
    return fields, {key.removeprefix("state."): t for key, t in tensors.items()}, generator
