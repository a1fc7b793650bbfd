"""What pages hold and what compressing them costs, on vLLM's ``/metrics``.

Workers are other processes than the server: each writes its numbers into a small file, which the
server's collector reads when it is asked.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_FOLDER = "KVSKETCH_STATS_DIR"
#: what is counted: in all layers and on all ranks, but tokens and slots, a request's in one layer
NAMES = {
    "tokens": "Tokens that were read or written.",
    "compressions": "Compressions of a page, in all layers and on all ranks.",
    "error": "Relative error that compressions add to the output of the last query, summed.",
    "above": "Compressions that add more error than the tolerance.",
    "slots": "Slots that the requests of the last step hold per KV head.",
}
_LAST = "slots"  # not a sum but what is now
_mine: Any = None


def add(**numbers: float) -> None:
    """Count something; nothing where nobody collects."""
    global _mine
    folder = os.environ.get(_FOLDER)
    if folder is None:
        return
    if _mine is None:
        path = Path(folder) / f"{os.getpid()}.bin"
        _mine = np.memmap(path, dtype=np.float64, mode="w+", shape=(len(NAMES),))
    for name, number in numbers.items():
        at = list(NAMES).index(name)
        _mine[at] = number if name == _LAST else _mine[at] + number


def total() -> dict[str, float]:
    """Of all workers."""
    found = np.zeros(len(NAMES))
    for path in Path(os.environ[_FOLDER]).glob("*.bin"):
        numbers = np.fromfile(path, dtype=np.float64)
        if len(numbers) == len(found):  # else it is being made
            found += numbers
    return dict(zip(NAMES, found.tolist(), strict=True))


class Collector:
    """For ``prometheus_client``."""

    def collect(self) -> Iterator[Any]:
        """The numbers of now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, value in total().items():
            family = GaugeMetricFamily if name == _LAST else CounterMetricFamily
            yield family(f"kvsketch:{name}", NAMES[name], value=value)


def show() -> None:
    """Register the collector, in the first process; its children write."""
    if _FOLDER in os.environ:
        return
    from prometheus_client import REGISTRY

    os.environ[_FOLDER] = folder = tempfile.mkdtemp(prefix="kvsketch_")
    atexit.register(_clean, folder, os.getpid())
    REGISTRY.register(Collector())


def _clean(folder: str, owner: int) -> None:
    """At the end of the process that made the folder; forks of it end earlier."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
