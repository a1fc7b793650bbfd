"""Training sequences of the spread model as token ids: documents, and questions about them.

Every batch is a function of (seed, step), as in `data`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from transformers import PreTrainedTokenizerBase

from training.data import Batch
from training.ruler_documents import AGAIN, KINDS, Document, Documents, Part

EVEN = (1.0,) * len(KINDS)


@dataclass(frozen=True)
class Mixture:
    """What the sequences of one stage look like."""

    length: int  # tokens per sequence
    rows: int  # sequences per step
    echoes: float = 0.0  # share of rows of random words that are repeated
    bags: float = 0.0  # share of rows of random words that are listed without repeating any
    verbatim: float = 0.0  # share of documents that are repeated instead of asked about
    kinds: tuple[float, ...] = EVEN  # weight of each of `KINDS`
    questions: float = 0.4  # share of the tokens spent on questions, where there are that many
    whole: float = 0.5  # share of rows with a single document
    least: int = 64  # tokens of the shortest document
    gaps: float = 0.0  # share of rows with random position gaps between sentences
    span: int = 0  # largest position that gaps reach
    spelled: float = 0.02  # share of key words that nobody knows
    listed: float = 0.0  # share of the texts of several keys that are asked for in lists
    firsts: float = 0.0  # share of the texts of chains that are asked for first names only


class _Row:
    """Tokens read so far, and what is predicted of them."""

    def __init__(self, bos: int) -> None:
        self.ids: list[int] = [bos]
        self.loss: list[bool] = [False]
        self.answer: list[int] = [-1]
        self.either: dict[int, list[int]] = {}
        self.jumps: dict[int, int] = {}  # of the position, before a token
        self.kinds: list[str] = []  # of every counted answer


class Sequences:
    """Makes batches."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = tokenizer.backend_tokenizer
        self.encode = lambda text: backend.encode(text, add_special_tokens=False).ids
        self.first = lru_cache(maxsize=20_000)(lambda text: self.encode(text)[0])
        self.documents = Documents()
        self.words = range(len(tokenizer.all_special_ids), len(tokenizer))
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        ends = [self.encode(text)[0] for text in (". ", ".\nVAR", ">\n", "\n", "\n\n", ", ")]
        self.ends = np.array([*ends, self.eos])

    def _add(self, row: _Row, parts: list[Part]) -> None:
        for part in parts:
            ids = self.encode(part.text)
            if part.either:
                row.either[len(row.ids)] = [ids[0], *map(self.first, part.either)]
            row.ids += ids
            row.loss += [part.loss] * len(ids)
            row.answer += [len(row.kinds) if part.kind else -1] * len(ids)
            if part.kind:
                row.kinds.append(part.kind)

    def _end(self, row: _Row) -> None:
        row.ids.append(self.eos)
        row.loss.append(True)
        row.answer.append(-1)

    def _document(self, row: _Row, mix: Mixture, kind: str, size: int, rng: random.Random) -> None:
        """Adds a document and questions, of ``size`` tokens where it has questions enough."""
        verbatim = rng.random() < mix.verbatim
        share = 0.5 if verbatim else mix.questions
        # A list of words has one question, and few tokens are spent on it.
        room = size - 50 if kind == "counts" and not verbatim else int(size * (1 - share))
        firsts = kind == "chains" and mix.firsts > 0 and rng.random() < mix.firsts
        made = "firsts" if firsts else kind
        if kind == "several" and mix.listed > 0 and rng.random() < mix.listed:
            made, room = "list", int(size * 0.45)
        document: Document = self.documents.make(made, max(room, 24), rng, mix.spelled)
        end = len(row.ids) + size
        if verbatim:
            copies = [Part(unit + document.joint, True, "copies") for unit in document.units]
            self._add(row, [Part(document.text), Part(AGAIN), *copies])
            self._end(row)
            return
        self._add(row, [*document.before, Part(document.text)])
        for question in document.questions:
            self._add(row, question)
            if not firsts:
                self._end(row)
            if len(row.ids) >= end:
                break

    def _echo(self, row: _Row, length: int, rng: random.Random) -> None:
        """Random tokens again and again: nothing but copying predicts them."""
        period = int(2 * (length / 4) ** rng.random())
        some = [rng.choice(self.words) for _ in range(period)]
        row.ids += (some * (length // period + 1))[: length - 1]
        row.loss = [at > period for at in range(length)]
        row.answer = [at // 4 if at > period else -1 for at in range(length)]
        row.kinds = ["echoes"] * length

    def _bags(self, row: _Row, length: int, rng: random.Random) -> None:
        """Random tokens, then in any order those that came most often, each once."""
        begin, ask, space = (self.encode(text)[0] for text in ("\n\n", "\n", " "))
        while len(row.ids) < length:
            wanted, times = rng.randint(2, 10), rng.choice([1, 1, 2, 3, 4])
            others = 0 if times == 1 else rng.randint(1, 2 * wanted)
            drawn = rng.sample(self.words, wanted + others)
            entries = drawn[:wanted] * times + drawn[wanted:]
            rng.shuffle(entries)
            row.ids += [begin, *(i for word in entries for i in (word, space)), ask]
            row.jumps[len(row.ids) - 1] = rng.randint(40, 400)
            for i, word in enumerate(drawn[:wanted]):
                row.either[len(row.ids) + 1] = drawn[i:wanted]
                row.ids += [space, word]
            row.ids.append(self.eos)
            read, said = 2 * len(entries) + 2, 2 * wanted
            row.loss += [False] * read + [True] * (said + 1)
            row.answer += [-1] * read
            for _ in range(wanted):
                row.answer += [-1, len(row.kinds)]
                row.kinds.append("bags")
            row.answer.append(-1)

    def _row(self, mix: Mixture, rng: random.Random) -> _Row:
        row = _Row(self.bos)
        draw = rng.random()
        if draw < mix.echoes:
            self._echo(row, mix.length, rng)
            return row
        if draw < mix.echoes + mix.bags:
            self._bags(row, mix.length, rng)
            return self._cut(row, mix.length)
        whole = rng.random() < mix.whole
        while (left := mix.length - len(row.ids)) > 0:
            size = left
            if not whole and left > 2 * mix.least:
                size = int(mix.least * (left / mix.least) ** rng.random())
            kind = rng.choices(KINDS, mix.kinds)[0]
            self._document(row, mix, kind, size, rng)
        return self._cut(row, mix.length)

    @staticmethod
    def _cut(row: _Row, length: int) -> _Row:
        cut = row.answer[length - 1]  # the last answer may be cut: it is not counted
        row.ids, row.loss = row.ids[:length], row.loss[:length]
        row.answer = [-1 if a == cut else a for a in row.answer[:length]]
        row.either = {at: ids for at, ids in row.either.items() if at < length}
        return row

    def _positions(self, row: _Row, mix: Mixture, rng: np.random.Generator) -> np.ndarray:
        positions = np.arange(mix.length)
        if row.jumps:
            step = np.zeros(mix.length, dtype=np.int64)
            for at, jump in row.jumps.items():
                step[at:] += jump
            return positions + step
        ids = np.array(row.ids)
        if rng.random() >= mix.gaps:
            return positions
        starts = np.flatnonzero(np.isin(ids[:-1], self.ends)) + 1
        if rng.random() < 0.5:
            extra = int(rng.uniform(0, mix.span - mix.length))
        else:
            extra = int(np.exp(rng.uniform(0, np.log(max(mix.span - mix.length, 2)))))
        # Uneven gaps: some sentences sit close together, others far apart.
        jumps = rng.exponential(1.0, len(starts)) ** rng.choice([1.0, 3.0])
        step = np.zeros(mix.length, dtype=np.int64)
        step[starts] = np.floor(jumps / max(jumps.sum(), 1e-9) * extra).astype(np.int64)
        return positions + np.cumsum(step)

    def batch(self, mix: Mixture, rng: np.random.Generator) -> Batch:
        draws = random.Random(int(rng.integers(2**62)))
        rows = [self._row(mix, draws) for _ in range(mix.rows)]
        ids = np.array([row.ids for row in rows])
        positions = np.array([self._positions(row, mix, rng) for row in rows])
        # Numbers of answers are made unique over the batch.
        answer = np.array([row.answer for row in rows])
        answer = np.where(answer >= 0, answer + np.arange(mix.rows)[:, None] * mix.length, -1)
        return Batch(
            ids,
            positions,
            np.array([row.loss for row in rows]),
            answer,
            {(r, at): some for r, row in enumerate(rows) for at, some in row.either.items()},
            {r * mix.length + i: k for r, row in enumerate(rows) for i, k in enumerate(row.kinds)},
        )
