"""Sessions: many turns with one cache, which is compressed as the session goes on.

All but the last are made of LongEval's records of lines (Li et al. 2023), so that nothing said is
like anything else and every answer is right or wrong:

- ``turns``: fifty questions about one record, one after the other;
- ``documents``: eleven records. A question about the newest follows each, and one about a record
  that was read some records before. In the end, questions about the first record: what is
  forgotten, and when;
- ``system``: the session begins with a message that says one thing more, which is asked for in the
  end, after all documents: what a system message is for;
- ``list``: a text of needles (RULER, Hsieh et al. 2024). A fifth of them are asked for at once,
  in another order: one long answer, whose later parts need its earlier ones to know what comes
  next.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvsketch.documents.wording import Wording
from kvsketch.errors import InputError, at_least, unknown_name
from kvsketch.evaluation.runner.encoding import EncodedCase, EncodedTurn, Encoder
from kvsketch.evaluation.runner.longeval import read_answer
from kvsketch.evaluation.runner.longeval_cases import (
    HEADER,
    QUESTION,
    format_line,
    make_key,
    make_record,
    word_lists,
)
from kvsketch.evaluation.tasks.base import Case, Reply, Task, mean
from kvsketch.evaluation.tasks.ruler_needles import Needles, question_about

FORMS = ("turns", "documents", "system", "list")
SYSTEM = "The code for {key} is {value}.\n"
CODE = "\nWhat is the code for {key}? It is "
LISTED = " {key} is: {value}"
QUESTIONS, DOCUMENTS = 50, 11
#: after each document but the first and the last, how many documents ago another one was read that
#: is asked about; about the first document, in the end
AGES, LAST = (1, 1, 2, 1, 3, 5, 2, 4, 8), 4
_NUMBER_TOKENS, _LISTED_TOKENS = 32, 20
_PART = 5  # of the needles of a text, one in so many is asked for
_MOST_CODE = 10**7


@dataclass(frozen=True)
class SessionTurn:
    """One turn of a session.

    Attributes:
        text: what is read first, such as a document; "": nothing.
        question: what is said then.
        answer: the right answer.
        about: the point of the session's curve to which the answer counts.
    """

    text: str
    question: str
    answer: str
    about: str


class Sessions(Task):
    """Sessions by form and number of lines.

    Args:
        form: in ``FORMS``.
        lines: of all records of a session together.
        num_cases: sessions for each number of lines.
        seed: of everything random.

    Raises:
        InputError: an unknown form, or a number out of range.
    """

    name = "sessions"

    def __init__(
        self,
        form: str = "documents",
        lines: Sequence[int] = (330,),
        num_cases: int = 10,
        seed: int = 0,
    ) -> None:
        if form not in FORMS:
            raise unknown_name("form", form, FORMS)
        least = {"turns": QUESTIONS, "list": 4 * _PART}.get(form, DOCUMENTS * (LAST + 2))
        self.lines = [at_least("lines", count, least) for count in dict.fromkeys(lines)]
        self.num_cases = at_least("num_cases", num_cases, 1)
        self.form, self.seed = form, seed
        self._turns: dict[str, list[SessionTurn]] = {}

    def cases(self) -> list[Case]:
        """By lines and number.

        Raises:
            InputError: the words of the records are missing (``wonderwords``).
        """
        try:
            word_lists()
        except ImportError as error:
            raise InputError(str(error)) from error
        return [self._case(lines, i) for lines in self.lines for i in range(self.num_cases)]

    def _case(self, lines: int, number: int) -> Case:
        rng = random.Random(f"sessions/{self.form}/{lines}/{self.seed}/{number}")
        turns = list(_MADE[self.form](lines, rng))
        case = Case(
            task=self.name,
            context="".join(turn.text + turn.question for turn in turns),
            question="",
            answers=tuple(turn.answer for turn in turns),
            max_new_tokens=lines // _PART * _LISTED_TOKENS
            if self.form == "list"
            else _NUMBER_TOKENS,
            group={"form": self.form, "lines": lines},
            where=f"sessions {self.form} lines={lines} seed={self.seed} case {number}",
        )
        self._turns[case.id] = turns
        return case

    def encoded(self, case: Case, encoder: Encoder, limit: int, new_tokens: int) -> EncodedCase:
        """The turns as token ids, in the tokenizer's chat template if it has one. A text is read
        before its question is known, if questions are unseen.

        Raises:
            InputError: the session does not fit the model's positions.
        """
        unseen = encoder.settings.question == "unseen"
        turns: list[EncodedTurn] = []
        wording = Wording.of(encoder.tokenizer)
        for turn in self._turns[case.id]:
            text, asked, special = turn.text, turn.question, not turns
            if wording.chat:
                special = False
                text = (wording.between if turns else wording.before) + text
                asked = asked + wording.answering
            if unseen and turn.text:
                own = encoder.ids(text, special)
                turns.append(EncodedTurn(own, encoder.ids(asked, False)))
            else:
                turns.append(EncodedTurn([], encoder.ids(text + asked, special)))
        tokens = sum(len(turn.text) + len(turn.question) for turn in turns)
        most = tokens + len(turns) * new_tokens
        if self.form != "list":  # answers are short, whatever they may be
            most = tokens + len(turns) * _NUMBER_TOKENS // 2
        if most > limit + new_tokens:
            raise InputError(
                f"{case.where}: about {most} tokens are beyond the model's positions: give fewer "
                "--lines"
            )
        return EncodedCase((), 0, new_tokens, turns=turns)

    def graded(self, case: Case, reply: Reply) -> float:
        """The mean over turns; of a system message, that of the last turn."""
        scores = [score for _, score in self._scores(case, reply)]
        return scores[-1] if self.form == "system" else mean(scores)

    def measured(self, case: Case, reply: Reply) -> Mapping[str, float]:
        """The curve of the session: the mean score of each of its points."""
        points: dict[str, list[float]] = {}
        for about, score in self._scores(case, reply):
            points.setdefault(about, []).append(score)
        return {about: mean(scores) for about, scores in sorted(points.items())}

    def score(self, case: Case, text: str) -> float:
        raise TypeError("the turns of a session are scored one by one")

    def _scores(self, case: Case, reply: Reply) -> list[tuple[str, float]]:
        turns = self._turns[case.id]
        if self.form == "list":
            return _listed(turns[0], reply.turns[0])
        return [
            (turn.about, float(read_answer(said) == int(turn.answer)))
            for turn, said in zip(turns, reply.turns, strict=True)
        ]


def _listed(turn: SessionTurn, said: str) -> list[tuple[str, float]]:
    """Which values were told with their keys, by quarters of the answer."""
    wanted = turn.answer.split(",")
    told = {part.strip(" .") for part in said.split(",")}
    found = [float(one.strip() in told) for one in wanted]
    return [(f"quarter {4 * i // len(wanted) + 1}", score) for i, score in enumerate(found)]


def _read(record: Mapping[str, int]) -> str:
    return HEADER + "".join(format_line(*item) for item in record.items())


def _asked(record: Mapping[str, int], key: str, about: str, text: str = "") -> SessionTurn:
    return SessionTurn(text, QUESTION.format(key=key), str(record[key]), about)


def _questions(lines: int, rng: random.Random) -> Iterator[SessionTurn]:
    record = make_record(lines, rng)
    for i, key in enumerate(rng.sample(list(record), QUESTIONS)):
        about = f"turns {i // 10 * 10 + 1:02}-{i // 10 * 10 + 10}"
        yield _asked(record, key, about, "" if i else _read(record))


def _documents(lines: int, rng: random.Random) -> Iterator[SessionTurn]:
    every = list(make_record(lines, rng).items())
    size = lines // DOCUMENTS
    records = [dict(every[i * size : (i + 1) * size]) for i in range(DOCUMENTS)]
    left = [rng.sample(list(record), len(record)) for record in records]  # nothing is asked twice
    for i, record in enumerate(records):
        yield _asked(record, left[i].pop(), "documents ago 00", _read(record))
        if 0 < i <= len(AGES):
            old = i - AGES[i - 1]
            yield _asked(records[old], left[old].pop(), f"documents ago {AGES[i - 1]:02}")
    for _ in range(LAST):
        yield _asked(records[0], left[0].pop(), f"documents ago {DOCUMENTS - 1:02}")


def _system(lines: int, rng: random.Random) -> Iterator[SessionTurn]:
    key, value = make_key(rng), str(rng.randrange(_MOST_CODE // 10, _MOST_CODE))
    before = SYSTEM.format(key=key, value=value)
    for turn in _documents(lines, rng):
        yield replace(turn, text=before + turn.text)
        before = ""
    yield SessionTurn("", CODE.format(key=key), value, "system")


def _list(lines: int, rng: random.Random) -> Iterator[SessionTurn]:
    kind, keys = Needles("needle", num_queries=lines // _PART), list(make_record(lines, rng))
    record = {key: str(rng.randrange(_MOST_CODE // 10, _MOST_CODE)) for key in keys}
    asked = rng.sample(keys, kind.num_queries)
    head, question = question_about(kind, asked)
    text = head + "\n".join(kind.needle(key, value) for key, value in record.items())
    answer = ",".join(LISTED.format(key=key, value=record[key]) for key in asked)
    yield SessionTurn(text, question, answer, "")


_MADE = {
    "turns": _questions,
    "documents": _documents,
    "system": _system,
    "list": _list,
}
