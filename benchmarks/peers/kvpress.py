"""The tokens that the presses of kvpress (NVIDIA) keep of given queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.peers.exchange import PeerError, call, missing
from kvsketch import InputError
from kvsketch.errors import unknown_name

_RUNNER = Path(__file__).with_name("kvpress_runner.py")

#: kvpress's class for each of our names of a method.
PRESSES = {
    "streaming_llm": "StreamingLLMPress",
    "snapkv": "SnapKVPress",
    "pyramidkv": "PyramidKVPress",
    "knorm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "lagkv": "LagKVPress",
    "tova": "TOVAPress",
    "observed_attention": "ObservedAttentionPress",
    # The queries are rotated already, so its average over future rotations has no effect.
    "expected_attention": "ExpectedAttentionPress",
    "chunkkv": "ChunkKVPress",
    "criticalkv": "CriticalKVPress",
    "compactor": "CompactorPress",
}
_WINDOWED = ("snapkv", "pyramidkv")
#: Presses that wrap another press, with our name of the latter.
_AROUND = {"chunkkv": "snapkv", "criticalkv": "snapkv"}


@dataclass(frozen=True)
class Job:
    """One press on one layer.

    Args:
        press: a key of ``PRESSES``.
        queries: post-RoPE, ``[batch, num_attention_heads, n, head_dim]``, float32 or float64.
        keys: ``[batch, num_key_value_heads, n, head_dim]``.
        values: of the same shape as the keys, because presses take no other values.
        kept: tokens kept per head, 1 <= kept < n. For PyramidKV, on average over the layers.
        options: arguments of the press's constructor, by their names (``window_size``,
            ``kernel_size``, ``beta``, ``n_sink``, ...).
        layer: the index of the layer.
        layers: the number of layers, on which PyramidKV's budgets depend.
        inner_options: arguments of the constructor of the wrapped press, if there is one.
        output: weight of the layer's output projection, ``[num_attention_heads, head_dim, hidden]``
            with hidden = num_attention_heads x head_dim. None if the press does not use it.

    Raises:
        InputError: the press is unknown, ``kept`` is out of range, or the window does not fit.
    """

    press: str
    queries: Tensor
    keys: Tensor
    values: Tensor
    kept: int
    options: Mapping[str, Any] = field(default_factory=dict)
    layer: int = 0
    layers: int = 1
    inner_options: Mapping[str, Any] = field(default_factory=dict)
    output: Tensor | None = None

    def __post_init__(self) -> None:
        if self.press not in PRESSES:
            raise unknown_name("press", self.press, PRESSES)
        n = self.keys.shape[2]
        if not 1 <= self.kept < n:
            raise InputError(f"kept={self.kept} must be at least 1 and below n={n}")
        if self.keys.shape != self.values.shape:
            raise InputError(
                f"keys {tuple(self.keys.shape)} and values {tuple(self.values.shape)} must have "
                "the same shape for kvpress"
            )
        if self.queries.shape[1] % self.keys.shape[1]:
            raise InputError(
                f"num_attention_heads={self.queries.shape[1]} must be a multiple of "
                f"num_key_value_heads={self.keys.shape[1]}"
            )
        if self.queries.shape[2] != n:
            raise InputError(f"queries for {self.queries.shape[2]} tokens, keys for {n}")
        # kvpress's default is a window of 64.
        inner = _AROUND.get(self.press, self.press)
        options = self.inner_options if self.press in _AROUND else self.options
        window = options.get("window_size", 64) if inner in _WINDOWED else 0
        if window >= n:
            raise InputError(f"window_size={window} must be below the prompt's {n} tokens")
        if not 0 <= self.layer < self.layers:
            raise InputError(f"layer={self.layer} must be at least 0 and below {self.layers}")

    def ratio(self) -> float:
        """The compression_ratio with which kvpress keeps ``kept`` tokens."""
        n = self.keys.shape[2]
        if self.press == "pyramidkv":
            return 1 - self.kept / n  # kvpress rounds after its schedule.
        return 1 - (self.kept + 0.5) / n  # kvpress truncates.


def available() -> str | None:
    """None if kvpress can be run, else what is missing or wrong."""
    return missing("kvpress")


def kept_many(jobs: Sequence[Job]) -> list[Tensor]:
    """The tokens that kvpress keeps in each job: int64 ``[batch, num_key_value_heads, kept]``,
    ascending. All jobs run in one process, because importing kvpress takes seconds.

    Raises:
        PeerError: kvpress is missing, has another version, or failed.
    """
    found = _run(jobs, 1)
    return [found[f"kept.{i}"] for i in range(len(jobs))]


def seconds(jobs: Sequence[Job], repeats: int) -> list[float]:
    """The time of the press's own ``compress`` in each job, as the shortest of ``repeats`` calls.
    It raises the same errors as ``kept_many``."""
    found = _run(jobs, repeats)
    return [float(found[f"seconds.{i}"]) for i in range(len(jobs))]


def _run(jobs: Sequence[Job], repeats: int) -> dict[str, Tensor]:
    reason = available()
    if reason is not None:
        raise PeerError(reason)
    tensors: dict[str, Tensor] = {}
    request = []
    for i, job in enumerate(jobs):
        # Copies, because jobs may share tensors, but the entries of a safetensors file may not.
        for name in ("queries", "keys", "values"):
            tensors[f"{name}.{i}"] = getattr(job, name).clone()
        if job.output is not None:
            tensors[f"output.{i}"] = job.output.clone()
        request.append(
            {
                "press": PRESSES[job.press],
                "arguments": dict(job.options),
                "inner": PRESSES[_AROUND[job.press]] if job.press in _AROUND else None,
                "inner_arguments": dict(job.inner_options),
                "ratio": job.ratio(),
                "layer": job.layer,
                "layers": job.layers,
                "repeats": repeats,
            }
        )
    return call(_RUNNER, tensors, request)


def kept(
    press: str, queries: Tensor, keys: Tensor, values: Tensor, n_kept: int, **options: Any
) -> Tensor:
    """``kept_many`` for one press on one layer. ``options`` are those of the press.

    Raises:
        InputError: see ``Job``.
        PeerError: see ``kept_many``.
    """
    return kept_many([Job(press, queries, keys, values, n_kept, options)])[0]
