"""The curriculum of the model with spread retrieval.

Goals are lower than a whole network's accuracy: heads are missing while it trains.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from training.ruler_data import Mixture
from training.schedule import Stage

REST = 0.05  # as in large models, most attention rests on the first token


def _one(name: str, least: int, most: int, mixture: Mixture, **rest) -> Stage:
    return Stage(name, ((1.0, mixture),), least, most, rest=REST, **rest)


# In the order of `KINDS`: lines, single, several, chains, counts.
NO_COUNTS = (1.0, 1.0, 1.0, 1.0, 0.0)
ALL = (0.8, 0.8, 0.8, 3.0, 0.0)
SHORT = Mixture(1024, 8, 0.0, 0.05, 0.1, ALL, 0.3, whole=0.5, least=150, gaps=0.5, span=4800)
MIDDLE = Mixture(2048, 4, 0.0, 0.0, 0.05, ALL, 0.25, whole=0.5, least=300, gaps=0.4, span=4800)
LONG = Mixture(4096, 2, 0.0, 0.0, 0.0, ALL, 0.15, whole=0.6, least=500, gaps=0.1, span=5000)
# Chains are learned last, and from short texts.
HARD = Mixture(400, 16, 0.0, 0.0, 0.0, (0.0, 0.0, 0.4, 1.6, 0.0), 0.4, whole=0.4, least=100)
# Of a chain's names the first alone must be found by the value, which is not learned beside others.
FIRSTS = replace(HARD, kinds=(0.0, 0.0, 0.0, 1.0, 0.0), whole=0.5, firsts=0.8)

# Missing heads make retrieval redundant. Where too many are missing no answer is to be given, so
# that many heads are needed, and none alone.
EARLY: dict[str, Any] = {"drop": (0.2, 0.05)}
SHARED: dict[str, Any] = {"drop": (0.05, 0.0), "few": 0.15, "ahead": 0.3}
# At a low rate. What predicts the tokens after the next one is not in an exported model: it learns
# anew.
TUNED: dict[str, Any] = {"drop": (0.05, 0.0), "few": 0.15, "adamw": True}
SETTLED: dict[str, Any] = {**TUNED, "few": 0.45, "ahead": 0.5, "alone": 40}

STAGES: tuple[Stage, ...] = (
    _one(
        "copy",
        50,
        150,
        Mixture(160, 24, 0.15, 0.1, 0.3, NO_COUNTS, gaps=0.2, span=512),
        goal=0.6,
        rate=1.5,
        **EARLY,
    ),
    _one(
        "ask-256",
        50,
        250,
        Mixture(256, 16, 0.0, 0.1, 0.1, NO_COUNTS, gaps=0.5, span=2048),
        goal=0.75,
        rate=1.5,
        **EARLY,
    ),
    _one(
        "ask-512",
        100,
        300,
        Mixture(512, 10, 0.0, 0.1, 0.1, ALL, gaps=0.5, span=4096),
        goal=0.8,
        **SHARED,
    ),
    Stage("ask-1024", ((0.6, SHORT), (0.4, HARD)), 150, 150, rate=0.5, rest=REST, **SHARED),
    Stage(
        "ask-2048",
        ((0.7, MIDDLE), (0.1, SHORT), (0.2, HARD)),
        150,
        150,
        rate=0.5,
        rest=REST,
        **SHARED,
    ),
    Stage(
        "ask-4096",
        ((0.5, LONG), (0.3, MIDDLE), (0.2, HARD)),
        345,
        345,
        rate=0.5,
        rest=REST,
        **SHARED,
    ),
    Stage(
        "decay",
        ((0.6, LONG), (0.3, MIDDLE), (0.1, HARD)),
        240,
        240,
        goal=2.0,
        rate=0.5,
        decay=True,
        rest=REST,
        **SHARED,
    ),
    Stage(
        "firsts",
        ((0.7, FIRSTS), (0.1, HARD), (0.1, SHORT), (0.05, MIDDLE), (0.05, LONG)),
        100,
        100,
        goal=2.0,
        rate=0.4,
        rest=REST,
        **TUNED,
    ),
    Stage(
        "settle",
        ((0.45, LONG), (0.3, MIDDLE), (0.15, HARD), (0.1, FIRSTS)),
        200,
        200,
        goal=2.0,
        rate=0.4,
        decay=True,
        rest=REST,
        **SETTLED,
    ),
)

# Long answers, from the finished model: many keys are asked for at once.
SEVERAL = (0.0, 0.0, 1.0, 0.0, 0.0)
LISTS = Mixture(
    1024, 8, 0.0, 0.0, 0.0, SEVERAL, whole=0.4, least=150, gaps=0.4, span=7000, listed=0.9
)
LONGER_LISTS = replace(LISTS, length=2048, rows=4, whole=0.6, least=300)
LONGEST_LISTS = replace(LISTS, length=4096, rows=2, whole=0.8, least=500, gaps=0.3)
LISTS_STAGES: tuple[Stage, ...] = tuple(
    Stage(
        name,
        (
            (0.4, LISTS),
            (0.2, LONGER_LISTS),
            (0.15, LONGEST_LISTS),
            (0.15, LONG),
            (0.1, MIDDLE),
        ),
        steps,
        steps,
        goal=2.0,
        rate=0.4,
        decay=name == "lists-settle",
        rest=REST,
        drop=(0.05, 0.0),
        few=0.1,
        adamw=True,
    )
    for name, steps in (("lists", 200), ("lists-settle", 300))
)
# With all heads: where too few could answer none was to be given, and some answers ended early.
LISTS_STAGES += (
    replace(
        LISTS_STAGES[-1],
        name="lists-whole",
        mixtures=(
            (0.2, LISTS),
            (0.25, LONGER_LISTS),
            (0.35, LONGEST_LISTS),
            (0.15, LONG),
            (0.05, MIDDLE),
        ),
        least=110,
        most=110,
        rate=0.3,
        drop=(0.0, 0.0),
        few=0.0,
    ),
)
