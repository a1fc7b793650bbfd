"""The contribution of a token's value to the output of its attention layer: v W_O."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsketch.errors import InputError
from kvsketch.slots import Slots, compute_dtype

# Numbers of v W_O that are formed at a time: 32 MB in float32.
_BLOCK = 1 << 23


def output_norms(slots: Slots, output: Tensor | None, name: str, order: int) -> Tensor:
    """Norms of v W_O for every slot and every query head that looks at it, float32 (or float64)
    ``[batch, num_key_value_heads, group, n]``. A slot of mass m counts with its mean value u / m.

    Args:
        output: W_O, ``[num_attention_heads, value_dim, hidden]``.
        name: of the method that needs it, for messages.
        order: 1 or 2, of the norm.

    Raises:
        InputError: there is no W_O, or it does not fit the values.
    """
    values = slots.mean_values()
    heads, n, dim = values.shape[1:]
    if output is None:
        raise InputError(
            f"{name} needs the weight of the model's output projection: SketchCache passes it at "
            "the first forward; without a cache, set the compressor's `output`, "
            "[num_attention_heads, value_dim, hidden]"
        )
    if output.dim() != 3 or output.shape[0] % heads or output.shape[1] != dim:
        raise InputError(
            f"output {tuple(output.shape)} must be [num_attention_heads, value_dim, hidden] for "
            f"{heads} KV heads and values of {dim}"
        )
    weight = output.view(heads, -1, *output.shape[1:])
    dtype = compute_dtype(values.dtype)
    group = weight.shape[1]
    found = torch.empty(len(values), heads, group, n, dtype=dtype, device=values.device)
    step = max(1, _BLOCK // max(1, len(values) * heads * group * output.shape[2]))
    weight = weight.to(values.device, dtype)
    for start in range(0, n, step):
        some = values[:, :, None, start : start + step].to(dtype)
        found[..., start : start + step] = torch.linalg.vector_norm(some @ weight, order, dim=-1)
    return found
