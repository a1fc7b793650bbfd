"""The methods, by name. To add one: write its file, add its class to ``_CLASSES``."""

from __future__ import annotations

from kvsketch.errors import unknown_name
from kvsketch.methods.balancekv import BalanceKV, SoftmaxBalance
from kvsketch.methods.base import Compressor, keep_top
from kvsketch.methods.cam import CaM
from kvsketch.methods.chunkkv import ChunkKV
from kvsketch.methods.cluster_merge import ClusterMerge
from kvsketch.methods.compactor import Compactor
from kvsketch.methods.d2o import D2O
from kvsketch.methods.expected_attention import ExpectedAttention
from kvsketch.methods.h2o import H2O
from kvsketch.methods.halving import Halving
from kvsketch.methods.heavy_merge import HeavyMerge
from kvsketch.methods.kcenter import KCenter
from kvsketch.methods.kernel_halving import GreedyHalving, KernelHalving
from kvsketch.methods.keydiff import KeyDiff
from kvsketch.methods.knorm import KNorm
from kvsketch.methods.lagkv import LagKV
from kvsketch.methods.observed_attention import ObservedAttention
from kvsketch.methods.pyramidkv import PyramidKV, pyramid_shares
from kvsketch.methods.rkv import RKV
from kvsketch.methods.snapkv import SnapKV
from kvsketch.methods.streaming_llm import StreamingLLM
from kvsketch.methods.tova import TOVA
from kvsketch.methods.uniform import Uniform

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
    RKV,
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
    "BalanceKV",
    "CaM",
    "Compressor",
    "GreedyHalving",
    "Halving",
    "KernelHalving",
    "SnapKV",
    "SoftmaxBalance",
    "Uniform",
    "keep_top",
    "make",
    "pyramid_shares",
]
