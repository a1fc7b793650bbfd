"""Prompts as token ids, cut where the question starts and checked against the model's positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvsketch.errors import InputError
from kvsketch.evaluation.runner.settings import Settings


@dataclass(frozen=True)
class EncodedTurn:
    """Token ids of a turn of a session: what is read before the question is known, and the rest."""

    text: Sequence[int]
    question: Sequence[int]


@dataclass(frozen=True)
class EncodedCase:
    """Token ids of a prompt. The first `record` of them are compressed before the question is
    seen; with the question seen, that is all of them. `new_tokens`: longest answer.

    With a `measure`, nothing is answered: the ids continue after the prompt, and the last
    `new_tokens` of them are measured (`following`). With `turns`, it is a session: the ids are
    theirs, and `new_tokens` the longest answer to one of them."""

    ids: Sequence[int]
    record: int
    new_tokens: int
    measure: str = ""
    turns: Sequence[EncodedTurn] = ()


class Encoder:
    """Encodes prompts for one model; needs its tokenizer and config, not its weights."""

    def __init__(self, tokenizer: Any, config: Any, settings: Settings) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self._limit = max_positions(config)

    def encode(
        self, context: str, question: str, where: str, new_tokens: int, chat: bool = True
    ) -> EncodedCase:
        """Token ids of `context + question`, in the tokenizer's chat template if it has one and
        `chat` is not False.

        Raises `InputError` if prompt and answer need more positions than the model has, or
        (question unseen) if there is no question apart from the context.
        """
        ids, seen = self._split(context, question, where, chat)
        if self._over(len(ids), new_tokens) > 0:
            raise InputError(
                f"{where}: a prompt of {len(ids)} tokens plus an answer of {new_tokens} "
                f"(--max-new-tokens) is beyond the model's {self._limit} positions"
            )
        return EncodedCase(ids, seen, new_tokens)

    def excess(
        self, context: str, question: str, where: str, new_tokens: int, chat: bool = True
    ) -> int:
        """The number of tokens by which the prompt is too long for `encode`; 0 if it fits."""
        return self._over(len(self._split(context, question, where, chat)[0]), new_tokens)

    def _over(self, tokens: int, new_tokens: int) -> int:
        return 0 if self._limit is None else max(0, tokens + new_tokens - self._limit)

    def _split(self, context: str, question: str, where: str, chat: bool) -> tuple[list[int], int]:
        """Token ids of the prompt, and how many are compressed before the question is seen."""
        prompt, special = self.prompt(context, question, chat)
        if self.settings.question != "unseen":
            ids = self.ids(prompt, special)
            return ids, len(ids)
        # Templates may cut white space at the end.
        cut = prompt.rfind(question.rstrip()) if question.strip() else -1
        if cut <= 0:
            raise InputError(
                f"{where}: --question unseen needs a prompt whose question comes after the context"
            )
        record = self.ids(prompt[:cut], special)
        return record + self.ids(prompt[cut:], False), len(record)

    def prompt(self, context: str, question: str, chat: bool = True) -> tuple[str, bool]:
        """The text of a prompt, in the tokenizer's chat template if it has one and ``chat`` is not
        False, and whether the tokenizer must add its special tokens."""
        prompt = context + question
        if not chat or not getattr(self.tokenizer, "chat_template", None):
            return prompt, True
        text: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        return text, False  # the template writes them

    def ids(self, text: str, special: bool) -> list[int]:
        """Token ids of a text, with the tokenizer's own first and last ones where `special`."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)[
            "input_ids"
        ]
        return ids


def max_positions(config: Any) -> int | None:
    """The number of positions of the model, or None if it is unlimited (ALiBi)."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        limit = getattr(text, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None
