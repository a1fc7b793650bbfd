"""Takes over attention between a cache's update and the kernel that the model requests.

Every model that uses transformers' attention interface first passes its new keys and values to the
cache and then calls ``AttentionInterface.get_interface`` for the kernel that its configuration
names. ``install`` wraps this one method. Right after a ``SketchLayer`` was updated it returns the
layer's own attention, which wraps the requested kernel; at any other time it returns the kernel
itself. A model's configuration is therefore never changed, and other caches are not affected.
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

from kvsketch.hf.compiled import graph_attention

if TYPE_CHECKING:
    from kvsketch.hf.layer import SketchLayer

Kernel = Callable[..., tuple[Tensor, Tensor | None]]
_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """``function``, which ``torch.compile`` does not trace: the contents of a layer change from
    token to token and cannot be part of a graph."""
    outside: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return outside


class _Open:
    """Layers of one thread's forward that were updated and not yet attended to.

    Attributes:
        updated: the layer that was updated last, until its kernel is requested.
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
    """Every attention of ``model`` calls ``around(kernel, module, query, key, value, ...)`` instead
    of ``kernel(module, query, key, value, ...)``, with any cache; the kernel may be ours."""
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
    """Record that ``layer`` was updated: the next kernel requested in this thread is for it."""
    _OPEN.setdefault(threading.get_ident(), _Open()).updated = layer


def share(layer: SketchLayer) -> None:
    """Record that further layers will read the keys that ``layer`` returned."""
    shared = _OPEN.setdefault(threading.get_ident(), _Open()).shared
    shared[:] = [held for held in shared if held() not in (None, layer)]
    shared.append(weakref.ref(layer))


def close(layer: SketchLayer | None = None) -> None:
    """Remove ``layer``, or all open layers of this thread."""
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
    """The attention of the layer that was updated last, or of a layer that shares its keys."""
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
