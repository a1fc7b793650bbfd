"""The stream of a layer: its page, its budget, its measured errors."""

from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.curves import Curves
from kvsketch.cache.make_plan import make_plan
from kvsketch.cache.plan import Plan
from kvsketch.cache.retrieval_heads import RetrievalHeads
from kvsketch.cache.stream import Stream
from kvsketch.cache.window import windowed
from kvsketch.cache.windowed_sketch import WindowedSketch
from kvsketch.page.page import Page

__all__ = [
    "Curves",
    "HeadBudgets",
    "Page",
    "Plan",
    "RetrievalHeads",
    "Stream",
    "WindowedSketch",
    "make_plan",
    "windowed",
]
