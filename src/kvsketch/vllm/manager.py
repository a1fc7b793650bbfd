"""Which blocks requests hold: a page each, and the page of a prefix that others can start from.

A page changes with every token, so that requests cannot share one as they share vLLM's blocks of
tokens. What they share is a copy: while a prompt is read, its page is copied to a second one at the
last multiple of the block size; that copy is what vLLM's own table of hashes knows, what a later
request with the same beginning starts from, and what is given up when pages run short. To read a
document once, send it alone: requests that begin with it start behind it.

The block table of a request says it all: its own page, the copy it starts from, the copy it makes;
vLLM's null block where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager

#: entries of a request's row of the block table where prefixes are kept
WIDTH = 3


class PageManager(CircularBufferManager):
    """Claims a request's page with its first token and frees it with the request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By request: the copy it starts from, tokens that were scheduled, and the request with the
        # number of blocks of tokens that its own copy will stand for.
        self._found: dict[str, Any] = {}
        self._seen: dict[str, int] = {}
        self._made: dict[str, tuple[Any, int]] = {}

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        *_: Any,
        **__: Any,
    ) -> int:
        """A page, once; and a copy that was found and that nobody holds will be held."""
        if self.req_to_blocks.get(request_id):
            return 0
        held = self._get_num_evictable_blocks(new_computed_blocks)
        return int(self.kv_cache_spec.blocks + held)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[Any],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Hold the copy that was found, for as long as the request lives."""
        self.block_pool.touch(new_computed_blocks)
        for block in new_computed_blocks:
            self._found[request_id] = block
        self._seen[request_id] = num_local_computed_tokens

    def _claim_ring_block(self, request_id: str, record_for_zeroing: bool = True) -> list[Any]:
        held = self.req_to_blocks[request_id]
        if held:
            return []
        new: list[Any] = self.block_pool.get_new_blocks(self.kv_cache_spec.blocks)
        if self._record_new_block_ids and record_for_zeroing:
            self.new_block_ids.extend(block.block_id for block in new)
        if self.kv_cache_spec.prefixes:
            new.append(self._found.pop(request_id, self._null_block))
            spare = self.block_pool.get_num_free_blocks() > 0
            new += self.block_pool.get_new_blocks(1) if spare else [self._null_block]
        held.extend(new)
        return new

    def cache_blocks(self, request: Any, num_tokens: int, *_: Any, **__: Any) -> None:
        """Remember what the copy stands for: the worker makes it at the last multiple of the block
        size of every step that starts within the prompt."""
        name = request.request_id
        before, self._seen[name] = self._seen.get(name, 0), num_tokens
        blocks = num_tokens // self.block_size
        if before < request.num_prompt_tokens and blocks * self.block_size > before:
            self._made[name] = request, blocks

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Let others find the copy once the prompt was read."""
        if num_prompt_tokens is not None and processed_computed_tokens >= num_prompt_tokens:
            self._publish(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """The page, and the copy that the request started from."""
        self._publish(request_id)
        self._seen.pop(request_id, None)
        return list(super().pop_blocks_for_free(request_id))

    def _publish(self, request_id: str) -> None:
        request, blocks = self._made.pop(request_id, (None, 0))
        held = self.req_to_blocks.get(request_id) or []
        if not self.kv_cache_spec.prefixes or len(held) < WIDTH or held[2].is_null:
            return
        copy, held[2] = held[2], self._null_block
        group = self.kv_cache_group_id
        if blocks and not self.block_pool.get_cached_block(
            request.block_hashes[blocks - 1], [group]
        ):
            row = [self._null_block] * (blocks - 1) + [copy]
            self.block_pool.cache_full_blocks(
                request, row, blocks - 1, blocks, self.block_size, group
            )
        self.block_pool.free_blocks([copy])

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        *_: Any,
        **__: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        """The copy of the longest prefix, and its tokens."""
        size = kv_cache_spec.block_size
        if kv_cache_spec.prefixes:
            for blocks in range(min(max_length // size, len(block_hashes)), 0, -1):
                found = block_pool.get_cached_block(block_hashes[blocks - 1], kv_cache_group_ids)
                if found:
                    return tuple([block] for block in found), blocks * size
        return tuple([] for _ in kv_cache_group_ids), 0

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """None: what requests share, they do not read."""
        return 0
