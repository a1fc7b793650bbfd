"""Options that the error benchmarks share, and their error messages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import typer

from kvsketch import ALL_METHODS, InputError
from kvsketch.arguments import QUERY_SOURCES
from kvsketch.errors import unknown_name
from kvsketch.evaluation.runner.setups import BITS
from kvsketch.methods.registry import PROJECTING, REREADING, default_allocation, default_bits

#: how a budget is spent over heads and layers, in the words of ``kvsketch eval --methods``: the
#: same for every head; by errors measured on this very prompt; by the method's scores, over a layer
#: or the model; by errors measured beforehand on other prompts (there ``@FILE``, written by
#: ``kvsketch calibrate``)
SPENT = ("even", "measured", "layer", "global", "calibrated")
METHODS_HELP = (
    "comma-separated names, each with any of these behind it, in this order: @even, @measured, "
    "@layer, @global or @calibrated (the same budget for every head, or spent by errors measured "
    "on this prompt, by scores over a layer or the model, or by errors measured beforehand on "
    "others); +16bit, +int8, +int4 or +measured (slots in this many bits, or in those that "
    "measured errors choose); /reread, /local or /sample (by the queries of a second reading). A "
    "bare name: the method's own ways. int8, int4: all tokens."
)
#: the ways to read a context a second time
SECOND = QUERY_SOURCES[1:]
#: all tokens in this many bits
ALONE = {"int8": 8, "int4": 4}
#: one_dimensional needs head_dim 1; the others a model, where errors are measured on activations
LEFT_OUT = ("one_dimensional", *PROJECTING)
#: beside the bare name: what else we compare of our default
OURS = tuple(
    f"heavy_merge{ending}"
    for ending in ("@even+16bit", "+16bit", "@calibrated+16bit", "@calibrated+int4")
)
USUAL = tuple(name for name in ALL_METHODS if name not in (*LEFT_OUT, *REREADING))


@dataclass(frozen=True)
class Method:
    """``name[@even|@measured|@layer|@global|@calibrated][+16bit|+int8|+int4|+measured]`` and
    ``[/reread|/local|/sample]``, or ``int8``, ``int4``: all tokens, in this many bits. A bare name
    is the method as ``SketchCache(model.config, name, budget=...)`` runs it.

    Attributes:
        label: as it was written.
        name: the method; None where all tokens are kept.
        spent: one of ``SPENT``; where the label has none, the method's own.
        bits: of its slots, 16 where they are stored as they come, or "measured".
        queries: what it goes by: "prompt", or the second reading that its label names.
    """

    label: str
    name: str | None
    spent: str = "even"
    bits: int | str = 16
    queries: str = "prompt"


def parse(label: str) -> Method:
    """
    Raises:
        InputError: no such method, or no such ending.
    """
    if label in ALONE:
        return Method(label, None, bits=ALONE[label])
    whole, slash, source = label.partition("/")
    if slash and source not in SECOND:
        raise unknown_name("where queries come from", source, SECOND)
    rest, plus, ending = whole.partition("+")
    if plus and ending not in BITS:
        raise unknown_name("the ending of a method", ending, BITS)
    name, at, way = rest.partition("@")
    if at and way not in SPENT:
        raise unknown_name("the way a budget is spent", at + way, [f"@{known}" for known in SPENT])
    if name not in USUAL and not (slash and name in REREADING):
        raise unknown_name("method", name, (*USUAL, *ALONE))
    spent = way if at else default_allocation(name)
    bits = BITS[ending] if plus else default_bits(name)
    return Method(label, name, spent, bits, source or "prompt")


def methods(text: str, others: Collection[str] = ()) -> list[Method]:
    """``--methods``: comma-separated; ``others`` are names that need no explanation."""
    chosen = []
    for label in dict.fromkeys(text.split(",")):
        try:
            chosen.append(Method(label, label) if label in others else parse(label))
        except InputError as error:
            raise typer.BadParameter(f"--methods: {error}") from None
    return chosen


def paths(text: str) -> list[Path]:
    """``--files``: comma-separated, all of them there."""
    found = [Path(file) for file in text.split(",") if file]
    missing = [str(path) for path in found if not path.is_file()]
    if missing:
        raise typer.BadParameter(f"--files: {', '.join(missing)} not there")
    return found


def positive(**values: int) -> None:
    """Refuse what is below 1."""
    for name, value in values.items():
        if value < 1:
            raise typer.BadParameter(f"--{name} {value} must be at least 1")


def among(option: str, text: str, allowed: Collection[str]) -> list[str]:
    """Comma-separated names out of ``allowed``."""
    chosen = text.split(",")
    for name in chosen:
        if name not in allowed:
            raise typer.BadParameter(f"--{option} {name!r} must be one of {', '.join(allowed)}")
    return chosen


def fractions(option: str, text: str) -> list[float]:
    """Comma-separated numbers in (0, 1]."""
    try:
        found = [float(x) for x in text.split(",")]
    except ValueError:
        found = [0.0]
    if not all(0 < x <= 1 for x in found):
        raise typer.BadParameter(f"--{option} {text!r} must be numbers in (0, 1]")
    return found


def integers(option: str, text: str) -> list[int] | None:
    """Comma-separated ints; None where nothing was given."""
    try:
        return [int(x) for x in text.split(",")] if text else None
    except ValueError:
        raise typer.BadParameter(f"--{option} {text!r} must be whole numbers") from None
