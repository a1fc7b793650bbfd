"""A prompt's own queries, asked again after it: what a second reading would ask, without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.cache.queries import joined
from kvsketch.observed import Observed

#: From queries ``[batch, num_attention_heads, q, head_dim]`` to those of the same tokens so many
#: positions later.
Turn = Callable[[Tensor, int], Tensor]

#: The largest number of queries that are asked again, and of pairs of a query and a token: beyond
#: 8,192 tokens an echo takes no more time. Of a longer prompt the queries come in runs of ``RUN``
#: tokens, since the score of a token comes from its neighbours' queries.
MOST, PAIRS = 4096, 4096 * 8192
RUN = 64
# How many of them are kept to measure errors on: one of so many, at least, and at most.
_ONE_OF, _LEAST, _KEPT = 64, 32, 256


class Echo:
    """The queries of a prompt, until it is compressed. Ours.

    A token's query tells what the model would look for if the token came again. So the queries of
    the whole prompt, moved behind it, stand for a second reading of it (KVzip, arXiv:2505.23416),
    which costs no forward: with rotary positions, moving them is a rotation.

    Args:
        turn: moves queries.

    Attributes:
        covered: tokens from the first on whose queries were added without a gap.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._parts: list[tuple[Observed, Tensor]] = []
        self._every = 1  # of so many runs, one is kept
        self.covered = 0

    def add(self, observed: Observed, seen: int) -> None:
        """Append the queries of the newest tokens; ``seen``: tokens so far, these included."""
        count = observed.queries.shape[2]
        if seen - count != self.covered:
            return  # some are missing
        self.covered = seen
        self._parts.append((observed, torch.arange(seen - count, seen, device="cpu")))
        most = min(MOST, PAIRS // seen)
        while sum(len(self._kept(places)) for _, places in self._parts) > most:
            self._every *= 2
        self._parts = [self._thinned(*part) for part in self._parts]

    def _kept(self, places: Tensor) -> Tensor:
        """Which of the queries of some tokens are kept."""
        return (places // RUN % self._every == 0).nonzero().flatten()

    def _thinned(self, observed: Observed, places: Tensor) -> tuple[Observed, Tensor]:
        kept = self._kept(places)
        if len(kept) == len(places):
            return observed, places
        where = kept.to(observed.queries.device)
        live = None if observed.live is None else observed.live[:, where]
        queries = observed.queries.index_select(2, where)
        return replace(observed, queries=queries, live=live), places[kept]

    def asked(self) -> tuple[Observed, Tensor | None]:
        """The queries, after all tokens, and the tokens whose they are, int64, in order; None: of
        all tokens."""
        every = joined([observed for observed, _ in self._parts])
        queries = self._turn(every.queries, self.covered)
        places = torch.cat([places for _, places in self._parts])
        sample = None if len(places) == self.covered else places.to(queries.device)
        return replace(every, queries=queries, after=True), sample

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn``, which acts on axis 0, the batch."""
        self._parts = [(observed.map_batch(fn), places) for observed, places in self._parts]

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        return [observed.queries for observed, _ in self._parts]


def some_of(asked: Observed) -> Observed:
    """A few of the queries, as a copy."""
    count = asked.queries.shape[2]
    kept = min(max(count // _ONE_OF, _LEAST), _KEPT, count)
    few = asked.every(0, count // kept)
    return replace(few, queries=few.queries.clone())
