"""The names of the methods, for code that must not import torch, such as checks of names.

The methods themselves are ``kvsketch.ALL_METHODS``; a test compares the two.
"""

from __future__ import annotations

from kvsketch.errors import InputError, unknown_name

#: the names that ``SketchCache`` accepts, in the order of ``ALL_METHODS``
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
    "rkv",
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
    "triattention",
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

#: the methods among them that need a second reading of the context
NEED_REREAD = ("kvzip", "kvzip_plus", "kvgrad")


def unknown_method(name: object) -> InputError:
    """The error for a name that is not one of a method."""
    if name == "exact":
        return InputError(
            "method='exact' compresses nothing: use transformers' DynamicCache, or budget=1.0 to "
            "keep every token"
        )
    return unknown_name("method", name, METHOD_NAMES)
