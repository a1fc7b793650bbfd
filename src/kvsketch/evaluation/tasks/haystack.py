"""Text to hide needles in: a folder of essays, generated filler, or RULER's noise."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from kvsketch.errors import InputError
from kvsketch.evaluation.runner.files import read_text

_ENDS = re.compile(r"[.!?][\"')\]\u201d\u2019]*$")
#: RULER's "noise" haystack, five sentences a line (scripts/data/synthetic/niah.py)
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
_FILLER_WORDS = 20_000
_SUBJECTS = ("baker", "farmer", "sailor", "teacher", "gardener", "miller", "weaver", "painter")
_VERBS = ("watches", "carries", "follows", "remembers", "repairs", "describes", "measures")
_OBJECTS = ("boat", "ladder", "window", "garden", "basket", "river", "bridge", "lantern", "wagon")
_QUALITIES = ("old", "quiet", "wooden", "narrow", "broad", "heavy", "plain", "distant", "small")
_WHENS = (
    "in the morning",
    "before supper",
    "on most days",
    "after the rain",
    "without any hurry",
    "near the mill",
    "as the others do",
    "when the wind turns",
)


@dataclass(frozen=True)
class Haystack:
    """Words of running text, read round and round. ``name`` says where they are from."""

    name: str
    words: tuple[str, ...]
    starts: tuple[int, ...] = field(init=False)  # where sentences begin

    def __post_init__(self) -> None:
        ends = (i + 1 for i, word in enumerate(self.words[:-1]) if _ENDS.search(word))
        object.__setattr__(self, "starts", (0, *ends))

    def sentences(self, start: int, count: int) -> list[str]:
        """``count`` words from word ``start`` on, by sentence; the last one may be cut."""
        length = len(self.words)
        words = [self.words[i % length] for i in range(start, start + count)]
        ends = [i + 1 for i, word in enumerate(words) if _ENDS.search(word)]
        if words and (not ends or ends[-1] < count):
            ends.append(count)
        return [" ".join(words[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def essays_folder() -> Path:
    """Where the essays lie beside a checkout: ``$KVSKETCH_DATA/essays``."""
    beside = Path(__file__).resolve().parents[5] / "shared" / "data"
    return Path(os.environ.get("KVSKETCH_DATA", beside)) / "essays"


def load_haystack(folder: Path | None = None) -> Haystack:
    """All ``*.txt`` files of a folder in the order of their names, white space made single spaces.
    Without a folder: ``essays_folder()``, or filler where that is not there.

    Raises:
        InputError: a folder that is missing or holds no text, or a file that is not UTF-8.
    """
    if folder is None:
        folder = essays_folder()
        if not folder.is_dir():
            return filler()
    if not folder.is_dir():
        raise InputError(f"haystack {folder} is not a folder; give one that holds .txt files")
    words = [
        word
        for file in sorted(folder.glob("*.txt"))
        for word in read_text(file, "haystack").split()
    ]
    if not words:
        raise InputError(f"haystack {folder} holds no text; allowed: a folder of .txt files")
    return Haystack(folder.name, tuple(words))


def filler() -> Haystack:
    """Sentences that say nothing, always the same: for where there are no essays."""
    rng = random.Random("haystack/filler")
    words: list[str] = []
    while len(words) < _FILLER_WORDS:
        subject, verb, thing = (rng.choice(kind) for kind in (_SUBJECTS, _VERBS, _OBJECTS))
        some, other = rng.sample(_QUALITIES, 2)
        when = rng.choice(_WHENS)
        words += f"The {some} {subject} {verb} the {other} {thing} {when}.".split()
    return Haystack("filler", tuple(words))


def noise_lines(count: int) -> list[str]:
    """``count`` sentences of noise, five a line; the last line may be shorter."""
    sentences = iter([NOISE[i % len(NOISE)] for i in range(count)])
    lines = []
    while line := list(islice(sentences, len(NOISE))):
        lines.append(" ".join(line))
    return lines


def inserted(lines: Sequence[str], items: Sequence[str], shares: Sequence[float]) -> list[str]:
    """``lines`` with ``items`` among them in their order, item i at the share ``sorted(shares)[i]``
    in [0, 1] of the lines."""
    found = list(lines)
    for before, (item, share) in enumerate(zip(items, sorted(shares), strict=True)):
        found.insert(before + min(int(share * (len(lines) + 1)), len(lines)), item)
    return found
