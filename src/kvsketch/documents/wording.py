"""The text around a document, a question and an answer: a model's own chat template, or plain
lines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvsketch.errors import InputError

_ONE, _TWO, _THREE = "\ue000first\ue001", "\ue000second\ue001", "\ue000third\ue001"


@dataclass(frozen=True)
class Wording:
    """
    Attributes:
        chat: whether it is a chat template's, which writes special tokens itself.
        before: in front of a document, or of the first thing said.
        asking: between a document and a question about it.
        answering: between what is said and the answer.
        between: between an answer and the next thing that is said.
    """

    chat: bool = False
    before: str = ""
    asking: str = "\n"
    answering: str = ""
    between: str = "\n"

    @staticmethod
    def of(tokenizer: Any, plain: bool = False, system: str | None = None) -> Wording:
        """The tokenizer's chat template, if it has one and it puts all it is told in order; else,
        and if ``plain``, lines.

        Args:
            system: a message in front of the first thing said.

        Raises:
            InputError: the template leaves it out.
        """
        lines = Wording(before="" if system is None else system + "\n")
        if plain or not getattr(tokenizer, "chat_template", None):
            return lines
        said = [("user", _ONE), ("assistant", _TWO), ("user", _THREE)]
        if system is not None:
            said.insert(0, ("system", system))
        try:
            text = tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in said],
                tokenize=False,
                add_generation_prompt=True,
            )
            before, rest = text.split(_ONE)
            answering, rest = rest.split(_TWO)
            between, end = rest.split(_THREE)
        except Exception:  # errors that a template raises, or missing fields
            if system is None:
                return lines
            before = ""
        if system is not None and system.strip() not in before:
            raise InputError(
                f"system={system!r:.60}: the model's chat template has no place for it"
            )
        # The end opens an answer; what is between the first two may say more of one that is past.
        return Wording(True, before, "\n\n", end or answering, between)

    def values(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @staticmethod
    def read(values: Any) -> Wording:
        """What ``values`` said.

        Raises:
            InputError: it is something else.
        """
        known = {name: type(value) for name, value in asdict(Wording()).items()}
        if not isinstance(values, dict) or {k: type(v) for k, v in values.items()} != known:
            raise InputError(f"wording={values!r:.60} must have {', '.join(known)}")
        return Wording(**values)
