"""The rounds of a model that guesses tokens for the served one (speculative decoding).

Its layers have pages of their own, with the numbers of the served model's, which hold the same
tokens and are compressed after the same ones. After each step of the served model it reads the
tokens of the step and the one that was chosen after them, and then its own guesses, one by one.
What it reads behind the step's tokens is read again in the next step, and compressed then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvsketch.page.schedule import Numbers
from kvsketch.vllm.rounds import Copies, Round
from kvsketch.vllm.states import States

_Made = Callable[..., list[Round]]


@dataclass
class Step:
    """A step of the served model, R requests.

    Attributes:
        seen: tokens of each request before the step, and, once the guessing model has read those of
            the step, after it; int64 ``[R]``.
        pages: the page of each request, int64 ``[R]``.
        states: of the pages after ``seen`` tokens.
        copies: of pages.
        pieces: as an argument of ``rounds``.
    """

    seen: Numbers
    pages: Numbers
    states: States
    copies: Copies | None
    pieces: Numbers

    def read(self, starts: Numbers, rejected: Numbers, made: _Made) -> list[Round]:
        """The rounds of the guessing model's first batch.

        Args:
            starts: where each request's tokens start in the batch, and the end, ``[R + 1]``: those
                of the step that are right, the chosen one, and as many as were rejected.
            rejected: how many that are, int64 ``[R]``.
            made: ``rounds`` with what is the same in all batches of these layers.
        """
        new = np.maximum(np.diff(starts) - 1 - rejected, 0)
        kept = {"copies": self.copies, "states": self.states, "pieces": self.pieces}
        todo = made(starts, self.seen, self.pages, **kept, new=new)
        self.seen = self.seen + new
        return todo + self.guess(0, np.append(starts[:-1] + new, starts[-1]), made)

    def guess(self, ahead: int, starts: Numbers, made: _Made) -> list[Round]:
        """The rounds of a batch with one token of each request, ``ahead`` behind the chosen one.

        Args:
            starts: where it is in the batch, and the end, ``[R + 1]``.
            made: as in ``read``.
        """
        seen, one = self.seen + ahead, np.ones_like(self.seen)
        return made(starts, seen, self.pages, states=self.states, new=one, guessed=True)
