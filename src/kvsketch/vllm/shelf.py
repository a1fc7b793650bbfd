"""Compressed documents in a folder, found by the tokens with which a prompt begins."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsketch.errors import InputError, KVSketchError
from kvsketch.files import container
from kvsketch.files.tokens import Mark, mark_of, marks
from kvsketch.hf.saving import KIND
from kvsketch.vllm import metrics

SUFFIX = ".kvs"
#: files of a folder that are looked at, the first by name
MOST = 10_000
# The folder is trusted to be unchanged if its last change is this many seconds ago: times of files
# are coarse. Files that could not be used are looked at again as often.
_SETTLED = 1.0

#: time of the last change, and bytes
Stamp = tuple[int, int]


@dataclass(frozen=True)
class Found:
    """A document.

    Attributes:
        name: of the file in the folder.
        stamp: of the file when its header was read.
        mark: of its tokens.
    """

    name: str
    stamp: Stamp
    mark: Mark

    @property
    def tokens(self) -> int:
        """How many it holds."""
        return self.mark[0]


class Shelf:
    """The documents of a folder. It is read again when it changes, and only files that changed.

    Args:
        folder: only regular files directly in it are used.
        check: raises ``KVSketchError`` for the header of a file that cannot be used.
        say: is told once of a file that is not used, and why.
    """

    def __init__(
        self, folder: str, check: Callable[[dict[str, Any]], None], say: Callable[[str], None]
    ) -> None:
        self._folder, self._check, self._say = Path(folder), check, say
        self._files: dict[str, tuple[Stamp, Found | None]] = {}  # None: it cannot be used
        self._known: dict[Mark, Found] = {}
        self._counts: list[int] = []
        self._changed, self._looked, self._many = 0, 0.0, False
        self._look()

    def find(self, ids: Sequence[int], above: int = 0) -> Found | None:
        """The longest document of more than ``above`` tokens with which a prompt begins, and after
        which at least one of its tokens is left."""
        if self._stale():
            self._look()
        counts = [count for count in self._counts if above < count < len(ids)]
        for mark in reversed(marks(ids[: counts[-1]], counts) if counts else []):
            found = self._known.get(mark)
            if found is None:
                continue
            if stamp_of(self._folder / found.name) == found.stamp:
                return found
            self._look()  # it was written anew or removed
            return self.find(ids, above)
        return None

    def reject(self, found: Found) -> None:
        """Do not use a file until it changes."""
        if self._files.get(found.name, (None, None))[0] == found.stamp:
            self._files[found.name] = found.stamp, None
            self._index()

    def _stale(self) -> bool:
        try:
            changed = os.stat(self._folder).st_mtime_ns
        except OSError:
            changed = 0
        if changed != self._changed or time.time() - changed / 1e9 < _SETTLED:
            return True
        if time.monotonic() - self._looked < _SETTLED:
            return False
        return any(found is None for _, found in self._files.values())

    def _look(self) -> None:
        self._looked = time.monotonic()
        names: list[str] = []
        try:
            self._changed = os.stat(self._folder).st_mtime_ns
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(SUFFIX))
        except OSError as error:
            self._changed = 0
            if self._files:
                self._say(f"documents={str(self._folder)!r} cannot be read: {error.strerror}")
        if len(names) > MOST and not self._many:
            self._many = True
            self._say(f"documents={str(self._folder)!r}: only the first {MOST:,} files are used")
        before, self._files = self._files, {}
        for name in names[:MOST]:
            stamp = stamp_of(self._folder / name)
            known = before.get(name)
            if known is None or known[0] != stamp:
                known = stamp, self._read(name, stamp)
            self._files[name] = known
        self._index()

    def _read(self, name: str, stamp: Stamp) -> Found | None:
        try:
            header = header_of(self._folder / name)
            self._check(header)
            return Found(name, stamp, mark_of(header))
        except KVSketchError as error:
            self._say(f"{name} is not used: {error}")
            metrics.add(unusable=1)
            return None

    def _index(self) -> None:
        usable = [found for _, found in self._files.values() if found is not None]
        self._known = {found.mark: found for found in reversed(usable)}  # the first by name
        self._counts = sorted({found.tokens for found in usable})


def header_of(path: Path) -> dict[str, Any]:
    """The header of a regular file.

    Raises:
        InputError: a link, a folder, or not a whole file of a compressed document.
    """
    if not stat.S_ISREG(_mode(path)):
        raise InputError(f"{path.name!r} is not a regular file (links are not followed)")
    with container.opened(path, KIND) as (_, table):
        return table.header


def _mode(path: Path) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError as error:
        raise InputError(f"{path.name!r} cannot be read: {error.strerror}") from error


def stamp_of(path: Path) -> Stamp:
    """Of a file, not of what a link names; zeros if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
