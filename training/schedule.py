"""The curriculum: what is trained, for how long, and when the next stage starts."""

from __future__ import annotations

from dataclasses import dataclass

from training.data import Mixture


@dataclass(frozen=True)
class Stage:
    """A stage ends once `goal` accuracy is reached after `least` steps, or after `most` steps."""

    name: str
    mixtures: tuple[tuple[float, Mixture], ...]  # (weight, mixture), one drawn per step
    least: int
    most: int
    goal: float = 0.95
    decay: bool = False  # learning rate falls linearly to zero over the `most` steps
    rate: float = 1.0  # of the peak learning rate
    drop: tuple[float, float] = (0.0, 0.0)  # how often KV heads and layers are left out
    adamw: bool = False  # AdamW for all matrices; where this changes, optimizers are new
    few: float = 0.0  # share of sequences with too few heads to answer
    weight_decay: float = 0.0  # of what the layers add to the residual
    rest: float = 0.0  # weight of attention that does not rest on the first token
    ahead: float = 0.0  # weight of the tokens after the next one (`Ahead`)
    alone: int = 0  # first steps in which only the maps of `Ahead` learn from them
    evaluate: int = 0  # steps between evaluations on held-out official prompts; 0 for none


def _one(name: str, least: int, most: int, mixture: Mixture, **rest) -> Stage:
    return Stage(name, ((1.0, mixture),), least, most, **rest)


# Short records repeated word for word come first: without them copying is not learned at all.
# Position gaps teach long distances at the price of short sequences; the last stages are long.
LONG = Mixture(8192, 1, official=0.6, header=0.8, questions=0.2, gaps=0.3, span=10_000)
MIDDLE = Mixture(4096, 2, official=0.6, header=0.7, questions=0.25, gaps=0.5, span=12_000)
SHORT = Mixture(2048, 4, official=0.6, header=0.7, questions=0.3, gaps=0.7, span=12_000)

STAGES: tuple[Stage, ...] = (
    _one("copy-64", 100, 2000, Mixture(64, 64, verbatim=1.0, spelled=0.0), goal=0.9),
    _one("copy-128", 50, 500, Mixture(128, 48, verbatim=0.6, spelled=0.0), goal=0.8),
    _one("ask-128", 50, 1000, Mixture(128, 64, verbatim=0.1, gaps=0.3, span=512), goal=0.9),
    _one("ask-256", 50, 1000, Mixture(256, 32, gaps=0.5, span=2048), goal=0.9),
    _one("ask-512", 50, 1000, Mixture(512, 16, gaps=0.5, span=4096), goal=0.92),
    _one("ask-1024", 100, 1000, Mixture(1024, 8, gaps=0.6, span=10_000), goal=0.94, evaluate=100),
    _one("ask-2048", 150, 1000, SHORT, evaluate=100),
    Stage("ask-4096", ((0.7, MIDDLE), (0.3, SHORT)), 150, 800, evaluate=100),
    Stage("ask-8192", ((0.6, LONG), (0.2, MIDDLE), (0.2, SHORT)), 400, 800, evaluate=100),
    Stage(
        "decay",
        ((0.6, LONG), (0.2, MIDDLE), (0.2, SHORT)),
        600,
        600,
        goal=2.0,
        decay=True,
        evaluate=100,
    ),
)
