"""What an engine is told to do with its cache, from the environment and from its own configuration.

    KVSKETCH_METHOD=heavy_merge KVSKETCH_BUDGET=1024 vllm serve ...
    --additional-config '{"kvsketch": {"method": "heavy_merge", "budget": 1024}}'

The second wins where both name a setting. A setting that does not exist is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..budget import Budget
from ..cache.curves import Curves
from ..cache.quantized import check_bits
from ..cache.storage import Bits
from ..cache.window import Windowed, windowed
from ..errors import InputError, at_least, unknown_name
from ..methods.window import check_window
from .layout import Layout
from .pages import Pages
from .rhythm import Rhythm
from .split_layout import SplitLayout
from .split_pages import SplitPages

#: the name of the uncompressed page
EXACT = "exact"
#: Whatever is drawn at random follows from the seed, the layer and the tokens seen, so that a
#: request's answer does not depend on what else is served.
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
    "balancekv",
    "uniform",
)
#: Those that draw: a rank of tensor parallelism would draw for its heads as if they were the first.
DRAWING = ("balancekv", "uniform")
_PREFIX = "KVSKETCH_"
# Variables of other parts of the package, its tests and its benchmarks.
_OTHERS = {
    "KVSKETCH_BALANCEKV",
    "KVSKETCH_DATA",
    "KVSKETCH_LONGBENCH",
    "KVSKETCH_PEERS_PYTHON",
    "KVSKETCH_STATS_DIR",
    "KVSKETCH_THINFORMER",
}
# The buffer is one part in so many of the budget, and at most so many slots.
_BUFFER_PART, _MOST_BUFFER = 4, 256
# Curves tell heads apart from so many times their smallest part of the tokens on.
_TOLD = 2.0


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
        bits: of the keys and values that were compressed, 16 (as the model has them), 8 or 4.
        allocation: path of curves (``kvsketch calibrate``), by which the budget, then the average,
            is spent on layers and KV heads; None: the same for all.
        tolerance: relative error that a compression should not add more than; those that do are
            counted, since a page cannot grow. None: none are.
        seed: of methods that draw random numbers.

    Raises:
        InputError: an unknown method, numbers out of range, or a file that holds no curves.
    """

    method: str = "heavy_merge"
    budget: int | float | None = None
    sink: int = 4
    recent: int = 32
    buffer: int | None = None
    bits: int = 16
    allocation: str | None = None
    tolerance: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in SERVED:
            raise unknown_name("method", self.method, SERVED)
        check_window(self.sink, self.recent)
        check_bits(self.bits)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InputError(f"seed={self.seed!r} must be an int")
        if self.tolerance is not None:
            number = self.tolerance
            if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
                raise InputError(f"tolerance={number!r} must be a number > 0")
        if self.method == EXACT:
            for name in ("budget", "bits", "allocation", "tolerance"):
                if getattr(self, name) != getattr(Settings, name):
                    raise InputError(
                        f"{name}={getattr(self, name)!r} with method='exact': the exact page holds "
                        f"every token as it is; leave {name} out, or name another method"
                    )
            return
        if self.budget is None:
            raise InputError("budget is missing: slots per KV head (an int), or a share (a float)")
        Budget(self.budget)  # or it says what is wrong
        if self.buffer is not None:
            at_least("buffer", self.buffer, 1)
        if self.allocation is not None:
            self._curves()  # or they say what is wrong

    @property
    def split(self) -> bool:
        """Whether a page has two parts: a window as the model has it, and a middle."""
        return self.bits != 16 or self.allocation is not None

    def _curves(self) -> Curves:
        if not isinstance(self.allocation, str):
            raise InputError(f"allocation={self.allocation!r} must be the path of a file of curves")
        return Curves.load(self.allocation)

    def rhythm(self, context: int) -> Rhythm:
        """Slots of a page, and when it is compressed, where requests have at most ``context``
        tokens.

        Raises:
            InputError: a budget too small for the sinks and the recent window.
        """
        if self.method == EXACT:
            return Rhythm(context + 1, 1)
        kept = self.kept(context)
        room = self.buffer or max(1, min(_MOST_BUFFER, kept // _BUFFER_PART))
        if self.split:
            return Rhythm(self.sink + self.recent + room, room, kept - self.sink - self.recent)
        return Rhythm(kept + room, room)

    def kept(self, context: int) -> int:
        """Slots per KV head that a compression leaves, on average.

        Raises:
            InputError: a budget too small for the sinks and the recent window.
        """
        assert self.budget is not None
        kept = Budget(self.budget).slots(context)
        if kept <= self.sink + self.recent:
            raise InputError(
                f"budget={self.budget!r} is {kept} slots per KV head; sink={self.sink} and "
                f"recent={self.recent} leave none to the method: at least "
                f"{self.sink + self.recent + 1} are needed"
            )
        return kept

    def sizes(self, context: int, layers: int, heads: int, model: str) -> list[list[int]]:
        """Slots of every KV head between sinks and recent window, ``[layers][heads]``, by curves:
        by their errors where the budget is so large a part of the longest context, or, where they
        tell nothing about so small a part, at the smallest at which they do.

        Args:
            model: as ``curves.model_of`` names it.

        Raises:
            InputError: the curves are of another model.
        """
        curves, fixed = self._curves(), self.sink + self.recent
        curves.check_model(layers, heads, model)
        kept = self.kept(context)
        part = min(1.0, max(kept / context, _TOLD * curves.least))
        shares = curves.allocate(part)
        return [[max(1, round(share * kept) - fixed) for share in layer] for layer in shares]

    def layout(
        self,
        context: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        dtype: torch.dtype,
        sizes: Sequence[int] | None = None,
    ) -> Layout | SplitLayout:
        """A request's page in one layer.

        Args:
            context: the longest, in tokens.
            group: query heads of a KV head.
            sizes: slots of each KV head between sinks and recent window; None: the same for all.
        """
        rhythm, method = self.rhythm(context), self.windowed()
        queries = 0
        if method is not None:
            window = method.window or rhythm.buffer
            queries = min(rhythm.buffer, window) if method.needs_queries else 1
        scored = method is not None and method.needs_queries
        page = Layout(kv_heads, group, rhythm.slots, head_dim, head_dim, queries, scored, dtype)
        if not self.split:
            return page
        if sizes is None:
            sizes = [self.kept(context) - self.sink - self.recent] * kv_heads
        return SplitLayout(page, tuple(sizes), Bits(self.bits, self.bits))

    def pages(self, layout: Layout | SplitLayout, context: int, layer: int, *args: Any) -> Pages:
        """The pages of one layer. Arguments behind ``layer``: those of ``Pages`` from ``scaling``
        on."""
        given = self.windowed(layer), self.rhythm(context), *args
        return SplitPages(layout, *given) if isinstance(layout, SplitLayout) else Pages(*given)

    def windowed(self, layer: int = 0) -> Windowed | None:
        """A layer's fresh method with its window; None: nothing is compressed."""
        if self.method == EXACT:
            return None
        made = windowed(self.method, self.sink, self.recent, self.seed + layer)
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
    if not isinstance(config, Mapping | None):
        raise InputError(f"kvsketch={config!r} must be an object of settings")
    for name, value in (config or {}).items():
        if name not in names:
            raise unknown_name("kvsketch setting", name, names)
        given[name] = value
    return Settings(**given) if given else None


def _number(name: str, text: str) -> str | int | float:
    """What a variable says."""
    if name in ("method", "allocation"):
        return text
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{_PREFIX}{name.upper()}={text!r} is not a number") from None
