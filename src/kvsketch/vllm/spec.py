"""What vLLM's block pool is told: one block per request, however many tokens it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import CircularBufferSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from ..serving.layout import Layout


@dataclass(frozen=True, kw_only=True)
class PageSpec(CircularBufferSpec):
    """A request's page in one layer.

    ``block_size``, tokens, is what vLLM's own arithmetic goes by and says nothing about the page.

    Attributes:
        layout: of the page.
    """

    layout: Layout

    @property
    def unpadded_page_size_bytes(self) -> int:
        return self.layout.bytes

    @property
    def prefix_cacheable(self) -> bool:
        # With False, groups of sliding windows could skip tokens that no page has seen. Our manager
        # finds no prefix, so that none is skipped.
        return True

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        # Entry 0 is the page. The runner still reads entry ``position // block_size``.
        return int(cdiv(max_len, self.block_size))

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        return all(isinstance(spec, PageSpec) for spec in kv_cache_specs.values())


class PageManager(CircularBufferManager):
    """Claims a request's page with its first token and frees it with the request."""


def register() -> None:
    """Tell vLLM's scheduler of the two."""
    # Its own registration returns early where anything is registered: it goes first.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(PageSpec, PageManager, uniform_type_base_spec=PageSpec)
