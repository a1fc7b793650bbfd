"""Streaming: drivers that turn a compressor into a stream, and sketches that are one by nature."""

from .balancekv import BalanceKVStreaming
from .base import Sketch
from .curves import Curves
from .head_groups import HeadGroups
from .merge_reduce import MergeReduce
from .methods import ALL_METHODS, SKETCHES, default_allocation, default_schedule, windowed
from .one_dimensional import OneDimensional
from .page import Page
from .periodic import Periodic
from .planned import Goal, Planner, Waiting
from .sliding_window import SlidingWindow, SlidingWindowSampled
from .subgen import SubGen, SubGenCoupled
from .windowed_sketch import WindowedSketch

__all__ = [
    "ALL_METHODS",
    "SKETCHES",
    "BalanceKVStreaming",
    "Curves",
    "Goal",
    "HeadGroups",
    "MergeReduce",
    "OneDimensional",
    "Page",
    "Periodic",
    "Planner",
    "Sketch",
    "SlidingWindow",
    "SlidingWindowSampled",
    "SubGen",
    "SubGenCoupled",
    "Waiting",
    "WindowedSketch",
    "default_allocation",
    "default_schedule",
    "windowed",
]
