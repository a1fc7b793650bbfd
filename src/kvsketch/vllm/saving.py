"""Saves the pages of requests as documents, in the process that holds the pages."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm.logger import init_logger

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.files.format import write
from kvsketch.files.tokens import Mark
from kvsketch.hf.checkpoint import Checkpoint
from kvsketch.hf.identity import mark_of
from kvsketch.hf.models import layers_of
from kvsketch.hf.saving import KIND, cache_state, summary_of, told_model
from kvsketch.observed import Observed
from kvsketch.state import name_of
from kvsketch.vllm import metrics
from kvsketch.vllm.attention import layout_of, page_layers
from kvsketch.vllm.checks import BOTH
from kvsketch.vllm.conversion import page_of
from kvsketch.vllm.engine import running
from kvsketch.vllm.offline import cache_for
from kvsketch.vllm.sessions import Save

_LOGGER = init_logger("vllm.kvsketch")


class Saver:
    """Copies pages in the thread that calls it, and writes them to files in one of its own. Until
    then vLLM keeps the page, so that no more copies wait than there are pages.

    Args:
        config: ``VllmConfig``.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._thread = ThreadPoolExecutor(1, "kvsketch-sessions")
        self._writing: dict[Future[None], Save] = {}
        # Not in the other thread: transformers changes torch's default dtype meanwhile.
        saves = config.kv_transfer_config.kv_role == BOTH
        self._marks = [_mark(config.model_config)] if saves else []

    def step(self, saves: Sequence[Save], patience: float) -> set[str]:
        """Begin to save pages.

        Args:
            saves: the new ones.
            patience: seconds to wait if none was written yet.

        Returns:
            The ids of requests whose files were written, or could not be.
        """
        if saves:
            running().compress_due()
        for save in saves:
            rows = {
                number: layer.kv_cache.view(torch.uint8).flatten(1)[save.block].to("cpu", copy=True)
                for number, layer in page_layers(self._config).items()
            }
            state = running().pages.state(save.block)
            self._writing[self._thread.submit(self._write, save, rows, *state)] = save
        if self._writing and patience:
            wait(self._writing, patience, FIRST_COMPLETED)
        over = [future for future in self._writing if future.done()]
        for future in over:
            error = future.exception()
            if error is not None:
                _LOGGER.warning("%s is not saved: %s", self._writing[future].name, error)
            metrics.add(**{"saved" if error is None else "unsaved": 1})
        return {self._writing.pop(future).request for future in over}

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._thread.shutdown()

    @torch.no_grad()
    def _write(self, save: Save, rows: dict[int, Tensor], tokens: int, last: int) -> None:
        """Write a file.

        Args:
            rows: the page in every layer.
            tokens: of the page.
            last: after how many of them it was last compressed.

        Raises:
            KVSketchError: it cannot be written, or there is no cache of such pages.
        """
        engine, model = running(), self._config.model_config
        settings = engine.settings
        assert settings.documents is not None
        mark = _of(save.marks, tokens, last)
        seen, dtype = mark[0], model.dtype
        cache = cache_for(settings, engine.context, model.hf_config, seen)
        if len(cache._sketches()) != len(rows):
            raise UnsupportedError(
                f"{len(rows)} of {len(cache._sketches())} layers are in this process"
            )
        for number, layer in page_layers(self._config).items():
            layout, kept = layout_of(layer, dtype), cache._sketches()[number]
            page, queries = page_of(rows[number], layout, last, seen, settings, engine.context)
            token = torch.empty(1, layout.heads, 1, layout.head_dim, dtype=dtype, device="cpu")
            kept.lazy_initialization(token, token)
            kept.stream.held_page, kept.stream.seen = page, seen
            if queries.shape[2]:
                impl = layer.impl
                asked = Observed(queries, impl.scale, impl.softcap, sinks=impl.sinks)
                kept.stream.scores.queries.add(asked)
        cache._marks = {"layers": self._marks, "dtype": name_of(dtype)}
        header = {
            "model": told_model(cache),
            "tokenizer": None,
            "summary": summary_of(cache),
            "about": {"ids": {"count": seen, "sha256": mark[1]}},
        }
        write(Path(settings.documents) / save.name, KIND, header, cache_state(cache), new=True)


def _of(known: Sequence[Mark], tokens: int, last: int) -> Mark:
    """The mark of the tokens that a file holds.

    Args:
        known: of all tokens but the last one, and of all.
        tokens, last: of the page. A step was ahead if it holds the last token, which is left out,
            unless it is in slots already.

    Raises:
        InputError: the page holds others.
    """
    for mark in known:
        if max(1, last) <= mark[0] <= tokens <= known[-1][0]:
            return mark
    raise InputError(f"its page holds {tokens} tokens of {known[-1][0]}")


def _mark(model: Any) -> str:
    """The mark of the attention weights of the first layer, with the name of their module in
    transformers; without a name if the weights have others there.

    Args:
        model: vLLM's ``ModelConfig``.
    """
    checkpoint = Checkpoint(model.model, model.hf_config, model.revision)
    first, files = layers_of(model.hf_config)[1][0], checkpoint._files()
    known = checkpoint._marks(first)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(model.hf_config)
    for name, module in made.named_modules():
        if getattr(module, "layer_idx", None) != first:
            continue
        weights = []
        for part in sorted(dict(module.named_parameters())):
            path = files.get(f"{name}.{part}")
            if path is not None:
                with safe_open(path, "pt") as file:
                    weights.append((part, file.get_tensor(f"{name}.{part}")))
        if mark_of(weights) in known:
            return f"{type(module).__name__}:{mark_of(weights)}"
    return f":{min(known)}"
