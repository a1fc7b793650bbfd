"""The stream of a layer: its page, its budget, its measured errors."""

from .budgets import HeadBudgets
from .curves import Curves
from .make_plan import make_plan
from .page import Page
from .plan import Plan
from .retrieval_heads import RetrievalHeads
from .stream import Stream
from .window import Windowed, windowed
from .windowed_sketch import WindowedSketch

__all__ = [
    "Curves",
    "HeadBudgets",
    "Page",
    "Plan",
    "RetrievalHeads",
    "Stream",
    "Windowed",
    "WindowedSketch",
    "make_plan",
    "windowed",
]
