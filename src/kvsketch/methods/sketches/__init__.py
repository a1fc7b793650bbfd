"""The streaming sketches: one file each."""

from kvsketch.methods.sketches.balancekv import BalanceKVStreaming
from kvsketch.methods.sketches.base import Sketch
from kvsketch.methods.sketches.merge_reduce import MergeReduce
from kvsketch.methods.sketches.one_dimensional import OneDimensional
from kvsketch.methods.sketches.sliding_window import SlidingWindow, SlidingWindowSampled
from kvsketch.methods.sketches.subgen import SubGen, SubGenCoupled

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
