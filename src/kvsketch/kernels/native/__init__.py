"""The compiled kernels for CPUs, ``attention.cpp``, as a library without torch, and its threads.

``KVSKETCH_NATIVE`` chooses: ``off`` (torch's kernels), or the most that is used of ``amx`` (AVX-512
and a matrix unit), ``avx512``, ``avx2`` and ``plain`` (what every processor of the platform has).
Default: what the processor has.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvsketch.errors import InputError
from kvsketch.kernels.native import build

_enabled = True
# Operations on so many numbers take well below a millisecond on one thread.
_FEW = 1 << 20
_outside = threading.local()

LEVELS = tuple(build.X86)
# Numbers of ``Part`` and ``Call`` in attention.cpp.
PART, CALL = 44, 14


@functools.cache
def loaded() -> tuple[ctypes.CDLL | None, str]:
    """The library, and which instructions it uses; or None, and why.

    Raises:
        InputError: ``KVSKETCH_NATIVE`` is none of the above.
    """
    wanted = os.environ.get("KVSKETCH_NATIVE", "")
    if wanted not in ("", "off", *LEVELS):
        raise InputError(
            f"KVSKETCH_NATIVE={wanted!r} must be off, {', '.join(LEVELS)}, or not be set"
        )
    if wanted == "off":
        return None, "KVSKETCH_NATIVE=off"
    if not build.LIBRARY.exists():
        return None, (
            "the kernel was not compiled when kvsketch was built: it needs a C++ compiler, such as "
            "GCC 12 or newer"
        )
    try:
        library = ctypes.CDLL(str(build.LIBRARY))
        library.kvsketch_mark.restype = ctypes.c_char_p
        library.kvsketch_layout.restype = ctypes.c_int64
        if library.kvsketch_mark().decode() != build.mark():
            return None, f"the kernel is older than its source; run python {build.__file__}"
        same = library.kvsketch_layout() == (8 * PART) << 32 | (8 * CALL)
    except (OSError, AttributeError) as error:
        return None, f"{build.LIBRARY} cannot be loaded: {error}"
    assert same
    pointer, real = ctypes.c_void_p, ctypes.c_double
    library.kvsketch_attend.argtypes = [pointer, pointer, pointer, real, real]
    library.kvsketch_receive.argtypes = [pointer, pointer, pointer, real, real]
    library.kvsketch_group.argtypes = [pointer, ctypes.c_int64]
    library.kvsketch_share.argtypes = [pointer, ctypes.c_int64]
    library.kvsketch_exchange.argtypes = [pointer, ctypes.c_int64]
    level = library.kvsketch_limit(LEVELS.index(wanted) if wanted else len(LEVELS))
    if build.ON_X86 and level == 0 and wanted != "plain":
        return None, "this processor has no AVX2, without which torch's kernels are faster"
    _share_threads(library)
    return library, LEVELS[level] if build.ON_X86 else platform.machine()


def _share_threads(library: ctypes.CDLL) -> None:
    """Let the library run on the threads of torch's OpenMP, which torch has loaded for all. A
    forked process stays on one thread: those of its parent are gone."""
    parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None) if os.name == "posix" else None
    if parallel is None:
        return
    library.kvsketch_threads.argtypes = [ctypes.c_void_p]
    library.kvsketch_threads(ctypes.cast(parallel, ctypes.c_void_p))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: library.kvsketch_threads(None))


def library() -> ctypes.CDLL | None:
    """The library, if it is used."""
    return loaded()[0] if _enabled else None


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Use the library, or torch's kernels, to compare them; for the whole process."""
    global _enabled
    before, _enabled = _enabled, on
    try:
        yield
    finally:
        _enabled = before


def kernel() -> str:
    """Which kernel decodes on CPUs, in a few words."""
    library, what = loaded()
    return f"torch ({what})" if library is None else f"compiled for {what}"


def threads() -> int:
    """How many threads the library takes: torch's number, also within ``one_thread``."""
    return getattr(_outside, "count", 0) or torch.get_num_threads()


@contextmanager
def one_thread(numbers: int, device: torch.device) -> Iterator[None]:
    """Torch's operations of this thread run on it alone, if they have few ``numbers``, on a CPU. A
    compression of an engine's page has hundreds of them: each would gain some microseconds from
    further threads, and where other processes have all cores, each would wait for milliseconds."""
    count = torch.get_num_threads()
    few = numbers <= _FEW and device.type == "cpu"
    set_threads = _openmp() if few and count > 1 else None
    if set_threads is None:
        yield
        return
    set_threads(1)
    _outside.count = count
    try:
        yield
    finally:
        _outside.count = 0
        set_threads(count)


@functools.cache
def _openmp() -> Callable[[int], object] | None:
    """What sets the threads of the calling thread alone, unlike ``torch.set_num_threads``, if torch
    uses an OpenMP library that all can find."""
    found = getattr(ctypes.CDLL(None), "omp_set_num_threads", None) if os.name == "posix" else None
    if found is None:
        return None
    count = torch.get_num_threads()
    found(1)
    theirs = torch.get_num_threads() == 1
    found(count)
    return found if theirs else None
