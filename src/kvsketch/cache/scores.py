"""What the slots of a stream are worth: scores, and the queries that wait to become scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.cache.echo import Echo, some_of
from kvsketch.cache.error import QUERIES
from kvsketch.cache.pace import Pace
from kvsketch.cache.queries import Queries
from kvsketch.cache.sketch_page import SketchPage
from kvsketch.cache.windowed_sketch import WindowedSketch
from kvsketch.errors import UnsupportedError
from kvsketch.kernels import cpu
from kvsketch.methods.base import Compressor
from kvsketch.observed import Observed
from kvsketch.page.fields import owned
from kvsketch.page.page import Page
from kvsketch.slots import Slots, compute_dtype

#: Added to the scores of a question's tokens while it is answered; scores are far below it.
MARK = 64.0


class Scores:
    """The scores of a stream's slots, which lie on its page, and the queries that they do not
    include yet: these wait until they are many, or until a compression needs the scores. A prompt's
    queries may be asked again when it is over, so that every token is asked for by all of them.

    Args:
        method: turns queries into scores.
        pace: of the stream: with a rhythm, slots are to be those of an engine.

    Attributes:
        queries: those that wait.
        row_bytes: the bytes of a row beside which they wait; the more, the more may wait.
        echo: a prompt's queries, if they can be asked again after it; None: they cannot.
        asked_again: whether the scores of a prompt are those of its queries, asked again.
        last: the prompt's last queries, if others wait.
        answers: whether tokens are decoded after the newest piece of a prompt.
    """

    def __init__(self, method: Compressor | WindowedSketch, pace: Pace) -> None:
        self._method, self._pace = method, pace
        self.queries = Queries()
        self.reset()

    def reset(self) -> None:
        """Forget all queries."""
        self.queries.clear()
        self.row_bytes = 0
        self.echo: Echo | None = None
        self.asked_again = self.answers = False
        self.last: Observed | None = None
        # During a second reading: scores by an echo, and a few of its queries.
        self._heard: tuple[Tensor, Observed] | None = None

    def add_last(self, observed: Observed, kept: int, due: bool) -> None:
        """Let only the last ``kept`` queries wait, if a compression is due."""
        count = observed.queries.shape[2]
        last = observed.narrow(max(0, count - kept), min(count, kept))
        self.queries.add(replace(last, queries=owned(last.queries)))
        if due or self.queries.count >= 2 * kept:
            self.queries.keep_last(kept)

    def settle(self, page: Page | SketchPage, prefill: bool, hold: bool) -> None:
        """Turn a prompt's queries into scores now (they are many), a decoded token's only now and
        then. What looks at a window of queries only waits for the last chunk of a held prompt."""
        method, queries = self._method, self.queries
        if hold and not method.requires.queries:
            queries.keep_last(QUERIES)
        elif hold and method.window is not None:
            queries.keep_last(method.window)
        elif hold and method.requires.whole_prompt:
            pass
        elif prefill or queries.many(self.row_bytes):
            self.fold(page)

    @torch.no_grad()
    def fold(self, page: Page | SketchPage) -> None:
        """Update scores by the waiting queries now."""
        asked = self.queries.all()
        self.queries.clear()
        if asked is not None and not asked.after:  # those of a second reading are in the scores
            fold(self._method, page, asked, self._in_place(page))
            page.release()

    def _in_place(self, page: Page | SketchPage) -> bool:
        """Whether scores may be updated where they are: an engine can tell a page that was
        compressed before from one that was not by its middle alone."""
        return page.compressed if self._pace.rhythm is None else page.middle is not None

    def of(self, slots: Slots) -> Slots:
        """Slots with the waiting queries folded in. What these saw is still all here, so this
        equals observing every query at its own time."""
        observed = self.queries.all()
        if observed is None or observed.after:
            return slots  # those of a second reading are in the scores already
        return replace(slots, score=self._method.observe(slots, observed).score)

    def read(self, page: Page) -> Slots:
        """The slots of a page that is about to be compressed, with all scores."""
        asked = self.queries.all()
        if asked is not None and self._in_place(page) and received(self._method, page, asked):
            self.queries.clear()
        slots = page.read(exactly=page.middle is not None)
        if self._pace.rhythm is not None:  # as in an engine's memory, where every slot has a mass
            slots = replace(slots, values=slots.values.to(compute_dtype(slots.values.dtype)))
        return self.of(slots)

    def importance(self, slots: Slots) -> Tensor:
        """The importance of the slots to the method, float ``[batch, num_key_value_heads, n]``;
        -inf for padding.

        Raises:
            UnsupportedError: the method has none.
        """
        found = self._method.importance(self.of(slots))
        if found is None:
            raise UnsupportedError("this method has no scores by which heads could be compared")
        live = slots.live()
        return found if live is None else found.masked_fill(~live, -torch.inf)

    @torch.no_grad()
    def ask_again(self, page: Page | SketchPage, seen: int) -> None:
        """Ask the prompt's own queries again, after it, if this is possible: they become scores,
        and a few of them wait instead of the last ones."""
        echo, self.echo = self.echo, None
        if echo is None or page.compressed or not 0 < echo.covered == seen:
            return
        asked, sample = echo.asked()
        score = self._method.echo(self.of(page.slots), asked, sample, alone=False).score
        assert score is not None
        page.set_score(score)
        self._wait_for(asked)

    @torch.no_grad()
    def ask_piece_again(self, page: Page, observed: Observed, newest: int) -> None:
        """Ask the queries of the newest piece of a prompt again after it: they become scores, and
        wait instead of all others; if there is no budget yet, a few of them, to measure on. Of a
        piece that is answered next, the ``newest`` tokens are marked, until the next piece."""
        asked = replace(observed, after=True)
        slots = page.read(exactly=page.middle is not None)
        score = scored(self._method, slots, observed, asked).score
        assert score is not None
        score = unmarked(score)
        if self.answers:
            score[..., -newest:] += MARK
        page.set_score(score)
        self.queries.clear()
        if self._pace.budget is None:
            self.queries.add(observed)
            self._wait_for(asked)
        else:
            self.queries.add(asked)

    def _wait_for(self, asked: Observed) -> None:
        """Let a few of the queries that were asked again wait instead of the prompt's last ones."""
        self.last, self.asked_again = self.queries.last(QUERIES), True
        self.queries.clear()
        self.queries.add(some_of(asked))

    @torch.no_grad()
    def hear(self, page: Page | SketchPage, seen: int, observed: Observed, tokens: int) -> None:
        """Take the queries of the newest tokens of a prompt of which a sample will be read again:
        at its end, after ``tokens``, all of them are asked again."""
        if self.echo is None:
            return
        self.echo.add(observed, seen)
        if self.echo.covered == tokens:  # scores are far smaller than the queries
            asked, sample = self.echo.asked()
            score = self._method.echo(page.slots, asked, sample, alone=True).score
            assert score is not None
            self._heard, self.echo = (score, some_of(asked)), None

    @torch.no_grad()
    def ask(
        self, page: Page | SketchPage, observed: Observed, about: slice | Tensor, sample: int
    ) -> Page | SketchPage:
        """Take the queries of a part of a second reading, whose tokens are the newest on the page
        and go again: they are no part of the stream. Returns the page without them.

        Args:
            observed: the queries.
            about: the tokens of the first reading that are read again, as in ``Compressor.reread``.
            sample: of the queries, which wait for what else looks at queries, unless those of an
                echo will.
        """
        score = None
        if self._method.requires.queries:
            score = self._method.reread(page.slots, observed, about).score
        page.drop(observed.queries.shape[2])
        page = page.map(Tensor.detach)  # of a reading that took gradients
        if score is not None:
            page.set_score(score)
        if self._heard is not None:
            return page
        step = max(1, observed.queries.shape[2] // max(1, sample))
        some = replace(observed, after=True, weights=None).every(0, step)
        self.queries.add(replace(some, queries=some.queries.clone()))
        return page

    def complete(self, page: Page | SketchPage, sample: Tensor) -> None:
        """The second reading is over and repeated only these tokens, int64, in order. Their scores
        correct those of the prompt's echo, some of whose queries wait now; without an echo, the
        scores of all other tokens are predicted from theirs."""
        echo = None
        if self._heard is not None:
            (echo, few), self._heard = self._heard, None
            self.queries.add(few)
        if self._method.requires.queries:
            score = self._method.complete(page.slots, sample, echo).score
            assert score is not None
            page.set_score(score)

    def forget(self, waiting: bool) -> None:
        """Forget the prompt's last queries, and those that are ``waiting``."""
        self.last = None
        if waiting:
            self.queries.clear()

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn``, which acts on axis 0, the batch."""
        self.queries.map_batch(fn)
        if self.echo is not None:
            self.echo.map_batch(fn)
        if self.last is not None:
            self.last = self.last.map_batch(fn)

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        held = [] if self.last is None else [self.last.queries]
        held += [] if self._heard is None else [self._heard[0], self._heard[1].queries]
        return held + [t for x in (self.queries, self.echo) if x is not None for t in x.tensors()]


def received(method: Compressor | WindowedSketch, page: Page | SketchPage, asked: Observed) -> bool:
    """Update the scores of a page by queries of decoded tokens where the slots are, which are not
    turned into floats for it. False: no kernel can."""
    weights = method.weights_of(asked) if cpu.takes(asked.queries) else None
    if weights is None:
        return False
    parts = page.scored()
    group = asked.queries.shape[1] // parts[0].heads
    return cpu.receive(asked, parts, weights / group)


def fold(
    method: Compressor | WindowedSketch,
    page: Page | SketchPage,
    asked: Observed,
    in_place: bool = True,
) -> None:
    """Update the scores of a page by queries, ``in_place`` if a kernel can."""
    if in_place and received(method, page, asked):
        return
    score = method.observe(page.to_score(method.requires.values), asked).score
    if score is not None:
        page.set_score(score)


def scored(
    method: Compressor | WindowedSketch, slots: Slots, asked: Observed, again: Observed | None
) -> Slots:
    """Slots with scores.

    Args:
        method: one that has scores.
        slots: as left by the compression before, with the tokens since then.
        asked: the last queries.
        again: at the end of a piece of a prompt, all of its queries, asked again after it: the
            largest score of any piece counts.
    """
    if again is None:
        return method.observe(slots, asked)
    before = slots.score
    found = method.echo(method.observe(replace(slots, score=None), asked), again, None, alone=False)
    assert found.score is not None
    if before is None:
        return found
    return replace(slots, score=torch.maximum(before, found.score))


def unmarked(score: Tensor) -> Tensor:
    """Scores without ``MARK``, which are summed where slots are merged."""
    return torch.where(score >= MARK, score.remainder(MARK), score)
