"""Results that survive anything: one JSON line per answered case, each complete in itself.

A line says what was run (``identity``: everything its outcome depends on) and what came out
(``result``). Its key is a hash of the identity, so a store may hold any number of models, tasks,
methods and settings, a rerun finds what is there, and stores can be concatenated. A line is
written by a single append: a killed run loses at most the case it was working on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsketch.errors import InputError, KVSketchError
from kvsketch.evaluation.runner.locking import lock

FORMAT = 1
#: Windows would write two bytes for the end of a line
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True)
class Record:
    """One line.

    Attributes:
        identity: what was run: task, case, model, method, budget, seed, settings, versions.
        result: what came out: score, text, bytes, seconds.
    """

    identity: Mapping[str, Any]
    result: Mapping[str, Any]

    @property
    def key(self) -> str:
        return key_of(self.identity)


def key_of(identity: Mapping[str, Any]) -> str:
    """Hash of an identity: 24 hexadecimal digits. 1 (one slot) and 1.0 (everything) differ."""
    text = json.dumps(identity, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class Store:
    """Records in memory and, with a path, in a file that later runs continue. One process writes a
    file at a time.

    Args:
        path: JSON lines, made where it is not there; None keeps everything in memory.
        write: False only reads, and needs no lock.

    Raises:
        InputError: the file is not such a store, holds lines of another version, is being written
            by another process, or cannot be opened; nothing of it is lost then.
    """

    def __init__(self, path: Path | None, write: bool = True) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        self._descriptor: int | None = None
        self._made = False
        if path is None:
            return
        if not write:
            self._take(path, _read(path))
            return
        # A device such as /dev/full is written to, not read.
        existing, self._made = path.is_file(), not path.exists()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, _FLAGS, 0o644)
        except OSError as error:
            raise InputError(f"--out {path} cannot be written: {_reason(error)}") from error
        try:
            try:
                lock(self._descriptor)
            except OSError as error:
                raise InputError(
                    f"--out {path} is being written by another process; wait for it, or give "
                    "another file (stores can be concatenated afterwards)"
                ) from error
            if existing:
                whole = self._take(path, _read(path))
                os.ftruncate(self._descriptor, whole)
        except BaseException:
            self.close()
            raise

    def _take(self, path: Path, raw: bytes) -> int:
        """Take in what a file holds; returns where its last whole line ends."""
        end = raw.rfind(b"\n") + 1  # a killed run may leave half a line
        if raw and not end:
            raise _foreign(path, 1)
        for number, line in enumerate(raw[:end].split(b"\n")[:-1], start=1):
            record = _parsed(path, number, line)
            self.records[record.key] = record
        return end

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records.values())

    def add(self, record: Record) -> None:
        """Keep a record.

        Raises:
            KVSketchError: the file cannot take it (disk full); what it held before is intact.
        """
        if self._descriptor is not None:
            self._append(record)
        self.records[record.key] = record

    def _append(self, record: Record) -> None:
        assert self._descriptor is not None
        line = {"format": FORMAT, "identity": record.identity, "result": record.result}
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        before = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, data)
            if written < len(data):
                raise OSError(f"only {written} of {len(data)} bytes were taken")
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, before)
            self.close()
            raise KVSketchError(
                f"--out {self.path} cannot be written: {_reason(error)}; the {len(self)} finished "
                "cases in it are kept: make room and run the same command again"
            ) from error

    def close(self) -> None:
        """Close the file and let others write it; what was added stays readable in memory."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def discard(self) -> None:
        """Close the file, and remove it where it was made for this and holds nothing: a run that is
        refused leaves none behind."""
        if self._made and self.path is not None and not self.records:
            with suppress(OSError):
                self.path.unlink()
        self.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {_reason(error)}") from error


def _parsed(path: Path, number: int, line: bytes) -> Record:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not {"format", "identity", "result"} <= set(found):
        raise _foreign(path, number)
    if found["format"] != FORMAT:
        raise InputError(
            f"{path}:{number} is of format {found['format']!r}, this version reads {FORMAT}; "
            "nothing was changed"
        )
    return Record(found["identity"], found["result"])


def _foreign(path: Path, number: int) -> InputError:
    return InputError(
        f"{path}:{number} is not a line of a results store; nothing was changed: give another file"
    )


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
