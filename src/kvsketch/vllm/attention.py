"""The attention implementation of a layer that vLLM calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from kvsketch.cache.curves import model_shape
from kvsketch.errors import UnsupportedError
from kvsketch.page.layout import Layout
from kvsketch.page.page import Page
from kvsketch.vllm.checks import check_engine, check_layer
from kvsketch.vllm.engine import begin
from kvsketch.vllm.metadata import PageMetadata
from kvsketch.vllm.pages import Pages, compress_all


class Workspace:
    """Memory in which pages of several blocks are gathered. It is reused, because allocating it
    costs more than the copy, and shared by all layers, which run one after the other."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def rows(self, blocks: Tensor, which: Tensor) -> Tensor:
        """``blocks[which]``, valid until the next call."""
        shape = torch.Size((len(which), *blocks.shape[1:]))
        size, buffer = shape.numel(), self._buffer
        if buffer is None or buffer.numel() < size or buffer.device != blocks.device:
            buffer = self._buffer = torch.empty(size, dtype=blocks.dtype, device=blocks.device)
        return torch.index_select(blocks, 0, which, out=buffer[:size].view(shape))


_WORKSPACE = Workspace()


class PageImpl(AttentionImpl[PageMetadata]):
    """The attention of one layer over pages."""

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
                "kvsketch does not serve layers with a sliding window, and vLLM's own backends do: "
                "replace --attention-backend CUSTOM by --attention-config "
                '\'{"backend_per_kind": {"full_attention": "CUSTOM"}}\''
            )
        from kvsketch.vllm.sliding import SlidingImpl

        given = (num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window)
        return SlidingImpl(*given, *args, **kwargs)

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
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        config = get_current_vllm_config()
        check_engine(config)
        check_layer(alibi_slopes, attn_type, kv_sharing_target_layer_name, others)
        self.engine = engine = begin(config)
        self.group = num_heads // self.num_kv_heads
        key = self.num_kv_heads, head_size
        engine.groups[key] = max(self.group, engine.groups.get(key, 0))
        self.softcap, self.sinks = logits_soft_cap or None, sinks
        self.number = engine.layers
        engine.layers += 1
        self._seen: Tensor | None = None
        self._held: tuple[Page, Tensor] | None = None
        self._layout: Layout | None = None
        self._pages: Pages | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """With curves, give each layer its own backend class that knows its budgets. vLLM asks
        backends for cache specs without naming the layer; here all layers exist, and none was asked
        yet."""
        engine = self.engine
        settings, config = engine.settings, engine.config
        parallel = config.parallel_config
        if settings.allocation is None:
            return
        modules = config.compilation_config.static_forward_context.values()
        ours = [module for module in modules if isinstance(getattr(module, "impl", None), PageImpl)]
        if ours[0].impl is not self:  # the first does it for all
            return
        heads = int(config.model_config.get_total_num_kv_heads())
        model = model_shape(config.model_config.hf_config)
        ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        layers = len(ours) if stages == 1 else config.model_config.get_total_num_hidden_layers()
        sizes = settings.sizes(engine.context, layers, heads, model)
        engine.middle = max(max(layer) for layer in sizes)
        for module in ours:
            layer = sizes[module.impl.number]
            mine = tuple(of_rank(layer, rank, ranks) for rank in range(ranks))
            module.attn_backend = type("PageBackend", (module.attn_backend,), {"sizes": mine})
            impl = module.impl
            shape = impl.num_kv_heads, impl.group, impl.head_size, act_dtype
            engine.largest = max(engine.largest, module.attn_backend.bytes(*shape))

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Nothing to do: ``forward`` writes the new tokens."""

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
            kv_cache: all pages, ``[pages, 1, 1, ...]``.
            attn_metadata: None while vLLM profiles memory.
        """
        if attn_metadata is None:
            return output.zero_()
        table, raw = attn_metadata.table, kv_cache.view(torch.uint8).flatten(1)
        if table is not None:
            together = _WORKSPACE.rows(raw, table.flatten())
            pages, held = self._opened(layer, together.view(len(table), -1), key.dtype)
        elif self._seen is not kv_cache:  # it is always the same tensor
            pages, held = self._opened(layer, raw, key.dtype)
            self._seen, self._held = kv_cache, held
        else:
            assert self._pages is not None
            assert self._held is not None
            pages, held = self._pages, self._held
        own = attn_metadata.num_actual_tokens  # padding may follow
        out = output.view(-1, self.num_heads, self.head_size)[:own]
        query, key, value = query[:own], key[:own], value[:own]
        if not attn_metadata.whole:
            out.zero_()
        due = pages.attend(query, key, value, held, attn_metadata.rounds, out)
        if table is None:
            self.engine.due += due
        else:  # the pages are copies
            compress_all(due)
            raw.index_copy_(0, table.flatten().long(), together)
        self.engine.report()
        return output

    def _opened(
        self, layer: Any, raw: Tensor, dtype: torch.dtype
    ) -> tuple[Pages, tuple[Page, Tensor]]:
        """What is done with the pages of this layer, and the pages.

        Args:
            raw: uint8 ``[pages, bytes]``.
        """
        if self._layout is None or self._pages is None:
            settings = self.engine.settings
            shape = self.num_kv_heads, self.group, self.head_size, dtype
            self._layout = layout = layer.attn_backend.layout(*shape)
            given = self.scale, self.softcap, self.engine.counts, self.sinks
            self._pages = settings.pages(layout, self.engine.context, self.number, *given)
        return self._pages, self._layout.views(raw)


def page_layers(config: Any) -> dict[int, Any]:
    """Our layers in this process by their number in the model.

    Args:
        config: ``VllmConfig``.
    """
    modules = config.compilation_config.static_forward_context.values()
    impls = [(getattr(module, "impl", None), module) for module in modules]
    return {impl.number: module for impl, module in impls if isinstance(impl, PageImpl)}


def layout_of(layer: Any, dtype: torch.dtype) -> Layout:
    """The layout of the pages of one of our layers on this rank."""
    impl = layer.impl
    shape = impl.num_kv_heads, impl.group, impl.head_size, dtype
    found: Layout = layer.attn_backend.layout(*shape)
    return found


def of_rank(heads: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """The sizes of the KV heads of one of ``ranks``: an equal part of them, or one head that
    several ranks share."""
    number = max(1, len(heads) // ranks)
    first = rank * len(heads) // ranks
    return tuple(heads[first : first + number])
