"""A conversation in one cache, turn after turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvsketch.documents.answering import Sampling, check_question, ends_of, next_tokens
from kvsketch.documents.document import Document, encoded
from kvsketch.errors import InputError
from kvsketch.hf import accounting
from kvsketch.hf.passing import passed

# Tokens between two looks at the error: each costs attention over all slots.
_LOOK = 16


@dataclass(frozen=True)
class Status:
    """The size of a cache: tokens seen, slots per KV head, bytes, and the measured relative error,
    the mean over layers and heads (None: nothing was compressed yet, or it is not known); ``now``:
    whether that is of all tokens, or of the first part only, which was compressed before."""

    tokens: int
    slots: float
    nbytes: int
    error: float | None
    now: bool = True


class Conversation:
    """Passes messages to a model and yields the answers.

    Args:
        document: what it is about, or an empty cache.
        new_tokens: of an answer, at most.

    Attributes:
        stop: set to True from anywhere (a signal): the answer ends with the token that is on its
            way, and the conversation goes on.
        stopped: whether the last answer ended like that.
    """

    def __init__(self, document: Document, new_tokens: int, sampling: Sampling) -> None:
        self.document, self.new_tokens, self.sampling = document, new_tokens, sampling
        self.stop = self.stopped = False
        self.turns = 0
        self._unread: list[int] = []  # tokens of the last answer that the cache has not seen
        self._error: float | None = None
        self._now = True

    def say(self, text: str) -> Iterator[str]:
        """Pieces of the answer, as they come.

        Raises:
            InputError: nothing is said, or it does not fit the positions left. Nothing has changed
                then.
        """
        document, wording = self.document, self.document.wording
        if not text.strip():
            raise InputError("there is nothing to say")
        empty = not document.cache.get_seq_length()
        opening = wording.between if document.answered else wording.asking
        opening = wording.before if empty else opening
        special = empty and not wording.chat
        said = opening + text + wording.answering
        ids = encoded(document.model, document.tokenizer, said, special)
        unread = torch.tensor([self._unread], dtype=ids.dtype, device=ids.device)
        ids = torch.cat([unread, ids], dim=1)
        check_question(document, ids, text)
        left = document.positions_left
        most = self.new_tokens if left is None else min(self.new_tokens, left - ids.shape[1])
        self.stop, self._unread = False, []
        self.document = replace(document, answered=True)
        sampling = replace(self.sampling, seed=self.sampling.seed + self.turns)
        self.turns += 1
        ends = ends_of(document.model, document.tokenizer)
        pieces = _Pieces(document.tokenizer)
        for count, token in enumerate(
            next_tokens(document.model, document.cache, ids, sampling), 1
        ):
            if count % _LOOK == 1:
                self._look()
            number = int(token)
            if number in ends:
                break
            yield pieces.add(number)
            if self.stop or count >= most:
                self._unread = [number]
                break
        self.stopped = self.stop
        self._look()
        yield pieces.rest()

    @torch.no_grad()
    def settle(self) -> Document:
        """The document with all that was said read into its cache, to be saved."""
        if self._unread:
            document = self.document
            ids = torch.tensor([self._unread], device=document.model.device)
            taken = passed(document.model, document.cache)
            document.model(ids, **taken, use_cache=True, logits_to_keep=1)
            self._unread = []
        return self.document

    def status(self) -> Status:
        """The present size of the cache."""
        cache = self.document.cache
        slots = accounting.mean_held(cache.layers)
        return Status(cache.get_seq_length(), slots, cache.nbytes(), self._error, self._now)

    def _look(self) -> None:
        error, self._now = accounting.known_error(self.document.cache.layers)
        self._error = sum(error) / len(error) if error else None


class _Pieces:
    """Text of tokens that come one by one; incomplete characters wait."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """The text that a token adds."""
        self._ids.append(token)
        text = self._text()
        if text.endswith("\ufffd") and len(self._ids) < 64:
            return ""
        piece = text[len(self._shown) :]
        self._shown = text
        if len(self._ids) >= 64:  # the last few are enough for what follows
            self._ids = self._ids[-8:]
            self._shown = self._text()
        return piece

    def rest(self) -> str:
        """The rest at the end."""
        return self._text()[len(self._shown) :]

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text
