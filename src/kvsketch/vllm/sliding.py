"""vLLM's CPU attention of layers with a sliding window, in models whose other layers have pages."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl


class SlidingImpl(CPUAttentionBackendImpl):
    """Clears a block before its first token. The block may have been part of a page, whose bytes
    can be NaN as tokens, and the kernel reads whole blocks. On CUDA, vLLM clears blocks itself
    because the dtypes differ; on a CPU it does so for full attention only."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new tokens.

        Args:
            kv_cache: ``[blocks, heads, tokens of a block, ...]``.
            slot_mapping: where each token is written, block times tokens of a block plus place.
        """
        size = kv_cache.shape[2]
        first = slot_mapping[slot_mapping % size == 0] // size
        if len(first):
            kv_cache.index_fill_(0, first.long(), 0)
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
