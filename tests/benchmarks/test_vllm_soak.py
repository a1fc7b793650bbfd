"""The files that the benchmark of a long run of an engine changes."""

from __future__ import annotations

import random

import pytest

from benchmarks.vllm_soak import Folder


@pytest.mark.parametrize("seed", range(3))
def test_files_come_and_go(seed, tmp_path):
    """Every file is added once before any comes back; files are whole or damaged, and no other is
    left in the folder."""
    source, shelf = tmp_path / "source", tmp_path / "shelf"
    source.mkdir()
    shelf.mkdir()
    for number in range(30):
        (source / f"{number}.kvs").write_bytes(bytes([number]) * 100)
    files, seen = Folder(source, shelf, 30, random.Random(seed)), set()
    for _ in range(300):
        files.change()
        seen |= {path.name for path in shelf.iterdir()}
    whole = {path.name: path.read_bytes() for path in source.iterdir()}
    assert seen == whole.keys()
    assert all(count > 0 for count in files.done.values())
    assert sum(files.done.values()) == 300
    different = [path for path in shelf.iterdir() if path.read_bytes() != whole[path.name]]
    assert len(different) <= files.done["damaged"]
    files.empty()
    assert not list(shelf.iterdir())
    files.all_of_them()
    assert {path.name for path in shelf.iterdir()} == seen
