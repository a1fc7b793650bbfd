"""Streaming: drivers that turn a compressor into a stream, and sketches that are one by nature."""

from .base import Sketch
from .page import Page
from .periodic import Periodic
from .subgen import SubGen, SubGenCoupled

__all__ = ["Page", "Periodic", "Sketch", "SubGen", "SubGenCoupled"]
