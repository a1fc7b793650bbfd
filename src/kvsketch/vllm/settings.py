"""PageSettings of the serving plugin, from environment variables and the engine's configuration.

    KVSKETCH_METHOD=heavy_merge KVSKETCH_BUDGET=1024 vllm serve ...
    --additional-config '{"kvsketch": {"method": "heavy_merge", "budget": 1024}}'

If both give a setting, the second has precedence. An unknown setting is an error.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from kvsketch.arguments import PIECE
from kvsketch.budget import Budget
from kvsketch.cache.curves import Curves
from kvsketch.cache.window import windowed
from kvsketch.errors import InputError, at_least, unknown_name
from kvsketch.methods.base import Compressor
from kvsketch.methods.window import check_window
from kvsketch.page.layout import Layout
from kvsketch.page.quantized import Bits, check_bits
from kvsketch.page.schedule import Rhythm, Schedule
from kvsketch.vllm.pages import Pages

#: the name of the uncompressed page
EXACT = "exact"
#: vLLM's ``--scheduler-cls`` with which prompts are compressed in pieces
SCHEDULER = "kvsketch.vllm.scheduler.PageScheduler"
#: Methods that can be served. Their random numbers depend on the seed, the layer and the number of
#: tokens seen, so that a request's answer does not depend on the other requests.
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
#: Methods that draw random numbers: with tensor parallelism, every rank would draw those of the
#: first heads for its own.
DRAWING = ("balancekv", "uniform")
_PREFIX = "KVSKETCH_"
# Variables of other parts of the package, its tests and its benchmarks.
_OTHERS = {
    "KVSKETCH_ATTENTION_MATCHING",
    "KVSKETCH_BALANCEKV",
    "KVSKETCH_DATA",
    "KVSKETCH_LONGBENCH",
    "KVSKETCH_PEERS_PYTHON",
    "KVSKETCH_STATS_DIR",
    "KVSKETCH_NATIVE",
    "KVSKETCH_RKV",
    "KVSKETCH_THINFORMER",
    "KVSKETCH_TRIATTENTION",
}
# Curves distinguish heads for budgets of at least this multiple of their smallest measured one.
_TOLD = 2.0


@dataclass(frozen=True)
class PageSettings:
    """How the pages of requests are compressed.

    Attributes:
        method: one of ``SERVED``.
        budget: slots per KV head, as a number of ``SketchCache``; a float in (0, 1] is a fraction
            of the longest context that the engine allows. Not with "exact", which keeps all tokens.
        sink: number of first tokens that are kept unchanged.
        recent: number of last tokens that are kept unchanged.
        buffer: the number of slots by which a page may exceed the budget, before it is compressed
            to some such buffers below it (``Schedule``). None: 1/40 of the budget, at most 64.
        piece: with ``scheduler.PageScheduler``, the number of tokens of a prompt that are
            compressed together.
        bits: of compressed keys and values, 16 (the model's dtype), 8 or 4.
        allocation: path of a file of curves (``kvsketch calibrate``), which allocate the budget to
            layers and KV heads; it is then their average. None: the same for all.
        tolerance: the largest relative error that a compression should add. Compressions above it
            are counted, because a page cannot grow. None: they are not counted.
        seed: of methods that draw random numbers.
        documents: a folder of compressed documents, which are loaded for requests whose prompts
            begin with their tokens, and to which requests may save their pages
            (``DocumentConnector``). None: none are.
        squeeze: whether documents that do not fit a page are compressed again when they are loaded.
            Otherwise their prompts are read.

    Raises:
        InputError: an unknown method, a number out of range, or a file without curves.
    """

    method: str = "heavy_merge"
    budget: int | float | None = None
    sink: int = 4
    recent: int = 32
    buffer: int | None = None
    piece: int = PIECE
    bits: int = 16
    allocation: str | None = None
    tolerance: float | None = None
    seed: int = 0
    documents: str | None = None
    squeeze: bool = True

    def __post_init__(self) -> None:
        if self.method not in SERVED:
            raise unknown_name("method", self.method, SERVED)
        check_window(self.sink, self.recent)
        check_bits(self.bits)
        at_least("piece", self.piece, 2)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InputError(f"seed={self.seed!r} must be an int")
        folder = self.documents
        if folder is not None and not (isinstance(folder, str) and os.path.isdir(folder)):
            raise InputError(f"documents={self.documents!r} must be a folder")
        if self.squeeze not in (0, 1):
            raise InputError(f"squeeze={self.squeeze!r} must be 0 or 1")
        if self.tolerance is not None:
            number = self.tolerance
            if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
                raise InputError(f"tolerance={number!r} must be a number > 0")
        if self.method == EXACT:
            for name in ("budget", "bits", "allocation", "tolerance"):
                if getattr(self, name) != getattr(PageSettings, name):
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

    def shown(self) -> dict[str, Any]:
        """The settings that make a page and differ from the defaults."""
        given = {field.name: getattr(self, field.name) for field in fields(PageSettings)}
        if self.allocation is not None:
            given["allocation"] = os.path.abspath(self.allocation)
        defaults = {field.name: field.default for field in fields(PageSettings)}
        others = ("documents", "squeeze")
        return {k: v for k, v in given.items() if v != defaults[k] and k not in others}

    @property
    def split(self) -> bool:
        """Whether a page has two parts: a window in the model's dtype, and a middle."""
        return self.bits != 16 or self.allocation is not None

    def _curves(self) -> Curves:
        if not isinstance(self.allocation, str):
            raise InputError(f"allocation={self.allocation!r} must be the path of a file of curves")
        return Curves.load(self.allocation)

    @property
    def _schedule(self) -> Schedule:
        return Schedule(self.sink, self.recent, self.buffer, self.bits != 16)

    @property
    def least(self) -> int:
        """The smallest budget that leaves the method a slot when a page is compressed."""
        window = self.sink + self.recent
        return next(n for n in itertools.count(1) if self._schedule.rhythm(n).kept > window)

    def rhythm(self, context: int) -> Rhythm:
        """When pages are compressed, and to what, for requests of at most ``context`` tokens.

        Raises:
            InputError: a budget too small for the sinks and the recent window.
        """
        if self.method == EXACT:
            return Rhythm(context + 1, 1)
        assert self.budget is not None
        budget, window = Budget(self.budget).slots(context), self.sink + self.recent
        if budget < self.least:
            raise InputError(
                f"budget={self.budget!r} is {budget} slots per KV head; sink={self.sink} and "
                f"recent={self.recent} leave none to the method when a page is compressed: at "
                f"least {self.least} are needed"
            )
        found = self._schedule.rhythm(budget)
        if self.split and not found.middle:  # in two parts, because heads differ in size
            return Rhythm(window + found.every, found.every, found.kept - window)
        return found

    def sizes(self, context: int, layers: int, heads: int, model: str) -> list[list[int]]:
        """Slots of every KV head between sinks and recent window, ``[layers][heads]``, from the
        curves at this fraction of the longest context, or at the smallest fraction for which they
        distinguish heads if that is larger.

        Args:
            model: as ``curves.model_shape`` names it.

        Raises:
            InputError: the curves are of another model.
        """
        curves, fixed = self._curves(), self.sink + self.recent
        curves.check_model(layers, heads, model)
        kept = self.rhythm(context).kept
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
    ) -> Layout:
        """The layout of a request's page in one layer.

        Args:
            context: the longest context, in tokens.
            group: query heads per KV head.
            sizes: slots of each KV head between sinks and recent window; None: the same for all.
        """
        rhythm, method = self.rhythm(context), self.windowed()
        scored = method is not None and method.requires.queries
        if self.split and sizes is None:
            sizes = [rhythm.middle] * kv_heads
        queries = self.queries(context)
        shape = (kv_heads, group, rhythm.slots, head_dim, head_dim, queries, scored, dtype)
        return Layout(*shape, tuple(sizes or ()), Bits(self.bits, self.bits))

    def queries(self, context: int) -> int:
        """How many of the last queries before a compression a page keeps, per query head."""
        method = self.windowed()
        if method is None:
            return 0
        return self.rhythm(context).queries(method.window) if method.requires.queries else 1

    def whole(self, context: int) -> int:
        """Tokens of the longest document whose slots are all put into the window: it leaves room
        for the queries before the first compression."""
        return self.rhythm(context).slots - self.queries(context)

    def pages(self, layout: Layout, context: int, layer: int, *args: Any) -> Pages:
        """The pages of one layer. The arguments after ``layer`` are those of ``Pages`` from
        ``scaling`` on."""
        return Pages(layout, self.windowed(layer), self.rhythm(context), *args)

    def windowed(self, layer: int = 0) -> Compressor | None:
        """A new method with its window for a layer; None: nothing is compressed."""
        if self.method == EXACT:
            return None
        made = windowed(self.method, self.sink, self.recent, self.seed + layer)
        assert isinstance(made, Compressor)
        return made


def read(
    config: Mapping[str, Any] | None = None, environment: Mapping[str, str] = os.environ
) -> PageSettings | None:
    """The settings, or None if nothing is set.

    Args:
        config: the engine's additional configuration under "kvsketch".
        environment: variables; those that start with ``KVSKETCH_`` must name a setting.

    Raises:
        InputError: an unknown setting, or a value that is not allowed.
    """
    names = [field.name for field in fields(PageSettings)]
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
    return PageSettings(**given) if given else None


def settings_of(config: Any) -> PageSettings | None:
    """The settings of an engine, as ``read``.

    Args:
        config: ``VllmConfig``.
    """
    extra = config.additional_config
    return read(extra.get("kvsketch") if isinstance(extra, dict) else None)


def _number(name: str, text: str) -> str | int | float:
    """The value of a variable."""
    if name in ("method", "allocation", "documents"):
        return text
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{_PREFIX}{name.upper()}={text!r} is not a number") from None
