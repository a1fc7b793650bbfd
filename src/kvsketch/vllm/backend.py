"""What vLLM asks of a backend: the classes of attention and metadata, and the shape of a page."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, SlidingWindowSpec

from kvsketch.errors import UnsupportedError
from kvsketch.page.layout import Layout
from kvsketch.vllm.checks import BOTH, CONNECTOR, check_drafts
from kvsketch.vllm.engine import running
from kvsketch.vllm.spec import PageSpec
from kvsketch.vllm.windows import window_layers

# vLLM's own blocks of tokens, where a layer has a sliding window: what the CPU's kernels take.
_BLOCKS = 32


class PageBackend(AttentionBackend):
    """The backend of all layers with full attention."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]
    # On a CPU, layers with a sliding window share this class, and vLLM writes their tokens.
    forward_includes_kv_cache_update: bool = False
    #: of one layer: slots of its KV heads in the middle on every rank; None: the same for all
    sizes: ClassVar[tuple[tuple[int, ...], ...] | None] = None

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        from kvsketch.vllm.attention import PageImpl

        return PageImpl

    @staticmethod
    def get_builder_cls() -> Any:
        from kvsketch.vllm.metadata import PageMetadataBuilder

        return PageMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1 if isinstance(kv_cache_spec, PageSpec) else _BLOCKS)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True  # or ``PageImpl`` says what to do

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A page instead of blocks, for a layer of full attention."""
        if type(spec) in (SlidingWindowSpec, PageSpec):
            return spec
        if type(spec) is not FullAttentionSpec:
            raise UnsupportedError(
                f"kvsketch does not serve layers with a cache of type {type(spec).__name__}: unset "
                "KVSKETCH_METHOD and KVSKETCH_BUDGET for this model"
            )
        if spec.head_size_v != spec.head_size:
            raise UnsupportedError(
                f"kvsketch does not serve heads with {spec.head_size_v} channels of values and "
                f"{spec.head_size} of keys: unset KVSKETCH_METHOD and KVSKETCH_BUDGET"
            )
        engine = running()
        check_drafts(engine.config, PageBackend)
        group = engine.groups[spec.num_kv_heads, spec.head_size]
        shape = spec.num_kv_heads, group, spec.head_size, spec.dtype
        size, blocks = cls.bytes(*shape), 1
        hybrid = bool(window_layers(engine.config))
        if hybrid and engine.config.parallel_config.pipeline_parallel_size > 1:
            raise UnsupportedError(
                "kvsketch does not serve models with sliding windows with pipeline parallelism: "
                "unset --pipeline-parallel-size"
            )
        if hybrid and engine.settings.documents is not None:
            _check_documents(engine.config)
        if hybrid:  # all groups of layers have blocks of one size: those of tokens
            blocks = -(-max(size, engine.largest) // spec.page_size_bytes)
            size = spec.page_size_bytes
        return PageSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            # Where pages and tokens take turns in a block, vLLM must clear it for tokens: bytes of
            # a page may be NaN to a kernel that reads a whole block. It does so if dtypes differ.
            dtype=torch.uint8 if hybrid else spec.dtype,
            num_head_slots=1,
            state_content_bytes=size,
            tokens_per_state=0,
            dcp_sharded=False,
            layout=cls.layout(*shape),
            blocks=blocks,
            prefixes=engine.config.cache_config.enable_prefix_caching
            and (blocks == 1 or not _has_events(engine.config)),
            piece=engine.piece,
            second_runner=engine.config.use_v2_model_runner,
        )

    @classmethod
    def layout(
        cls,
        kv_heads: int,
        group: int,
        head_size: int,
        dtype: torch.dtype,
        rank: int | None = None,
    ) -> Layout:
        """The layout of a page of this layer on a rank of tensor parallelism; None: this rank."""
        engine, sizes = running(), None
        if cls.sizes is not None:
            sizes = cls.sizes[get_tensor_model_parallel_rank() if rank is None else rank]
        return engine.settings.layout(engine.context, kv_heads, group, head_size, dtype, sizes)

    @classmethod
    def bytes(cls, kv_heads: int, group: int, head_size: int, dtype: torch.dtype) -> int:
        """Bytes of a page of this layer on the rank where it is largest: all ranks need as many."""
        ranks = range(len(cls.sizes or (None,)))
        return max(cls.layout(kv_heads, group, head_size, dtype, rank).bytes for rank in ranks)


def _check_documents(config: Any) -> None:
    """Raise unless documents can be loaded in a model with sliding windows.

    Raises:
        UnsupportedError: the prefix cache is on: it would keep the first block of a window, which
            a file holds in part; or requests may save their pages.
    """
    if config.cache_config.enable_prefix_caching:
        raise UnsupportedError(
            "kvsketch loads documents for models with sliding windows only without vLLM's prefix "
            "cache: pass --no-enable-prefix-caching, or unset KVSKETCH_DOCUMENTS"
        )
    if config.kv_transfer_config.kv_role == BOTH:
        raise UnsupportedError(
            "kvsketch does not save pages of models with sliding windows: use the role "
            f"{CONNECTOR['kv_role']!r} in --kv-transfer-config"
        )


def _has_events(config: Any) -> bool:
    """Whether vLLM publishes which blocks of tokens it caches. A copy of several blocks is none."""
    events = config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)
