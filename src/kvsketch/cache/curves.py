"""Measured errors against kept slots, head by head, and the budgets that follow from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.writing import path_of, save_bytes

#: later tokens differ from the measured ones, so a tolerance is multiplied by this factor (measured
#: by ``benchmarks.tolerance``)
MARGIN = 0.8

_FORMAT = 1


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
        if not least <= budget <= max(1.0, least):  # few tokens in few bits may cost more than all
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
                even = torch.full(needed.shape, most, dtype=torch.float64, device="cpu")
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
        number = torch.arange(levels, device="cpu")
        last = number[-1:].expand(rows, 1) if most is None else most.reshape(rows, 1)
        level = torch.zeros(rows, dtype=torch.long, device="cpu")
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
        save_bytes(path_of(path, "path"), text.encode(), repr(str(path)))

    @staticmethod
    def load(path: str | Path) -> Curves:
        """Read a file that ``save`` wrote.

        Raises:
            InputError: the file is missing, truncated, or not a file of curves.
        """
        file = path_of(path, "path")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
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
            tensors = [
                None if x is None else torch.tensor(x, dtype=torch.float64, device="cpu")
                for x in fields
            ]
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
    limit = torch.as_tensor(most, dtype=kept.dtype, device=kept.device).expand(kept.shape)
    kept = torch.minimum(kept, limit)
    for _ in range(20):
        open_ = kept < limit
        left = total - float(kept.sum())
        if left <= 1e-9 or not bool(open_.any()):
            break
        grown = kept * (1 + left / float(kept[open_].sum()))
        kept = torch.where(open_, torch.minimum(grown, limit), kept)
    return kept


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
