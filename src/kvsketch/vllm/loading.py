"""Writes compressed documents into the pages of requests, in the process that holds the pages."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.logger import init_logger

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.files.format import read
from kvsketch.hf.saving import KIND
from kvsketch.vllm import metrics
from kvsketch.vllm.attention import layout_of, of_rank, page_layers
from kvsketch.vllm.conversion import Converted, converted
from kvsketch.vllm.engine import running
from kvsketch.vllm.saved import saved_of
from kvsketch.vllm.shelf import Found, stamp_of
from kvsketch.vllm.windows import check_window, window_layers, write_window

_LOGGER = init_logger("vllm.kvsketch")
# Bytes of converted documents that are kept for later requests.
_KEPT = 1 << 30


@dataclass(frozen=True)
class Load:
    """A document to write.

    Attributes:
        request: its id.
        found: the document.
        blocks: of the request, in every group of layers.
        unread: tokens of its prompt that are not read because the document holds them.
    """

    request: str
    found: Found
    blocks: tuple[list[int], ...]
    unread: int


class Loader:
    """Reads documents in a thread of its own, and writes them into the pages of this process's
    layers, in the thread that calls it.

    Args:
        config: ``VllmConfig``.
        groups: of layers that share blocks, vLLM's ``KVCacheGroupSpec``.
    """

    def __init__(self, config: Any, groups: Sequence[Any]) -> None:
        self._config = config
        # By the name of a layer: the number of its group, and how its blocks are used.
        self._specs = {
            name: (number, group.kv_cache_spec)
            for number, group in enumerate(groups)
            for name in group.layer_names
        }
        self._thread = ThreadPoolExecutor(1, "kvsketch-documents")
        self._waiting: list[Load] = []
        self._reading: dict[Found, Future[Converted]] = {}
        self._kept: OrderedDict[Found, Converted] = OrderedDict()

    def step(self, loads: Sequence[Load], patience: float) -> Iterator[tuple[str, bool]]:
        """Begin to load documents, and write those that were read.

        Args:
            loads: the new ones.
            patience: seconds to wait if none was read yet.

        Yields:
            The id of a request whose load is over, and whether its page holds the document.
        """
        layers = page_layers(self._config)
        for load in loads:
            if load.found not in self._kept and load.found not in self._reading:
                self._reading[load.found] = self._thread.submit(self._read, load.found, layers)
        self._waiting += loads
        if self._reading and patience:
            wait(self._reading.values(), patience, FIRST_COMPLETED)
        over = {found: future for found, future in self._reading.items() if future.done()}
        for found, future in over.items():
            del self._reading[found]
            error = future.exception()
            if error is None:
                self._kept[found] = future.result()
                self._count(squeezed=bool(self._kept[found].squeezed))
            else:
                _LOGGER.warning("%s is not used: %s", found.name, error)
                self._count(unusable=1)
        waiting, self._waiting = self._waiting, []
        for load in waiting:
            if load.found in self._reading:
                self._waiting.append(load)
                continue
            document = self._kept.get(load.found)
            if document is not None:
                self._kept.move_to_end(load.found)
                self._write(load.blocks, document, layers)
                self._count(documents=1, unread=load.unread)
            yield load.request, document is not None
        newest = {found.name: found for found in over}
        for found in [one for one in self._kept if newest.get(one.name, one) != one]:
            del self._kept[found]  # the file was written anew
        while len(self._kept) > 1 and sum(one.bytes for one in self._kept.values()) > _KEPT:
            self._kept.popitem(last=False)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _write(
        self, blocks: Sequence[list[int]], document: Converted, layers: dict[int, Any]
    ) -> None:
        engine = running()
        engine.compress_due()
        for number, layer in layers.items():
            row, pages = document.rows[number], layer.kv_cache.view(torch.uint8).flatten(1)
            group, _ = self._specs[layer.layer_name]
            for block, part in zip(blocks[group], torch.split(row, pages.shape[1]), strict=False):
                pages[block, : part.numel()].copy_(part)
            state = blocks[group][0], document.tokens, document.last
            engine.pages.put(*(np.array([number]) for number in state))
        dtype = self._config.model_config.dtype
        for number, layer in window_layers(self._config).items():
            group, spec = self._specs[layer.layer_name]
            own = blocks[group], spec.block_size, dtype
            write_window(layer, document.windows[number], document.tokens, *own)
        engine.batch = None  # an equal batch of an earlier request of this page says nothing now

    def _count(self, **numbers: int) -> None:
        """Add to the metrics, in one of the processes that do the same."""
        if get_tensor_model_parallel_rank() == 0 and get_pp_group().is_first_rank:
            metrics.add(**numbers)

    def _read(self, found: Found, layers: dict[int, Any]) -> Converted:
        """A document as pages.

        Raises:
            KVSketchError: the file changed, is damaged or does not fit.
        """
        engine, model = running(), self._config.model_config
        settings = engine.settings
        assert settings.documents is not None
        path = Path(settings.documents) / os.path.basename(found.name)
        _, state = read(path, KIND)
        if stamp_of(path) != found.stamp:
            raise InputError(f"{found.name} changed while it was read")
        saved = saved_of(state, model.get_total_num_hidden_layers())
        if saved.seen != found.tokens:
            raise InputError(f"{found.name} holds {saved.seen} tokens, and says {found.tokens}")
        layouts = {number: layout_of(layer, model.dtype) for number, layer in layers.items()}
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        heads = of_rank(range(model.get_total_num_kv_heads()), rank, ranks)
        own = slice(heads[0], heads[-1] + 1)
        document = converted(saved, layouts, own, settings, engine.context, rank)
        for number, layer in window_layers(self._config).items():
            check_window(layer, number, document.windows.get(number), saved.seen)
        if document.squeezed:
            said = (
                f"{found.name} does not fit the pages ({document.squeezed}); "
                "`kvsketch compress --for-vllm` makes files that do"
            )
            if not settings.squeeze:
                raise UnsupportedError(said)
            _LOGGER.warning("%s. It was compressed again, which costs accuracy.", said)
        return document
