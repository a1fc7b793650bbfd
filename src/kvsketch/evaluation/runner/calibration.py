"""Curves of a model on the user's own text files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track

from kvsketch.arguments import RECENT
from kvsketch.errors import InputError
from kvsketch.evaluation.runner.files import read_text
from kvsketch.evaluation.runner.loading import (
    check_device,
    load_model,
    load_tokenizer,
    resolve_model,
)
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.method_names import METHOD_NAMES, unknown_method

if TYPE_CHECKING:
    from kvsketch.cache import Curves


def calibrate_files(
    model_name: str,
    files: Sequence[Path],
    method: str,
    follow: int,
    settings: Settings,
    seed: int,
    console: Console,
) -> Curves:
    """Curves of a method (``measure_curves``), each file one prompt, longer ones cut to the model's
    positions.

    Raises:
        InputError: an unknown method, a file that cannot be read, or a prompt too short.
    """
    if method not in METHOD_NAMES:
        raise unknown_method(method)
    if follow < 1:
        raise InputError(f"--follow {follow} must be at least 1")
    texts = [read_text(file) for file in files]
    folder = resolve_model(model_name)

    # The following imports torch and transformers; all checks that do not need them are done.
    from kvsketch.cache.curves import model_shape, pooled
    from kvsketch.hf.measuring import check_length, measure_curves

    recent = RECENT if settings.recent is None else settings.recent
    check_device(settings.device)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, settings.device, settings.dtype)
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    prompts = [tokenizer(text, return_tensors="pt").input_ids[:, :limit] for text in texts]
    for file, prompt in zip(files, prompts, strict=True):
        try:
            check_length(prompt, settings.sink + recent + follow)
        except InputError as error:
            raise InputError(f"{file}: {error}") from error
    found = [
        measure_curves(
            model,
            [prompt],
            method,
            follow=follow,
            sink=settings.sink,
            recent=recent,
            seed=seed,
        )
        for prompt in track(prompts, "measuring", console=console, transient=True)
    ]
    return replace(pooled(found), model=model_shape(model.config))
