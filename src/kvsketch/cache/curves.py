"""Measured errors against slots kept, head by head, and what follows from them for a budget."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..slots import Observed, Slots, causal
from ..writing import save_bytes
from .error import asked_of, relative_error, window_error

#: kept shares of the middle whose errors are measured
# Nothing between a half and all: where retrieval hangs on every token, three quarters have a small
# error and lose the answer.
LEVELS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)

#: the tokens to come are not those measured on: a tolerance is held to with this margin (measured
#: by ``benchmarks.tolerance``)
MARGIN = 0.8

_FORMAT = 1

#: (tokens, budget, queries) to slots
Compress = Callable[[Slots, int, Observed], Slots]
#: (tokens, queries) to scored slots
Observe = Callable[[Slots, Observed], Slots]


@dataclass(frozen=True)
class Curves:
    """Measured errors of every KV head at every level.

    Attributes:
        error: float64 ``[layers, heads, levels]``: squared error of the outputs of the head's
            queries, over the squared norm of the layer's exact output; mean over prompts.
        kept: slots over tokens at each level, ``[levels]``, rising to 1; or what a level costs
            (``storage.Price``), ``[layers, levels]`` where layers differ.
        relative: float64 ``[layers, heads, levels]``: error over the norm of the head's own exact
            output, the largest of all prompts and rows; None where it was not measured.
        model: whose they are (``model_of``); None: not said.

    Raises:
        InputError: shapes that do not fit, or numbers that are not finite.
    """

    error: Tensor
    kept: Tensor
    relative: Tensor | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        levels = self.error.shape[-1:]
        fits = self.kept.shape in (levels, (*self.error.shape[:1], *levels))
        if self.error.dim() != 3 or not fits:
            raise InputError(
                "error must be [layers, heads, levels] and kept [levels], got "
                f"{tuple(self.error.shape)} and {tuple(self.kept.shape)}"
            )
        if self.relative is not None and self.relative.shape != self.error.shape:
            raise InputError(
                f"relative {tuple(self.relative.shape)} must have the shape of error "
                f"{tuple(self.error.shape)}"
            )
        for name in ("error", "kept", "relative"):
            tensor = getattr(self, name)
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                raise InputError(f"{name} is not finite (NaN or infinity)")

    def check_model(self, layers: int, heads: int, model: str | None) -> None:
        """Raise unless they are curves of this model.

        Args:
            layers: that are compressed; heads: KV heads of each.
            model: as ``model_of`` names it; None: nobody knows.

        Raises:
            InputError: they are of another.
        """
        found = tuple(self.error.shape[:2])
        if found != (layers, heads):
            raise InputError(
                f"allocation: the curves are of {found[0]} layers x {found[1]} KV heads, the model "
                f"compresses {layers} x {heads}"
            )
        if self.model is not None and model is not None and self.model != model:
            raise InputError(
                f"allocation: the curves are of another model ({self.model}), this one is {model}: "
                "measure its own with kvsketch calibrate"
            )

    def allocate(self, budget: float) -> list[list[float]]:
        """The shares, mean 1, that lower the summed error most: from the lowest level, always the
        step with the greatest fall of error per slot, looking past steps that do not help yet.

        Args:
            budget: kept fraction of the tokens, on average over all heads.

        Raises:
            InputError: the budget is below the lowest level or above 1.
        """
        least = self.least
        if not least <= budget <= 1:
            raise InputError(
                f"budget={budget!r} must lie in [{least:.4f}, 1]: sinks, recent tokens and the "
                "lowest level measured need that much"
            )
        kept = self._at(self._greedy(budget))
        most = self._costs[:, -1:].expand_as(kept)
        kept = spend(kept.flatten(), budget * kept.numel(), most.flatten()).view(kept.shape)
        return (kept / budget).tolist()

    @property
    def least(self) -> float:
        """The mean of ``kept`` at the lowest level."""
        return float(self._costs[:, 0].mean())

    @property
    def _costs(self) -> Tensor:
        """``kept``, ``[layers, levels]``."""
        return self.kept.double().expand(self.error.shape[0], -1)

    def _at(self, level: Tensor) -> Tensor:
        """``kept`` at levels ``[layers, heads]``."""
        return self._costs.gather(1, level)

    def within(self, tolerance: float, most: float = 1.0) -> tuple[Tensor, Tensor]:
        """The least slots per head whose relative error, and that of every level above, is within
        ``MARGIN`` of the tolerance.

        Args:
            tolerance: of a head's relative error, > 0.
            most: kept fraction of the tokens, on average over all heads, that may not be exceeded:
                if it would be, it is spent where the error falls most, never on more than the
                tolerance needs. Below the lowest level measured: the same for every head.

        Returns:
            Kept fractions ``[layers, heads]``, 1 where only all tokens do, and bool ``[layers,
            heads]``: the heads that ``most`` keeps above the tolerance.

        Raises:
            InputError: tolerance not > 0, or no relative errors measured.
        """
        if not tolerance > 0:
            raise InputError(f"tolerance={tolerance!r} must be > 0")
        if self.relative is None:
            raise InputError("these curves hold no relative errors: a tolerance needs them")
        good = self.relative <= tolerance * MARGIN
        good[..., -1] = True  # all tokens: exact
        needed = good.shape[-1] - good.flip(-1).long().cumprod(-1).sum(-1)
        level = needed
        if float(self._at(needed).mean()) > most:
            if most < self.least:  # less than was measured: nothing is left to spend
                even = torch.full(needed.shape, most, dtype=torch.float64)
                return even, self._at(needed) > most
            level = self._greedy(most, needed)
        return self._at(level), level < needed

    def rounds_within(self, tolerance: float) -> bool:
        """Whether every head that keeps all its tokens is within ``MARGIN`` of the tolerance: not
        so, perhaps, where they are stored in few bits."""
        assert self.relative is not None
        return bool((self.relative[..., -1] <= tolerance * MARGIN).all())

    def _greedy(self, budget: float, most: Tensor | None = None) -> Tensor:
        """Levels ``[layers, heads]`` within the budget, and within ``most``."""
        layers, heads, levels = self.error.shape
        rows = layers * heads
        # More slots never hurt: a rise in a measured curve is noise.
        error = self.error.cummin(-1).values.reshape(rows, levels).double()
        kept = self._costs.repeat_interleave(heads, 0)  # [rows, levels]
        number = torch.arange(levels)
        last = torch.full((rows, 1), levels - 1) if most is None else most.reshape(rows, 1)
        level = torch.zeros(rows, dtype=torch.long)
        left = budget * rows - float(kept[:, 0].sum())
        while True:
            cost = kept - kept.gather(1, level.unsqueeze(1))
            possible = (number > level.unsqueeze(1)) & (number <= last) & (cost <= left + 1e-12)
            gain = (error.gather(1, level.unsqueeze(1)) - error) / cost.clamp(min=1e-12)
            gain = gain.masked_fill(~possible, 0.0)
            best = int(gain.argmax())
            if float(gain.view(-1)[best]) <= 0:
                return level.view(layers, heads)
            head, to = divmod(best, levels)
            left -= float(cost[head, to])
            level[head] = to

    def save(self, path: str | Path) -> None:
        """Write JSON.

        Raises:
            InputError: the file cannot be written.
        """
        relative = None if self.relative is None else self.relative.tolist()
        content = {"kvsketch_curves": _FORMAT, "kept": self.kept.tolist()}
        content |= {"error": self.error.tolist(), "relative": relative, "model": self.model}
        text = json.dumps(content, allow_nan=False) + "\n"
        save_bytes(Path(path), text.encode(), repr(str(path)))

    @staticmethod
    def load(path: str | Path) -> Curves:
        """Read what ``save`` wrote.

        Raises:
            InputError: no such file, truncated, or not curves.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise InputError(f"{str(path)!r} is not JSON: {error}") from error
        if not isinstance(content, dict) or content.get("kvsketch_curves") != _FORMAT:
            raise InputError(
                f"{str(path)!r} holds no curves that this version reads "
                f"(kvsketch_curves: {_FORMAT}); write it with Curves.save"
            )
        try:
            fields = [content[name] for name in ("error", "kept", "relative")]
            tensors = [None if x is None else torch.tensor(x, dtype=torch.float64) for x in fields]
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(f"{str(path)!r} holds damaged curves: {error}") from error
        if tensors[0] is None or tensors[1] is None:
            raise InputError(f"{str(path)!r} holds damaged curves: error or kept is missing")
        model = content.get("model")
        if not isinstance(model, str | None):
            raise InputError(f"{str(path)!r} holds damaged curves: model={model!r} is no text")
        return Curves(tensors[0], tensors[1], tensors[2], model)


def model_of(config: Any) -> str:
    """A model by its shape, so that the curves of one are not taken for another's.

    Args:
        config: of a transformers model.
    """
    text = config.get_text_config(decoder=True)
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    sizes = [f"{name}={getattr(text, name)}" for name in names if hasattr(text, name)]
    return " ".join([str(text.model_type), *sizes])


def spend(kept: Tensor, total: float, most: Tensor | float = 1.0) -> Tensor:
    """Kept fractions, cut to ``most``, whose sum is ``total``: what is left of it goes to the heads
    that may have more, in proportion."""
    limit = torch.as_tensor(most, dtype=kept.dtype).expand(kept.shape)
    kept = torch.minimum(kept, limit)
    for _ in range(20):
        open_ = kept < limit
        left = total - float(kept.sum())
        if left <= 1e-9 or not bool(open_.any()):
            break
        grown = kept * (1 + left / float(kept[open_].sum()))
        kept = torch.where(open_, torch.minimum(grown, limit), kept)
    return kept


def measure_layer(
    slots: Slots,
    observed: Observed,
    compress: Compress,
    held_out: int,
    sink: int,
    recent: int,
    levels: Sequence[float] = LEVELS,
    observe: Observe | None = None,
) -> Curves:
    """One layer's curves: those of ``measure_rows``, pooled over the rows of the batch."""
    rows = measure_rows(slots, observed, compress, held_out, sink, recent, levels, observe=observe)
    return pooled(rows)


def measure_rows(
    slots: Slots,
    observed: Observed,
    compress: Compress,
    held_out: int,
    sink: int,
    recent: int,
    levels: Sequence[float] = LEVELS,
    total: Callable[[Tensor], Tensor] | None = None,
    observe: Observe | None = None,
) -> list[Curves]:
    """One layer's curves on one prompt per row: the tokens before its last ``held_out`` are
    compressed, the method having seen no later query; the held-out queries then attend to the slots
    and, causally, to their own tokens.

    ``relative`` is the larger of their error and that of the last queries before them, asked
    again: the latter see few tokens that are kept as they are, the former the method never saw.
    Queries after all slots are held out by turns instead, and all tokens are compressed.

    Args:
        slots: all tokens, ``[batch, heads, n, ...]``.
        observed: the newest queries, more than ``held_out``.
        compress: the method, the same way fresh at every call.
        held_out: queries, at least 1 and less than n - sink - recent.
        sink: kept as they are, as in ``compress``.
        recent: likewise.
        levels: kept shares of what is neither, rising, the last one 1.
        total: makes the squared norms of these heads' outputs, ``[batch]``, those of the layer's,
            if it has others.
        observe: folds queries into the slots' scores, once; ``compress`` then gets scored slots.
            None: ``compress`` does it itself, at every level.
    """
    q = observed.queries.shape[2]
    batch, heads = slots.keys.shape[:2]
    if observed.after:
        n, before, asked = slots.count, observed.every(0, 2), observed.every(1, 2)
    else:
        n = slots.count - held_out
        before, asked = observed.narrow(0, q - held_out), observed.narrow(q - held_out, held_out)
    tokens, later = slots.narrow(0, n), slots.narrow(n, slots.count - n)
    scored = tokens if observe is None or observed.after else observe(tokens, before)
    exact = answers(tokens, later, asked)
    norm = exact.double().square().sum((1, 2, 3))
    norm = (norm if total is None else total(norm)).clamp(min=1e-300)
    errors, relatives, kept = [], [], []
    for level in levels:
        budget = min(n, sink + recent + max(1, round(level * (n - sink - recent))))
        compressed = compress(scored, budget, before)
        answer = answers(compressed, later, asked)
        wrong = (answer - exact).double().square().sum((2, 3)).view(batch, heads, -1).sum(-1)
        errors.append(wrong / norm.unsqueeze(1))
        seen = window_error(tokens, compressed, before, recent)
        relatives.append(torch.maximum(relative_error(exact, answer, heads), seen))
        kept.append(budget / n)
    error, relative = (torch.stack(rows, dim=-1).cpu() for rows in (errors, relatives))
    shares = torch.tensor(kept, dtype=torch.float64)
    return [Curves(error[[row]], shares, relative[[row]]) for row in range(batch)]


def pooled(curves: Sequence[Curves]) -> Curves:
    """Curves of the same heads on several prompts as one."""
    relative = [c.relative for c in curves if c.relative is not None]
    return Curves(
        torch.stack([c.error for c in curves]).mean(0),
        torch.stack([c.kept for c in curves]).mean(0),
        torch.stack(relative).amax(0) if len(relative) == len(curves) else None,
    )


def of_layers(layers: Sequence[Curves]) -> Curves:
    """Curves of one layer each as those of a model.

    Raises:
        InputError: they differ in heads.
    """
    if len({c.error.shape[1:] for c in layers}) > 1:
        raise InputError("layers differ in KV heads: their curves cannot be compared")
    relative = [c.relative for c in layers if c.relative is not None]
    same = all(torch.equal(c.kept, layers[0].kept) for c in layers)
    return Curves(
        torch.cat([c.error for c in layers]),
        layers[0].kept if same else torch.stack([c.kept for c in layers]),
        torch.cat(relative) if len(relative) == len(layers) else None,
    )


def answers(slots: Slots, later: Slots, asked: Observed) -> Tensor:
    """Attention of the queries of ``later`` over ``slots`` and, causally, over their own tokens:
    ``[batch, num_attention_heads, q, value_dim]``. A padded query gets zeros."""
    if asked.after:
        return asked_of(slots, asked)
    together = Slots.cat([replace(slots, score=None), replace(later, score=None)])
    mask = causal(asked.queries.shape[2], together.count, asked.queries.device)
    return asked_of(together, asked, mask)


def held_out_for(tokens: int, sink: int, recent: int) -> int:
    """How many of a prompt's last queries to hold out: up to 128, a quarter of what is neither
    sink nor recent; 0 where that is too few to measure on."""
    count = min(128, (tokens - sink - recent) // 4)
    return count if count >= 16 else 0


def least_tokens(sink: int, recent: int) -> int:
    """The shortest prompt that can be measured on."""
    return sink + recent + math.ceil(4 * 16)
