"""Finds and loads the model and tokenizer of an evaluation, with useful error messages.

torch and transformers are imported when something is loaded, after the name was checked.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from kvsketch.errors import InputError
from kvsketch.evaluation.runner import hub
from kvsketch.evaluation.runner.devices import DEVICE_MAPS, check_device_name, needs_accelerate
from kvsketch.models import PACKAGED_MODELS, packaged_model

_CONFIGURATION = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
_WHOLE_FILE = 64 * 2**20  # bytes; larger weights are identified by size and first megabyte


def resolve_model(name: str) -> str:
    """Turns `--model` into a folder or a Hugging Face Hub id, without loading anything.

    Raises `InputError` if it looks like a path and is not a model folder, or if it is not a folder
    and not available from the Hub or its local cache.
    """
    path = packaged_model(name) if name in PACKAGED_MODELS else Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"--model {path} has no config.json, so it is not a model folder")
        return str(path)
    if name in PACKAGED_MODELS:
        raise InputError(
            f"the packaged model is missing ({path}); reinstall kvsketch, "
            "or give a model folder or Hugging Face id with --model"
        )
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1 or not name:
        raise InputError(f"--model {name!r} is not a folder; give one, or a Hugging Face id")
    hub.check_model(name)
    return name


def load_config(model: str) -> Any:
    """Configuration of the model. Raises `KVSketchError` if it cannot be loaded."""
    from transformers import AutoConfig

    return _loaded(AutoConfig, model)


def load_tokenizer(model: str) -> Any:
    """Tokenizer of the model. Raises `KVSketchError` if it cannot be loaded."""
    from transformers import AutoTokenizer

    return _loaded(AutoTokenizer, model)


def load_model(model: str, device: str, dtype: str) -> Any:
    """The model in evaluation mode. Raises `KVSketchError` if it cannot be loaded."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    check_device(device)
    logging.disable_progress_bar()  # the dtype of the weights: commands have their own default
    mapped = device in DEVICE_MAPS
    placed: dict[str, Any] = {"device_map": device} if mapped else {}
    placed |= {"dtype": getattr(torch, dtype), "output_loading_info": True}
    loaded, found = _loaded(AutoModelForCausalLM, model, **placed)
    if missing := sorted(found["missing_keys"]):
        raise InputError(
            f"--model {model!r} has no weights for {', '.join(missing[:3])}"
            f"{f' and {len(missing) - 3} others' if len(missing) > 3 else ''}: it is incomplete, "
            "or its configuration is of another model"
        )
    return (loaded if mapped else loaded.to(device)).eval()


def check_device(device: str) -> None:
    """Raises `InputError` unless torch can place tensors on `device`, or transformers can place
    layers (`DEVICE_MAPS`)."""
    check_device_name(device)
    if device in DEVICE_MAPS:
        from transformers.utils import is_accelerate_available

        if not is_accelerate_available():  # it may be too old
            raise needs_accelerate(device)
        return
    import torch

    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"--device {device!r} cannot be used here: {str(error).splitlines()[0]}"
        ) from error


def fingerprint(model: str) -> str:
    """Short hash of a model folder's weights and config; the id itself for a Hub model.

    Results of a model must not be mixed with results from before further training.
    """
    folder = Path(model)
    if not folder.is_dir():
        return model
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        weights = file.suffix in {".safetensors", ".bin"}
        if not (weights or file.name in _CONFIGURATION) or not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(size if size <= _WHOLE_FILE else 2**20))
    return digest.hexdigest()[:16]


def _loaded(cls: Any, model: str, **options: Any) -> Any:
    from safetensors import SafetensorError

    try:
        return cls.from_pretrained(model, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = hub.reason_of(error)
        # What is damaged or too large for the memory is here, also if it came from the Hub.
        if Path(model).is_dir() or isinstance(error, RuntimeError | SafetensorError):
            raise InputError(f"--model {model!r} cannot be loaded: {reason}") from error
        raise hub.not_fetched(model, reason) from error
