"""The blocks of requests: one page each, and copies of pages from which later requests can start.

A page changes with every token, so requests cannot share pages as they share vLLM's blocks of
tokens. They share a copy. While a prompt is read, its page is copied to a second page at the last
multiple of the block size, or of ``PageScheduler``'s pieces. vLLM's prefix cache knows the copy by
its hash, a later request with the same prefix starts from it, and it is evicted when pages run out.
To read a document only once, send it alone first: requests that begin with it then start after it.

The row of a request in the block table has three parts: its own page, the copy it starts from, and
the copy it makes. A part has as many entries as a page has blocks (one, except in models with
sliding windows), which are vLLM's null block if there is no such page. The blocks of a copy are
found by different hashes, and it is found if none of them has been evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager

#: parts of a request's row in the block table with prefix caching
PARTS = 3


class PageManager(CircularBufferManager):
    """Allocates a request's page with its first token and frees it when the request ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By request: the copy it starts from, the number of tokens scheduled, and the request with
        # the number of blocks of tokens that its own copy represents.
        self._found: dict[str, list[Any]] = {}
        self._seen: dict[str, int] = {}
        # By request: the number of tokens up to which the worker makes copies.
        self._read: dict[str, int] = {}
        self._made: dict[str, tuple[Any, int]] = {}

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        *_: Any,
        **__: Any,
    ) -> int:
        """One page, once, plus the copy that was found if no other request uses it."""
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
        """Keep the copy that was found until the request ends, unless a document is loaded, which
        holds more tokens."""
        if new_computed_blocks and not num_external_computed_tokens:
            self.block_pool.touch(new_computed_blocks)
            self._found[request_id] = list(new_computed_blocks)
        self._seen[request_id] = num_local_computed_tokens + num_external_computed_tokens

    def _claim_ring_block(self, request_id: str, record_for_zeroing: bool = True) -> list[Any]:
        held = self.req_to_blocks[request_id]
        if held:
            return []
        size, pool = self.kv_cache_spec.blocks, self.block_pool
        new: list[Any] = pool.get_new_blocks(size)
        if self._record_new_block_ids and record_for_zeroing:
            self.new_block_ids.extend(block.block_id for block in new)
        if self.kv_cache_spec.prefixes:
            nothing = [self._null_block] * size
            new += self._found.pop(request_id, nothing)
            spare = pool.get_num_free_blocks() >= size
            new += pool.get_new_blocks(size) if spare else nothing
        held.extend(new)
        return new

    def cache_blocks(self, request: Any, num_tokens: int, *_: Any, **__: Any) -> None:
        """Record how many tokens the copy holds. The worker makes it at the last multiple of
        ``copied_every`` in every step that starts within the prompt; to the model runner V2, the
        prompt of a request that was preempted ends with its decoded tokens. With pieces it does
        not, since what a page holds after decoded tokens depends on where the prompt ended."""
        name, spec = request.request_id, self.kv_cache_spec
        all_of_them = spec.second_runner and not spec.piece
        prompt = request.num_tokens if all_of_them else request.num_prompt_tokens
        prompt = self._read.setdefault(name, prompt)
        before, self._seen[name] = self._seen.get(name, 0), num_tokens
        tokens = num_tokens // spec.copied_every * spec.copied_every
        if before < prompt and tokens > before:
            self._made[name] = request, tokens // self.block_size

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Publish the copy once the prompt is read."""
        prompt = self._read.get(request_id, num_prompt_tokens)
        if prompt is not None and processed_computed_tokens >= prompt:
            self._publish(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """The request's page and the copy that it started from."""
        self._publish(request_id)
        self._seen.pop(request_id, None)
        self._read.pop(request_id, None)
        return list(super().pop_blocks_for_free(request_id))

    def _publish(self, request_id: str) -> None:
        request, blocks = self._made.pop(request_id, (None, 0))
        held, size = self.req_to_blocks.get(request_id) or [], self.kv_cache_spec.blocks
        first = (PARTS - 1) * size
        if not self.kv_cache_spec.prefixes or len(held) <= first or held[first].is_null:
            return
        copy, held[first:] = held[first:], [self._null_block] * size
        if blocks:
            self._cache(copy, request, blocks)
        self.block_pool.free_blocks(copy)

    def _cache(self, copy: list[Any], request: Any, blocks: int) -> None:
        """Let requests find a copy, unless they find one of the same tokens already.

        Args:
            blocks: number of blocks of tokens that it holds.
        """
        pool, group = self.block_pool, self.kv_cache_group_id
        hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, self.block_size)
        names = _names(hashes[blocks - 1], len(copy))
        known = [pool.get_cached_block(name, [group]) for name in names]
        if all(known):
            return
        # Blocks of an older copy, of which some were evicted, are not mixed with those of this one.
        pool.evict_blocks({found[0].block_id for found in known if found})
        row = [self._null_block] * (blocks - 1) + copy[:1]
        pool.cache_full_blocks(request, row, blocks - 1, blocks, self.block_size, group)
        for name, block in zip(names[1:], copy[1:], strict=True):
            only = SimpleNamespace(block_hashes=[name])
            pool.cache_full_blocks(only, [block], 0, 1, pool.hash_block_size, group)

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
        """The copy of the longest known prefix, and its number of tokens."""
        size = kv_cache_spec.block_size
        if kv_cache_spec.prefixes:
            hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, size)
            for blocks in range(min(max_length // size, len(hashes)), 0, -1):
                first, *others = _names(hashes[blocks - 1], kv_cache_spec.blocks)
                found = [block_pool.get_cached_block(first, kv_cache_group_ids)]
                if not found[0]:
                    continue
                found += [block_pool.get_cached_block(name, kv_cache_group_ids) for name in others]
                if all(found):
                    return tuple(map(list, zip(*found, strict=True))), blocks * size
        return tuple([] for _ in kv_cache_group_ids), 0


def _names(name: BlockHash, size: int) -> list[BlockHash]:
    """The hashes of a copy's blocks."""
    return [name, *(BlockHash(name + number.to_bytes(4, "big")) for number in range(1, size))]
