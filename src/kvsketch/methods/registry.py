"""All methods by name: compressors and streaming sketches."""

from __future__ import annotations

from kvsketch.budget import Budget
from kvsketch.errors import InputError
from kvsketch.method_names import unknown_method
from kvsketch.methods import METHODS, Compressor
from kvsketch.methods.criticalkv import CriticalKV
from kvsketch.methods.kvgrad import KVgrad
from kvsketch.methods.kvzip import KVzip
from kvsketch.methods.kvzip_plus import KVzipPlus
from kvsketch.methods.sketches import (
    BalanceKVStreaming,
    MergeReduce,
    OneDimensional,
    Sketch,
    SlidingWindow,
    SlidingWindowSampled,
    SubGen,
    SubGenCoupled,
)
from kvsketch.methods.triattention import TriAttention

#: The streaming sketches, by name. To add one: write its file, add its class here.
SKETCHES: dict[str, type[Sketch]] = {
    cls.name: cls
    for cls in (
        SubGen,
        SubGenCoupled,
        MergeReduce,
        BalanceKVStreaming,
        SlidingWindow,
        SlidingWindowSampled,
        OneDimensional,
    )
}

#: The methods that need the weight of every layer's output projection, so a model.
PROJECTING: dict[str, type[Compressor]] = {CriticalKV.name: CriticalKV}

#: The methods that need the frequencies of the model's rotary embedding, so a model.
ROTATING: dict[str, type[Compressor]] = {TriAttention.name: TriAttention}

#: The methods that need a second reading of the context (``kvsketch.prefill``).
REREADING: dict[str, type[Compressor]] = {cls.name: cls for cls in (KVzip, KVzipPlus, KVgrad)}

#: All names that ``SketchCache`` accepts as a method.
ALL_METHODS: dict[str, type[Compressor] | type[Sketch]] = {
    **METHODS,
    **PROJECTING,
    **ROTATING,
    **SKETCHES,
    **REREADING,
}


#: A method of a cache: a name in ``ALL_METHODS``, a user-defined class, or a compressor
Method = str | Compressor | type[Compressor] | type[Sketch]


def class_of(method: Method) -> type[Compressor] | type[Sketch]:
    """The class of a method.

    Raises:
        InputError: an unknown name, or not a method.
    """
    if isinstance(method, str):
        if method not in ALL_METHODS:
            raise unknown_method(method)
        return ALL_METHODS[method]
    cls = method if isinstance(method, type) else type(method)
    if not issubclass(cls, (Compressor, Sketch)) or (cls is not method and not cls.recompresses):
        raise InputError(
            f"method={method!r} must be a name (see `kvsketch methods`), a Compressor or its "
            "class, or the class of a Sketch, which is made when its size is known"
        )
    if not isinstance(getattr(cls, "name", None), str):
        raise InputError(f"method={method!r} has no name: give its class a `name`")
    return cls


def default_schedule(
    method: Method, layers: int, budget: Budget, recent: int
) -> list[float] | None:
    """A method's own shares of the budget per layer, or None: the same everywhere."""
    shares = getattr(class_of(method), "shares", None)
    return None if shares is None else shares(layers, budget, recent)


def default_allocation(method: Method) -> str:
    """A method's default allocation: "measured" or "even"."""
    found: str = getattr(class_of(method), "allocation", "even")
    return found


def default_bits(method: Method) -> int | str:
    """A method's default bits: 16 or "measured"."""
    found: int | str = getattr(class_of(method), "bits", 16)
    return found
