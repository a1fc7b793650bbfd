"""Detects a prompt that is read in chunks by a cache that took the first chunk for the whole
prompt."""

from __future__ import annotations

import warnings


class Chunks:
    """A cache cannot see how many chunks a prompt will have. Unless ``prefill`` is its length, an
    exact prefill is compressed after the first chunk, and the others attend to slots: a warning is
    given, once.

    Successive forwards of equal size from the start are taken for chunks, and a shorter one after
    two or more of them for the last chunk. A prompt of two chunks, the second of which is shorter,
    looks like a context and a question, and is not detected.

    Args:
        watched: whether the prefill is exact and the length of the prompt was not given.
    """

    def __init__(self, watched: bool) -> None:
        self._watched = watched
        self._size = 0  # of all forwards so far; 0: they differ
        self._told = False

    def note(self, tokens: int, before: int, compressed: bool) -> None:
        """A forward of several tokens begins.

        Args:
            tokens: how many, > 1.
            before: tokens that the cache has seen.
            compressed: whether it holds slots already.
        """
        if not self._watched:
            return
        size = self._size
        if before == 0:
            self._size = tokens
        elif not size or before % size or tokens > size or (tokens < size and before < 2 * size):
            self._size = 0
        elif compressed:
            self._watched = False
            warnings.warn(
                f"SketchCache(prefill='exact') gets a prompt in chunks of {size} tokens and was "
                "compressed before the last of them, so that later chunks attend to slots. Give "
                "prefill= the number of tokens of the whole prompt to wait for all of it, or "
                "prefill='streaming' if this is intended",
                UserWarning,
                stacklevel=3,
            )

    def wait(self, tokens: int, length: int) -> None:
        """A forward of one token begins, after which there are ``tokens``; a prompt of ``length``
        was announced."""
        if self._told or tokens >= length:
            return
        self._told = True
        warnings.warn(
            f"SketchCache(prefill={length}) waits for a prompt of {length} tokens, and tokens come "
            f"one by one when there are {tokens}: nothing is compressed until there are {length}. "
            "Give prefill= the number of tokens that the prompt has",
            UserWarning,
            stacklevel=4,
        )
