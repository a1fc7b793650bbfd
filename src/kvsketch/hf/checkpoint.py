"""Compares the weights of a checkpoint with those that a file was made with, for an engine whose
modules are not transformers' own."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PretrainedConfig
from transformers.utils.hub import cached_file

from kvsketch.errors import InputError
from kvsketch.hf.identity import check_model_config, mark_of
from kvsketch.hf.models import layers_of

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint:
    """The weights of a model on disk, of which those of one layer are read at the first check.

    Args:
        model: a folder, or a Hugging Face id that is in the cache on disk.
        config: of the model.
        revision: of the id; None: the main one.
    """

    def __init__(self, model: str, config: PretrainedConfig, revision: str | None = None) -> None:
        self._model, self._config, self._revision = model, config, revision
        self._known: set[str] | None = None

    def check(self, told: Any) -> None:
        """Raise InputError unless a file's ``model`` is this one: its configuration, and the
        attention weights of its first compressed layer."""
        check_model_config(told, self._config)
        marks = told.get("layers")
        if not isinstance(marks, list) or not marks or not isinstance(marks[0], str):
            raise InputError("model: the file does not say with which weights it was made")
        if self._known is None:
            self._known = self._marks(layers_of(self._config)[1][0])
        if marks[0].rpartition(":")[2] not in self._known:
            raise InputError(
                "model: the file is of a model with the same configuration and other weights "
                "(another fine-tuning, another adapter)"
            )

    def _marks(self, layer: int) -> set[str]:
        """Hashes of the weights of every module of a layer, as ``identity.module_mark`` has
        them."""
        modules: dict[str, dict[str, Path]] = defaultdict(dict)
        for name, path in self._files().items():
            module, _, part = name.rpartition(".")
            module, _, inner = module.rpartition(".")
            if str(layer) in module.split("."):
                modules[module][f"{inner}.{part}"] = path
        found = set()
        for module, parts in modules.items():
            tensors = []
            for name, path in sorted(parts.items()):
                with safe_open(path, "pt") as file:
                    tensors.append((name, file.get_tensor(f"{module}.{name}")))
            found.add(mark_of(tensors))
        return found

    def _files(self) -> dict[str, Path]:
        """The file of every tensor.

        Raises:
            InputError: the checkpoint has no safetensors.
        """
        index = self._file(_INDEX)
        if index is not None:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: index.with_name(Path(file).name) for name, file in names.items()}
        whole = self._file(_WHOLE)
        if whole is None:
            raise InputError(
                f"model={self._model!r} has no {_WHOLE} on disk, so that its weights cannot be "
                "compared with those of the file"
            )
        with safe_open(whole, "pt") as file:
            return dict.fromkeys(file.keys(), whole)

    def _file(self, name: str) -> Path | None:
        found = cached_file(
            self._model,
            name,
            revision=self._revision,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if found is None else Path(found)
