"""MPT: ALiBi positions, and no attention interface in transformers.

MPT's attention adds a bias that depends on the distance between query and key, so slots must
remember where they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

from kvsketch.hf.adapters.base import Adapter, wrap
from kvsketch.hf.passing import given
from kvsketch.observed import Observed


def install() -> None:
    """Let every MptAttention work with SketchCache; other caches are not affected."""
    wrap(MptAttention, _cache, _asked, _keys_and_values, _finish)


ADAPTER = Adapter(install, needs_positions=True)


def slopes_of(num_heads: int, position_bias: Tensor) -> Tensor:
    """ALiBi slopes ``[num_heads]``: what the bias gains per position."""
    if position_bias.shape[-1] < 2:
        position_bias = build_mpt_alibi_tensor(num_heads, 2, device=position_bias.device)
    return position_bias[:, 0, -1] - position_bias[:, 0, -2]


@contextmanager
def watched(
    model: nn.Module, seen: Callable[[nn.Module, Observed, Tensor, Tensor], None]
) -> Iterator[None]:
    """``seen(module, asked, keys, values)`` before every attention of ``model``, whatever its
    cache: the queries ``[batch, heads, n, head_dim]`` with the slopes of their scores, and the
    keys and values of the same tokens."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        asked, _ = _asked(module, *args, **kwargs)
        seen(module, asked, *_keys_and_values(module, *args, **kwargs))

    hooks = [
        module.register_forward_pre_hook(before, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, MptAttention)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _cache(
    module: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return args[0] if args else given(kwargs)


def _asked(
    module: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    _: Any = None,
    attention_mask: Tensor | None = None,
    **__: Any,
) -> tuple[Observed, Any]:
    # MPT's mask is True where a query may NOT look.
    mask = None if attention_mask is None else ~attention_mask
    slopes = slopes_of(module.n_heads, position_bias)
    queries = _project(module, hidden_states)[0]
    return Observed(queries, float(module.softmax_scale), slopes=slopes), mask


def _keys_and_values(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    return _project(module, hidden_states)[1:]


def _finish(context: Tensor, module: Any, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return module.out_proj(context), None


def _project(module: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    return tuple(mixed.unflatten(-1, (3, module.n_heads, module.head_dim)).permute(2, 0, 3, 1, 4))
