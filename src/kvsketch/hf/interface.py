"""Where attention becomes ours: between a cache's update and the kernel the model requests.

Every model that uses transformers' attention interface first hands its new keys and values to the
cache and then calls ``AttentionInterface.get_interface`` for the kernel its configuration names.
``install`` wraps that one method: right after a ``SketchLayer`` was updated it returns the layer's
own attention, around the very kernel that was asked for, and at any other time the kernel itself.
So a model's configuration is never changed, and other caches never meet our code.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from .compiled import graph_attention

if TYPE_CHECKING:
    from .layer import SketchLayer

Kernel = Callable[..., tuple[Tensor, Tensor | None]]
_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """``function``, which ``torch.compile`` leaves as it is: what a layer holds changes from token
    to token and is no part of a graph."""
    outside: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return outside


class _Open:
    """What one thread's forward has handed out and not yet attended to.

    Attributes:
        updated: the layer that was updated last, until its kernel is asked for.
        shared: layers whose keys further layers of the model will read (Gemma 3n, Gemma 4).
    """

    def __init__(self) -> None:
        self.updated: SketchLayer | None = None
        self.shared: list[weakref.ref[SketchLayer]] = []


# By thread; empty whenever no SketchCache is in the middle of a forward.
_OPEN: dict[int, _Open] = {}
_WATCHING: list[Callable[..., Any]] = []


def install() -> None:
    """Wrap ``AttentionInterface.get_interface``, once per process."""
    original = AttentionInterface.get_interface
    if getattr(original, "_kvsketch", False):
        return

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Kernel) -> Kernel:
        kernel: Kernel = original(self, attn_implementation, default)
        if torch.compiler.is_compiling():
            if not _OPEN and not _WATCHING:
                graphed: Kernel = graph_attention(kernel, attn_implementation)
                return graphed
            if _OPEN:
                kernel = _ours_outside(kernel, attn_implementation)
        elif _OPEN:
            kernel = _ours(kernel, attn_implementation)
        for around in _WATCHING:
            kernel = functools.partial(around, kernel)
        return kernel

    get_interface._kvsketch = True  # type: ignore[attr-defined]
    AttentionInterface.get_interface = get_interface


@contextmanager
def watched(model: nn.Module, around: Callable[..., Any]) -> Iterator[None]:
    """Every attention of ``model`` is ``around(kernel, module, query, key, value, ...)`` instead of
    ``kernel(module, query, key, value, ...)``, whatever its cache; the kernel may be ours."""
    install()
    mine = set(model.modules())

    def only_mine(kernel: Kernel, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module in mine:
            return around(kernel, module, *args, **kwargs)
        return kernel(module, *args, **kwargs)

    _WATCHING.append(only_mine)
    try:
        yield
    finally:
        _WATCHING.remove(only_mine)


def updated(layer: SketchLayer) -> None:
    """Say that ``layer`` was updated: the next kernel asked for in this thread is for it."""
    _OPEN.setdefault(threading.get_ident(), _Open()).updated = layer


def share(layer: SketchLayer) -> None:
    """Say that further layers will read the keys that ``layer`` returned."""
    shared = _OPEN.setdefault(threading.get_ident(), _Open()).shared
    shared[:] = [held for held in shared if held() not in (None, layer)]
    shared.append(weakref.ref(layer))


def close(layer: SketchLayer | None = None) -> None:
    """Forget ``layer``, or everything this thread has open."""
    thread = threading.get_ident()
    found = _OPEN.get(thread)
    if found is None:
        return
    if layer is not None:
        found.shared = [held for held in found.shared if held() not in (None, layer)]
        if found.updated is layer:
            found.updated = None
    if layer is None or (found.updated is None and not found.shared):
        del _OPEN[thread]


def _ours(kernel: Kernel, name: str) -> Kernel:
    """The attention of the layer that was updated last, or of whatever shares its keys."""
    found = _OPEN.get(threading.get_ident())
    if found is None:
        return kernel
    layer, found.updated = found.updated, None
    shared = [held for ref in found.shared if (held := ref()) is not None]
    if not shared:
        del _OPEN[threading.get_ident()]
    if layer is not None:
        return functools.partial(layer.attend, kernel, name)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        for owner in shared:
            if owner.returned(key):
                return owner.attend(kernel, name, module, query, key, *args, **kwargs)
        return kernel(module, query, key, *args, **kwargs)

    return attention


@uncompiled
def _ours_outside(kernel: Kernel, name: str) -> Kernel:
    return uncompiled(_ours(kernel, name))
