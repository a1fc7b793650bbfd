"""The settings of an evaluation run, checked on creation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsketch.arguments import PIECE, PREFILL_MODES, QUERY_SOURCES
from kvsketch.errors import InputError
from kvsketch.evaluation.runner.devices import check_device_name

DTYPES = ("float32", "bfloat16", "float16")
#: settings that no answer depends on
_NOT_IDENTITY = ("batch_size", "max_new_tokens")


@dataclass(frozen=True)
class Settings:
    """The settings shared by all answers of a run, besides the model.

    Attributes:
        prefill_chunk_size: tokens; None prefills the prompt in one piece (1,024 when streaming).
        queries: the queries that a compression uses: "prompt", or "reread", "local" or "sample",
            those of a second reading of the context (``kvsketch.prefill``), with the question
            unseen.
        question: "seen" or "unseen" when the context is compressed.
        max_new_tokens: largest number of tokens of an answer; None: that of each case.
        max_prompt_tokens: longer prompts are cut by the task's own rule, if it has one; None: the
            model's positions minus the answer.
        batch_size: cases answered at once.

    Raises:
        InputError: an option is out of range; the message names it.
    """

    sink: int = 4
    recent: int | None = None
    prefill: str = "exact"
    prefill_chunk_size: int | None = None
    question: str = "seen"
    queries: str = "prompt"
    one_shot: bool = False
    max_new_tokens: int | None = None
    max_prompt_tokens: int | None = None
    batch_size: int = 1
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, least in (
            ("sink", 0),
            ("recent", 0),
            ("prefill_chunk_size", 1),
            ("max_new_tokens", 1),
            ("max_prompt_tokens", 1),
            ("batch_size", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{_option(name)} {value} must be at least {least}")
        for name, allowed in (
            ("prefill", PREFILL_MODES),
            ("question", ("seen", "unseen")),
            ("queries", QUERY_SOURCES),
            ("dtype", DTYPES),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise InputError(f"{_option(name)} {value!r} must be one of {', '.join(allowed)}")
        check_device_name(self.device)
        if self.question == "unseen" and self.batch_size > 1:
            raise InputError(
                f"--question unseen works on one case at a time, got --batch-size {self.batch_size}"
            )
        if self.queries != "prompt" and (self.question == "seen" or self.prefill != "exact"):
            raise InputError(
                f"--queries {self.queries} reads the context a second time before it is "
                "compressed: it needs --question unseen and --prefill exact"
            )
        if self.prefill == "streaming" and self.prefill_chunk_size is None:
            object.__setattr__(self, "prefill_chunk_size", PIECE)

    def new_tokens(self, most: int) -> int:
        """Longest answer to a case that asks for ``most`` tokens."""
        return self.max_new_tokens or most

    def identity(self) -> dict[str, Any]:
        """What an answer depends on."""
        found = {k: v for k, v in self.__dict__.items() if k not in _NOT_IDENTITY}
        if self.queries == "prompt":  # as in the records of before there was a choice
            del found["queries"]
        return found


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
