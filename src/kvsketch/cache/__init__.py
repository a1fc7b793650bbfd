"""What a cache holds of a stream: pages, budgets, measured errors."""

from .curves import Curves
from .head_groups import HeadGroups
from .page import Page
from .periodic import Periodic, joined
from .planned import Goal, Planner, Waiting
from .recipe import Recipe, windowed
from .row_groups import RowGroups
from .windowed_sketch import WindowedSketch

__all__ = [
    "Curves",
    "Goal",
    "HeadGroups",
    "Page",
    "Periodic",
    "Planner",
    "Recipe",
    "RowGroups",
    "Waiting",
    "WindowedSketch",
    "joined",
    "windowed",
]
