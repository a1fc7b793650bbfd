"""Long texts from a file, a folder, or a data set of the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvsketch.errors import InputError
from kvsketch.evaluation.runner import hub
from kvsketch.evaluation.runner.files import read_text
from kvsketch.evaluation.tasks.haystack import essays_folder, filler

_FIELD = "text"


def load_texts(data: str | None) -> Iterator[tuple[str, str]]:
    """Where a text is from, and the text, one after the other.

    Args:
        data: a ``.txt`` or ``.jsonl`` file (a ``text`` in every line), a folder of such files in
            the order of their names, or ``hub:NAME[:CONFIGURATION[:SPLIT]]``, a data set with a
            column ``text`` (split ``test`` unless said; read as far as it is needed). None: the
            essays beside a checkout, else filler.

    Raises:
        InputError: nothing there, or not such data, naming file and line.
    """
    if data is not None and data.startswith("hub:"):
        return _from_hub(data.removeprefix("hub:"))
    if data is None:
        if not essays_folder().is_dir():
            found = filler()
            return iter([(found.name, " ".join(found.words))])
        data = str(essays_folder())
    path = Path(data)
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".txt", ".jsonl"))
        if not files:
            raise InputError(f"--data {path} holds no .txt or .jsonl files")
        return (found for file in files for found in _of_file(file))
    if not path.is_file():
        raise InputError(
            f"--data {data} is not there; allowed: a .txt or .jsonl file, a folder of them, or "
            "hub:NAME[:CONFIGURATION[:SPLIT]]"
        )
    return _of_file(path)


def _of_file(path: Path) -> Iterator[tuple[str, str]]:
    text = read_text(path, "--data")
    if path.suffix != ".jsonl":
        yield path.name, text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{path}:{number}"
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise InputError(f"--data {where} is not JSON: {error}") from error
            yield where, _text_of(record, where)


def _text_of(record: Any, where: str) -> str:
    text = record.get(_FIELD) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise InputError(f"--data {where} has no {_FIELD!r} that is a string")
    return text


def _from_hub(name: str) -> Iterator[tuple[str, str]]:
    """Streamed, so that a book corpus is not fetched for a few of its pages."""
    hub.unreachable()  # then reading fails at once; `datasets` looks when it is imported
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"--data hub:{name} needs datasets: pip install 'kvsketch[evaluation]'"
        ) from error
    path, _, rest = name.partition(":")
    configuration, _, split = rest.partition(":")
    try:
        rows = datasets.load_dataset(
            path, configuration or None, split=split or "test", streaming=True
        )
        for number, record in enumerate(rows, start=1):
            where = f"hub:{name}, record {number}"
            yield where, _text_of(record, where)
    except InputError:
        raise
    except Exception as error:  # datasets, fsspec, pyarrow and httpx have errors of their own
        reason = hub.reason_of(error)
        raise InputError(f"--data hub:{name} could not be read: {reason}") from error
