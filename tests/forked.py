"""Processes that have imported torch and transformers when they start, but did nothing else.

To import them takes a new process several seconds. Tests that are about what a process does from
its first import on start one with ``subprocess``.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

#: The context of such processes; None where there is no fork.
FORKED: Any = multiprocessing.get_context("forkserver") if hasattr(os, "fork") else None
if FORKED is not None:
    FORKED.set_forkserver_preload(["kvsketch.documents.document"])


def result_of(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns in a process of its own."""
    with FORKED.Pool(1) as pool:
        return pool.apply(function, arguments)
