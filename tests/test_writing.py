"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvsketch.errors import InputError
from kvsketch.writing import save_bytes, whole


def test_what_was_there_stays_until_the_new_content_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    save_bytes(path, b"old", "--out")
    path.chmod(0o640)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match="--out cannot be written: No space left"):
            save_bytes(path, b"new", "--out")
        with pytest.raises(InputError):
            save_bytes(tmp_path / "other.html", b"new", "--out")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]  # and nothing else
    save_bytes(path, b"new", "--out")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_links_and_devices(tmp_path: Path) -> None:
    path, link = tmp_path / "real", tmp_path / "link"
    path.write_bytes(b"old")
    link.symlink_to(path)
    save_bytes(link, b"new", "it")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    save_bytes(Path(os.devnull), b"gone", "it")
    assert not Path(os.devnull).is_file()
    with pytest.raises(InputError, match="it cannot be written"):
        save_bytes(path / "below", b"", "it")


def test_a_new_file_replaces_nothing(tmp_path: Path) -> None:
    """Not even what another writer has made meanwhile, nor what a link names."""
    path, link = tmp_path / "new", tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")

    def write(target: Path, meanwhile: bytes | None = None) -> None:
        with whole(target, "x", new=True) as stream:
            stream.write(b"mine")
            if meanwhile is not None:
                target.write_bytes(meanwhile)

    with pytest.raises(InputError, match="x cannot be written: File exists"):
        write(path, b"theirs")
    with pytest.raises(InputError, match="File exists"):
        write(link)
    assert path.read_bytes() == b"theirs"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "new"]
    path.unlink()
    write(path)
    assert path.read_bytes() == b"mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "new"]
