"""The settings of an evaluation run, checked as they are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvsketch.budget import ALLOCATIONS
from kvsketch.errors import InputError

DTYPES = ("float32", "bfloat16", "float16")
STREAMING_CHUNK = 512  # tokens; streaming prefill without a chunk size would be one chunk


@dataclass(frozen=True)
class Settings:
    """Everything of a run that its outcomes depend on, besides model, cases, methods, budgets.

    `prefill_chunk_size` is in tokens; None prefills the prompt in one piece (512 when streaming).
    `allocation` is SketchCache's; None: each method's own.
    Raises `InputError` naming the option that is out of range.
    """

    sink: int = 4
    recent: int = 32
    prefill: str = "exact"
    prefill_chunk_size: int | None = None
    question: str = "seen"
    one_shot: bool = False
    allocation: str | None = None
    max_new_tokens: int = 32
    batch_size: int = 1
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, least in (
            ("sink", 0),
            ("recent", 0),
            ("prefill_chunk_size", 1),
            ("max_new_tokens", 1),
            ("batch_size", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{_option(name)} {value} must be at least {least}")
        for name, allowed in (
            ("prefill", ("exact", "streaming")),
            ("question", ("seen", "unseen")),
            ("dtype", DTYPES),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise InputError(f"{_option(name)} {value!r} must be one of {', '.join(allowed)}")
        if self.allocation not in (None, *ALLOCATIONS) and not Path(self.allocation).is_file():
            raise InputError(
                f"--allocation {self.allocation!r} must be one of {', '.join(ALLOCATIONS)}, or a "
                "file written by kvsketch calibrate"
            )
        if self.question == "unseen" and self.batch_size > 1:
            raise InputError(
                f"--question unseen works on one case at a time, got --batch-size {self.batch_size}"
            )
        if self.prefill == "streaming" and self.prefill_chunk_size is None:
            object.__setattr__(self, "prefill_chunk_size", STREAMING_CHUNK)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
