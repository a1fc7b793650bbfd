"""The rounds of a batch, made from the metadata of vLLM's scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from ..serving.rhythm import Copies, Numbers, Rhythm, Round, rounds
from . import metrics
from .backend import PageBackend
from .manager import WIDTH
from .spec import PageSpec


@dataclass
class PageMetadata:
    """The work of a batch, the same in all layers.

    Attributes:
        rounds: in order.
        num_actual_tokens: of all requests.
        table: the blocks of every request, ``[requests, blocks]``, if a page is several blocks.
    """

    rounds: list[Round]
    num_actual_tokens: int
    table: Tensor | None


class PageMetadataBuilder(AttentionMetadataBuilder[PageMetadata]):
    """Makes ``PageMetadata`` from the scheduler's batch."""

    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold = None
    # The last metadata and its inputs: layers whose pages differ have their own builders.
    _last: ClassVar[tuple[list[Any], PageMetadata] | None] = None

    # How many tokens the copy of a page in each block holds; 0: the block holds no copy.
    _made: ClassVar[Numbers] = np.zeros(0, dtype=np.int64)

    def __new__(cls, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(kv_cache_spec, PageSpec):
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

            return CPUAttentionMetadataBuilder(kv_cache_spec, *args, **kwargs)
        return super().__new__(cls)

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._rhythm: Rhythm | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PageMetadata:
        batch, settings, spec = common_attn_metadata, PageBackend.settings, self.kv_cache_spec
        assert settings is not None
        requests = batch.num_reqs
        starts = batch.query_start_loc_cpu[: requests + 1].numpy().astype(np.int64)
        new = np.diff(starts)
        seen = batch.seq_lens[:requests].cpu().numpy().astype(np.int64) - new
        width = WIDTH if spec.prefixes else spec.blocks
        table = batch.block_table_tensor[:requests, :width]
        blocks = table.cpu().numpy().astype(np.int64)
        assert batch.is_prefilling is not None
        reading = batch.is_prefilling[:requests].cpu().numpy()
        now, last = [starts, seen, blocks, reading], PageMetadataBuilder._last
        if last is not None and all(map(np.array_equal, last[0], now)):
            return last[1]
        if self._rhythm is None:
            self._rhythm = settings.rhythm(PageBackend.context)
        rhythm = self._rhythm
        if get_tensor_model_parallel_rank() == 0 and get_pp_group().is_first_rank:
            # All ranks see the same.
            slots = rhythm.all_held(seen + new).sum()
            metrics.add(tokens=float(new.sum()), slots=float(slots))
        # Pages of several blocks are gathered in every layer, in the order of the requests.
        pages = blocks[:, 0] if spec.blocks == 1 else np.arange(requests)
        copies = self._copies(blocks, seen, seen + new, reading) if spec.prefixes else None
        todo = rounds(starts, seen, pages, rhythm, spec.layout.queries, self.device, copies)
        together = None if spec.blocks == 1 else table
        found = PageMetadata(todo, batch.num_actual_tokens, together)
        PageMetadataBuilder._last = now, found
        return found

    def _copies(self, blocks: Numbers, seen: Numbers, after: Numbers, reading: Numbers) -> Copies:
        """The copies that ``PageManager`` has put into the block table. A request starts from a
        copy if it has seen exactly the tokens of the copy; later it has seen more."""
        source, target, size = blocks[:, 1], blocks[:, 2], self.kv_cache_spec.block_size
        known = PageMetadataBuilder._made
        made = np.zeros(max(len(known), int(blocks[:, 1:].max()) + 1), dtype=np.int64)
        made[: len(known)] = known
        start = np.where((source != 0) & (made[source] == seen), source, -1)
        at = after // size * size
        at = np.where(reading & (at > seen) & (target != 0), at, 0)
        made[target[at > 0]] = at[at > 0]
        PageMetadataBuilder._made = made
        return Copies(start, target, at)
