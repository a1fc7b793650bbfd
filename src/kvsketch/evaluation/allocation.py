"""Spend the same bytes where they matter: shares per layer and head from measured errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch.budget import Budget
from kvsketch.errors import InputError
from kvsketch.evaluation.activations import Activations, capture
from kvsketch.slots import Observed, Slots, attend
from kvsketch.streaming import windowed

#: kept shares of the middle whose errors are measured
LEVELS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


@dataclass(frozen=True)
class Curves:
    """Measured errors of every KV head at every level.

    Attributes:
        error: float64 ``[layers, heads, levels]``: squared error of the outputs of the head's
            queries, over the squared norm of the layer's exact output; mean over prompts.
        kept: slots over tokens at each level, ``[levels]``, rising to 1.
    """

    error: Tensor
    kept: Tensor

    def allocate(self, budget: float) -> list[list[float]]:
        """The shares, mean 1, that lower the summed error most: from the lowest level, always the
        step with the greatest fall of error per slot, looking past steps that do not help yet.

        Args:
            budget: kept fraction of the tokens, on average over all heads.

        Raises:
            InputError: the budget is below the lowest level or above 1.
        """
        layers, heads, levels = self.error.shape
        least = float(self.kept[0])
        if not least <= budget <= 1:
            raise InputError(
                f"budget={budget!r} must lie in [{least:.4f}, 1]: sinks, recent tokens and the "
                "lowest level measured need that much"
            )
        # More slots never hurt: a rise in a measured curve is noise.
        error = self.error.cummin(-1).values.reshape(layers * heads, levels)
        level = [0] * (layers * heads)
        left = (budget - least) * layers * heads
        while True:
            best, choice = 0.0, None
            for head, now in enumerate(level):
                for to in range(now + 1, levels):
                    cost = float(self.kept[to] - self.kept[now])
                    gain = float(error[head, now] - error[head, to]) / cost
                    if cost <= left + 1e-12 and gain > best:
                        best, choice = gain, (head, to, cost)
            if choice is None:
                break
            head, to, cost = choice
            level[head] = to
            left -= cost
        kept = self.kept[torch.tensor(level)].double()
        kept = _spend(kept, left)
        return (kept / budget).view(layers, heads).tolist()


def _spend(kept: Tensor, left: float) -> Tensor:
    """Give what is left over to the heads that are not complete, in proportion."""
    for _ in range(20):
        open_ = kept < 1
        if left <= 1e-9 or not bool(open_.any()):
            break
        total = float(kept[open_].sum())
        grown = torch.where(open_, kept * (1 + left / total), kept).clamp(max=1.0)
        left -= float((grown - kept).sum())
        kept = grown
    return kept


def measure_curves(
    model: Any,
    prompts: Sequence[Tensor],
    method: str,
    *,
    follow: int = 64,
    sink: int = 4,
    recent: int = 32,
    levels: Sequence[float] = LEVELS,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Curves:
    """Errors of every head at every level, on prompts of the user's own kind.

    The last ``follow`` tokens of a prompt are held back, as questions about the rest: the method
    compresses the tokens before them, having seen no later query, and the held-back queries then
    attend to the slots and, causally, to their own tokens.

    Args:
        model: a transformers causal language model.
        prompts: token ids, ``[1, n]`` each; n above sink + recent + follow.
        method: a name in ``kvsketch.streaming.ALL_METHODS``.
        levels: kept shares of what is neither sink nor recent, rising, the last one 1.
        options: the method's own arguments.

    Raises:
        InputError: a prompt too short, or no prompt.
    """
    if not prompts:
        raise InputError("prompts is empty: at least one is needed to measure with")
    least = sink + recent + follow + len(levels)
    short = min(int(p.shape[-1]) for p in prompts)
    if short <= least:
        raise InputError(f"a prompt of {short} tokens is too short: more than {least} are needed")
    errors, kept = [], []
    for prompt in prompts:
        layers = capture(model, prompt)
        rows = [
            _layer_curve(c, method, follow, sink, recent, levels, options, seed) for c in layers
        ]
        errors.append(torch.stack([e for e, _ in rows]))
        kept.append(rows[0][1])
    return Curves(torch.stack(errors).mean(0), torch.stack(kept).mean(0))


def _layer_curve(
    caught: Activations,
    method: str,
    follow: int,
    sink: int,
    recent: int,
    levels: Sequence[float],
    options: Mapping[str, Any] | None,
    seed: int,
) -> tuple[Tensor, Tensor]:
    n = caught.keys.shape[2] - follow
    whole = Slots(caught.keys, caught.values)
    prompt, later = whole.narrow(0, n), whole.narrow(n, follow)
    observed = Observed(caught.queries[:, :, :n], caught.scaling)
    queries = caught.queries[:, :, n:]
    exact = answer_later(prompt, later, queries, caught.scaling)
    heads = caught.keys.shape[1]
    errors, kept = [], []
    for level in levels:
        budget = min(n, sink + recent + max(1, round(level * (n - sink - recent))))
        slots = windowed(method, sink, recent, seed, options)(prompt, budget, observed)
        wrong = answer_later(slots, later, queries, caught.scaling) - exact
        by_head = wrong.double().square().sum((0, 2, 3)).view(heads, -1).sum(-1)
        errors.append(by_head / exact.double().square().sum())
        kept.append(budget / n)
    return torch.stack(errors, dim=-1), torch.tensor(kept, dtype=torch.float64)


def answer_later(slots: Slots, later: Slots, queries: Tensor, scaling: float) -> Tensor:
    """Attention of held-back queries over slots and, causally, over their own tokens."""
    plain = Slots(slots.keys, slots.values, slots.mass)
    together = Slots.cat([plain, later])
    q = queries.shape[2]
    seen = torch.ones(q, together.count, dtype=torch.bool, device=queries.device)
    seen[:, together.count - q :] = seen[:, together.count - q :].tril()
    return attend(queries, together, scaling=scaling, mask=seen[None, None])


def measure_schedule(
    model: Any, prompts: Sequence[Tensor], method: str, budget: float, **settings: Any
) -> list[list[float]]:
    """A schedule for ``SketchCache(schedule=...)``: the same total as ``budget`` everywhere, spent
    where the measured error falls most. Depends on the model, the method and the kind of prompt,
    not on one prompt: measure once, keep the list.

    Args:
        budget: kept fraction of the tokens (float in (0, 1]); others as for ``measure_curves``.

    Raises:
        InputError: as ``measure_curves`` and ``Curves.allocate``.
    """
    fraction = Budget(float(budget)).value
    return measure_curves(model, prompts, method, **settings).allocate(float(fraction))
