"""Takes over attention between a cache's update and the kernel that the model requests.

Every model that uses transformers' attention interface first passes its new keys and values to the
cache and then calls ``AttentionInterface.get_interface`` for the kernel that its configuration
names. ``install`` wraps this one method. Right after a layer of ours was updated it returns the
attention of its owner (``updated``), which wraps the requested kernel; at any other
time it returns the kernel itself. A model's configuration is therefore never changed, and other
caches are not affected.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

Kernel = Callable[..., tuple[Tensor, Tensor | None]]
_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """``function``, which ``torch.compile`` does not trace: the contents of a layer change from
    token to token and cannot be part of a graph."""
    outside: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return outside


class Updated(Protocol):
    """A layer whose attention is ours."""

    def returned(self, key: Tensor) -> bool:
        """Whether ``key`` is what its last update returned."""


class Owner(Protocol):
    """What gives the layers of a cache their attention."""

    def attend(
        self, layer: Any, kernel: Kernel, name: str, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """What the model gets instead of ``kernel``, with the kernel's own arguments."""


class _Open:
    """Layers of one thread's forward that were updated and not yet attended to.

    Attributes:
        updated: the layer that was updated last, until its kernel is requested, and its owner.
        shared: layers whose keys further layers of the model will read (Gemma 3n, Gemma 4).
    """

    def __init__(self) -> None:
        self.updated: tuple[Updated, Owner] | None = None
        self.shared: list[tuple[weakref.ref[Updated], weakref.ref[Owner]]] = []

    def forget(self, layer: Updated) -> None:
        """Remove a layer from those that are shared, and those that are gone."""
        self.shared = [pair for pair in self.shared if pair[0]() not in (None, layer)]


# By thread; empty whenever no SketchCache is in the middle of a forward.
_OPEN: dict[int, _Open] = {}
_WATCHING: list[Callable[..., Any]] = []
#: what a compiled graph gets for the kernel of a name; ``compiled`` sets it
graphed: Callable[[Kernel, str], Kernel] | None = None


def install() -> None:
    """Wrap ``AttentionInterface.get_interface``, once per process."""
    original = AttentionInterface.get_interface
    if getattr(original, "_kvsketch", False):
        return

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Kernel) -> Kernel:
        kernel: Kernel = original(self, attn_implementation, default)
        if torch.compiler.is_compiling():
            if not _OPEN and not _WATCHING and graphed is not None:
                return graphed(kernel, attn_implementation)
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


def updated(layer: Updated, owner: Owner, shared: bool) -> None:
    """Record that ``layer`` was updated: the next kernel requested in this thread is for it, and
    is replaced by ``owner.attend``. ``shared``: further layers will read the keys that it
    returned."""
    found = _OPEN.setdefault(threading.get_ident(), _Open())
    found.updated = layer, owner
    if shared:
        found.forget(layer)
        found.shared.append((weakref.ref(layer), weakref.ref(owner)))


def close(layer: Updated | None = None) -> None:
    """Remove ``layer``, or all open layers of this thread."""
    thread = threading.get_ident()
    found = _OPEN.get(thread)
    if found is None:
        return
    if layer is not None:
        found.forget(layer)
        if found.updated is not None and found.updated[0] is layer:
            found.updated = None
    if layer is None or (found.updated is None and not found.shared):
        del _OPEN[thread]


def _ours(kernel: Kernel, name: str) -> Kernel:
    """The attention of the layer that was updated last, or of a layer that shares its keys."""
    found = _OPEN.get(threading.get_ident())
    if found is None:
        return kernel
    last, found.updated = found.updated, None
    pairs = [(layer(), owner()) for layer, owner in found.shared]
    shared = [(layer, owner) for layer, owner in pairs if layer is not None and owner is not None]
    if not shared:
        del _OPEN[threading.get_ident()]
    if last is not None:
        layer, owner = last
        return functools.partial(owner.attend, layer, kernel, name)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        for layer, owner in shared:
            if layer.returned(key):
                return owner.attend(layer, kernel, name, module, query, key, *args, **kwargs)
        return kernel(module, query, key, *args, **kwargs)

    return attention


@uncompiled
def _ours_outside(kernel: Kernel, name: str) -> Kernel:
    return uncompiled(_ours(kernel, name))
