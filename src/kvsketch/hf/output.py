"""The weight of an attention module's output projection, for methods that use v W_O."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvsketch.errors import UnsupportedError

#: its names in models
_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")


def output_weight(module: nn.Module, kv_heads: int, value_dim: int, method: str) -> Tensor:
    """W_O of a module, ``[num_attention_heads, value_dim, hidden]``: a view of its weight.

    Args:
        kv_heads: KV heads of the layer.
        value_dim: numbers in a value.
        method: the method that needs it, for messages.

    Raises:
        UnsupportedError: the module has no such projection, or one whose weight is not plain
            numbers for just these heads (quantized, offloaded, spread over devices).
    """
    what = f"method={method!r} needs the output projection of {type(module).__name__}"
    found = next((part for name in _NAMES if (part := getattr(module, name, None))), None)
    if not isinstance(found, (nn.Linear, Conv1D)):
        raise UnsupportedError(
            f"{what}, which has none that kvsketch knows ({', '.join(_NAMES)}); use another method"
        )
    weight = found.weight.detach()
    plain = type(found.weight) is nn.Parameter and weight.is_floating_point()
    if not plain or weight.device.type == "meta" or weight.dim() != 2:
        raise UnsupportedError(
            f"{what}, whose weight is not plain numbers here ({type(found.weight).__name__}, "
            f"{weight.dtype}, {weight.device}); use another method"
        )
    weight = weight if isinstance(found, Conv1D) else weight.T
    if weight.shape[0] % (kv_heads * value_dim):
        raise UnsupportedError(
            f"{what}, whose weight takes {weight.shape[0]} numbers, which are no values of "
            f"{value_dim} for {kv_heads} KV heads; use another method"
        )
    return weight.view(-1, value_dim, weight.shape[1])
