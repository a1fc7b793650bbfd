"""The engine that runs in this process. vLLM calls backends and specs without a configuration and
without naming the layer, so that what they depend on is kept here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from kvsketch.vllm import metrics
from kvsketch.vllm.checks import check_settings, guesses_for
from kvsketch.vllm.drafts import Step
from kvsketch.vllm.pages import Counts, Due, compress_all
from kvsketch.vllm.scheduler import piece_of
from kvsketch.vllm.settings import EXACT, SCHEDULER, PageSettings, settings_of
from kvsketch.vllm.states import KnownPages


@dataclass
class Engine:
    """
    Attributes:
        config: ``VllmConfig``.
        settings: of the plugin.
        context: the longest context, in tokens.
        layers: the number of the next layer of full attention; a later stage of pipeline
            parallelism starts where the one before it ends.
        pages: the states of the pages in all blocks.
        groups: by KV heads and head_dim, the largest number of query heads per KV head.
        largest: bytes of the largest page if layers differ.
        middle: slots of the largest head in the middle of a page if layers differ.
        batch: the inputs of the last metadata and the metadata: layers whose pages differ have
            their own builders.
        piece: prompts are compressed at multiples of so many tokens; 0: where their pages are full.
        step: the last one, which a model that guesses tokens follows.
        due: full pages, of all layers, that wait to be compressed.
        counts: of compressions that the metrics do not have yet.
    """

    config: Any
    settings: PageSettings
    context: int
    layers: int
    pages: KnownPages
    groups: dict[tuple[int, int], int] = field(default_factory=dict)
    largest: int = 0
    middle: int = 0
    batch: tuple[list[Any], Any] | None = None
    piece: int = 0
    step: Step | None = None
    due: list[Due] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)

    def compress_due(self) -> None:
        """Compress the pages that wait for it: before a batch writes to any page, and before
        anything else reads or writes one."""
        due, self.due = self.due, []
        compress_all(due)
        self.report()

    def report(self) -> None:
        """Add what was counted to the metrics."""
        now = self.counts
        if now.compressions:
            metrics.add(compressions=now.compressions, error=now.errors, above=now.above)
            self.counts.clear()


# The engine that started last.
_RUNNING: list[Engine] = []


def begin(config: Any) -> Engine:
    """The engine of a configuration, whose settings are read at the first call.

    Args:
        config: ``VllmConfig``.
    """
    if _RUNNING and (_RUNNING[0].config is config or guesses_for(config, _RUNNING[0].config)):
        return _RUNNING[0]
    settings = settings_of(config)
    assert settings is not None
    first, _ = config.model_config.get_layers_start_end_indices(config.parallel_config)
    check_settings(config, settings)
    context = int(config.model_config.max_model_len)
    piece = piece_of(config, settings)
    if not piece and settings.method != EXACT:
        init_logger("vllm.kvsketch").warning(
            "Prompts are compressed faster, and answers are more accurate, with --scheduler-cls %s "
            "(docs/vllm.md)",
            SCHEDULER,
        )
    metrics.tell({**settings.shown(), "max_model_len": context})
    guesses = int(config.num_speculative_tokens)
    known, counts = KnownPages(guesses), Counts(tolerance=settings.tolerance or math.inf)
    given = config, settings, context, first, known
    _RUNNING[:] = [Engine(*given, piece=piece, counts=counts)]
    return _RUNNING[0]


def running() -> Engine:
    """The engine that started last."""
    return _RUNNING[0]
