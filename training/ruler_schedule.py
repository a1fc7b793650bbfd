"""The RULER model's curriculum."""

from __future__ import annotations

from training.ruler_data import Mixture
from training.schedule import Stage


def _one(name: str, least: int, most: int, mixture: Mixture, **rest) -> Stage:
    return Stage(name, ((1.0, mixture),), least, most, **rest)


# In the order of `KINDS`: lines, single, several, chains, counts.
NO_COUNTS = (1.0, 1.0, 1.0, 1.0, 0.0)
ALL = (0.7, 0.8, 1.2, 1.2, 2.2)
WEAK = (0.6, 0.6, 1.6, 2.2, 0.2)
SHORT = Mixture(1024, 8, 0.0, 0.05, 0.0, ALL, 0.3, whole=0.5, least=150, gaps=0.4, span=4500)
MIDDLE = Mixture(2048, 4, 0.0, 0.0, 0.0, ALL, 0.25, whole=0.5, least=300, gaps=0.3, span=4500)
LONG = Mixture(4096, 2, 0.0, 0.0, 0.0, ALL, 0.15, whole=0.6, least=500, gaps=0.1, span=5000)
# Chains and counts are learned last, and from short texts.
HARD = Mixture(400, 20, 0.0, 0.1, 0.0, (0.0, 0.0, 0.2, 1.0, 2.0), 0.4, whole=0.4, least=100)

TUNE = Mixture(4096, 2, 0.0, 0.0, 0.0, WEAK, 0.1, whole=0.7, least=800, gaps=0.1, span=5000)
TUNE_SHORT = Mixture(1024, 8, 0.0, 0.0, 0.0, WEAK, 0.2, whole=0.5, least=200, gaps=0.3, span=4500)

STAGES: tuple[Stage, ...] = (
    _one("echo", 25, 200, Mixture(96, 32, 0.5, 0.5), goal=0.85),
    _one("copy", 25, 200, Mixture(128, 32, 0.1, 0.2, 1.0, NO_COUNTS, whole=1.0), goal=0.75),
    _one("ask-128", 50, 200, Mixture(160, 40, 0.0, 0.2, gaps=0.2, span=512), goal=0.9),
    _one("ask-256", 50, 200, Mixture(256, 24, 0.0, 0.2, 0.0, ALL, gaps=0.5, span=2048), goal=0.9),
    _one("ask-512", 50, 300, Mixture(512, 14, 0.0, 0.1, 0.0, ALL, gaps=0.5, span=4096), goal=0.9),
    Stage("ask-1024", ((0.5, SHORT), (0.5, HARD)), 400, 400, rate=0.5),
    Stage("ask-2048", ((0.7, MIDDLE), (0.1, SHORT), (0.2, HARD)), 300, 300, rate=0.5),
    Stage(
        "ask-4096",
        ((0.65, LONG), (0.15, MIDDLE), (0.2, HARD)),
        450,
        450,
        rate=0.5,
        evaluate=450,
    ),
    Stage(
        "decay",
        ((0.7, LONG), (0.2, MIDDLE), (0.1, HARD)),
        450,
        450,
        goal=2.0,
        rate=0.5,
        decay=True,
        evaluate=450,
    ),
    # What the run above left short: several values of a key, and the first name of a chain.
    Stage(
        "tune",
        ((0.75, TUNE), (0.25, TUNE_SHORT)),
        320,
        320,
        goal=2.0,
        rate=0.3,
        decay=True,
        evaluate=320,
    ),
)
