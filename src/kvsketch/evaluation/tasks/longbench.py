"""LongBench and LongBench-E: long questions of many kinds, in English, Chinese and code.

Source: Bai et al., arXiv:2308.14508; prompts, truncation and scores are those of the official
code, THUDM/LongBench (``pred.py``, ``eval.py``, ``metrics.py``), commit 2e00731.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from kvsketch.errors import InputError, at_least, unknown_name
from kvsketch.evaluation.runner import hub
from kvsketch.evaluation.tasks.base import Case, Task
from kvsketch.evaluation.tasks.longbench_metrics import METRICS, PARAGRAPH, require
from kvsketch.evaluation.tasks.longbench_prompts import DATASETS

if TYPE_CHECKING:
    from kvsketch.evaluation.runner.encoding import EncodedCase, Encoder

HUB = "zai-org/LongBench"
BUCKETS = ("0-4k", "4-8k", "8k+")  # words (Chinese: characters), by the records' own count


class LongBench(Task):
    """Cases of some of its data sets.

    A case's ``details`` hold what else the official run needs: ``all_classes``, None where the
    answer is not one of a list; ``chat``, False where a chat model is asked without its chat
    template; ``stop``, strings that end an answer (not as its first token).

    Args:
        datasets: names in ``DATASETS``.
        data: folder with one ``<name>.jsonl`` each (``<name>_e.jsonl`` for LongBench-E), as in the
            published ``data.zip``; None: that file, from the Hugging Face Hub or its local cache.
        extended: LongBench-E, whose results are told by length.
        limit: only the first so many of each data set; None: all.
        chat: False asks every chat model without its chat template.

    Raises:
        InputError: an unknown or repeated name, or one that LongBench-E does not have.
        UnsupportedError: a metric's package is not installed.
    """

    name: ClassVar[str] = "longbench"

    def __init__(
        self,
        datasets: Sequence[str],
        data: Path | None,
        extended: bool = False,
        limit: int | None = None,
        chat: bool = True,
    ) -> None:
        if data is not None and not Path(data).is_dir():
            raise InputError(f"data={str(data)!r} is not a folder of data sets, NAME.jsonl each")
        # A string is a sequence too, of letters.
        if isinstance(datasets, str) or not datasets or len(set(datasets)) < len(datasets):
            raise InputError(f"datasets={datasets!r} must be names, at least one, each once")
        for name in datasets:
            if name not in DATASETS:
                raise unknown_name("datasets", name, DATASETS)
            if extended and not DATASETS[name].extended:
                allowed = ", ".join(sorted(n for n, d in DATASETS.items() if d.extended))
                raise InputError(f"datasets={name!r} is not in LongBench-E. Allowed: {allowed}.")
            require(DATASETS[name].metric)
        self.datasets = tuple(datasets)
        self.data = None if data is None else Path(data)
        self.extended = extended
        self.chat = chat
        self.limit = None if limit is None else at_least("limit", limit, 1)

    def cases(self) -> list[Case]:
        return [case for name in self.datasets for case in self._of(name)]

    def score(self, case: Case, text: str) -> float:
        """The best over the answers. Where the prompt shows examples, only the first line of
        ``text`` counts: a model goes on with examples of its own."""
        dataset = DATASETS[case.group["dataset"]]
        if dataset.few_shot:
            text = text.lstrip("\n").split("\n")[0]
        metric, classes = METRICS[dataset.metric], case.details["all_classes"] or ()
        return max(metric(text, answer, classes) for answer in case.answers)

    def encoded(self, case: Case, encoder: Encoder, limit: int, new_tokens: int) -> EncodedCase:
        """The case, truncated. Encoded again it may have more tokens than ``limit``: where no
        ``--max-prompt-tokens`` says otherwise, the limit is then lowered until it fits the model.

        Raises:
            InputError: it does not fit.
        """
        if encoder.settings.max_prompt_tokens is None:
            over = -1
            while over and limit > 2:
                fitted = self.fitted(case, encoder.tokenizer, limit)
                chat = fitted.details["chat"]
                over = encoder.excess(fitted.context, fitted.question, case.where, new_tokens, chat)
                limit -= over
        return super().encoded(case, encoder, limit, new_tokens)

    def fitted(self, case: Case, tokenizer: Any, limit: int) -> Case:
        """The official truncation: the first and the last ``limit // 2`` tokens of the prompt, as
        text, without special tokens.

        Encoded again, it may have a few tokens more than ``limit``: where the cut goes through a
        character, and by what a chat template adds. The official limits leave 4 to 15% for that.

        The question stays apart from the context; if the cut goes through the question,
        everything is context.

        Raises:
            InputError: ``limit`` below 2.
        """
        half = at_least("limit", limit, 2) // 2
        ids = tokenizer(case.prompt, truncation=False, verbose=False)["input_ids"]
        if len(ids) <= limit:
            return case
        first, last = (
            tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:])
        )
        question = _kept_question(case.question, tokenizer, last)
        text = first + last
        return replace(case, context=text[: len(text) - len(question)], question=question)

    def _of(self, name: str) -> Iterator[Case]:
        file = f"{name}_e.jsonl" if self.extended else f"{name}.jsonl"
        with _opened(self.data, file) as (where, lines):
            found = 0
            for number, line in enumerate(lines, start=1):
                if found == self.limit:
                    return
                if line.strip():
                    found += 1
                    yield self._case(name, line, f"{where}:{number}")
            if not found:
                raise InputError(f"{where} is empty: it must hold one JSON object a line")

    def _case(self, name: str, line: bytes, where: str) -> Case:
        dataset = DATASETS[name]
        record = _parsed(line, where)
        answers = _strings(record, "answers", where)
        pattern = PARAGRAPH.get(dataset.metric, "")
        for answer in answers:
            if not re.search(pattern, answer):
                raise InputError(f"{where}: answers: {answer!r} must match {pattern!r}")
        classified = dataset.metric == "classification"
        classes = list(_strings(record, "all_classes", where)) if classified else None
        group = {"dataset": name}
        if self.extended:
            group["length"] = bucket(_length(record, where))
        head, tail = dataset.prompt.split("{context}")
        return Case(
            task=f"{self.name}_e/{name}" if self.extended else f"{self.name}/{name}",
            context=head + _text(record, "context", where),
            question=tail.replace("{input}", _text(record, "input", where)),
            answers=answers,
            max_new_tokens=dataset.max_new_tokens,
            group=group,
            details={
                "all_classes": classes,
                "chat": self.chat and dataset.chat,
                "stop": list(dataset.stop),
            },
            where=where,
        )


def bucket(length: int) -> str:
    """LongBench-E's group of a record of ``length`` words."""
    return BUCKETS[(length >= 4000) + (length >= 8000)]


def _kept_question(question: str, tokenizer: Any, last: str) -> str:
    """The question as ``last`` ends with it, or ""."""
    if last.endswith(question):
        return question
    # Some tokenizers give back other spaces, or drop a "</s>" in the text.
    ids = tokenizer(question, add_special_tokens=False, verbose=False)["input_ids"]
    again: str = tokenizer.decode(ids, skip_special_tokens=True)
    return again if last.endswith(again) else ""


@contextmanager
def _opened(data: Path | None, file: str) -> Iterator[tuple[str, IO[bytes]]]:
    """A data set's name for messages, and its lines."""
    if data is not None:
        try:
            stream = (data / file).open("rb")
        except OSError as error:
            raise InputError(f"data={str(data)!r}: cannot read {file}: {error.strerror}") from error
        with stream:
            yield str(data / file), stream
        return
    try:
        with zipfile.ZipFile(_archive()) as archive, archive.open(f"data/{file}") as member:
            yield f"{HUB}/data.zip/data/{file}", member
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"data.zip of {HUB} is damaged: {error}") from error


def _archive() -> Path:
    # Not through `datasets`: from version 4 it refuses data sets that, like this one, come with
    # a loading script.
    from huggingface_hub import hf_hub_download

    hub.unreachable()  # then the download fails at once
    try:
        return Path(hf_hub_download(HUB, "data.zip", repo_type="dataset"))
    except OSError as error:
        reason = hub.reason_of(error)
        raise InputError(
            f"data=None: data.zip of {HUB} could not be fetched from the Hugging Face Hub: "
            f"{reason}; unpack it somewhere and give that folder with --data"
        ) from error


def _parsed(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise InputError(f"{where} must be a JSON object, not {type(record).__name__}")
    return record


def _text(record: Mapping[str, Any], name: str, where: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise _wrong(record, name, "a string", where)
    return value


def _strings(record: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = record.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise _wrong(record, name, "a list of strings, at least one", where)
    return tuple(value)


def _length(record: Mapping[str, Any], where: str) -> int:
    value = record.get("length")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(record, "length", "an int >= 0", where)
    return value


def _wrong(record: Mapping[str, Any], name: str, allowed: str, where: str) -> InputError:
    if name not in record:
        return InputError(f"{where}: {name} is missing; it must be {allowed}")
    shown = repr(record[name])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return InputError(f"{where}: {name}={shown} must be {allowed}")
