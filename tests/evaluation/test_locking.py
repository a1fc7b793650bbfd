"""The lock of a results store, on this system and by the functions of Windows."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kvsketch.errors import InputError
from kvsketch.evaluation.runner import locking
from kvsketch.evaluation.runner.setups import Setup
from kvsketch.evaluation.runner.store import Record, Store

HOLDER = """
import sys
from pathlib import Path
from kvsketch.evaluation.runner.store import Store
with Store(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    words = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="is being written by another process"):
            Store(path)
        other.kill()  # the lock ends with its process
    Store(path).close()


def test_windows_locks_a_byte_beyond_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for msvcrt, the locked byte is beyond the file, records are still appended at
    its end, and a lock in use is an error."""
    places: list[tuple[int, int]] = []
    held: set[int] = set()

    def locking_of(descriptor: int, mode: int, count: int) -> None:
        place = os.lseek(descriptor, 0, os.SEEK_CUR)
        if mode != 2 or place in held:
            raise OSError(36, "Resource deadlock avoided")
        held.add(place)
        places.append((place, count))

    stand_in = types.ModuleType("msvcrt")
    stand_in.locking, stand_in.LK_NBLCK = locking_of, 2  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "msvcrt", stand_in)
        patch.setattr(sys, "platform", "win32")
        windows = importlib.reload(locking)
    try:
        path = tmp_path / "run.jsonl"
        monkeypatch.setattr("kvsketch.evaluation.runner.store.lock", windows.lock)
        record = Record({"setup": Setup("exact").identity()}, {"score": 1.0})
        with Store(path) as store:
            store.add(record)
            with pytest.raises(InputError, match="is being written by another process"):
                Store(path)
        assert places == [(1 << 40, 1)]
        held.clear()  # closing the file does this
        with Store(path) as store:
            assert len(store) == 1
            store.add(Record({"setup": "another"}, {"score": 0.0}))
        assert len(path.read_bytes().splitlines()) == 2
    finally:
        importlib.reload(locking)
