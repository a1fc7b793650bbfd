"""What the model reads: a text with much in it to ask about, and questions with answers.

Wording and layout are the evaluation's (`kvsketch.evaluation.tasks.ruler`, `longeval_cases`); there
is more to ask about each text, and anything said is drawn at random. Most answers follow the
question at once, so that the question's own tokens must look back; some repeat the key first.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, field, replace
from itertools import pairwise

from kvsketch.evaluation.runner.longeval_cases import (
    HEADER,
    MAX_NUMBER,
    QUESTION,
    format_line,
    make_key,
)
from kvsketch.evaluation.tasks.haystack import filler, inserted, noise_lines
from kvsketch.evaluation.tasks.ruler_chains import HOPS
from training.ruler_tokenizer import common, words

VALUES = 4  # of a key with several, and keys of a question about several
REPEATED = 0.25  # share of questions whose answer repeats the key, and of texts worded otherwise
NEEDLE = "One of the special magic numbers for {key} is: {value}."
# Other wordings of a needle, and of the question about it.
OTHERS = (
    ("The code for {key} is {value}.", "\nWhat is the code for {key}? It is "),
    ("{key} was entered under number {value}.", "\nUnder which number was {key} entered? "),
)
AGAIN = "\nRepeat all of the above.\n"
KINDS = ("lines", "single", "several", "chains", "counts")


@dataclass(frozen=True)
class Part:
    """A piece of text, encoded apart. ``kind``: it is an answer that is counted. ``either``: what
    would be as right at its first token."""

    text: str
    loss: bool = False
    kind: str = ""
    either: tuple[str, ...] = ()


@dataclass
class Document:
    """A text and what can be asked about it. ``before``: a solved example."""

    head: str
    units: list[str]
    joint: str = ""
    questions: list[list[Part]] = field(default_factory=list)
    before: list[Part] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.head + self.joint.join(self.units)


class Prose:
    """Sentences like an essay's, of random words: common ones, known ones, and invented ones that
    are spelled in bytes."""

    def __init__(self, seed: str = "training/prose", count: int = 4000) -> None:
        rng = random.Random(seed)
        self.sentences = [self._sentence(rng) for _ in range(count)]
        rest = filler()
        for start in rest.starts[: count // 10]:
            self.sentences += rest.sentences(start, 12)[:1]

    @staticmethod
    def _sentence(rng: random.Random) -> str:
        found = []
        for _ in range(rng.randint(4, 22)):
            draw = rng.random()
            if draw < 0.5:
                found.append(rng.choice(common()))
            elif draw < 0.7:
                found.append(rng.choice(words()))
            elif draw < 0.98:
                found.append(invented(rng))
            else:
                found.append(str(rng.randrange(10 ** rng.randint(1, 4))))
            if rng.random() < 0.08:
                found[-1] += rng.choice([",", ",", ",", ";", ":", " --", '"', "'s"])
        text = " ".join(found)
        return text[0].upper() + text[1:] + rng.choice("......?!)")


def invented(rng: random.Random) -> str:
    """A word nobody knows."""
    letters = []
    for i in range(rng.randint(2, 10)):
        common_ones = "aeiouaeo" if i % 2 else "tnshrdlcmwfgypbvk"
        letters.append(rng.choice(common_ones if rng.random() < 0.8 else string.ascii_lowercase))
    return "".join(letters)


class Documents:
    """Documents of about so many tokens."""

    def __init__(self) -> None:
        self.prose = Prose()

    def make(self, kind: str, room: int, rng: random.Random, spelled: float = 0.0) -> Document:
        """``room``: tokens of the text. ``spelled``: share of keys with an unknown word."""
        return getattr(self, "_" + kind)(room, rng, spelled)

    def _keys(self, count: int, rng: random.Random, spelled: float) -> list[str]:
        """None twice. Half the time of few words, so both halves of a key matter."""
        found: dict[str, None] = {}
        few = [make_key(rng).split("-", 1) for _ in range(2 + count // rng.choice([2, 4, 6]))]
        blend = rng.random() < 0.5
        while len(found) < count:
            if blend and rng.random() < 0.9:
                first, second = rng.choice(few)[0], rng.choice(few)[1]
            else:
                first, second = make_key(rng).split("-", 1)
            if rng.random() < spelled:
                first = invented(rng)
            if rng.random() < spelled:
                second = invented(rng)
            found.setdefault(f"{first}-{second}")
        return list(found)

    def _lines(self, room: int, rng: random.Random, spelled: float) -> Document:
        keys = self._keys(max(2, room // 8), rng, spelled)
        record = {key: rng.randint(1, MAX_NUMBER) for key in keys}
        head = HEADER if room > 256 or rng.random() < 0.5 else ""
        found = Document(head, [format_line(*item) for item in record.items()])
        rng.shuffle(keys)
        for key in keys:
            if rng.random() < REPEATED:
                question = f"\nRepeat line {key} of the record.\n"
                told = [Part(f"line {key}: REGISTER_CONTENT is <", True)]
                told.append(Part(f"{record[key]}>", True, "lines"))
            else:
                # Some callers strip the prompt, and the space then opens the answer.
                question, told = QUESTION.format(key=key), []
                if rng.random() < 0.1:
                    question, told = question[:-1], [Part(" ", True)]
                told.append(Part(f"{record[key]}.", True, "lines"))
            found.questions.append([Part(question), *told])
        return found

    def _haystack(
        self, room: int, count: int, rng: random.Random, essays: float
    ) -> tuple[str, list[str], str]:
        """What surrounds ``count`` needles: its kind, sentences or lines, and what joins them."""
        left = room - 9 * count
        if left < 60:
            return "needle", [], "\n"
        if rng.random() < essays:
            start = rng.randrange(len(self.prose.sentences))
            sentences = self.prose.sentences[start:] + self.prose.sentences[:start]
            return "essay", sentences[: left // 60], " "
        return "noise", noise_lines(left // 7), "\n"

    def _needles(
        self, record: dict[str, list[str]], room: int, rng: random.Random, wording: str = NEEDLE
    ) -> tuple[list[str], str]:
        hidden = [
            wording.format(key=key, value=value)
            for key, values in record.items()
            for value in values
        ]
        rng.shuffle(hidden)
        _, units, joint = self._haystack(room, len(hidden), rng, 0.7)
        return inserted(units, hidden, [rng.random() for _ in hidden]), joint

    def _count(self, room: int, rng: random.Random) -> int:
        """Needles in a text: nothing else, or fewer among other text."""
        if rng.random() < 0.4:
            return max(2, room // 9)
        return rng.randint(1, max(4, room // 40))

    def _single(self, room: int, rng: random.Random, spelled: float) -> Document:
        keys = self._keys(self._count(room, rng), rng, spelled)
        record = {key: [_number(rng)] for key in keys}
        head = (
            "A special magic number is hidden within the following text. Make sure to "
            "memorize it. I will quiz you about the number afterwards.\n"
        )
        wording, other = rng.choice(OTHERS) if rng.random() < REPEATED else (NEEDLE, "")
        found = Document(head, *self._needles(record, room, rng, wording))
        rng.shuffle(keys)
        for key in keys:
            about = f"the special magic number for {key} mentioned in the provided text"
            question = other.format(key=key) or f"\nWhat is {about}? The{about[3:]} is"
            told = [Part(f"{record[key][0]}.", True, "single")]
            if rng.random() < REPEATED:
                question = f"\nRepeat what is said about {key}.\n"
                told = [
                    Part(wording.split("{value}")[0].format(key=key), True),
                    Part(f"{record[key][0]}.", True, "single"),
                ]
            found.questions.append([Part(question), *told])
        return found

    def _several(self, room: int, rng: random.Random, spelled: float) -> Document:
        """Keys with one value each, to be asked for together, and keys with several."""
        count = max(self._count(room, rng), VALUES)
        multiple = rng.choice([0, 1, 1 + count // 8, count // 4]) or (count < 8)
        keys = self._keys(max(count - (VALUES - 1) * multiple, multiple, 1), rng, spelled)
        record = {
            key: [_number(rng) for _ in range(VALUES if i < multiple else 1)]
            for i, key in enumerate(keys)
        }
        many, one = keys[:multiple], keys[multiple:]
        head = (
            "Some special magic numbers are hidden within the following text. Make sure to "
            "memorize it. I will quiz you about the numbers afterwards.\n"
        )
        found = Document(head, *self._needles(record, room, rng))
        asked: list[tuple[str, list[str]]] = [("values", [key]) for key in many]
        rng.shuffle(one)
        asked += [("queries", one[i : i + VALUES]) for i in range(0, len(one) - 3, VALUES)]
        rng.shuffle(asked)
        for kind, some in asked:
            query = some[0] if len(some) == 1 else f"{', '.join(some[:-1])}, and {some[-1]}"
            about = f"the special magic numbers for {query} mentioned in the provided text"
            question = f"\nWhat are all {about}? The{about[3:]} are"
            pairs = [(key, record[key]) for key in some]
            found.questions.append([Part(question), *_told(pairs, kind)])
        return found

    def _list(self, room: int, rng: random.Random, spelled: float) -> Document:
        """Keys with one value each, which are asked for in lists of few or of many: one long
        answer, of which every part must see from those before it where it stands."""
        count = max(4, min(self._count(room, rng) * rng.choice([1, 3]), room // 9))
        keys = self._keys(count, rng, spelled)
        record = {key: [_number(rng)] for key in keys}
        head = (
            "Some special magic numbers are hidden within the following text. Make sure to "
            "memorize it. I will quiz you about the numbers afterwards.\n"
        )
        found = Document(head, *self._needles(record, room, rng))
        rng.shuffle(keys)
        while len(keys) > 2:
            many = int(3 * (max(len(keys), 3) / 3) ** rng.random())
            some, keys = keys[:many], keys[many:]
            query = f"{', '.join(some[:-1])}, and {some[-1]}"
            about = f"the special magic numbers for {query} mentioned in the provided text"
            told: list[Part] = []
            for key in some:
                told += [
                    Part(f"{',' if told else ''} ", True),
                    Part(key, True, "next"),
                    Part(" is: ", True),
                    Part(record[key][0], True, "listed"),
                ]
            told.append(Part(".", True))
            found.questions.append([Part(f"\nWhat are all {about}? The{about[3:]} are"), *told])
        return found

    def _chains(self, room: int, rng: random.Random, spelled: float) -> Document:
        if room > 250 and rng.random() < 0.5:  # the official form: an example, then one chain
            # One chain is little to learn from in a long text: more of them in half the texts.
            many = rng.choice([1, max(1, room // 300)])
            found = self._chain_text(room - 100, many, 5, rng)
            found.before = self._solved(room, rng)
            return found
        many = rng.randint(1, max(1, min(24, room // 60)))
        return self._chain_text(room, many, 5, rng)

    def _solved(self, room: int, rng: random.Random) -> list[Part]:
        """An example, which is only read. Its names have other numbers of tokens, and with both
        numbers in the answers the model began names at their second token."""
        example = self._chain_text(rng.randint(60, min(500, room // 3)), 1, 3, rng)
        solved = "".join(part.text for part in example.questions[0])
        return [Part(f"{example.text}{solved}\n\n")]

    def _firsts(self, room: int, rng: random.Random, spelled: float) -> Document:
        """Many chains, each asked for the first of its names only, which is found by the value.
        The others follow from the name before them and are learned long before it."""
        before = self._solved(room, rng) if room > 250 and rng.random() < 0.5 else []
        room -= 100 * len(before)
        many = max(1, min(60, room // rng.choice([48, 48, 100, 300])))
        official = rng.random() < 0.5
        digits = 5 if official else rng.choice([5, 7, 9, 9])
        found = self._chain_text(room, many, 5, rng, digits)
        found.before = before
        # Wordings in which the value stands where the name before does in the rest of a chain are
        # learned at once, the official one from them.
        kind = "firsts" if official else "easier"
        for i, (question, space, name) in enumerate(q[:3] for q in found.questions):
            text = question.text
            if not official:
                value = text.split(" value ")[1].split()[0]
                text = rng.choice([f"\n = {value}", text.removesuffix(", they are:"), text])
            found.questions[i] = [replace(question, text=text), space, replace(name, kind=kind)]
        return found

    def _chain_text(
        self, room: int, many: int, letters: int, rng: random.Random, digits: int = 5
    ) -> Document:
        names: dict[str, None] = {}
        while len(names) < many * (HOPS + 1):
            names.setdefault("".join(rng.choices(string.ascii_uppercase, k=letters)))
        values = rng.sample(range(10 ** (digits - 1), 10**digits - 1), many)
        steps: list[tuple[float, str]] = []
        questions = []
        for i, value in enumerate(values):
            chain = list(names)[i * (HOPS + 1) : (i + 1) * (HOPS + 1)]
            places = sorted(rng.random() for _ in chain)
            said = [f"VAR {chain[0]} = {value}"]
            said += [f"VAR {new} = VAR {old}" for old, new in pairwise(chain)]
            steps += zip(places, said, strict=True)
            question = (
                f"\nQuestion: Find all variables that are assigned the value {value} in the text "
                "above. Answer: According to the chain(s) of variable assignment in the text "
                f"above, {len(chain)} variables are assigned the value {value}, they are:"
            )
            told = [p for name in chain for p in (Part(" ", True), Part(name, True, "chains"))]
            told[1] = Part(chain[0], True, "firsts")
            questions.append([Part(question), *told])
        steps.sort()
        lines = noise_lines(max(room - 9 * len(steps), 0) // 7)
        units = inserted(lines, [step for _, step in steps], [place for place, _ in steps])
        rng.shuffle(questions)
        head = (
            "Memorize and track the chain(s) of variable assignment hidden in the following "
            "text.\n\n"
        )
        return Document(head, units, "\n", questions)

    def _counts(self, room: int, rng: random.Random, spelled: float) -> Document:
        if room > 450 and rng.random() < 0.6:  # the official form: an example of 20 words first
            example = self._count_text(10, 3, 10, rng)
            found = self._count_text(10, 6, int((room - 220) / 4.2) - 60, rng)
            found.before = [Part(example.text), *example.questions[0], Part("\n", True)]
            return found
        most = 10 if room > 300 or rng.random() < 0.3 else rng.randint(2, 10)
        times = rng.choice([3, 4, 6]) if room > 200 else rng.randint(2, 4)
        return self._count_text(most, times, max(int(room / 4.2) - most * times, 2), rng)

    def _count_text(self, most: int, times: int, others: int, rng: random.Random) -> Document:
        drawn = rng.sample(words(), most + others)
        entries = drawn[:most] * times + drawn[most:]
        rng.shuffle(entries)
        head = (
            "Below is a numbered list of words. In these words, some appear more often than "
            "others. Memorize the ones that appear most often.\n"
        )
        question = (
            "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
            "words that appear most often in the list are:"
        )
        told = []
        for i, word in enumerate(drawn[:most], start=1):
            told += [Part(f" {i}. ", True), Part(word, True, "counts", tuple(drawn[i:most]))]
        units = [f"{i}. {word}" for i, word in enumerate(entries, start=1)]
        return Document(head, units, " ", [[Part(question), *told]])


def _number(rng: random.Random) -> str:
    return str(rng.randint(10**6, 10**7 - 1))


def _told(pairs: list[tuple[str, list[str]]], kind: str) -> list[Part]:
    """The answer: every value with its key, in words of the needle. Several values of one key are
    told in any order."""
    told = []
    for key, values in pairs:
        for i, value in enumerate(values, start=1):
            told += [
                Part(f"{',' if told else ''} {key} is: ", True),
                Part(value, True, kind, tuple(values[i:])),
            ]
    return [*told, Part(".", True)]
