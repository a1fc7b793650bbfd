"""The rounds of a batch, made from the metadata of vLLM's scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from kvsketch.page.schedule import Numbers, Rhythm
from kvsketch.vllm import metrics
from kvsketch.vllm.drafts import Step
from kvsketch.vllm.engine import running
from kvsketch.vllm.manager import PARTS
from kvsketch.vllm.rounds import Copies, Round, rounds
from kvsketch.vllm.spec import PageSpec
from kvsketch.vllm.states import States


@dataclass
class PageMetadata:
    """The work of a batch, the same in all layers.

    Attributes:
        rounds: in order.
        num_actual_tokens: of all requests.
        table: the blocks of every page, ``[pages, blocks]``, if a page is several blocks: those of
            the requests, then the copies that they start from or make now.
        whole: whether every token of the batch is in a round.
    """

    rounds: list[Round]
    num_actual_tokens: int
    table: Tensor | None
    whole: bool = True


class PageMetadataBuilder(AttentionMetadataBuilder[PageMetadata]):
    """Makes ``PageMetadata`` from the scheduler's batch."""

    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold = None

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
        batch, engine, spec = common_attn_metadata, running(), self.kv_cache_spec
        engine.compress_due()
        requests = batch.num_reqs
        starts = batch.query_start_loc_cpu[: requests + 1].numpy().astype(np.int64)
        new = np.diff(starts)
        seen = batch.seq_lens[:requests].cpu().numpy().astype(np.int64) - new
        table = batch.block_table_tensor[:requests, : spec.blocks * (PARTS if spec.prefixes else 1)]
        blocks = table.cpu().numpy().astype(np.int64)
        assert batch.is_prefilling is not None
        reading = batch.is_prefilling[:requests].cpu().numpy()
        now, last = [starts, seen, blocks, reading], engine.batch
        if last is not None and all(map(np.array_equal, last[0], now)):
            known: PageMetadata = last[1]
            return known
        if self._rhythm is None:
            self._rhythm = engine.settings.rhythm(engine.context)
        rhythm = self._rhythm
        pages, copies, together, own = blocks[:, 0], None, None, blocks[:, 0]
        states = engine.pages.states(own, seen, rhythm)
        if spec.prefixes:
            firsts = blocks[:, :: spec.blocks]
            copies = self._copies(firsts, seen, seen + new, reading, states, rhythm)
        keep = np.zeros(0, dtype=bool) if copies is None else copies.at > 0
        target = own[:0] if copies is None else copies.keep[keep]
        if spec.blocks > 1:
            pages, copies, together = _gathered(table, spec.blocks, copies)
        layout = spec.layout
        # the largest of all layers, whose layouts differ with curves
        middle = max(engine.middle, *layout.middle, 0)
        pieces = np.where(reading, engine.piece, 0)
        given = rhythm, layout.queries, self.device, copies, middle
        engine.step = Step(seen, pages, States(states.last), copies, pieces)
        todo = rounds(starts, seen, pages, *given, states, pieces)
        engine.pages.put(own, seen + new, states.last)
        if copies is not None:
            engine.pages.put(target, copies.at[keep], states.copied[keep])
        if get_tensor_model_parallel_rank() == 0 and get_pp_group().is_first_rank:
            # All ranks see the same.
            slots = states.held(rhythm, seen + new) + states.filled(rhythm, rhythm.middle)
            metrics.add(tokens=float(new.sum()), slots=float(slots.sum()))
        found = PageMetadata(todo, batch.num_actual_tokens, together)
        engine.batch = now, found
        return found

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> PageMetadata:
        """Of the layers of a model that guesses tokens.

        Args:
            draft_index: 0: it reads the tokens of the step, the one that was chosen after them,
                and, in rows that follow, tokens that were rejected. Later: it reads its last guess.
        """
        batch, engine, layout = common_attn_metadata, running(), self.kv_cache_spec.layout
        engine.compress_due()
        step, rhythm = engine.step, engine.settings.rhythm(engine.context)
        assert step is not None
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].numpy().astype(np.int64)
        shape = {"queries": layout.queries, "middle": max(layout.middle, default=0)}
        made = partial(rounds, rhythm=rhythm, device=self.device, **shape)
        if draft_index:
            todo = step.guess(draft_index, starts, made)
        else:
            nowhere = (batch.slot_mapping[: starts[-1]] < 0).cpu().numpy()
            todo = step.read(starts, np.add.reduceat(nowhere, starts[:-1], dtype=np.int64), made)
        return PageMetadata(todo, batch.num_actual_tokens, None, whole=False)

    def _copies(
        self,
        blocks: Numbers,
        seen: Numbers,
        after: Numbers,
        reading: Numbers,
        states: States,
        rhythm: Rhythm,
    ) -> Copies:
        """The copies that ``PageManager`` has put into the block table. A request starts from a
        copy if it has seen exactly the tokens of the copy; later it has seen more.

        Args:
            blocks: the first blocks of the parts of a row, ``[requests, PARTS]``.
            states: of the requests' pages, changed to that of the copy they start from.
        """
        source, target, every = blocks[:, 1], blocks[:, 2], self.kv_cache_spec.copied_every
        made = running().pages.tokens(source) * (source != 0)
        assert (made <= seen).all(), "a copy holds tokens that its request has not seen"
        start = np.where((source != 0) & (made == seen), source, -1)
        theirs, begun = running().pages.states(source, made, rhythm), start >= 0
        states.last = np.where(begun, theirs.last, states.last)
        if self.kv_cache_spec.piece:  # decoded tokens that the model runner V2 reads again
            reading = reading & (after - seen > 1)
        at = after // every * every
        return Copies(start, target, np.where(reading & (at > seen) & (target != 0), at, 0))


def _gathered(
    table: Tensor, size: int, copies: Copies | None
) -> tuple[Numbers, Copies | None, Tensor]:
    """Numbers of pages of ``size`` blocks, which are gathered in every layer in the order of their
    blocks: those of the requests, the copies with the same numbers, and the blocks."""
    requests = len(table)
    pages, blocks = np.arange(requests), [table[:, :size]]
    if copies is None:
        return pages, None, blocks[0]
    start, keep, number = copies.start.copy(), copies.keep.copy(), requests
    for part, (numbers, used) in enumerate(((start, copies.start >= 0), (keep, copies.at > 0)), 1):
        rows = used.nonzero()[0]
        numbers[rows] = number + np.arange(len(rows))
        blocks.append(table[torch.from_numpy(rows), part * size : (part + 1) * size])
        number += len(rows)
    return pages, Copies(start, keep, copies.at), torch.cat(blocks)
