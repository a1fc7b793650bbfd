"""The streaming sketches: one file each."""

from .balancekv import BalanceKVStreaming
from .base import Sketch
from .merge_reduce import MergeReduce
from .one_dimensional import OneDimensional
from .sliding_window import SlidingWindow, SlidingWindowSampled
from .subgen import SubGen, SubGenCoupled

__all__ = [
    "BalanceKVStreaming",
    "MergeReduce",
    "OneDimensional",
    "Sketch",
    "SlidingWindow",
    "SlidingWindowSampled",
    "SubGen",
    "SubGenCoupled",
]
