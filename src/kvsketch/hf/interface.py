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


_Shared = list[tuple[weakref.ref[Updated], weakref.ref[Owner]]]

# By thread; empty whenever no SketchCache is in the middle of a forward: the layer that was updated
# last, until its kernel is requested, with its owner; and layers whose keys further layers of the
# model will read (Gemma 3n, Gemma 4).
_UPDATED: dict[int, tuple[Updated, Owner]] = {}
_SHARED: dict[int, _Shared] = {}
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
            if not (_UPDATED or _SHARED or _WATCHING) and graphed is not None:
                return graphed(kernel, attn_implementation)
            if _UPDATED or _SHARED:
                kernel = _ours_outside(kernel, attn_implementation)
        elif _UPDATED or _SHARED:
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
    thread = threading.get_ident()
    _UPDATED[thread] = layer, owner
    if shared:
        _set_shared(thread, [*_without(layer, thread), (weakref.ref(layer), weakref.ref(owner))])


def close(layer: Updated | None = None) -> None:
    """Remove ``layer``, or all open layers of this thread."""
    thread = threading.get_ident()
    if layer is None or _UPDATED.get(thread, (None,))[0] is layer:
        _UPDATED.pop(thread, None)
    if thread in _SHARED:
        _set_shared(thread, [] if layer is None else _without(layer, thread))


def _without(layer: Updated, thread: int) -> _Shared:
    """The shared layers without this one, and without those that are gone."""
    return [pair for pair in _SHARED.get(thread, ()) if pair[0]() not in (None, layer)]


def _set_shared(thread: int, shared: _Shared) -> None:
    if shared:
        _SHARED[thread] = shared
    else:
        _SHARED.pop(thread, None)


def _ours(kernel: Kernel, name: str) -> Kernel:
    """The attention of the layer that was updated last, or of a layer that shares its keys."""
    thread = threading.get_ident()
    last = _UPDATED.pop(thread, None)
    if last is not None:
        layer, owner = last
        return functools.partial(owner.attend, layer, kernel, name)
    pairs = [(layer(), owner()) for layer, owner in _SHARED.get(thread, ())]
    shared = [(layer, owner) for layer, owner in pairs if layer is not None and owner is not None]
    if not shared:
        _SHARED.pop(thread, None)
        return kernel

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
