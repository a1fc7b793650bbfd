"""What a method requires from what calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Requirements:
    """
    Attributes:
        queries: whether ``observe`` scores slots by queries.
        values: whether ``observe`` uses values; if not, it may get slots whose values have no
            columns.
        whole_prompt: whether it scores a prompt as a whole, so that the queries of a chunked
            prompt must wait for the last chunk.
        second_reading: of the context, whose queries belong to no slot: whether scores by them are
            refused, allowed, or all that the method is made for.
        echo: whether it scores a prompt also by the prompt's own queries, asked again after it
            (``Compressor.echo``), where the model's positions allow it.
        weights: of the queries of a second reading, see ``hf.weighing``.
        part: tokens of the context in one part of a second reading; None: KVzip's number.
        output: whether it uses the contribution of values to the layer's output, and therefore
            ``Compressor.output``.
        rotary: whether it uses how the model rotates queries and keys by their positions, and
            therefore ``Compressor.turn``.
    """

    queries: bool = False
    values: bool = True
    whole_prompt: bool = False
    second_reading: Literal["refused", "allowed", "required"] = "refused"
    echo: bool = False
    weights: Literal["hidden", "gradient"] | None = None
    part: int | None = None
    output: bool = False
    rotary: bool = False


#: Attributes of classes that became parts of ``requires``, and what they are called there.
FORMER = {
    "needs_queries": "queries=True",
    "observes_values": "values=False",
    "at_once": "whole_prompt=True",
    "rereads": 'second_reading="allowed"',
    "needs_reread": 'second_reading="required"',
    "weighs": "weights=...",
    "part": "part=...",
    "needs_output": "output=True",
}
