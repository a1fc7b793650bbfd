"""The error of a cache's slots, measured on queries whose exact attention output is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvsketch.attention import attend_to
from kvsketch.cache.queries import observed_state, read_observed
from kvsketch.errors import UnsupportedError
from kvsketch.estimator import attention_scores
from kvsketch.observed import Observed
from kvsketch.page.kind import Kind
from kvsketch.page.part import Part
from kvsketch.slots import Slots, compute_dtype
from kvsketch.state import Reader, State

#: queries the error is measured on
QUERIES = 32

#: what queries attend to: the parts of a page, or slots
Held = Sequence[Part] | Slots


def relative_error(exact: Tensor, answer: Tensor, heads: int) -> Tensor:
    """|answer - exact| / |exact|, Frobenius over the queries of each KV head.

    Args:
        exact: ``[batch, num_attention_heads, q, value_dim]``; ``answer`` likewise.
        heads: num_key_value_heads.

    Returns:
        float64 ``[batch, heads]``; 0 where both are zero.
    """
    wrong, norm = (
        t.double().square().sum((2, 3)).view(t.shape[0], heads, -1).sum(-1)
        for t in (answer - exact, exact)
    )
    return torch.where(wrong > 0, wrong / norm.clamp(min=1e-300), 0.0).sqrt()


class WindowError:
    """Relative error of the last queries after compression, in two steps: their exact outputs, then
    the error on what was kept.

    As many queries as the recent window has tokens (at most ``QUERIES``, at least the last one),
    because only these attend to the same tokens before and after. A method that uses queries has
    seen these.

    Args:
        tokens: all tokens, exact: slots, or the parts of a page.
        observed: the newest queries.
        recent: tokens kept unchanged at the end.
        padded: whether slots may be dead.
    """

    def __init__(self, tokens: Held, observed: Observed, recent: int, padded: bool = False) -> None:
        q = observed.queries.shape[2]
        count = min(QUERIES, q) if observed.after else min(QUERIES, max(1, recent), q)
        last = observed.narrow(q - count, count)
        if observed.after:  # from the whole of the second reading
            last = observed.every(0, -(-q // count))
        self._asked, self._padded = replace(last, queries=last.queries.clone()), padded
        self._exact = asked_of(tokens, self._asked, padded)

    def error(self, kept: Held) -> Tensor:
        """Relative error on what was kept, float64 ``[batch, num_key_value_heads]``; of no more
        queries than there are tokens of their own."""
        last = kept if isinstance(kept, Slots) else kept[-1]
        asked, exact, q = self._asked, self._exact, self._exact.shape[2]
        own = max(1, last.count)  # the last query sees all tokens
        if own < q and not asked.after:
            asked, exact = asked.narrow(q - own, own), exact[:, :, q - own :]
        heads = kept.keys.shape[1] if isinstance(kept, Slots) else kept[0].heads
        return relative_error(exact, asked_of(kept, asked, self._padded), heads)

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        return [self._asked.queries, self._exact]


def asked_of(held: Held, asked: Observed, padded: bool = False) -> Tensor:
    """Attention of observed queries over what a layer holds, ``[batch, num_attention_heads, q,
    value_dim]``, on a CPU in at least float32: fused kernels round weights to the dtype of the
    queries. Zeros for a padded query.

    Args:
        held: slots, or the parts of a page.
        padded: whether slots may be dead.
    """
    if isinstance(held, Slots):
        held = replace(held, score=None)
    elif not held[-1].count:  # neither sinks nor recent tokens, and nothing has come since
        held = held[:-1]
    if asked.queries.device.type == "cpu":
        asked = replace(asked, queries=asked.queries.to(compute_dtype(asked.queries.dtype)))
    out = attend_to(asked, held, None, padded)
    return out if asked.live is None else out.masked_fill(~asked.live[:, None, :, None], 0.0)


class Probe:
    """A few queries with their exact attention over the whole stream, kept up to date: the error
    of the slots at any time, as if these queries came then.

    A new token costs each probe one score; no other information about the stream is needed. (A
    reservoir of exact tokens would estimate the same with the error of uniform sampling, which is
    larger than what it measures.)

    Args:
        tokens: all tokens so far, exact.
        observed: the newest queries; the last ``QUERIES`` are kept.
    """

    def __init__(self, tokens: Slots, observed: Observed) -> None:
        q = observed.queries.shape[2]
        count = min(QUERIES, q)
        last = observed.narrow(q - count, count)
        dtype = compute_dtype(last.queries.dtype)
        self._asked = replace(last, queries=last.queries.to(dtype, copy=True))
        self._log_total, self._answer = self._attended(tokens)

    def extend(self, new: Slots) -> None:
        """Add exact tokens."""
        if new.count == 0:
            return
        log_new, answer = self._attended(new)
        log_total = torch.logaddexp(self._log_total, log_new)
        old, fresh = (
            (x - log_total).nan_to_num(nan=-torch.inf).exp().unsqueeze(-1)
            for x in (self._log_total, log_new)
        )
        self._answer = self._answer * old + answer * fresh
        self._log_total = log_total

    def error(self, slots: Slots) -> Tensor:
        """Relative error of ``slots``, float64 ``[batch, num_key_value_heads]``."""
        exact = self._answer
        if self._asked.sinks is not None:
            # the stored output is attention over the tokens only; an attention sink takes a share
            # of the total
            sinks = self._asked.sinks.to(exact.dtype)[:, None]
            exact = exact * torch.sigmoid(self._log_total - sinks).unsqueeze(-1)
        asked = replace(self._asked, after=True)
        return relative_error(exact, asked_of(slots, asked), slots.keys.shape[1])

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn`` to the batch axis of all tensors."""
        live = None if self._asked.live is None else fn(self._asked.live)
        self._asked = replace(self._asked, queries=fn(self._asked.queries), live=live)
        self._log_total, self._answer = fn(self._log_total), fn(self._answer)

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        return [self._asked.queries, self._log_total, self._answer]

    def to_state(self) -> State:
        """The queries and their exact outputs."""
        state = State()
        state.put("asked", observed_state(self._asked))
        state.keep(log_total=self._log_total, answer=self._answer)
        return state

    @classmethod
    def from_state(cls, reader: Reader, kind: Kind) -> Probe:
        """Restore the result of ``to_state``."""
        probe = cls.__new__(cls)
        probe._asked = read_observed(reader.part("asked"), kind)
        shape, dtype = probe._asked.queries.shape[:3], probe._asked.queries.dtype
        probe._log_total = reader.tensor("log_total", shape, dtype, allow=("inf",))
        probe._answer = reader.tensor("answer", (*shape, kind.value_dim), dtype)
        reader.close()
        return probe

    def _attended(self, tokens: Slots) -> tuple[Tensor, Tensor]:
        """Log of the summed weights ``[batch, num_attention_heads, q]`` and the attention."""
        asked = self._asked
        scores = attention_scores(
            asked.queries, tokens, asked.scaling, asked.softcap, None, asked.slopes
        )
        if tokens.mass is not None:
            scores += tokens.mass.to(scores.dtype).log()[:, :, None, None]
        log_total = scores.logsumexp(-1)
        if asked.slopes is not None and tokens.positions is not None:
            # scores count positions from the newest of these tokens
            slopes = asked.slopes.to(scores.dtype).view(1, *scores.shape[1:3], 1)
            log_total += slopes * tokens.positions.amax(-1)[:, :, None, None]
        return log_total.flatten(1, 2), asked_of(tokens, replace(asked, sinks=None, after=True))


class Errors:
    """The errors of one layer's slots: on the prompt's last queries, after it is compressed, and
    with ``track``, on a few of them over all tokens since.

    Attributes:
        prompt: relative error of the prompt's last queries on its slots, float64 ``[batch,
            num_key_value_heads]`` (``WindowError``); None before.
    """

    def __init__(self, track: bool) -> None:
        self.track = track
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.prompt: Tensor | None = None
        self._asked: WindowError | None = (
            None  # of a prompt whose final compression is still to come
        )
        self._probe: Probe | None = None
        self._probed = 0  # number of tokens that the probe has seen

    def ask(self, tokens: Held, last: Observed, recent: int, padded: bool) -> None:
        """Record the exact outputs of the ``last`` queries: the ``tokens`` are about to be
        compressed.

        Args:
            recent: tokens kept unchanged at the end.
            padded: whether some are padding.
        """
        self._asked = WindowError(tokens, last, recent, padded)

    def probe(self, tokens: Slots, last: Observed, seen: int) -> None:
        """Keep the exact outputs of the ``last`` queries up to date from now on.

        Args:
            seen: tokens so far.
        """
        self._probe, self._probed = Probe(tokens, last), seen

    def compressed(self, held: Held) -> None:
        """The prompt was compressed to what is ``held``, and will not be compressed again."""
        if self._asked is not None:
            self.prompt, self._asked = self._asked.error(held), None

    @property
    def probing(self) -> bool:
        """Whether there is a probe, which must see every token while it is exact."""
        return self._probe is not None

    def update(self, slots: Slots, seen: int) -> None:
        """Add the tokens appended since the last update to the probe, while they are exact."""
        if self._probe is not None and seen > self._probed:
            new = seen - self._probed
            self._probe.extend(slots.narrow(slots.count - new, new))
            self._probed = seen

    def running(self, slots: Slots, seen: int) -> Tensor | None:
        """Relative error of the probe's queries over all tokens seen, as if they came now, float64
        ``[batch, num_key_value_heads]``; None if there is no probe."""
        self.update(slots, seen)
        return None if self._probe is None else self._probe.error(slots)

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn``, which acts on axis 0, the batch."""
        if self._probe is not None:
            self._probe.map_batch(fn)
        self.prompt = None if self.prompt is None else fn(self.prompt)

    def to_state(self) -> State:
        """The measured errors, and the queries still to be measured.

        Raises:
            UnsupportedError: the final compression of the prompt is still to come.
        """
        if self._asked is not None:
            raise UnsupportedError(
                "the final compression of the prompt is still to come: read it to its end"
            )
        state = State(values={"probed": self._probed})
        state.keep(prompt=self.prompt)
        state.put("probe", None if self._probe is None else self._probe.to_state())
        return state

    def restore(self, reader: Reader, kind: Kind, seen: int) -> None:
        """Restore the result of ``to_state``."""
        self._probed = reader.whole("probed", 0, seen)
        if reader.has("prompt"):
            shape = (kind.batch, kind.heads)
            self.prompt = reader.tensor("prompt", shape, torch.float64, allow=("inf",))
        if reader.has("probe"):
            self._probe = Probe.from_state(reader.part("probe"), kind)
        reader.close()

    def tensors(self) -> list[Tensor]:
        """All tensors, for byte counting."""
        parts = [part for part in (self._probe, self._asked) if part is not None]
        return [tensor for part in parts for tensor in part.tensors()]
