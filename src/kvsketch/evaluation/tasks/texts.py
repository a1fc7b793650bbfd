"""Teacher-forced continuations of texts: KL divergence from the exact cache, perplexity, and single
layers' attention error.

A text's last tokens are fed as they are, through a cache that was compressed before
(see ``following`` for the measurements). With the question "seen", it was compressed right before
them; "unseen", ``GAP`` tokens earlier, which are read in one piece: as a question would be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvsketch.errors import InputError, at_least, unknown_name
from kvsketch.evaluation.runner.encoding import EncodedCase, Encoder
from kvsketch.evaluation.runner.longeval import QUESTION_MARK
from kvsketch.evaluation.runner.longeval_cases import ANSWER, generate_cases
from kvsketch.evaluation.tasks.base import Case, Task
from kvsketch.evaluation.tasks.text_data import load_texts

if TYPE_CHECKING:
    from kvsketch.evaluation.tasks.base import Reply

#: the entry of ``Reply.measured`` that is a task's score
MEASURES = {"kl": "kl", "perplexity": "nats", "attention_error": "error"}
FORMS = ("text", "line")
#: tokens between compression and the measured tokens, if a text has no question
GAP = 64
#: measured at the end of a text
FOLLOW = 128
#: of raw text for each token that is wanted: no tokenizer's tokens are longer on average
_CHARACTERS = 8
_USUAL = 4  # cases


class Texts(Task):
    """Parts of running text, by length.

    Args:
        name: in ``MEASURES``.
        lengths: tokens, what is measured included; not for "line".
        num_cases: per length (of "line": per number of lines); None: 4, or as many as the text has.
        form: "text": running text. "line": LongEval records with their question and answer, of
            which the answer is measured: for the packaged model, which knows nothing else.
        data: ``load_texts``.
        lines: of LongEval records.
        seed: of LongEval records.

    Raises:
        InputError: an unknown name or form, a length or num_cases below 1, or too little text.
    """

    def __init__(
        self,
        name: str,
        lengths: Sequence[int] = (1000,),
        num_cases: int | None = None,
        form: str = "text",
        data: str | None = None,
        lines: Sequence[int] = (200,),
        seed: int = 0,
    ) -> None:
        if name not in MEASURES:
            raise unknown_name("task", name, MEASURES)
        if form not in FORMS:
            raise unknown_name("form", form, FORMS)
        self.name = name  # type: ignore[misc]  # three tasks in one class
        self.lengths = list(dict.fromkeys(at_least("length", n, 1) for n in lengths))
        self.num_cases = None if num_cases is None else at_least("num_cases", num_cases, 1)
        self.form = form
        self.data = data
        self.lines = list(dict.fromkeys(lines))
        self.seed = seed

    def cases(self) -> list[Case]:
        """By length and number: the same parts of the text for every model and every task."""
        found = self._records() if self.form == "line" else self._parts()
        return list(found)

    def encoded(self, case: Case, encoder: Encoder, limit: int, new_tokens: int) -> EncodedCase:
        """The last ``new_tokens`` tokens are measured, and one before them is fed first.

        Raises:
            InputError: the text is too short, or too long for the model.
        """
        unseen = encoder.settings.question == "unseen"
        if self.form == "line":
            ids, asked, record = _answered(case, encoder, unseen)
            new_tokens = min(new_tokens, len(ids) - asked - 1)
        else:
            ids = encoder.ids(case.context, True)[: case.group["length"]]
            if len(ids) < case.group["length"]:
                raise InputError(
                    f"{case.where}: {len(case.context)} characters make {len(ids)} tokens, less "
                    f"than --lengths {case.group['length']}"
                )
            asked = len(ids) - 1 - new_tokens
            record = asked - GAP if unseen else asked
        if record < 1:
            raise InputError(
                f"{case.where}: {len(ids)} tokens are too few to measure {new_tokens} of them"
                + (f" {GAP} tokens after the rest was compressed" if unseen else "")
            )
        if asked > limit:
            raise InputError(
                f"{case.where}: {asked} tokens before those that are measured, and the model (or "
                f"--max-prompt-tokens) has room for {limit}"
            )
        return EncodedCase(ids[: asked + new_tokens + 1], record, new_tokens, self.name)

    def graded(self, case: Case, reply: Reply) -> float:
        """The measured error."""
        return float(reply.measured[MEASURES[self.name]])

    def score(self, case: Case, text: str) -> float:
        raise TypeError(f"{self.name} is measured, not answered")

    def _parts(self) -> Iterator[Case]:
        for length in self.lengths:
            wanted = self.num_cases or _USUAL
            size = _CHARACTERS * length
            found = list(islice(pieces(load_texts(self.data), size), wanted))
            if len(found) < (self.num_cases or 1):
                raise InputError(
                    f"--num-cases {wanted}: the text makes {len(found)} parts of {size} characters "
                    f"(--lengths {length}); give more text (--data), or shorter or fewer parts"
                )
            for index, (start, text) in enumerate(found):
                yield Case(
                    task=self.name,
                    context=text,
                    question="",
                    answers=(),
                    max_new_tokens=FOLLOW,
                    group={"length": length},
                    where=f"{self.name} length={length} case {index} ({start})",
                )

    def _records(self) -> Iterator[Case]:
        for lines in self.lines:
            found = generate_cases(lines, self.num_cases or _USUAL, self.seed)
            for index, record in enumerate(found):
                prompt, (key, _) = record["prompt"], record["random_idx"]
                cut = prompt.rfind(QUESTION_MARK)
                yield Case(
                    task=self.name,
                    context=prompt[:cut],
                    question=prompt[cut:],
                    answers=(ANSWER.format(key=key, number=record["expected_number"]),),
                    max_new_tokens=FOLLOW,
                    group={"lines": lines},
                    where=f"{self.name} lines={lines} seed={self.seed} case {index}",
                )


def pieces(texts: Iterator[tuple[str, str]], size: int) -> Iterator[tuple[str, str]]:
    """Where a piece begins, and the piece: ``size`` characters of running text, one after the
    other, texts with an empty line between them."""
    held, start = "", ""
    for where, text in texts:
        start = start if held else where
        held = f"{held}\n\n{text}" if held else text
        while len(held) >= size:
            yield start, held[:size]
            held, start = held[size:], where


def _answered(case: Case, encoder: Encoder, unseen: bool) -> tuple[list[int], int, int]:
    """Token ids of a record, its question and its answer; how many come before the answer, and
    before compression."""
    record = encoder.ids(case.context, True)
    question = encoder.ids(case.question, False)
    answer = encoder.ids(case.answers[0], False)
    asked = len(record) + len(question)
    return [*record, *question, *answer], asked, len(record) if unseen else asked
