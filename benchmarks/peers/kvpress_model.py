"""kvpress's presses that look at a whole model: which tokens they keep of a context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.peers.exchange import PeerError, call
from benchmarks.peers.kvpress import available

_RUNNER = Path(__file__).with_name("kvpress_model_runner.py")


@dataclass(frozen=True)
class ModelJob:
    """One press on one context.

    Args:
        press: kvpress's class.
        ids: int64 ``[1, n]``.
        kept: tokens kept per KV head on average, 1 <= kept < n.
        arguments: of the press's constructor.
        inner: kvpress's class of the press inside it, if there is one.
        inner_arguments: of that one's.
    """

    press: str
    ids: Tensor
    kept: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    inner: str | None = None
    inner_arguments: Mapping[str, Any] = field(default_factory=dict)

    def ratio(self) -> float:
        """The compression_ratio from which kvpress computes ``kept``: what it truncates to a whole
        number is what a press keeps of a head, or what it removes from the whole model."""
        n = self.ids.shape[1]
        return 1 - (self.kept + (-1e-3 if self.inner is None else 0.5)) / n


def kept_of_model(folder: Path, jobs: Sequence[ModelJob]) -> list[Tensor]:
    """For each job, bool ``[layers, num_key_value_heads, n]``: which tokens kvpress keeps. One
    process for all.

    Raises:
        PeerError: kvpress is missing, of another version, or refused.
    """
    return kept_and_scores(folder, jobs)[0]


def kept_and_scores(
    folder: Path, jobs: Sequence[ModelJob], texts: Sequence[str] | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """``kept_of_model``, and DuoAttention's scores of the heads by texts, float ``[layers,
    num_key_value_heads]``; its presses then measure on these.

    Args:
        texts: 50 of them, as many as kvpress takes; None: no scores.

    Raises:
        PeerError: as ``kept_of_model``.
    """
    reason = available()
    if reason is not None:
        raise PeerError(reason)
    request = [
        {
            "press": job.press,
            "arguments": dict(job.arguments),
            "inner": job.inner,
            "inner_arguments": dict(job.inner_arguments),
            "ratio": job.ratio(),
        }
        for job in jobs
    ]
    tensors = {f"ids.{i}": job.ids.clone() for i, job in enumerate(jobs)}
    given = None if texts is None else list(texts)
    found = call(_RUNNER, tensors, {"model": str(folder), "texts": given, "jobs": request})
    return [found[f"kept.{i}"] for i in range(len(jobs))], found.get("scores")
