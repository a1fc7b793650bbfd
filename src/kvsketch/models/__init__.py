"""The models that ship with the package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvsketch.errors import unknown_name

PACKAGED = "packaged"
#: names of the models that ship with the package, and their folders in ``kvsketch/models``
PACKAGED_MODELS: Mapping[str, str] = {
    PACKAGED: "spread",
    "spread": "spread",
    "lists": "lists",
    "longeval-one-head": "longeval",
    "ruler-one-layer": "ruler",
}


def packaged_model(name: str = PACKAGED) -> Path:
    """Folder of a model that ships with the package, for ``AutoModelForCausalLM.from_pretrained``.

    Args:
        name: "spread" answers questions of LongEval and RULER, and reads with many heads in several
            layers; "packaged" is another name of it, since commands use it unless another is named.
            "lists" is "spread", trained further to give long answers (``kvsketch eval sessions``).
            "longeval-one-head" retrieves lines (LongEval), and one of its KV heads reads them;
            "ruler-one-layer" also answers questions of RULER, and reads in one of its layers.

    Raises:
        InputError: unknown name.
    """
    if name not in PACKAGED_MODELS:
        raise unknown_name("name", name, PACKAGED_MODELS)
    return Path(__file__).resolve().parent / PACKAGED_MODELS[name]
