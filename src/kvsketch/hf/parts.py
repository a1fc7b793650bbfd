"""What ``prefill`` reads after a context: the context again, a sample of it, or questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch.arguments import QUERY_SOURCES
from kvsketch.errors import InputError

#: Tokens of the context in one part of a second reading, and the instruction before it, as in
#: KVzip's code (also kvpress's). A part that attends only to itself has fewer.
PART = 2048
LOCAL_PART = 512
REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_PART = "\n\nRepeat the part of the previous context exactly, starting with"
# Tokens of the part before that follow the latter.
_BEFORE = 8
#: "sample": the context is divided into runs of this many tokens, whose first ones are read again.
ROW, OF_ROW = 384, 64


@dataclass(frozen=True)
class RereadPart:
    """Tokens that are read after the context and not kept: ``ids`` ``[batch, q]`` with their mask,
    about some of its tokens."""

    ids: Tensor
    mask: Tensor
    about: slice | Tensor


def parts_of(
    queries: str | Sequence[str], tokenizer: Any, input_ids: Tensor, mask: Tensor, size: int | None
) -> list[RereadPart]:
    """The parts that are read after the context.

    Args:
        size: tokens of the context in one part; None: ``PART``.

    Raises:
        InputError: an unknown source, texts that are empty, or no tokenizer.
    """
    if isinstance(queries, str):
        if queries not in QUERY_SOURCES:
            raise InputError(
                f"queries={queries!r} must be one of {', '.join(QUERY_SOURCES)}, or a list of texts"
            )
        if queries == "prompt":
            return []
    elif not isinstance(queries, Sequence):
        raise InputError(
            f"queries={queries!r} must be one of {', '.join(QUERY_SOURCES)}, or a list of texts"
        )
    elif not queries or not all(isinstance(text, str) and text for text in queries):
        raise InputError("queries: the texts must be strings, at least one, and none empty")
    if not callable(tokenizer):
        raise InputError(f"queries={queries!r} needs tokenizer=, the model's tokenizer")
    if not isinstance(queries, str):
        return [
            RereadPart(ids, mask.new_ones(ids.shape), slice(0, input_ids.shape[1]))
            for ids in _given(queries, tokenizer, input_ids)
        ]
    parts = []
    for about in _abouts(queries, input_ids, size or PART):
        start = about.start if isinstance(about, slice) else int(about[0])
        before = input_ids[:, max(0, start - _BEFORE) : start]
        asked = _ids(tokenizer, REPEAT if start == 0 else REPEAT_PART, input_ids)
        request = torch.cat([asked, before, _ids(tokenizer, "\n", input_ids)], dim=1)
        ids = torch.cat([request, input_ids[:, about]], dim=1)
        # padding of the context stays padding
        live = torch.cat([mask.new_ones(request.shape), mask[:, about]], dim=1)
        parts.append(RereadPart(ids, live, about))
    return parts


def _abouts(queries: str, input_ids: Tensor, size: int) -> Iterator[slice | Tensor]:
    """The tokens of the context that each part of a second reading repeats."""
    tokens = input_ids.shape[1]
    if queries == "sample" and tokens > ROW:
        index = torch.arange(tokens, device=input_ids.device)
        yield from torch.split(index[index % ROW < OF_ROW], size)
        return
    size = min(size, LOCAL_PART) if queries == "local" else size
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def sampled(parts: Sequence[RereadPart]) -> Tensor | None:
    """The tokens that a second reading of a sample repeats; None: all of them."""
    found = [part.about for part in parts if isinstance(part.about, Tensor)]
    return torch.cat(found) if found else None


def _given(queries: Sequence[str], tokenizer: Any, input_ids: Tensor) -> Iterator[Tensor]:
    for text in queries:
        ids = _ids(tokenizer, text, input_ids)
        if not ids.shape[1]:
            raise InputError(f"queries: {text!r} has no tokens")
        yield ids


def _ids(tokenizer: Any, text: str, like: Tensor) -> Tensor:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor([ids] * len(like), dtype=like.dtype, device=like.device)
