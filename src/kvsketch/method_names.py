"""The names of the methods, for what must not wait for torch, such as refusing a wrong name.

The methods themselves are ``kvsketch.ALL_METHODS``; a test holds this list to it.
"""

from __future__ import annotations

#: what ``SketchCache`` takes as a method, in the order of ``ALL_METHODS``
METHOD_NAMES = (
    "uniform",
    "streaming_llm",
    "h2o",
    "d2o",
    "cam",
    "observed_attention",
    "snapkv",
    "pyramidkv",
    "chunkkv",
    "tova",
    "expected_attention",
    "compactor",
    "knorm",
    "keydiff",
    "lagkv",
    "kcenter",
    "balancekv",
    "kernel_halving",
    "greedy_halving",
    "cluster_merge",
    "heavy_merge",
    "criticalkv",
    "subgen",
    "subgen_coupled",
    "merge_reduce",
    "balancekv_streaming",
    "sliding_window",
    "sliding_window_sampled",
    "one_dimensional",
    "kvzip",
    "kvzip_plus",
    "kvgrad",
)

#: those of them that need a second reading of the context
NEED_REREAD = ("kvzip", "kvzip_plus", "kvgrad")
