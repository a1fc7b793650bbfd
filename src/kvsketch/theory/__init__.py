"""For theorists: size a sketch from a theorem, check a bound on real activations, attack a method
with the hard instances of the lower bounds."""

from .clusterability import ClusterCurve, clusterability
from .hard_instances import (
    IndexGame,
    NonAdaptivePair,
    Recovery,
    detection_rate,
    index_game,
    non_adaptive_pair,
)
from .norms import ErrorBounds, error_bounds, measured_error, smallest_eps
from .parameters import (
    BalanceKVSize,
    SlidingWindowSize,
    SubGenSize,
    balancekv,
    clusters_for_diameter,
    covering_number,
    sliding_window,
    subgen,
)

__all__ = [
    "BalanceKVSize",
    "ClusterCurve",
    "ErrorBounds",
    "IndexGame",
    "NonAdaptivePair",
    "Recovery",
    "SlidingWindowSize",
    "SubGenSize",
    "balancekv",
    "clusterability",
    "clusters_for_diameter",
    "covering_number",
    "detection_rate",
    "error_bounds",
    "index_game",
    "measured_error",
    "non_adaptive_pair",
    "sliding_window",
    "smallest_eps",
    "subgen",
]
