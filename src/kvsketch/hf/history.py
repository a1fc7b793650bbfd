"""The text of a cache, as far as ``generate`` and ``prefill`` know it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.files.tokens import Mark, marks, said_mark, told
from kvsketch.hf.checks import BEHIND

OTHERWISE = (
    "To continue, pass the ids of all that was read and generated, as they were, followed by new "
    "ones: a chat template may change earlier turns, a text that is encoded anew may become other "
    "tokens, and after a beam search the rows of a cache are its beams. For another text make a "
    "new SketchCache, or call reset()"
)


class History:
    """The token ids that a cache has read, which the next ``generate`` must begin with.

    A cache continues its own text: transformers passes on only what is beyond the tokens seen, and
    never looks at those before. If they are others, the answer is one to a text that nobody wrote.
    This happens where a chat template changes earlier turns (it removes what a model has thought),
    where the text of an answer is encoded anew, and where a context and its question are encoded
    together, so that a token spans both.

    It holds the ids that ``generate`` made for its last step, 8 bytes a token, which are not
    counted among the bytes of a cache. A file holds their hashes.
    """

    def __init__(self) -> None:
        self._ids: Tensor | None = None  # [batch, tokens]; there may be more than were read
        self._marks: list[Mark] = []  # of all rows, from a file
        self._unseen = True  # whether this call of ``generate`` has yet to show its text
        self._assisted = False

    def begin(self) -> None:
        """A call of ``generate`` begins."""
        self._unseen, self._assisted = True, False

    def assist(self, ids: Tensor, seen: int) -> None:
        """It is assisted decoding of a text. That passes on all of it first, with some guesses,
        whatever a cache has seen.

        Raises:
            InputError: the cache has seen as many tokens.
        """
        if seen >= ids.shape[1] > 0:
            raise InputError(BEHIND.format(seen=seen))
        self._assisted = True

    def passed(self, ids: Tensor, new: int | None, seen: int) -> int | None:
        """``generate`` passes on the last ``new`` (None: all) of some ids to a cache that has seen
        so many tokens.

        Returns:
            The number to pass on.

        Raises:
            InputError: the ids before these are not those that were read, or nothing is new.
        """
        if self._assisted and self._unseen and new is None and seen:
            new = ids.shape[1] - seen
        if new is not None and new <= 0 < seen:
            raise InputError(BEHIND.format(seen=seen))
        if ids.dim() != 2 or ids.shape[1] != seen + (ids.shape[1] if new is None else new):
            return new  # a chunk of a prompt, or embeddings came before
        if self._unseen:
            self._check(ids, seen)
            ids = ids.clone()  # this may be the caller's own
        self._ids, self._unseen = ids, False
        return new

    def _check(self, ids: Tensor, seen: int) -> None:
        known = self._ids
        if known is None and len(self._marks) == len(ids):
            for row, mark in enumerate(self._marks):
                if marks(ids[row, : mark[0]].tolist(), mark[:1]) != [mark]:
                    raise InputError(
                        f"the text does not begin with the {mark[0]} tokens that this cache had "
                        f"read when it was saved (row {row}). {OTHERWISE}"
                    )
        if known is None or len(known) != len(ids):
            return
        count = min(seen, known.shape[1])
        other = ids[:, :count] != known[:, :count].to(ids.device)
        if bool(other.any()):
            row, place = other.nonzero()[0].tolist()
            raise InputError(
                f"the text is not the one that this cache has read: token {place} of {seen} is "
                f"{int(ids[row, place])} and was {int(known[row, place])}"
                + (f" (row {row})" if len(ids) > 1 else "")
                + f". {OTHERWISE}"
            )

    def cut(self, tokens: int) -> None:
        """Only the first tokens are left."""
        if self._ids is not None:
            self._ids = self._ids[:, :tokens]
        if any(count > tokens for count, _ in self._marks):
            self._marks = []

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn``, which acts on axis 0, the batch."""
        self._marks = []
        if self._ids is not None:
            self._ids = fn(self._ids)

    def told(self, seen: int) -> list[dict[str, Any]]:
        """What a file says of the texts of a cache that has seen so many tokens, for ``read``."""
        if self._ids is not None:
            return [told(ids) for ids in self._ids[:, :seen].tolist()]
        return [{"count": count, "sha256": digest} for count, digest in self._marks]

    def read(self, said: Any) -> None:
        """Of a cache from a file that says this; without it, its texts are not known."""
        found = [said_mark(row) for row in said] if isinstance(said, list) else []
        self._marks = [mark for mark in found if mark is not None]
