"""Metrics of pages and their compression for vLLM's ``/metrics`` endpoint.

Workers run in other processes than the server. Each writes its numbers to a small file, which the
server's collector reads on every scrape.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_FOLDER = "KVSKETCH_STATS_DIR"
#: Metrics and their descriptions. Tokens and slots are those of one layer; the others are summed
#: over all layers and ranks.
NAMES = {
    "tokens": "Tokens that were read or written.",
    "compressions": "Compressions of a page, in all layers and on all ranks.",
    "error": "Relative error that compressions add to the output of the last query, summed.",
    "above": "Compressions that add more error than the tolerance.",
    "documents": "Requests that started behind a compressed document.",
    "unread": "Tokens of prompts that were not read because a compressed document holds them.",
    "squeezed": "Documents that were compressed again when they were loaded, to fit a page.",
    "unusable": "Files of documents that were not used, for a reason that the log names.",
    "saved": "Requests whose pages were saved to a file.",
    "unsaved": "Requests whose pages were to be saved and were not.",
    "slots": "Slots that the requests of the last step hold per KV head.",
}
_LAST = "slots"  # a gauge; all others are counters
_AT = {name: at for at, name in enumerate(NAMES)}
_mine: Any = None
_SETTINGS = "settings.json"


def add(**numbers: float) -> None:
    """Add to the metrics; does nothing if there is no collector."""
    global _mine
    folder = os.environ.get(_FOLDER)
    if folder is None:
        return
    if _mine is None:
        path = Path(folder) / f"{os.getpid()}.bin"
        # Numbers of a memoryview are faster to read and write than those of an array.
        _mine = np.memmap(path, dtype=np.float64, mode="w+", shape=(len(NAMES),)).data
    for name, number in numbers.items():
        at = _AT[name]
        _mine[at] = number if name == _LAST else _mine[at] + number


def tell(settings: dict[str, Any]) -> None:
    """Show the settings of an engine, JSON values, as labels of ``kvsketch:engine_info``."""
    if folder := os.environ.get(_FOLDER):
        path = Path(folder) / f"{os.getpid()}.tmp"
        path.write_text(json.dumps(settings), encoding="utf-8")
        path.replace(Path(folder) / _SETTINGS)  # every rank writes the same


def total() -> dict[str, float]:
    """The numbers of all workers together."""
    found = np.zeros(len(NAMES))
    for path in Path(os.environ[_FOLDER]).glob("*.bin"):
        numbers = np.fromfile(path, dtype=np.float64)
        if len(numbers) == len(found):  # otherwise the file is being created
            found += numbers
    return dict(zip(NAMES, found.tolist(), strict=True))


class Collector:
    """A collector for ``prometheus_client``."""

    def collect(self) -> Iterator[Any]:
        """The current numbers."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            InfoMetricFamily,
        )

        told = Path(os.environ[_FOLDER]) / _SETTINGS
        if told.is_file():
            labels = {"settings": told.read_text(encoding="utf-8")}
            yield InfoMetricFamily("kvsketch:engine", "Settings of the plugin.", value=labels)
        for name, value in total().items():
            family = GaugeMetricFamily if name == _LAST else CounterMetricFamily
            yield family(f"kvsketch:{name}", NAMES[name], value=value)


def show() -> bool:
    """Register the collector in the first process; its child processes write. Returns whether this
    is the first one."""
    if _FOLDER in os.environ:
        return False
    from prometheus_client import REGISTRY

    os.environ[_FOLDER] = folder = tempfile.mkdtemp(prefix="kvsketch_")
    atexit.register(_clean, folder, os.getpid())
    REGISTRY.register(Collector())
    return True


def _clean(folder: str, owner: int) -> None:
    """Remove the folder when the process that made it ends, not when one of its forks does."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
