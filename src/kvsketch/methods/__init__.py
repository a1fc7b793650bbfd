"""The methods, by name. To add one: write its file, add its class to ``_CLASSES``."""

from __future__ import annotations

from ..errors import unknown_name
from .balancekv import BalanceKV, SoftmaxBalance
from .base import Compressor, keep_top
from .cam import CaM
from .chunkkv import ChunkKV
from .cluster_merge import ClusterMerge
from .compactor import Compactor
from .d2o import D2O
from .expected_attention import ExpectedAttention
from .h2o import H2O
from .halving import Halving
from .heavy_merge import HeavyMerge
from .kcenter import KCenter
from .kernel_halving import GreedyHalving, KernelHalving
from .keydiff import KeyDiff
from .knorm import KNorm
from .lagkv import LagKV
from .observed_attention import ObservedAttention
from .pyramidkv import PyramidKV, pyramid_shares
from .snapkv import SnapKV
from .streaming_llm import StreamingLLM
from .tova import TOVA
from .uniform import Uniform

_CLASSES: tuple[type[Compressor], ...] = (
    Uniform,
    StreamingLLM,
    H2O,
    D2O,
    CaM,
    ObservedAttention,
    SnapKV,
    PyramidKV,
    ChunkKV,
    TOVA,
    ExpectedAttention,
    Compactor,
    KNorm,
    KeyDiff,
    LagKV,
    KCenter,
    BalanceKV,
    KernelHalving,
    GreedyHalving,
    ClusterMerge,
    HeavyMerge,
)

METHODS: dict[str, type[Compressor]] = {cls.name: cls for cls in _CLASSES}

#: The halvings that ``MergeReduce`` accepts. SoftmaxBalance keeps half or fewer, so it is not a
#: compressor with an exact budget.
HALVINGS: dict[str, type[Halving]] = {
    cls.name: cls for cls in (SoftmaxBalance, BalanceKV, KernelHalving, GreedyHalving)
}


def make(method: str, seed: int = 0) -> Compressor:
    """A new compressor by name.

    Raises:
        InputError: the name is unknown; the message suggests the nearest one.
    """
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    return METHODS[method](seed=seed)


__all__ = [
    "D2O",
    "H2O",
    "HALVINGS",
    "METHODS",
    "TOVA",
    "BalanceKV",
    "CaM",
    "ChunkKV",
    "Compactor",
    "Compressor",
    "ExpectedAttention",
    "GreedyHalving",
    "Halving",
    "KCenter",
    "KNorm",
    "KernelHalving",
    "KeyDiff",
    "LagKV",
    "ObservedAttention",
    "PyramidKV",
    "SnapKV",
    "SoftmaxBalance",
    "StreamingLLM",
    "Uniform",
    "keep_top",
    "make",
    "pyramid_shares",
]
