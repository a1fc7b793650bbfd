"""Peers that are not packages: a file in a checkout whose folder an environment variable names."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from benchmarks.peers.exchange import PeerError
from kvsketch import InputError


def missing(variable: str, file: str, function: str, arguments: Sequence[str]) -> str | None:
    """Why the peer cannot be used, or None if it can. The arguments are those of ``load``."""
    try:
        load(variable, file, function, arguments)
    except PeerError as error:
        return str(error)
    return None


def load(variable: str, file: str, function: str, arguments: Sequence[str]) -> Callable[..., Any]:
    """Load ``function`` from ``file`` in the folder that the environment variable names.

    Raises:
        PeerError: the variable is not set, the file does not exist or cannot be imported, or the
            function does not take these arguments, because it has another version.
    """
    folder = os.environ.get(variable)
    if not folder:
        return _refuse(f"{variable} is not set: it names a checkout that has {file}")
    return _load(Path(folder) / file, function, tuple(arguments))


@cache
def _load(path: Path, function: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    if not path.is_file():
        return _refuse(f"{path} is not there")
    # A package without its own first file, so that the file may import those beside it.
    package = ModuleType(f"kvsketch_peer_{path.parent.name}")
    package.__path__ = [str(path.parent)]
    sys.modules[package.__name__] = package
    spec = importlib.util.spec_from_file_location(f"{package.__name__}.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # Other authors' code may raise any error.
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
