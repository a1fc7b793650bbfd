"""Prompts and activations the error benchmarks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsketch.evaluation.loading import PACKAGED, load_model, load_tokenizer, resolve_model
from kvsketch.evaluation.longeval_cases import generate_cases

STORIES = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "stories260K"


def default_models() -> list[str]:
    """The packaged model, and stories260K where it is beside the checkout."""
    return [PACKAGED, *([str(STORIES)] if STORIES.is_dir() else [])]


def load(name: str) -> tuple[Any, Any]:
    """Model (float32, CPU) and tokenizer of a folder, a hub id, or "packaged"."""
    folder = resolve_model(name)
    return load_model(folder, "cpu", "float32"), load_tokenizer(folder)


def sampled(model: Any, count: int, tokens: int, seed: int) -> Tensor:
    """Texts of the model itself, ``[count, tokens]``, sampled at temperature 1 from its first
    token: what it knows best."""
    torch.manual_seed(seed)
    start = torch.full((count, 1), int(model.config.bos_token_id or 1))
    return model.generate(
        start,
        attention_mask=torch.ones_like(start),
        max_new_tokens=tokens - 1,
        min_new_tokens=tokens - 1,
        do_sample=True,
        top_k=0,
    )


def line_prompts(tokenizer: Any, count: int, lines: int, seed: int) -> list[Tensor]:
    """LongEval prompts of our own generator, ``[1, tokens]`` each."""
    cases = generate_cases(lines, count, seed)
    return [tokenizer(case["prompt"], return_tensors="pt").input_ids for case in cases]


def from_files(tokenizer: Any, files: list[Path], limit: int) -> list[Tensor]:
    """The beginning of each text file, at most ``limit`` tokens."""
    texts = [file.read_text(encoding="utf-8") for file in files]
    return [tokenizer(text, return_tensors="pt").input_ids[:, :limit] for text in texts]


def prompts_for(
    name: str, model: Any, tokenizer: Any, count: int, seed: int, files: list[Path]
) -> tuple[str, list[Tensor]]:
    """What a model is asked about, and what that is called: the user's files, LongEval lines for
    the packaged model, else text sampled from the model."""
    limit = int(model.config.max_position_embeddings)
    if files:
        return "files", from_files(tokenizer, files, limit)
    if name == PACKAGED:
        return "longeval-200", line_prompts(tokenizer, count, 200, seed)
    tokens = min(limit, 2048)
    return "sampled", list(sampled(model, count, tokens, seed).split(1))
