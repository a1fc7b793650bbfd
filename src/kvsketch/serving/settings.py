"""What an engine is told to do with its cache, from the environment and from its own configuration.

    KVSKETCH_METHOD=heavy_merge KVSKETCH_BUDGET=1024 vllm serve ...
    --additional-config '{"kvsketch": {"method": "heavy_merge", "budget": 1024}}'

The second wins where both name a setting. A setting that does not exist is an error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..cache.window import Windowed, windowed
from ..errors import InputError, unknown_name
from ..methods.window import check_window
from .layout import Layout
from .rhythm import Rhythm

#: the name of the uncompressed page
EXACT = "exact"
#: Methods without randomness, so that a request's answer does not depend on what else is served.
SERVED = (
    EXACT,
    "streaming_llm",
    "heavy_merge",
    "cluster_merge",
    "h2o",
    "tova",
    "snapkv",
    "keydiff",
    "knorm",
)
_PREFIX = "KVSKETCH_"
# Variables of other parts of the package.
_OTHERS = {"KVSKETCH_DATA", "KVSKETCH_STATS_DIR"}
# The buffer is one part in so many of the budget, and at most so many slots.
_BUFFER_PART, _MOST_BUFFER = 4, 256


@dataclass(frozen=True)
class Settings:
    """How a request's page is kept small.

    Attributes:
        method: one of ``SERVED``.
        budget: slots per KV head that a compression leaves; a float in (0, 1]: that share of the
            longest context the engine allows. Not with "exact", which holds all tokens.
        sink: first tokens kept as they are.
        recent: last tokens kept as they are.
        buffer: slots of a page above these: it is compressed when they are full, every so many
            tokens. None: a quarter of the budget, at most 256.

    Raises:
        InputError: an unknown method, or numbers out of range.
    """

    method: str = "heavy_merge"
    budget: int | float | None = None
    sink: int = 4
    recent: int = 32
    buffer: int | None = None

    def __post_init__(self) -> None:
        if self.method not in SERVED:
            raise unknown_name("method", self.method, SERVED)
        check_window(self.sink, self.recent)
        if self.method == EXACT:
            if self.budget is not None:
                raise InputError(
                    f"budget={self.budget!r} with method='exact': the exact page holds every token "
                    "of the longest context; leave budget out, or name another method"
                )
            return
        budget = self.budget
        if budget is None:
            raise InputError("budget is missing: slots per KV head (an int), or a share (a float)")
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0:
            raise InputError(f"budget={budget!r} must be an int >= 1 or a float in (0, 1]")
        if isinstance(budget, float) and not (math.isfinite(budget) and budget <= 1):
            raise InputError(f"budget={budget!r}: a float is a share of the context, at most 1")
        if self.buffer is not None and (isinstance(self.buffer, bool) or self.buffer < 1):
            raise InputError(f"buffer={self.buffer!r} must be an int >= 1")

    def rhythm(self, context: int) -> Rhythm:
        """Slots of a page, and when it is compressed, where requests have at most ``context``
        tokens.

        Raises:
            InputError: a budget too small for the sinks and the recent window.
        """
        if self.method == EXACT:
            return Rhythm(context + 1, 1)
        assert self.budget is not None
        kept = self.budget if isinstance(self.budget, int) else math.ceil(self.budget * context)
        if kept <= self.sink + self.recent:
            raise InputError(
                f"budget={self.budget!r} is {kept} slots per KV head; sink={self.sink} and "
                f"recent={self.recent} leave none to the method: at least "
                f"{self.sink + self.recent + 1} are needed"
            )
        room = self.buffer or max(1, min(_MOST_BUFFER, kept // _BUFFER_PART))
        return Rhythm(kept + room, room)

    def layout(
        self, context: int, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype
    ) -> Layout:
        """A request's page in one layer.

        Args:
            context: the longest, in tokens.
            group: query heads of a KV head.
        """
        rhythm, method = self.rhythm(context), self.windowed()
        queries = 0
        if method is not None:
            window = method.window or rhythm.buffer
            queries = min(rhythm.buffer, window) if method.needs_queries else 1
        scored = method is not None and method.needs_queries
        return Layout(kv_heads, group, rhythm.slots, head_dim, head_dim, queries, scored, dtype)

    def windowed(self) -> Windowed | None:
        """A fresh method with its window; None: nothing is compressed."""
        if self.method == EXACT:
            return None
        made = windowed(self.method, self.sink, self.recent)
        assert isinstance(made, Windowed)
        return made


def read(
    config: Mapping[str, Any] | None = None, environment: Mapping[str, str] = os.environ
) -> Settings | None:
    """The settings, or None where nothing is set.

    Args:
        config: of the engine: what stands under "kvsketch".
        environment: variables, of which those that start with ``KVSKETCH_`` and name a setting
            count.

    Raises:
        InputError: a setting that does not exist, or a value that it does not allow.
    """
    names = [field.name for field in fields(Settings)]
    given: dict[str, Any] = {
        name: _number(name, environment[_PREFIX + name.upper()])
        for name in names
        if environment.get(_PREFIX + name.upper())
    }
    known = {_PREFIX + name.upper() for name in names} | _OTHERS
    for variable in environment:
        if variable.startswith(_PREFIX) and variable not in known:
            raise unknown_name("environment variable", variable, known)
    for name, value in (config or {}).items():
        if name not in names:
            raise unknown_name("kvsketch setting", name, names)
        given[name] = value
    return Settings(**given) if given else None


def _number(name: str, text: str) -> str | int | float:
    """What a variable says."""
    if name == "method":
        return text
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{_PREFIX}{name.upper()}={text!r} is not a number") from None
