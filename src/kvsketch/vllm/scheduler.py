"""vLLM's scheduler with prompts in pieces that are compressed at once.

    vllm serve MODEL --scheduler-cls kvsketch.vllm.scheduler.PageScheduler

With vLLM's own scheduler, chunks of prompts end anywhere, so that a page has to be compressed
wherever it is full, every hundred tokens or so, if answers are not to depend on what else is
running. Here they end at multiples of ``PageSettings.piece`` tokens or with the prompt. The tokens
of a piece are at hand in one step, and are compressed together without a page that is larger.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.page.schedule import Rhythm
from kvsketch.vllm.settings import SCHEDULER, PageSettings, settings_of
from kvsketch.vllm.states import alone


def piece_of(config: Any, settings: PageSettings) -> int:
    """The number of tokens of a prompt that are compressed together; 0: the engine does not use
    ``PageScheduler``, or there is nothing to compress.

    Args:
        config: ``VllmConfig``.

    Raises:
        InputError: a step of the engine cannot take a piece.
        UnsupportedError: another scheduler that is not vLLM's.
    """
    given = config.scheduler_config.scheduler_cls
    name = given if isinstance(given, str | None) else f"{given.__module__}.{given.__qualname__}"
    if name != SCHEDULER and config.speculative_config is not None:
        raise UnsupportedError(
            "kvsketch serves speculative decoding only with --scheduler-cls " + SCHEDULER
        )
    if name != SCHEDULER or settings.windowed() is None:
        if name is not None and name != SCHEDULER and not name.startswith("vllm."):
            raise UnsupportedError(
                f"kvsketch does not know the scheduler {name}: unset --scheduler-cls, or use "
                f"{SCHEDULER}"
            )
        return 0
    piece, scheduler, cache = settings.piece, config.scheduler_config, config.cache_config
    most = scheduler.max_num_batched_tokens - scheduler.max_num_seqs
    if piece > most:
        raise InputError(
            f"piece={piece} is more than the {most} tokens of a prompt that a step takes beside "
            "decoding requests: choose a smaller KVSKETCH_PIECE, or a larger "
            "--max-num-batched-tokens"
        )
    if 0 < scheduler.long_prefill_token_threshold < piece:
        raise InputError(
            f"piece={piece} is more than --long-prefill-token-threshold="
            f"{scheduler.long_prefill_token_threshold}: choose a smaller KVSKETCH_PIECE"
        )
    if cache.enable_prefix_caching and piece % cache.block_size:
        raise InputError(
            f"piece={piece} must be a multiple of vLLM's block size, {cache.block_size} tokens: "
            "change KVSKETCH_PIECE, or pass --no-enable-prefix-caching"
        )
    return piece


class PageScheduler(AsyncScheduler):
    """Ends the chunks of prompts at multiples of ``PageSettings.piece``, and with the prompt.

    vLLM's scheduler has a place for this, of which it makes use itself for the states of Mamba. A
    request that was preempted reads its decoded tokens again: in a chunk of their own, or, with the
    model runner V2, to which they look like a prompt, one by one. Where tokens are guessed
    (``--speculative-config``), steps end in front of the token at which a page is compressed, so
    that no guess has part in a compression.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        settings = settings_of(vllm_config)
        self._piece = 0 if settings is None else piece_of(vllm_config, settings)
        if self._piece:
            self.need_mamba_block_aligned_split = True
        self._rhythm: Rhythm | None = None  # where tokens are guessed
        if settings is not None and self.num_spec_tokens:
            self._rhythm = settings.rhythm(int(vllm_config.model_config.max_model_len))

    def _mamba_block_aligned_split(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """How many of ``num_new_tokens`` tokens a step takes; 0: it waits for the next one."""
        more = num_new_local_computed_tokens + num_external_computed_tokens
        start = int(request.num_computed_tokens) + more
        end, prompt = start + num_new_tokens, int(request.num_prompt_tokens)
        if start >= prompt and self._rhythm is not None:
            return alone(self._rhythm, prompt, self._piece, start, num_new_tokens)
        if start >= prompt:
            return min(num_new_tokens, 1) if self.use_v2_model_runner else num_new_tokens
        if end < prompt:
            end = max(start, end // self._piece * self._piece)
        return min(end, prompt) - start
