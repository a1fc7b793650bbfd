"""How much of a large intermediate result is computed at a time."""

from __future__ import annotations

from torch import Tensor

# 256 MB in float32. On a GPU every piece costs launches, and there is no cache to stay in.
_ON_GPU = 1 << 26


def at_once(tensor: Tensor, on_cpu: int) -> int:
    """How many numbers to compute at a time.

    Args:
        tensor: any tensor of the computation.
        on_cpu: the number on a CPU, where a piece should stay in the processor's cache.
    """
    return on_cpu if tensor.device.type == "cpu" else max(on_cpu, _ON_GPU)
