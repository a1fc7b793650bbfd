"""Streaming: drivers that turn a compressor into a stream, and sketches that are one by nature."""

from .balancekv import BalanceKVStreaming
from .base import Sketch
from .curves import Curves
from .head_groups import HeadGroups
from .merge_reduce import MergeReduce
from .methods import (
    ALL_METHODS,
    SKETCHES,
    Method,
    class_of,
    default_allocation,
    default_schedule,
    windowed,
)
from .one_dimensional import OneDimensional
from .page import Page
from .periodic import Periodic, joined
from .planned import Goal, Planner, Waiting
from .recipe import Recipe
from .row_groups import RowGroups
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
    "Method",
    "OneDimensional",
    "Page",
    "Periodic",
    "Planner",
    "Recipe",
    "RowGroups",
    "Sketch",
    "SlidingWindow",
    "SlidingWindowSampled",
    "SubGen",
    "SubGenCoupled",
    "Waiting",
    "WindowedSketch",
    "class_of",
    "default_allocation",
    "default_schedule",
    "joined",
    "windowed",
]
