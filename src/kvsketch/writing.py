"""Atomic writing of files, and no file of another kind is replaced."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kvsketch.errors import InputError


def path_of(path: object, name: str) -> Path:
    """A path as given by a user.

    Raises:
        InputError: it is no path, or empty.
    """
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise InputError(f"{name}={path!r} must be the path of a file, as a str or a Path")
    return Path(path)


@contextmanager
def whole(path: Path, name: str, new: bool = False) -> Iterator[BinaryIO]:
    """A stream whose content becomes a file, atomically. It is written to a temporary file in the
    same folder, which replaces ``path`` once all of it is on the disk. Until then the old file is
    unchanged; of two concurrent writers, the last one wins. A device, such as /dev/stdout, is
    written to directly; if ``path`` is a link, its target is replaced.

    Args:
        name: name of the file in messages, such as "--out report.html".
        new: nothing is replaced, not even a link or what another writer has made meanwhile.

    Raises:
        InputError: it cannot be written.
    """
    try:
        target = path if new else Path(os.path.realpath(path))  # no error for a loop of links
        if not new and target.exists() and not target.is_file():
            with target.open("wb") as stream:
                yield stream
            return
        hidden = f".{target.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        made = target.with_name(hidden)
        try:
            with made.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            if new:
                target.hardlink_to(made)
            else:
                if target.exists():
                    made.chmod(target.stat().st_mode)
                made.replace(target)
        finally:
            with suppress(OSError):
                made.unlink()
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{name} cannot be written: {reason}") from error
    _sync_folder(target.parent)


def save_bytes(path: Path, data: bytes, name: str) -> None:
    """Write a file as ``whole`` does.

    Raises:
        InputError: it cannot be written.
    """
    with whole(path, name) as stream:
        stream.write(data)


def check_replaced(path: Path, option: str, begins: bytes, kind: str) -> None:
    """Raise InputError if writing to ``path`` would destroy a file of another kind, such as the
    text that a command reads. Links are followed; an empty file holds nothing to lose, and a
    device is not replaced.

    Args:
        begins: regular expression of the first bytes of every file of the kind.
        kind: its name, such as "a page of `kvsketch report`".
    """
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            first = file.read(4096)
    except (OSError, ValueError) as error:  # a name that is too long, or with a null byte
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{option} {path} cannot be read: {reason}") from error
    if first and re.match(begins, first, re.DOTALL) is None:
        raise InputError(
            f"{option} {path} exists and is not {kind}: it would be lost; name another file"
        )


def _sync_folder(folder: Path) -> None:
    """Also make the new name survive a loss of power; not all systems support this."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
