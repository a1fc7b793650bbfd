"""Calls into another Python interpreter, with tensors as safetensors and all other data as JSON.

kvpress pins an older transformers than ours, so the peers (the code of other authors) are in a
separate environment, ``.venv-peers`` (``make peers``), or in the one whose interpreter
KVSKETCH_PEERS_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from kvsketch import KVSketchError

VARIABLE = "KVSKETCH_PEERS_PYTHON"
ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-peers"

#: The distributions from a package index, with the versions for which the adapters are written.
VERSIONS = {
    "torch": "2.13.0",
    "kvpress": "0.5.5",
    "goodpoints": "0.6.3",
    "optimum-quanto": "0.2.7",
}

_ASK = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


class PeerError(KVSketchError):
    """A peer is missing, has the wrong version, or failed. The message includes its own output."""


def interpreter() -> Path:
    """The path of the peers' Python, which need not exist."""
    return Path(os.environ.get(VARIABLE) or ENVIRONMENT / "bin" / "python")


def missing(distribution: str) -> str | None:
    """Why a distribution in the peers' environment cannot be used, or None if it can."""
    return _missing(distribution, str(interpreter()))


@cache
def _missing(distribution: str, python: str) -> str | None:
    if not Path(python).is_file():
        return f"{python} is not there: run `make peers`, or set {VARIABLE}"
    try:
        asked = subprocess.run(
            [python, "-c", _ASK, distribution], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} does not run: {error}"
    if asked.returncode:
        return f"{distribution} is not installed for {python}: run `make peers`"
    found, wanted = asked.stdout.strip().split("+")[0], VERSIONS[distribution]
    if found != wanted:
        return f"{distribution} {found} is installed for {python}, but {wanted} is what we speak"
    return None


def call(
    runner: Path, tensors: Mapping[str, Tensor], request: Any, timeout: float = 600
) -> dict[str, Tensor]:
    """Run ``runner REQUEST.json IN.safetensors OUT.safetensors`` with the peers' interpreter.

    Raises:
        PeerError: the call failed. The message has the end of its error output.
    """
    with tempfile.TemporaryDirectory(prefix="kvsketch-peer-") as name:
        folder = Path(name)
        paths = [folder / "request.json", folder / "in.safetensors", folder / "out.safetensors"]
        paths[0].write_text(json.dumps(request, allow_nan=False), encoding="utf-8")
        save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, paths[1])
        try:
            done = subprocess.run(
                # -I keeps our PYTHONPATH and the folder of the runner off the path. The adapters in
                # that folder have the names of the peers' packages.
                [str(interpreter()), "-I", str(runner), *map(str, paths)],
                capture_output=True,
                text=True,
                timeout=timeout,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerError(f"{runner.name} did not finish: {error}") from error
        if done.returncode:
            raise PeerError(f"{runner.name} failed: {done.stderr.strip()[-800:]}")
        return load_file(paths[2])
