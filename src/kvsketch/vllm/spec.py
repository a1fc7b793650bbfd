"""What vLLM's block pool is told: a fixed number of blocks per request, whatever its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import CircularBufferSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from ..serving.layout import Layout
from ..serving.split_layout import SplitLayout
from .manager import WIDTH, PageManager


@dataclass(frozen=True, kw_only=True)
class PageSpec(CircularBufferSpec):
    """A request's page in one layer.

    ``block_size``, tokens, is what vLLM's own arithmetic goes by and says nothing about the page.
    vLLM calls a block a page: its ``page_size_bytes`` are those of one of ours only where a page is
    one block.

    Attributes:
        layout: of the page.
        blocks: that it takes. One; or, beside layers with a sliding window, as many of theirs as it
            needs, since vLLM gives all layers blocks of one size.
        prefixes: whether pages of prefixes are kept for later requests.
    """

    layout: Layout | SplitLayout = field(compare=False)  # of this rank
    blocks: int = 1
    prefixes: bool = False

    @property
    def unpadded_page_size_bytes(self) -> int:
        return int(self.state_content_bytes)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return self.blocks * int(self.page_size_bytes)

    @property
    def prefix_cacheable(self) -> bool:
        # With False, groups of sliding windows could skip tokens that no page has seen. Beside them
        # our manager finds no prefix, so that none is skipped.
        return True

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        # The first entries are the page. The runner still reads entry ``position // block_size``.
        return max(WIDTH, self.blocks, int(cdiv(max_len, self.block_size)))

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        return all(isinstance(spec, PageSpec) for spec in kv_cache_specs.values())


def register() -> None:
    """Tell vLLM's scheduler of the two."""
    # Its own registration returns early where anything is registered: it goes first.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(PageSpec, PageManager, uniform_type_base_spec=PageSpec)
