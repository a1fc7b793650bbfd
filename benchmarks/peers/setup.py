"""``make peers``: installs the peers that a package index has, and lists which peers can be used.

    python -m benchmarks.peers.setup

kvpress pins an older transformers than kvsketch, so the peers have a separate environment,
``.venv-peers``. If KVSKETCH_PEERS_PYTHON names an interpreter, nothing is installed, and the list
is about that interpreter's environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from rich.console import Console
from rich.table import Table

from benchmarks.peers import (
    attention_matching,
    balancekv,
    goodpoints,
    kvpress,
    quantized_cache,
    rkv,
    thinformer,
    triattention,
)
from benchmarks.peers.exchange import ENVIRONMENT, VARIABLE, VERSIONS, _missing, interpreter

#: How to check each peer, and what it is used for.
PEERS = {
    "kvpress": (kvpress.available, "presses: which tokens they keep"),
    "QuantizedCache": (partial(quantized_cache.available, 4), "transformers' own, 4 and 2 bits"),
    "goodpoints": (goodpoints.available, "kernel thinning"),
    "BalanceKV": (balancekv.available, "the authors' balanced_walk"),
    "Attention Matching": (attention_matching.available, "slots fitted to a second reading"),
    "Thinformer": (thinformer.available, "kernel halving"),
    "R-KV": (rkv.available, "which tokens it keeps"),
    "TriAttention": (triattention.available, "which tokens it keeps"),
}


def install(console: Console) -> None:
    """Make the environment and install the peers one by one, so that a failure affects one only."""
    if os.environ.get(VARIABLE):
        console.print(f"{VARIABLE} is set: nothing is installed")
        return
    if not interpreter().is_file():
        console.print(f"making {ENVIRONMENT}")
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    pip = [str(interpreter()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for name, version in VERSIONS.items():
        console.print(f"installing {name} {version}")
        done = subprocess.run([*pip, f"{name}=={version}"], capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            console.print(f"  failed: {last}", markup=False)
    _missing.cache_clear()


def table() -> Table:
    """A table of the peers: which can be used, and why the others cannot."""
    shown = Table("peer", "what for", "state")
    for name, (available, purpose) in PEERS.items():
        shown.add_row(name, purpose, available() or "ready")
    return shown


def main() -> None:
    console = Console()
    install(console)
    console.print(table())


if __name__ == "__main__":
    main()
