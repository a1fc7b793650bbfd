"""For theorists: compute the size of a sketch from a theorem, check a bound on real activations,
and test a method with the hard instances of the lower bounds."""

from kvsketch.theory.balance import (
    BalanceKVSize,
    MergeAndReduceSize,
    balancekv,
    break_even,
    merge_and_reduce,
)
from kvsketch.theory.clusterability import ClusterCurve, clusterability
from kvsketch.theory.hard_instances import (
    IndexGame,
    NonAdaptivePair,
    Recovery,
    detection_rate,
    index_game,
    non_adaptive_pair,
)
from kvsketch.theory.low_dimension import (
    UNIT_BALL_DELTA,
    Barrier,
    barrier,
    clusters_in_ball,
    coreset_size,
    index_bits,
    low_dimensional,
)
from kvsketch.theory.norms import ErrorBounds, error_bounds, measured_error, smallest_eps
from kvsketch.theory.parameters import (
    SlidingWindowSize,
    SubGenSize,
    clusters_for_diameter,
    covering_number,
    sliding_window,
    subgen,
)

__all__ = [
    "UNIT_BALL_DELTA",
    "BalanceKVSize",
    "Barrier",
    "ClusterCurve",
    "ErrorBounds",
    "IndexGame",
    "MergeAndReduceSize",
    "NonAdaptivePair",
    "Recovery",
    "SlidingWindowSize",
    "SubGenSize",
    "balancekv",
    "barrier",
    "break_even",
    "clusterability",
    "clusters_for_diameter",
    "clusters_in_ball",
    "coreset_size",
    "covering_number",
    "detection_rate",
    "error_bounds",
    "index_bits",
    "index_game",
    "low_dimensional",
    "measured_error",
    "merge_and_reduce",
    "non_adaptive_pair",
    "sliding_window",
    "smallest_eps",
    "subgen",
]
