"""Training sequences as token ids: a record of lines, then copies of it or questions about it.

Every batch is a function of (seed, step), so resuming needs no generator state.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvsketch.evaluation.runner.longeval_cases import (
    ANSWER,
    HEADER,
    MAX_NUMBER,
    QUESTION,
    word_lists,
)

CHAINS = ("chains", "firsts", "easier")  # kinds of answers that are names of a chain


@dataclass(frozen=True)
class Mixture:
    """What the sequences of one stage look like."""

    length: int  # tokens per sequence
    rows: int  # sequences per step
    verbatim: float = 0.0  # share of rows whose record is repeated in order
    official: float = 0.5  # share of the other rows that ask the official question
    header: float = 0.5  # share of rows that start with the official instruction
    questions: float = 0.4  # share of the tokens spent on questions
    gaps: float = 0.0  # share of rows with random position gaps between lines
    span: int = 0  # largest position that gaps reach
    spelled: float = 0.02  # share of words spelled in bytes


@dataclass
class Batch:
    ids: np.ndarray  # [rows, length]
    positions: np.ndarray  # [rows, length]
    loss: np.ndarray  # [rows, length] bool: is this token predicted with loss?
    answer: np.ndarray  # [rows, length] number of the answer this digit belongs to, or -1
    # Tokens that are as right as the one that stands there, itself among them, by (row, column).
    either: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)  # of the answers, by number
    wanted: np.ndarray | None = None  # [rows, length] what is predicted; by default what follows

    def __post_init__(self) -> None:
        if self.wanted is None:
            self.wanted = self.ids

    def unanswered(self, rows: np.ndarray, end: int) -> Batch:
        """The batch where in ``rows`` (bool) token ``end`` is predicted instead of each answer, and
        nothing else; these answers are not counted. Chains are not predicted there at all: each of
        their names is an answer, and the model came to end them although all its heads were there.
        """
        before = np.pad(self.answer, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
        chains = np.isin(self.answer, [n for n, kind in self.kinds.items() if kind in CHAINS])
        begins = (self.answer >= 0) & (self.answer != before) & ~chains
        chosen = rows[:, None]
        return replace(
            self,
            loss=np.where(chosen, begins, self.loss),
            answer=np.where(chosen, -1, self.answer),
            either={at: some for at, some in self.either.items() if not rows[at[0]]},
            wanted=np.where(chosen, end, self.ids),
        )


class Sequences:
    """Makes batches; holds the token ids of every word and phrase."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        adjectives, nouns = word_lists()
        # Words as they appear inside a line, where the pieces depend on their neighbours.
        self.adjectives = [encode("line " + word)[1:] for word in adjectives]
        self.nouns = [encode("-" + word) for word in nouns]
        vocabulary = tokenizer.get_vocab()
        # Any token of several characters, spelled with the byte tokens of its characters.
        self.spelled = {
            index: [vocabulary[character] for character in token]
            for token, index in vocabulary.items()
            if index not in tokenizer.all_special_ids and len(token) > 1
        }
        self.digits = [encode(str(d))[0] for d in range(10)]
        self.header = encode(HEADER)
        self.line = encode("line ")
        self.bare = encode(": REGISTER_CONTENT is <")
        self.close = encode(">\n")
        before, after = QUESTION.split("{key}")
        self.ask, self.asked = encode(before), encode(after)
        start, middle, end = ANSWER.replace("{number}", "{key}").split("{key}")
        self.say, self.said, self.end = encode(start), encode(middle), encode(end)
        self.say_spaced = encode(" " + start)
        self.eos, self.pad = tokenizer.eos_token_id, tokenizer.pad_token_id

    def _word(self, ids: list[int], share: float, rng: np.random.Generator) -> list[int]:
        if share and rng.random() < share:
            return [b for i in ids for b in self.spelled.get(i, [i])]
        return ids

    def _record(self, count: int, mix: Mixture, rng: np.random.Generator) -> list[list[int]]:
        """Unique keys; half the records draw from few words, so both halves of a key matter."""
        adjectives = np.arange(len(self.adjectives))
        nouns = np.arange(len(self.nouns))
        if rng.random() < 0.5:
            few = int(rng.integers(2, 40)) + count // 8
            adjectives = rng.choice(adjectives, min(few, len(adjectives)), replace=False)
            few = int(rng.integers(2, 40)) + count // 4
            nouns = rng.choice(nouns, min(few, len(nouns)), replace=False)
        seen: dict[tuple[int, int], None] = {}
        while len(seen) < count:
            a = rng.choice(adjectives, count)
            n = rng.choice(nouns, count)
            seen.update(dict.fromkeys(zip(a.tolist(), n.tolist(), strict=True)))
            if len(seen) < count:  # the pool may be smaller than the record
                adjectives = np.append(adjectives, rng.integers(len(self.adjectives), size=2))
                nouns = np.append(nouns, rng.integers(len(self.nouns), size=2))
        keys = list(seen)[:count]
        return [
            self._word(self.adjectives[a], mix.spelled, rng)
            + self._word(self.nouns[n], mix.spelled, rng)
            for a, n in keys
        ]

    def _row(
        self, mix: Mixture, rng: np.random.Generator
    ) -> tuple[list[int], np.ndarray, list[bool], list[int]]:
        """Ids, positions, loss flags and answer numbers of one sequence."""
        header = self.header if mix.length >= 512 and rng.random() < mix.header else []
        verbatim = rng.random() < mix.verbatim
        official = not verbatim and rng.random() < mix.official
        share = 0.5 if verbatim else mix.questions
        room = int((mix.length - len(header)) * (1 - share))
        keys = self._record(max(2, room // 9), mix, rng)
        numbers = [
            [self.digits[int(d)] for d in str(n)]
            for n in rng.integers(1, MAX_NUMBER + 1, len(keys)).tolist()
        ]
        ids: list[int] = list(header)
        starts: list[int] = []
        count = 0
        for key, number in zip(keys, numbers, strict=True):
            if len(ids) - len(header) + len(key) + len(number) + 3 > room and count >= 2:
                break
            starts.append(len(ids))
            ids += self.line + key + self.bare + number + self.close
            count += 1
        loss = [False] * len(ids)
        answer = [-1] * len(ids)
        order = range(count) if verbatim else rng.permutation(count).tolist()
        asked = 0
        while len(ids) < mix.length:
            for which in order:
                key, number = keys[which], numbers[which]
                starts.append(len(ids))
                if official:
                    # Some callers strip the prompt, and the space then opens the answer.
                    spaced = rng.random() < 0.1
                    given = self.ask + key + (self.asked[:-1] if spaced else self.asked)
                    told = (self.say_spaced if spaced else self.say) + key + self.said
                    tail = [*self.end, self.eos]
                    free = [False] * len(given) + [True] * (len(told) + len(number) + len(tail))
                    ids += given + told + number + tail
                    before, after = len(given) + len(told), len(tail) - 1
                else:
                    told = self.line + key + self.bare
                    free = [verbatim] * len(told) + [True] * (len(number) + 1)
                    ids += told + number + self.close
                    before, after = len(told), 0
                loss += free
                # The closing token counts as part of the number: it ends it.
                answer += [-1] * before + [asked] * (len(number) + 1) + [-1] * after
                asked += 1
                if len(ids) >= mix.length:
                    break
        if len(ids) > mix.length:  # the last answer is cut: keep its loss, do not count it
            answer = [-1 if a == asked - 1 else a for a in answer]
        positions = np.arange(mix.length)
        if mix.gaps and rng.random() < mix.gaps:
            used = [s for s in starts if s < mix.length]
            extra = int(np.exp(rng.uniform(0, np.log(max(mix.span - mix.length, 2)))))
            if rng.random() < 0.5:
                extra = int(rng.uniform(0, mix.span - mix.length))
            # Uneven gaps: some lines sit close together, others far apart.
            jumps = rng.exponential(1.0, len(used)) ** rng.choice([1.0, 3.0])
            jumps = np.floor(jumps / jumps.sum() * extra).astype(np.int64)
            step = np.zeros(mix.length, dtype=np.int64)
            step[used] = jumps
            positions = positions + np.cumsum(step)
        cut = mix.length
        return ids[:cut], positions, loss[:cut], answer[:cut]

    def batch(self, mix: Mixture, rng: np.random.Generator) -> Batch:
        rows = [self._row(mix, rng) for _ in range(mix.rows)]
        ids, positions, loss, answer = (np.array(part) for part in zip(*rows, strict=True))
        # Numbers of answers are made unique over the batch.
        answer = np.where(answer >= 0, answer + np.arange(mix.rows)[:, None] * mix.length, -1)
        return Batch(ids, positions, loss, answer)
