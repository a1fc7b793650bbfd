"""The tokens of a context that kvpress's presses keep which need a whole model."""

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
        press: the name of kvpress's class.
        ids: the token ids of the context, int64 ``[1, n]``.
        kept: tokens kept per KV head on average, 1 <= kept < n.
        arguments: arguments of the press's constructor.
        inner: the name of kvpress's class of the wrapped press, if there is one.
        inner_arguments: arguments of the wrapped press's constructor.
    """

    press: str
    ids: Tensor
    kept: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    inner: str | None = None
    inner_arguments: Mapping[str, Any] = field(default_factory=dict)

    def ratio(self) -> float:
        """The compression_ratio with which kvpress keeps ``kept`` tokens. With a wrapped press it
        truncates the tokens kept per head, else those removed from the whole model."""
        n = self.ids.shape[1]
        return 1 - (self.kept + (-1e-3 if self.inner is None else 0.5)) / n


def kept_of_model(folder: Path, jobs: Sequence[ModelJob]) -> list[Tensor]:
    """Which tokens kvpress keeps in each job, bool ``[layers, num_key_value_heads, n]``. All jobs
    run in one process.

    Raises:
        PeerError: kvpress is missing, has another version, or failed.
    """
    return kept_and_scores(folder, jobs)[0]


def kept_and_scores(
    folder: Path, jobs: Sequence[ModelJob], texts: Sequence[str] | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """The result of ``kept_of_model``, and DuoAttention's scores of the heads, float ``[layers,
    num_key_value_heads]``, measured on ``texts``.

    Args:
        texts: 50 texts, the number that kvpress takes. Without them, there are no scores.

    Raises:
        PeerError: see ``kept_of_model``.
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
