"""The KV cache spec of a page: a fixed number of blocks per request, whatever its length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import CircularBufferSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvsketch.page.layout import Layout
from kvsketch.vllm.manager import PARTS, PageManager


@dataclass(frozen=True, kw_only=True)
class PageSpec(CircularBufferSpec):
    """A request's page in one layer.

    ``block_size`` (in tokens) is used by vLLM's own arithmetic and means nothing for the page.
    vLLM calls a block a page: its ``page_size_bytes`` is the size of one of our pages only if that
    is one block.

    Attributes:
        layout: of the page.
        blocks: of a page. One; or, in models that also have layers with a sliding window, as many
            of their blocks as a page needs, because vLLM gives all layers blocks of one size.
        prefixes: whether copies of pages are kept for requests with the same prefix.
        piece: prompts are compressed after multiples of so many tokens; 0: where pages are full.
        second_runner: whether vLLM uses its model runner V2.
    """

    layout: Layout = field(compare=False)  # of this rank
    blocks: int = 1
    prefixes: bool = False
    piece: int = 0
    second_runner: bool = False

    @property
    def copied_every(self) -> int:
        """Copies hold a multiple of so many tokens."""
        return self.piece or int(self.block_size)

    @property
    def unpadded_page_size_bytes(self) -> int:
        return int(self.state_content_bytes)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return self.blocks * int(self.page_size_bytes)

    @property
    def prefix_cacheable(self) -> bool:
        # With False, groups of sliding-window layers could skip tokens that no page has seen.
        return True

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        # The page is in the first entries. The runner still reads ``position // block_size``.
        return max(PARTS * self.blocks, int(cdiv(max_len, self.block_size)))

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        return all(isinstance(spec, PageSpec) for spec in kv_cache_specs.values())


def register() -> None:
    """Register the spec and its manager with vLLM's scheduler."""
    # vLLM's own registration returns early if anything is registered, so it must run first.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(PageSpec, PageManager, uniform_type_base_spec=PageSpec)
