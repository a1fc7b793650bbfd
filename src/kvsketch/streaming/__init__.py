"""Streaming: drivers that turn a compressor into a stream, and sketches that are one by nature."""

from .balancekv import BalanceKVStreaming
from .base import Sketch
from .merge_reduce import MergeReduce
from .page import Page
from .periodic import Periodic
from .subgen import SubGen, SubGenCoupled

#: The natively streaming sketches, by name. To add one: write its file, add its class here.
SKETCHES: dict[str, type[Sketch]] = {
    cls.name: cls for cls in (SubGen, SubGenCoupled, MergeReduce, BalanceKVStreaming)
}

__all__ = [
    "SKETCHES",
    "BalanceKVStreaming",
    "MergeReduce",
    "Page",
    "Periodic",
    "Sketch",
    "SubGen",
    "SubGenCoupled",
]
