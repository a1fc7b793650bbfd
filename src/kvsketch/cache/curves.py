"""Measured errors against kept slots, head by head, and the budgets that follow from them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.error import WindowError, asked_of, relative_error
from kvsketch.errors import InputError
from kvsketch.observed import Observed
from kvsketch.page.page import Page
from kvsketch.slots import Slots
from kvsketch.writing import save_bytes

#: fractions of the tokens between sinks and recent window at which errors are measured
# Nothing between one half and all: if retrieval depends on every token, three quarters have a small
# error but lose the answer.
LEVELS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)

#: later tokens differ from the measured ones, so a tolerance is multiplied by this factor (measured
#: by ``benchmarks.tolerance``)
MARGIN = 0.8

_FORMAT = 1

#: (tokens, budget, queries) to slots
Compress = Callable[[Slots, int, Observed], Slots]
#: (tokens, queries) to scored slots
Observe = Callable[[Slots, Observed], Slots]
#: (slots, room) to the page on which they are stored, with room for as many more
Store = Callable[[Slots, int], Page]


def as_they_are(slots: Slots, room: int) -> Page:
    """The ``Store`` of slots in the dtype of their keys."""
    return Page(slots, room=room)


@dataclass(frozen=True)
class Curves:
    """Measured errors of every KV head at every level.

    Attributes:
        error: float64 ``[layers, heads, levels]``: squared error of the outputs of the head's
            queries, over the squared norm of the layer's exact output; mean over prompts.
        kept: slots over tokens at each level, ``[levels]``, increasing to 1; or the cost of a level
            (``storage.Price``), ``[layers, levels]`` where layers differ.
        relative: float64 ``[layers, heads, levels]``: error over the norm of the head's own exact
            output, the largest of all prompts and rows; None if not measured.
        model: the model that they belong to (``model_shape``); None: unknown.

    Raises:
        InputError: wrong shapes, or numbers that are not finite.
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
        """Raise unless these are curves of this model.

        Args:
            layers: number of compressed layers; heads: KV heads of each.
            model: its name by ``model_shape``; None: unknown.

        Raises:
            InputError: they belong to another model.
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
        """The shares, with mean 1, that reduce the summed error most: greedily from the lowest
        level, always the step with the largest reduction of error per slot, which may skip levels
        without a reduction.

        Args:
            budget: kept fraction of the tokens, on average over all heads.

        Raises:
            InputError: the budget is below the lowest level or above 1.
        """
        least = self.least
        if not least <= budget <= 1:
            raise InputError(
                f"budget={budget!r} must lie in [{least:.4f}, 1]: sinks, recent tokens and the "
                "lowest measured level need this much"
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
        """The fewest slots per head whose relative error, and that of every higher level, is at
        most ``MARGIN`` times the tolerance.

        Args:
            tolerance: limit on a head's relative error, > 0.
            most: upper limit on the kept fraction of the tokens, on average over all heads. If the
                tolerance needs more, this budget is allocated where the error falls most, and no
                head gets more than the tolerance needs. Below the lowest measured level: the same
                for every head.

        Returns:
            Kept fractions ``[layers, heads]``, 1 if all tokens are needed, and bool ``[layers,
            heads]``: the heads that exceed the tolerance because of ``most``.

        Raises:
            InputError: tolerance not > 0, or relative errors were not measured.
        """
        if not tolerance > 0:
            raise InputError(f"tolerance={tolerance!r} must be > 0")
        if self.relative is None:
            raise InputError("these curves have no relative errors, which a tolerance needs")
        good = self.relative <= tolerance * MARGIN
        good[..., -1] = True  # all tokens: exact
        needed = good.shape[-1] - good.flip(-1).long().cumprod(-1).sum(-1)
        level = needed
        if float(self._at(needed).mean()) > most:
            if most < self.least:  # below the lowest measured level: nothing is left to allocate
                even = torch.full(needed.shape, most, dtype=torch.float64)
                return even, self._at(needed) > most
            level = self._greedy(most, needed)
        return self._at(level), level < needed

    def rounds_within(self, tolerance: float) -> bool:
        """Whether every head that keeps all its tokens has an error of at most ``MARGIN`` times the
        tolerance, which may be false if they are stored in 8 or 4 bits."""
        assert self.relative is not None
        return bool((self.relative[..., -1] <= tolerance * MARGIN).all())

    def _greedy(self, budget: float, most: Tensor | None = None) -> Tensor:
        """Levels ``[layers, heads]`` within the budget, and within ``most``."""
        layers, heads, levels = self.error.shape
        rows = layers * heads
        # More slots do not increase the error: an increase in a measured curve is noise.
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
        """Read a file that ``save`` wrote.

        Raises:
            InputError: the file is missing, truncated, or not a file of curves.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise InputError(f"{str(path)!r} is not JSON: {error}") from error
        if not isinstance(content, dict) or content.get("kvsketch_curves") != _FORMAT:
            raise InputError(
                f"{str(path)!r} is not a file of curves that this version can read "
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
            raise InputError(f"{str(path)!r} holds damaged curves: model={model!r} is not a string")
        return Curves(tensors[0], tensors[1], tensors[2], model)


def model_shape(config: Any) -> str:
    """A name of a model's shape, to detect curves of another model.

    It says less than ``hf.identity`` on purpose. Curves are statistics: a fine-tuned version of the
    model may use them, in any dtype, and vLLM reads them before it loads the weights. The keys and
    values in a file, in contrast, are valid for one set of weights only.

    Args:
        config: configuration of a transformers model.
    """
    text = config.get_text_config(decoder=True)
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    sizes = [f"{name}={getattr(text, name)}" for name in names if hasattr(text, name)]
    return " ".join([str(text.model_type), *sizes])


def spend(kept: Tensor, total: float, most: Tensor | float = 1.0) -> Tensor:
    """Kept fractions, limited to ``most``, whose sum is ``total``: the rest goes to the heads below
    their limit, in proportion."""
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
    args = slots, observed, compress, held_out, sink, recent, levels
    (rows,) = measure_rows(*args, observe=observe)
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
    stores: Sequence[Store] = (as_they_are,),
) -> list[list[Curves]]:
    """One layer's curves on one prompt per row, for each way to store the slots. The tokens before
    the last ``held_out`` ones are compressed by a method that has seen no later query; the held-out
    queries then attend to the slots and, causally, to their own tokens.

    ``relative`` is the larger of their error and the error on the last queries before them: the
    latter attend to few tokens that are kept unchanged, and the method has not seen the former. Of
    queries after all slots, every second one is held out instead, and all tokens are compressed.

    Args:
        slots: all tokens, ``[batch, heads, n, ...]``.
        observed: the newest queries, more than ``held_out``.
        compress: the method, in the same initial state at every call.
        held_out: number of queries, at least 1 and less than n - sink - recent.
        sink: kept unchanged, as in ``compress``.
        recent: likewise.
        levels: increasing fractions of the tokens between sinks and recent window; the last one is
            1.
        total: turns the squared norms of these heads' outputs, ``[batch]``, into those of the whole
            layer, if other processes have more heads.
        observe: updates the slots' scores by queries, once; ``compress`` then gets scored slots.
            None: ``compress`` does this at every level.
        stores: how the slots are stored.

    Returns:
        For each of ``stores``, the curves of each row.
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
    padded = slots.mass is not None
    exact = asked_of(Page.of_tokens(slots).open(), asked, padded)
    norm = exact.double().square().sum((1, 2, 3))
    norm = (norm if total is None else total(norm)).clamp(min=1e-300)
    window = WindowError(Page.of_tokens(tokens).open(), before, recent, padded)
    kept: list[float] = []
    found: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in stores]
    for level in levels:
        budget = min(n, sink + recent + max(1, round(level * (n - sink - recent))))
        kept.append(budget / n)
        compressed = compress(scored, budget, before)
        for store, (errors, relatives) in zip(stores, found, strict=True):
            page = store(compressed, later.count)
            seen = window.error(page.open())
            if later.count:
                page.append(later)
            answer = asked_of(page.open(), asked, padded)
            wrong = (answer - exact).double().square().sum((2, 3)).view(batch, heads, -1).sum(-1)
            errors.append(wrong / norm.unsqueeze(1))
            relatives.append(torch.maximum(relative_error(exact, answer, heads), seen))
    shares = torch.tensor(kept, dtype=torch.float64)
    return [
        [
            Curves(error[[row]], shares, relative[[row]])
            for error, relative in [[torch.stack(each, dim=-1).cpu() for each in measured]]
            for row in range(batch)
        ]
        for measured in found
    ]


def pooled(curves: Sequence[Curves]) -> Curves:
    """Combine curves of the same heads on several prompts."""
    relative = [c.relative for c in curves if c.relative is not None]
    return Curves(
        torch.stack([c.error for c in curves]).mean(0),
        torch.stack([c.kept for c in curves]).mean(0),
        torch.stack(relative).amax(0) if len(relative) == len(curves) else None,
    )


def of_layers(layers: Sequence[Curves]) -> Curves:
    """Combine curves of single layers into those of a model.

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
    return asked_of(Slots.cat([replace(slots, score=None), replace(later, score=None)]), asked)


def held_out_for(tokens: int, sink: int, recent: int) -> int:
    """How many of a prompt's last queries to hold out: up to 128, a quarter of the tokens between
    sinks and recent window; 0 if these are too few to measure."""
    count = min(128, (tokens - sink - recent) // 4)
    return count if count >= 16 else 0


def least_tokens(sink: int, recent: int) -> int:
    """The number of tokens of the shortest prompt that can be measured."""
    return sink + recent + math.ceil(4 * 16)
