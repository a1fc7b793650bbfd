"""Drivers that turn a compressor into a streaming sketch."""

from .page import Page
from .periodic import Periodic

__all__ = ["Page", "Periodic"]
