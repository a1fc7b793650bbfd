"""What is in the pages of an engine: how many tokens, and where they were last compressed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvsketch.page.schedule import Numbers, Rhythm


@dataclass
class States:
    """The states of R pages, int64 ``[R]``.

    Attributes:
        last: number of tokens at the last compression; 0: nothing was compressed.
        copied: the same of copies of these pages.
    """

    last: Numbers

    def __post_init__(self) -> None:
        self.copied = self.last.copy()

    @staticmethod
    def regular(rhythm: Rhythm, seen: Numbers) -> States:
        """The states after ``seen`` tokens of pages compressed wherever they were full."""
        since = (seen - rhythm.slots) % rhythm.every
        return States(np.where(seen < rhythm.slots, 0, seen - since))

    def held(self, rhythm: Rhythm, seen: Numbers) -> Numbers:
        """Slots in use after ``seen`` tokens, without the middle."""
        return np.where(self.last > 0, seen - self.last + rhythm.first, seen)

    def filled(self, rhythm: Rhythm, middle: int) -> Numbers:
        """Slots in use in a middle of ``middle`` slots."""
        found: Numbers = np.clip(self.last - rhythm.first, 0, middle)
        return found

    def compress(self, some: Numbers, seen: Numbers) -> None:
        """Pages were compressed (bool ``[R]``) after ``seen`` tokens."""
        self.last = np.where(some, seen, self.last)

    def copy(self, some: Numbers) -> None:
        """Pages were copied (bool ``[R]``)."""
        self.copied = np.where(some, self.last, self.copied)


def alone(rhythm: Rhythm, prompt: int, piece: int, seen: int, tokens: int) -> int:
    """How many of ``tokens`` tokens a request may decode at once, some of which are guesses that
    may be rejected: so few that its page is compressed behind none of them, or a single one, which
    is no guess.

    Args:
        prompt: number of tokens of its prompt, which was read in pieces of ``piece`` tokens.
        seen: tokens of the request before these, >= ``prompt``.
    """
    start = (prompt - 1) // piece * piece
    last = prompt if prompt - start > 1 else start  # a piece of one token is decoded
    if last > rhythm.first:
        left = rhythm.every - (seen - last) % rhythm.every
    else:
        late = (seen - rhythm.slots) % rhythm.every
        left = rhythm.slots - seen if seen < rhythm.slots else rhythm.every - late
    return max(1, min(tokens, left - 1))


class KnownPages:
    """The states of the pages in an engine's blocks, of requests as well as of copies.

    Args:
        guesses: of the tokens that a request has decoded last, so many may be rejected.
    """

    def __init__(self, guesses: int = 0) -> None:
        self._guesses = guesses
        self._known = np.zeros((2, 0), dtype=np.int64)  # tokens, last

    def tokens(self, blocks: Numbers) -> Numbers:
        """The number of tokens of the page in each block; 0: there is none."""
        found: Numbers = self._of(blocks)[0]
        return found

    def states(self, blocks: Numbers, seen: Numbers, rhythm: Rhythm) -> States:
        """The states of pages after ``seen`` tokens. Pages of which nothing is known, such as those
        of the requests that vLLM makes up to warm up, were compressed wherever they were full."""
        known, default = self._of(blocks), States.regular(rhythm, seen)
        valid = (seen <= known[0]) & (known[0] <= seen + self._guesses) & (seen > 0)
        return States(np.where(valid, known[1], default.last))

    def put(self, blocks: Numbers, tokens: Numbers, last: Numbers) -> None:
        """Pages of these states are in these blocks now."""
        self._of(blocks)
        self._known[:, blocks] = np.stack([tokens, last])

    def state(self, block: int) -> tuple[int, int]:
        """The number of tokens of the page in a block, and how many there were at its last
        compression."""
        tokens, last = self._of(np.array([block]))[:, 0].tolist()
        return tokens, last

    def _of(self, blocks: Numbers) -> Numbers:
        most = int(blocks.max(initial=-1)) + 1
        if most > self._known.shape[1]:
            more = np.zeros((2, most - self._known.shape[1]), dtype=np.int64)
            self._known = np.concatenate([self._known, more], axis=1)
        found: Numbers = self._known[:, blocks]
        return found
