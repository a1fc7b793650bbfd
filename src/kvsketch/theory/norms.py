"""The right-hand sides of the error bounds, and a sketch's error relative to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.estimator import attend, attention_scores, check_queries
from kvsketch.slots import Slots

# Queries are taken in blocks of at most this many scores (16 MB in float64).
_BLOCK_SCORES = 1 << 21


@dataclass(frozen=True)
class ErrorBounds:
    """The factors of eps, per query, float64 ``[batch, num_attention_heads, q]``.

    Attributes:
        operator: |softmax(Kq)|_2 |V|_op: SubGen, Theorem 1.
        frobenius: |softmax(Kq)|_2 |V|_F: BalanceKV, equation 2. Never below ``operator``.
    """

    operator: Tensor
    frobenius: Tensor


def error_bounds(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float | None = None
) -> ErrorBounds:
    """Both right-hand sides, in float64. Every query attends to all keys.

    Args:
        queries: ``[batch, num_attention_heads, q, head_dim]``, grouped as in ``attend``.
        keys: ``[batch, num_key_value_heads, n, head_dim]``, exact.
        values: ``[batch, num_key_value_heads, n, value_dim]``.
        scaling: of the scores. Default: ``head_dim ** -0.5``.

    Raises:
        InputError: ``attend`` does not accept the shapes, or n = 0.
    """
    exact = Slots(keys.double(), values.double())
    check_queries(queries, exact, None)
    if exact.count == 0:
        raise InputError("keys hold no token (n = 0): there is nothing to compare with")
    batch, heads = queries.shape[:2]
    block = max(1, _BLOCK_SCORES // max(1, batch * heads * exact.count))
    # The scores are those of attend(), so that both sides of a bound use the same softmax.
    parts = [
        attention_scores(queries[:, :, i : i + block].double(), exact, scaling, None, None, None)
        .softmax(-1)
        .norm(dim=-1)
        for i in range(0, max(1, queries.shape[2]), block)
    ]
    softmax = torch.cat(parts, dim=-1).flatten(1, 2)
    group = queries.shape[1] // keys.shape[1]
    operator, frobenius = (
        norm.repeat_interleave(group, dim=1).unsqueeze(-1)
        for norm in (_operator_norm(exact.values), exact.values.norm(dim=(-2, -1)))
    )
    return ErrorBounds(softmax * operator, softmax * frobenius)


def measured_error(
    queries: Tensor, slots: Slots, keys: Tensor, values: Tensor, scaling: float | None = None
) -> Tensor:
    """|attention over ``slots`` - attention over the exact tokens|_2 per query, in float64.

    Args:
        slots: a compressor's output or a sketch's ``slots`` for these tokens.
        others: as for ``error_bounds``.

    Returns:
        float64 ``[batch, num_attention_heads, q]``.

    Raises:
        InputError: ``attend`` does not accept the shapes.
    """
    queries = queries.double()
    exact = attend(queries, Slots(keys.double(), values.double()), scaling=scaling)
    sketched = attend(queries, slots.map(Tensor.double), scaling=scaling)
    return (sketched - exact).square().sum(-1).sqrt()


def smallest_eps(error: Tensor, bound: Tensor) -> Tensor:
    """The smallest eps with error <= eps bound, elementwise. It is 0 where both are 0, and infinite
    where only the bound is 0."""
    return torch.where(error == 0, 0.0, error / bound)


def _operator_norm(values: Tensor) -> Tensor:
    """The largest singular value per head, float64 ``[batch, heads]``, from the smaller Gram
    matrix, which is fast for very many tokens, too."""
    n, dim = values.shape[-2:]
    gram = values.mT @ values if n >= dim else values @ values.mT
    eigenvalues: Tensor = torch.linalg.eigvalsh(gram)
    return eigenvalues.amax(-1).clamp(min=0).sqrt()
