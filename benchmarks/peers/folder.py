"""Peers that are not packages: a file in a checkout whose folder an environment variable names."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from torch import Tensor

from benchmarks.peers.exchange import PeerError
from kvsketch import InputError


def missing(
    variable: str,
    file: str,
    function: str,
    arguments: Sequence[str],
    beside: Mapping[str, str] = MappingProxyType({}),
) -> str | None:
    """Why the peer cannot be used, or None if it can. The arguments are those of ``load``."""
    try:
        load(variable, file, function, arguments, beside)
    except PeerError as error:
        return str(error)
    return None


def load(
    variable: str,
    file: str,
    function: str,
    arguments: Sequence[str],
    beside: Mapping[str, str] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Load ``function`` from ``file`` in the folder that the environment variable names.

    Args:
        beside: names that the file imports from its package, and the files that have them.

    Raises:
        PeerError: the variable is not set, the file does not exist or cannot be imported, or the
            function does not take these arguments, because it has another version.
    """
    folder = os.environ.get(variable)
    if not folder:
        return _refuse(f"{variable} is not set: it names a checkout that has {file}")
    return _load(Path(folder), file, function, tuple(arguments), tuple(beside.items()))


@cache
def _load(
    folder: Path,
    file: str,
    function: str,
    arguments: tuple[str, ...],
    beside: tuple[tuple[str, str], ...] = (),
) -> Callable[..., Any]:
    path = folder / file
    if not path.is_file():
        return _refuse(f"{path} is not there")
    # Packages without their own first files, so that the file may import those beside and above it.
    name = f"kvsketch_peer_{zlib.crc32(str(folder).encode())}"
    for place in (folder, *reversed(path.relative_to(folder).parents[:-1])):
        name = name if place == folder else f"{name}.{place.name}"
        package = sys.modules.setdefault(name, ModuleType(name))
        package.__path__ = [str(folder / place)]
    for imported, other in beside:
        if (folder / other).is_file():
            setattr(package, imported, _load(folder, other, imported, ()))
    spec = importlib.util.spec_from_file_location(f"{package.__name__}.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # Other authors' code may raise any error.
        del sys.modules[spec.name]
        raise PeerError(f"{path} does not import: {error!r}") from error
    found: Callable[..., Any] | None = getattr(module, function, None)
    if found is None:
        return _refuse(f"{path} has no function {function}: another version than we speak to")
    absent = [name for name in arguments if name not in inspect.signature(found).parameters]
    if absent:
        return _refuse(f"{function} in {path} takes no {', '.join(absent)}: another version")
    return found


def _refuse(reason: str) -> Any:
    raise PeerError(reason)


def check_rounds(keys: Tensor, rounds: int, even: bool = False) -> None:
    """Raise InputError if n tokens cannot be halved ``rounds`` times (``even``: evenly)."""
    n = keys.shape[2]
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1 or n >> rounds < 1:
        raise InputError(f"rounds={rounds!r} must be an int >= 1 with 2^rounds <= n={n}")
    if even and n % (1 << rounds):
        raise InputError(f"n={n} tokens must be a multiple of 2^rounds={1 << rounds}")
