"""Text files that a user names, and folders that results go to."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from kvsketch.errors import InputError


def read_text(path: Path, what: str = "") -> str:
    """A UTF-8 file's text, without a byte order mark.

    Args:
        what: comes before the path in messages, such as "--data".

    Raises:
        InputError: it cannot be read, or is not UTF-8.
    """
    name = f"{what} {path}".lstrip()
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text") from error


def check_folder(folder: Path, option: str) -> None:
    """Create a folder and try to write into it, before minutes of work.

    Raises:
        InputError: that fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{option} {folder} cannot be written: {error.strerror or error}"
        ) from error


def try_folder(folder: Path, option: str) -> None:
    """As ``check_folder``, but remove the folder again, because a later check may fail.

    Raises:
        InputError: as ``check_folder``.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        check_folder(folder, option)
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
