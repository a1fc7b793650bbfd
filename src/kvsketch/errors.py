"""The errors of kvsketch, all derived from KVSketchError, and its warning."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral


class KVSketchError(Exception):
    """Base class of all errors that kvsketch raises deliberately."""


class InputError(KVSketchError, ValueError):
    """An argument is wrong. The message names the argument, its value and the allowed values."""


class UnsupportedError(KVSketchError, NotImplementedError):
    """The request is valid in general, but not for this model or in this state of the cache."""


class AccuracyWarning(UserWarning):
    """What was asked for can be done, and answers from it are known or measured to be bad."""


def at_least(name: str, value: object, least: int) -> int:
    """``value`` if it is an int >= ``least``.

    Raises:
        InputError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name}={value!r} must be an int >= {least}")
    return int(value)


def check_seed(seed: object) -> None:
    """Raise InputError unless a seed is a whole number of 64 bits."""
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise InputError(f"seed={seed!r} must be an int")
    if not -(2**63) <= int(seed) < 2**63:
        raise InputError(f"seed={seed} must fit into 64 bits")


def unknown_name(kind: str, name: object, allowed: Iterable[str]) -> InputError:
    """The error for a name that is not in a registry; it suggests the nearest one."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return InputError(f"{kind}={name!r} is unknown{hint} Allowed: {', '.join(names)}.")
