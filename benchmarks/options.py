"""Options that several benchmarks share, how they are parsed, and their error messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from benchmarks.peers.attention_matching import METHODS as PEERS
from benchmarks.peers.attention_matching import available as peer_missing
from kvsketch import ALL_METHODS, InputError
from kvsketch.arguments import QUERY_SOURCES
from kvsketch.errors import unknown_name
from kvsketch.evaluation.runner.setups import BITS
from kvsketch.methods.registry import (
    PROJECTING,
    REREADING,
    ROTATING,
    default_allocation,
    default_bits,
)

#: How a budget is allocated to heads and layers, named as in ``kvsketch eval --methods``: the same
#: for every head; by errors measured on this prompt; by the method's scores, over a layer or the
#: model; by errors measured beforehand on other prompts. For the last, ``kvsketch eval`` takes
#: ``@FILE``, a file that ``kvsketch calibrate`` writes.
SPENT = ("even", "measured", "layer", "global", "calibrated")
METHODS_HELP = (
    "comma-separated names, each followed by any of these, in this order: @even, @measured, "
    "@layer, @global or @calibrated (the same budget for every head, or allocated by errors "
    "measured on this prompt, by scores over a layer or the model, or by errors measured "
    "beforehand on other prompts); +16bit, +int8, +int4 or +measured (slots in this many bits, or "
    "in bits chosen by measured errors); /reread, /local or /sample (by the queries of a second "
    "reading). A bare name is the method with its defaults. int8, int4: all tokens. "
    "peer:attention_matching/reread: its authors' own code (benchmarks/peers)."
)
#: The ways to read a context a second time.
SECOND = QUERY_SOURCES[1:]
#: The names for a cache that keeps all tokens, in this many bits.
ALONE = {"int8": 8, "int4": 4}
#: one_dimensional needs head_dim 1. The others need a model, not only its activations.
LEFT_OUT = ("one_dimensional", *PROJECTING, *ROTATING)
#: The variants of our default method that are compared, besides the bare name.
OURS = tuple(
    f"heavy_merge{ending}"
    for ending in ("@even+16bit", "+16bit", "@calibrated+16bit", "@calibrated+int4")
)
USUAL = tuple(name for name in ALL_METHODS if name not in (*LEFT_OUT, *REREADING))


@dataclass(frozen=True)
class Method:
    """A method with its options, written as
    ``name[@even|@measured|@layer|@global|@calibrated][+16bit|+int8|+int4|+measured]`` and
    ``[/reread|/local|/sample]``, or a cache of all tokens, ``int8`` or ``int4``. A bare name is the
    method as ``SketchCache(model.config, name, budget=...)`` runs it.

    Attributes:
        label: the method as it was written.
        name: the name of the method, None if all tokens are kept.
        spent: one of ``SPENT``, by default the method's own.
        bits: the bits of its slots, 16 if they are stored unchanged, or "measured".
        queries: the source of the queries that it uses: "prompt", or a second reading.
    """

    label: str
    name: str | None
    spent: str = "even"
    bits: int | str = 16
    queries: str = "prompt"

    @property
    def made(self) -> Any:
        """What ``SketchCache`` takes: the name, or the class of a peer's own code."""
        return PEERS.get(self.name or "", self.name)

    @property
    def allocation(self) -> str | None:
        """The argument of ``SketchCache``; None: not given."""
        return self.spent if "@" in self.label else None


def parse(label: str) -> Method:
    """Parse the label of a method.

    Raises:
        InputError: there is no such method, or no such ending.
    """
    if label in ALONE:
        return Method(label, None, bits=ALONE[label])
    whole, slash, source = label.partition("/")
    if slash and source not in SECOND:
        raise unknown_name("source of queries", source, SECOND)
    rest, plus, ending = whole.partition("+")
    if plus and ending not in BITS:
        raise unknown_name("ending of a method", ending, BITS)
    name, at, way = rest.partition("@")
    if at and way not in SPENT:
        raise unknown_name("allocation", at + way, [f"@{known}" for known in SPENT])
    if name not in USUAL and not (slash and name in (*REREADING, *PEERS)):
        raise unknown_name("method", name, (*USUAL, *ALONE))
    spent = way if at else default_allocation(PEERS.get(name, name))
    bits = BITS[ending] if plus else default_bits(PEERS.get(name, name))
    return Method(label, name, spent, bits, source or "prompt")


def methods(text: str, others: Collection[str] = ()) -> list[Method]:
    """Parse ``--methods``, which is comma-separated. ``others`` are names without any ending."""
    chosen = []
    for label in dict.fromkeys(text.split(",")):
        try:
            chosen.append(Method(label, label) if label in others else parse(label))
        except InputError as error:
            raise typer.BadParameter(f"--methods: {error}") from None
    return chosen


def at_hand(chosen: Iterable[Method], console: Console) -> list[Method]:
    """Those that can be run. Why a peer's own code cannot is printed."""
    found = []
    for method in chosen:
        reason = peer_missing() if method.name in PEERS else None
        if reason is None:
            found.append(method)
        else:
            console.print(f"left out: {method.label} ({reason})", markup=False)
    return found


def paths(text: str) -> list[Path]:
    """Parse ``--files``, which is comma-separated. Refuse files that do not exist."""
    found = [Path(file) for file in text.split(",") if file]
    missing = [str(path) for path in found if not path.is_file()]
    if missing:
        raise typer.BadParameter(f"--files {', '.join(missing)}: no such file")
    return found


def positive(**values: int) -> None:
    """Refuse values below 1."""
    for name, value in values.items():
        if value < 1:
            raise typer.BadParameter(f"--{name} {value} must be at least 1")


def among(option: str, text: str, allowed: Collection[str]) -> list[str]:
    """Parse comma-separated names, which must be in ``allowed``."""
    chosen = text.split(",")
    for name in chosen:
        if name not in allowed:
            raise typer.BadParameter(f"--{option} {name!r} must be one of {', '.join(allowed)}")
    return chosen


def fractions(option: str, text: str) -> list[float]:
    """Parse comma-separated numbers in (0, 1]."""
    try:
        found = [float(x) for x in text.split(",")]
    except ValueError:
        found = [0.0]
    if not all(0 < x <= 1 for x in found):
        raise typer.BadParameter(f"--{option} {text!r} must be comma-separated numbers in (0, 1]")
    return found


def integers(option: str, text: str) -> list[int] | None:
    """Parse comma-separated integers. None for an empty text."""
    try:
        return [int(x) for x in text.split(",")] if text else None
    except ValueError:
        raise typer.BadParameter(f"--{option} {text!r} must be comma-separated integers") from None
