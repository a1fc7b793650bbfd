"""The attention backend that vLLM runs: pages instead of blocks of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

from ..errors import UnsupportedError
from ..serving.layout import Fields, Layout
from ..serving.pages import Counts, Pages, Workspace
from ..serving.rhythm import Round, rounds
from ..serving.settings import Settings, read
from . import metrics
from .checks import check_engine, check_layer
from .spec import PageSpec

# vLLM's own blocks of tokens, where a layer has a sliding window: what the CPU's kernels take.
_BLOCKS = 32
_WORKSPACE = Workspace()


class PageBackend(AttentionBackend):
    """What vLLM asks for the classes below, and for the shape of a page."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]
    # Layers with a sliding window share this class on a CPU, and vLLM writes their tokens.
    forward_includes_kv_cache_update: bool = False
    #: of the engine that starts in this process: vLLM asks for specs without a configuration
    settings: ClassVar[Settings | None] = None
    context: ClassVar[int] = 0
    groups: ClassVar[dict[tuple[int, int], int]] = {}

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PageImpl]:
        return PageImpl

    @staticmethod
    def get_builder_cls() -> type[PageMetadataBuilder]:
        return PageMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1 if isinstance(kv_cache_spec, PageSpec) else _BLOCKS)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return bool(current_platform.is_cpu())

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A page instead of blocks, for a layer of full attention."""
        if type(spec) is not FullAttentionSpec:
            return spec
        layout = cls.layout(spec.num_kv_heads, spec.head_size, spec.dtype)
        return PageSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            num_head_slots=1,
            state_content_bytes=layout.bytes,
            tokens_per_state=0,
            dcp_sharded=False,
            layout=layout,
        )

    @classmethod
    def layout(cls, kv_heads: int, head_size: int, dtype: torch.dtype) -> Layout:
        """Of a page of this engine."""
        assert cls.settings is not None
        group = cls.groups[kv_heads, head_size]
        return cls.settings.layout(cls.context, kv_heads, group, head_size, dtype)


@dataclass
class PageMetadata:
    """What a batch of requests does, the same in all layers."""

    rounds: list[Round]
    num_actual_tokens: int


class PageMetadataBuilder(AttentionMetadataBuilder[PageMetadata]):
    """Makes that of what the scheduler has put together."""

    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold = None

    def __new__(cls, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(kv_cache_spec, PageSpec):
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

            return CPUAttentionMetadataBuilder(kv_cache_spec, *args, **kwargs)
        return super().__new__(cls)

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PageMetadata:
        batch = common_attn_metadata
        settings = PageBackend.settings
        assert settings is not None
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].numpy().astype(np.int64)
        seen = batch.seq_lens[: batch.num_reqs].cpu().numpy() - np.diff(starts)
        pages = batch.block_table_tensor[: batch.num_reqs, 0].cpu().numpy().astype(np.int64)
        rhythm = settings.rhythm(PageBackend.context)
        after = seen.astype(np.int64) + np.diff(starts)
        if get_tensor_model_parallel_rank() == 0:  # all ranks see the same
            tokens, slots = np.diff(starts).sum(), rhythm.held(after).sum()
            metrics.add(tokens=float(tokens), slots=float(slots))
        queries = self.kv_cache_spec.layout.queries
        todo = rounds(starts, seen.astype(np.int64), pages, rhythm, queries, self.device)
        return PageMetadata(todo, batch.num_actual_tokens)


class PageImpl(AttentionImpl[PageMetadata]):
    """The attention of one layer."""

    def __new__(
        cls,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if sliding_window is None:
            return super().__new__(cls)
        if not current_platform.is_cpu():
            raise UnsupportedError(
                "kvsketch does not serve layers with a sliding window on this device: unset "
                "KVSKETCH_METHOD and KVSKETCH_BUDGET for this model"
            )
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        given = (num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window)
        return CPUAttentionBackendImpl(*given, *args, **kwargs)

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        config = get_current_vllm_config()
        check_engine(config)
        check_layer(alibi_slopes, attn_type, kv_sharing_target_layer_name, others)
        extra = config.additional_config
        settings = read(extra.get("kvsketch") if isinstance(extra, dict) else None)
        assert settings is not None
        context = int(config.model_config.max_model_len)
        PageBackend.settings, PageBackend.context = settings, context
        group = num_heads // self.num_kv_heads
        PageBackend.groups[self.num_kv_heads, head_size] = group
        softcap = logits_soft_cap or None
        self.counts = Counts()
        self._seen: Tensor | None = None
        self._fields: Fields | None = None
        self.pages = Pages(
            settings.windowed(),
            settings.rhythm(context),
            self.scale,
            softcap,
            self.counts,
            _WORKSPACE,
        )

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Nothing: ``forward`` writes."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PageMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a batch.

        Args:
            query: ``[tokens, num_heads, head_size]``; key, value ``[tokens, num_kv_heads,
                head_size]``; output as query.
            kv_cache: of all pages, ``[pages, 1, 1, ...]``.
            attn_metadata: None while vLLM profiles.
        """
        if attn_metadata is None:
            return output.zero_()
        if self._seen is not kv_cache:  # the same all the time
            layout = PageBackend.layout(self.num_kv_heads, self.head_size, key.dtype)
            self._fields = layout.fields(kv_cache.view(torch.uint8).flatten(1))
            self._seen = kv_cache
        fields = self._fields
        assert fields is not None
        own = attn_metadata.num_actual_tokens  # behind them there may be padding
        out = output.view(-1, self.num_heads, self.head_size)[:own]
        query, key, value = query[:own], key[:own], value[:own]
        self.pages.attend(query, key, value, fields, attn_metadata.rounds, out)
        if self.counts.compressions:
            metrics.add(compressions=self.counts.compressions, error=self.counts.errors)
            self.counts.compressions, self.counts.errors = 0, 0.0
        return output
