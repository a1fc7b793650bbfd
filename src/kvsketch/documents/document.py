"""A document's cache, with its model, tokenizer and wording of questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsketch.documents.wording import Wording
from kvsketch.errors import InputError
from kvsketch.hf import SketchCache, prefill
from kvsketch.hf.identity import Origin
from kvsketch.hf.passing import passed
from kvsketch.hf.wrapped import transformers_model

#: tokens that are read at a time
CHUNK = 1024

#: positions that a document should leave to questions and answers
ROOM = 256

#: called with how many tokens were read and how many there are
Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class Document:
    """
    Attributes:
        model: a transformers causal language model.
        tokenizer: its own.
        cache: the compressed document, one row.
        wording: the text around it.
        answered: whether the last thing in the cache is an answer, not the document.
        about: other fields of the file: the model's name, the source of the text.
    """

    model: Any
    tokenizer: Any
    cache: SketchCache
    wording: Wording
    about: dict[str, Any]
    answered: bool = False

    def save(self, path: str | Path) -> None:
        """Write it to a file, see ``SketchCache.save``. Which tokens it holds is left out if it
        holds others by now."""
        more = {"wording": self.wording.values(), "answered": self.answered}
        about = {**self.about, **more}
        said = about.pop("ids", None)
        if isinstance(said, dict) and said.get("count") == self.cache.get_seq_length():
            about["ids"] = said
        self.cache.save(path, tokenizer=self.tokenizer, about=about)

    @staticmethod
    def load(path: str | Path, model: Any, tokenizer: Any) -> Document:
        """Read a file that ``save`` wrote; a cache that was saved in Python is a document, too.

        Raises:
            InputError: as ``SketchCache.load``, or it has several rows.
        """
        cache = SketchCache.load(path, model, tokenizer=tokenizer)
        if (rows := cache._sketches()[0].token_shape[0]) != 1:
            raise InputError(f"{str(path)!r} has {rows} rows; a document has one")
        about = dict(cache.about)
        said, answered = about.pop("wording", None), about.pop("answered", False)
        wording = Wording.of(tokenizer) if said is None else Wording.read(said)
        return Document(model, tokenizer, cache, wording, about, answered is True)

    @property
    def positions_left(self) -> int | None:
        """Tokens the model still has positions for; None: it has no limit."""
        most = self.cache.max_positions
        return None if most is None else max(0, most - self.cache.get_seq_length())

    def ids_of(self, text: str) -> Tensor:
        """A text after the existing tokens, int64 ``[1, tokens]``."""
        return encoded(self.model, self.tokenizer, text, special=False)

    @torch.no_grad()
    def append(self, text: str, advance: Advance = lambda done, total: None) -> int:
        """Read more text after the document.

        Returns:
            How many tokens.

        Raises:
            InputError: no text, an answer is the last thing there, or more tokens than positions.
        """
        if self.answered:
            raise InputError("the file contains a chat that ends with an answer: "
                             "append to the document before the chat")  # fmt: skip
        ids = self.ids_of(text)
        total, left = ids.shape[1], self.positions_left
        if not total:
            raise InputError("the text to append is empty")
        if left is not None and total > left:
            raise InputError(
                f"{total} tokens are to be appended, and {left} of the model's "
                f"{self.cache.max_positions} positions are left; append less of it, or compress "
                "less of the document (`kvsketch compress --max-tokens`)"
            )
        for start in range(0, total, CHUNK):
            part = ids[:, start : start + CHUNK]
            self.model(part, **passed(self.model, self.cache), use_cache=True, logits_to_keep=1)
            advance(start + part.shape[1], total)
        self.cache.settle()
        return total

    def fork(self) -> Document:
        """The same, with a cache that continues independently."""
        return replace(self, cache=self.cache.fork())


def encoded(model: Any, tokenizer: Any, text: str, special: bool) -> Tensor:
    """Ids of a text on the device of the model, int64 ``[1, tokens]``.

    Raises:
        InputError: the text was typed or given in bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = ascii(text[error.start : error.end])  # a byte 0xff is "\\udcff" to Python
        raise InputError(f"the text is not UTF-8: it has {wrong:.40}") from None
    ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return torch.tensor([ids], dtype=torch.int64, device=model.device)


def tokens_of(tokenizer: Any, text: str, span: tuple[int, int], special: bool) -> tuple[int, int]:
    """The first and the end of the tokens that hold some characters of a text.

    Raises:
        InputError: the tokenizer does not say where its tokens are.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError("pinned text needs a fast tokenizer, which knows where its tokens are")
    where = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)[
        "offset_mapping"
    ]
    found = [i for i, (a, b) in enumerate(where) if a < span[1] and b > span[0]]
    if not found:
        raise InputError(f"no token holds the pinned text {text[slice(*span)]!r:.60}")
    return found[0], found[-1] + 1


def check_positions(tokens: int, cache: SketchCache, what: str, least: int) -> None:
    """Raise InputError where a document leaves fewer than ``least`` of the model's positions to a
    question and its answer."""
    most = cache.max_positions
    if most is not None and tokens + least > most:
        room = f", which leaves {most - tokens} for questions" if tokens <= most else ""
        raise InputError(
            f"{what} has {tokens} tokens, and the model {most} positions{room}; --max-tokens "
            f"{max(1, most - ROOM)} reads the first ones and leaves room for questions"
        )


@torch.no_grad()
def read(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    cache: SketchCache,
    queries: str | Sequence[str] = "prompt",
    advance: Advance = lambda done, total: None,
) -> None:
    """Read a document into an empty cache and compress it.

    Args:
        ids: int64 ``[1, tokens]``.
        queries: as for ``kvsketch.prefill``.
        advance: called with the progress.
    """
    total = ids.shape[1]
    if all(layer.settings.exact_prefill for layer in cache._sketches()):
        size = CHUNK if total > CHUNK else None
        prefill(
            model,
            ids,
            cache,
            queries=queries,
            tokenizer=tokenizer,
            pin_system=False,  # merged documents and an engine's pages have no pins
            chunk_size=size,
            progress=advance,
        )
        return
    if queries != "prompt":
        raise InputError(
            f"--queries {queries} reads all of a document first and needs --prefill exact"
        )
    cache.origin = Origin(transformers_model(model))
    for start in range(0, total, CHUNK):
        part = ids[:, start : start + CHUNK]
        model(part, **passed(model, cache), use_cache=True, logits_to_keep=1)
        advance(start + part.shape[1], total)
