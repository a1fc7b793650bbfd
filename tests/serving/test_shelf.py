"""Documents in a folder, found by the tokens with which a prompt begins."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvsketch.errors import InputError
from kvsketch.files import container
from kvsketch.files.format import write
from kvsketch.files.tokens import mark_of, marks, told
from kvsketch.state import State
from kvsketch.vllm import shelf
from kvsketch.vllm.shelf import Shelf


class Said(list[str]):
    def shelf(self, folder: Path) -> Shelf:
        return Shelf(str(folder), check, self.append)


def check(header: dict[str, Any]) -> None:
    if header["model"] != "ours":
        raise InputError("model: another model")


def put(path: Path, ids: list[int] | None, model: str = "ours") -> None:
    about = {} if ids is None else {"ids": told(ids)}
    write(path, "cache", {"model": model, "about": about}, State())


def old(folder: Path) -> None:
    """Its last change is long ago, as that of a folder that is not being changed."""
    os.utime(folder, (1, 1))


def test_hashes_are_those_of_ids_in_four_bytes():
    digest = "4636993d3e1da4e9d6b8f87b79e8f7c6d018580d52661950eabc3845c5897a4d"
    assert told([1, 2, 3]) == {"count": 3, "sha256": digest}
    assert marks(list(range(9)), [2, 5]) == [
        (2, told([0, 1])["sha256"]),
        (5, told([0, 1, 2, 3, 4])["sha256"]),
    ]


@pytest.mark.parametrize(
    "ids", [None, 3, {}, {"count": 0, "sha256": "0" * 64}, {"count": True, "sha256": "0" * 64}]
)
def test_a_header_without_tokens_is_refused(ids):
    with pytest.raises(InputError, match="does not say which tokens"):
        mark_of({"about": {"ids": ids}})


def test_the_longest_document_that_a_prompt_begins_with(tmp_path):
    ids, said = list(range(100, 200)), Said()
    for count in (10, 40, 70):
        put(tmp_path / f"{count}.kvs", ids[:count])
    put(tmp_path / "other.kvs", [1, *ids[1:90]])
    found = said.shelf(tmp_path)

    def name(prompt: list[int], above: int = 0) -> str | None:
        one = found.find(prompt, above)
        return None if one is None else one.name

    assert name(ids) == "70.kvs"
    assert name(ids[:71]) == "70.kvs"
    assert name(ids[:70]) == "40.kvs"  # a token is left to read
    assert name([*ids[:50], 3, 4]) == "40.kvs"
    assert name(ids, above=69) == "70.kvs"
    assert name(ids, above=70) is None
    assert name(ids[1:]) is None
    assert said == []


def test_a_folder_that_changes(tmp_path):
    first, second, said = list(range(30)), list(range(50, 80)), Said()
    put(tmp_path / "a.kvs", first)
    found = said.shelf(tmp_path)
    old(tmp_path)
    assert found.find([*first, 1]) is not None
    put(tmp_path / "b.kvs", second)
    assert found.find([*second, 1]).name == "b.kvs"
    (tmp_path / "a.kvs").unlink()
    assert found.find([*first, 1]) is None
    # written anew in place, which does not change the folder
    old(tmp_path)
    assert found.find([*second, 1]) is not None
    put(tmp_path.parent / "new.kvs", first)
    (tmp_path / "b.kvs").write_bytes((tmp_path.parent / "new.kvs").read_bytes())
    old(tmp_path)
    assert found.find([*second, 1]) is None
    assert found.find([*first, 1]).name == "b.kvs"
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.rmdir()
    assert found.find([*first, 1]) is None
    assert said == [f"documents={str(tmp_path)!r} cannot be read: No such file or directory"]


def test_files_that_cannot_be_used_are_named_once(tmp_path):
    ids, said, folder = list(range(30)), Said(), tmp_path / "documents"
    folder.mkdir()
    put(tmp_path / "outside.kvs", ids)
    (folder / "link.kvs").symlink_to(tmp_path / "outside.kvs")
    (folder / "folder.kvs").mkdir()
    os.mkfifo(folder / "pipe.kvs")
    put(folder / "model.kvs", ids, model="another")
    put(folder / "older.kvs", None)
    whole = (tmp_path / "outside.kvs").read_bytes()
    (folder / "half.kvs").write_bytes(whole[: len(whole) // 2])
    (folder / "notes.txt").write_text("no document")
    found = said.shelf(folder)
    for _ in range(3):
        assert found.find([*ids, 1]) is None
        old(folder)
    lines = dict(line.split(" is not used: ") for line in said)
    assert len(lines) == len(said) == 6
    for name in ("link.kvs", "folder.kvs", "pipe.kvs"):
        assert "is not a regular file" in lines[name]
    assert lines["model.kvs"] == "model: another model"
    assert "does not say which tokens" in lines["older.kvs"]
    assert "truncated" in lines["half.kvs"]
    # the second half arrives, and the folder does not change
    (folder / "half.kvs").write_bytes(whole)
    old(folder)
    found._looked -= 2 * shelf._SETTLED
    assert found.find([*ids, 1]).name == "half.kvs"


def test_a_document_that_was_rejected_is_used_again_when_it_changes(tmp_path):
    ids, said = list(range(30)), Said()
    put(tmp_path / "a.kvs", ids)
    found = said.shelf(tmp_path)
    one = found.find([*ids, 1])
    found.reject(one)
    old(tmp_path)
    found._looked -= 2 * shelf._SETTLED
    assert found.find([*ids, 1]) is None
    put(tmp_path / "a.kvs", ids)
    assert found.find([*ids, 1]).stamp != one.stamp


def test_a_folder_is_read_once_while_it_does_not_change(tmp_path, monkeypatch):
    ids, said, opened = list(range(30)), Said(), []
    put(tmp_path / "a.kvs", ids)
    found = said.shelf(tmp_path)
    old(tmp_path)
    found.find(ids)
    real = container.opened
    monkeypatch.setattr(container, "opened", lambda *args: opened.append(args) or real(*args))
    monkeypatch.setattr(os, "listdir", pytest.fail)
    for _ in range(3):
        assert found.find([*ids, 1]) is not None
    monkeypatch.undo()
    monkeypatch.setattr(container, "opened", lambda *args: opened.append(args) or real(*args))
    put(tmp_path / "b.kvs", ids[:5])
    assert found.find([*ids, 1]) is not None
    assert len(opened) == 1


def test_only_so_many_files_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(shelf, "MOST", 2)
    said = Said()
    for number in range(4):
        put(tmp_path / f"{number}.kvs", [number, 1, 2])
    found = said.shelf(tmp_path)
    assert [found.find([n, 1, 2, 3]) is not None for n in range(4)] == [True, True, False, False]
    assert len(said) == 1
    assert "only the first 2 files" in said[0]


def test_many_lengths_take_little_time(tmp_path):
    said = Said()
    found = said.shelf(tmp_path)
    found._counts = list(range(1, 10_001))
    ids = list(range(20_000))
    start = time.perf_counter()
    assert found.find(ids) is None
    assert time.perf_counter() - start < 1
