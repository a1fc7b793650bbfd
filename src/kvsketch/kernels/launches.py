"""Attention over one part of a layer's slots, by one launch of a Triton kernel."""

from __future__ import annotations

from torch import Tensor

from kvsketch.kernels.gpu import flat_of
from kvsketch.kernels.triton_decode import decode
from kvsketch.kernels.triton_prefill import prefill
from kvsketch.observed import Observed
from kvsketch.page.part import Part


def decode_part(asked: Observed, part: Part, newest: Tensor | None) -> tuple[Tensor, Tensor]:
    """The attention ``[batch, num_attention_heads, 1, value_dim]`` and the logs of its totals, in
    one launch for all heads, whatever their sizes."""
    (start, count), flat = part.spans(), flat_of(part)
    sinks, slopes = (None if x is None else x.float() for x in (asked.sinks, asked.slopes))
    positions = flat["positions"].float() if slopes is not None else None
    return decode(
        asked.queries,
        flat["keys"],
        flat["values"],
        flat.get("log_mass"),
        start,
        count,
        scaling=asked.scaling,
        softcap=asked.softcap,
        sinks=sinks,
        slopes=slopes,
        positions=positions,
        query_positions=None if newest is None else newest.flatten().float(),
        most=part.count + part.room,
    )


def prefill_page(asked: Observed, page: Part) -> tuple[Tensor, Tensor]:
    """The attention over the slots before the new tokens and, causally, over the new tokens, and
    the logs of its totals, in one launch."""
    q = asked.queries.shape[2]
    (start, count), flat, new = page.spans(), flat_of(page), page.last(q)
    return prefill(
        asked.queries,
        flat["keys"],
        flat["values"],
        flat.get("log_mass"),
        start,
        count - q,
        new["keys"],
        new["values"],
        scaling=asked.scaling,
        new_log_mass=new.get("log_mass"),
        softcap=asked.softcap,
        sinks=None if asked.sinks is None else asked.sinks.float(),
    )
