"""Which tokens a file holds: their number, and a hash of their ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvsketch.errors import InputError

#: a number of tokens, and the SHA-256 of their ids, each in four bytes, least significant first
Mark = tuple[int, str]


def marks(ids: Sequence[int], counts: Iterable[int]) -> list[Mark]:
    """The marks of the first tokens, for some ascending numbers of them.

    Args:
        ids: token ids, at least as many as the largest of ``counts``.
    """
    data = np.asarray(ids, dtype="<i4").tobytes()
    found, digest, start = [], hashlib.sha256(), 0
    for count in counts:
        digest.update(data[4 * start : 4 * count])
        found.append((count, digest.copy().hexdigest()))
        start = count
    return found


def told(ids: Sequence[int]) -> dict[str, Any]:
    """The mark of all of them for a file's header, which ``mark_of`` reads."""
    (found,) = marks(ids, [len(ids)])
    return {"count": found[0], "sha256": found[1]}


def mark_of(header: dict[str, Any]) -> Mark:
    """What a file's header says.

    Raises:
        InputError: it does not say which tokens it holds.
    """
    about = header.get("about")
    found = said_mark(about.get("ids") if isinstance(about, dict) else None)
    if found is None:
        raise InputError(
            "the file does not say which tokens it holds: it is older, or was appended to, merged "
            "or saved after a chat; compress the whole text again with `kvsketch compress`"
        )
    return found


def said_mark(said: Any) -> Mark | None:
    """What ``told`` has written, or None if this is nothing of the kind."""
    count, digest = (said.get("count"), said.get("sha256")) if isinstance(said, dict) else (0, "")
    if type(count) is not int or count < 1 or not isinstance(digest, str) or len(digest) != 64:
        return None
    return count, digest
