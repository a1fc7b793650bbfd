"""LongBench's metrics, one answer at a time, each in [0, 1] (the official tables report 100 times
the mean). Source: Bai et al., arXiv:2308.14508, and ``LongBench/metrics.py`` of THUDM/LongBench,
whose results these equal, oddities included."""

from __future__ import annotations

import importlib
import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from kvsketch.errors import InputError, UnsupportedError

Metric = Callable[[str, str, Sequence[str]], float]

# What the answer of a retrieval data set has to say.
PARAGRAPH: Mapping[str, str] = {"retrieval": r"Paragraph (\d+)", "retrieval_zh": r"段落(\d+)"}

_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "qa_f1_zh": ("jieba",),
    "rouge": ("rouge",),
    "rouge_zh": ("jieba", "rouge"),
    "code_sim": ("rapidfuzz.fuzz",),
}
_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿"  # noqa: RUF001
    "–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)


def require(metric: str) -> None:
    """Import what a metric needs, so that it is missed before a model runs, not after.

    Raises:
        UnsupportedError: a package is not installed.
    """
    for name in _PACKAGES.get(metric, ()):
        _package(name)


def qa_f1(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 of the bags of words, without case, punctuation and articles."""
    return _f1(_english(prediction), _english(answer))


def qa_f1_zh(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 of the bags of words as jieba cuts them, without case and punctuation."""
    return _f1(_chinese(prediction), _chinese(answer))


def rouge(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 of ROUGE-L, summary level, by the ``rouge`` package.

    The official code takes any failure for a 0. There are two: a text without a sentence, and a
    pair of sentences of about a thousand words together, too deep for the package's recursion.
    """
    scorer = _package("rouge").Rouge(metrics=["rouge-l"], stats=["f"])
    try:
        return float(scorer.get_scores(prediction, answer)[0]["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def rouge_zh(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """``rouge`` of the words as jieba cuts them. Only ``.`` ends a sentence, not ``。``."""
    return rouge(" ".join(_cut(prediction)), " ".join(_cut(answer)))


def classification(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """1 / how many classes the prediction names, if the answer is among them."""
    named = [name for name in classes if name in prediction]
    # Official: a class whose name is part of the answer's does not count, but the loop deletes
    # from the list it walks, so the class after a deleted one is never looked at.
    at = 0
    while at < len(named):
        if named[at] in answer and named[at] != answer:
            del named[at]
        at += 1
    return 1.0 / len(named) if answer in named else 0.0


def retrieval(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Share of the prediction's numbers that are the answer's paragraph.

    Raises:
        InputError: the answer does not say "Paragraph <number>".
    """
    return _share(prediction, _paragraph("retrieval", answer))


def retrieval_zh(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """As ``retrieval``, with "段落<number>"."""
    return _share(prediction, _paragraph("retrieval_zh", answer))


def count(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Share of the prediction's numbers that are the answer, digit by digit."""
    return _share(prediction, answer)


def code_sim(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the answer to the prediction's first line that is neither comment nor fence:
    2 LCS / (sum of lengths), in whole hundredths.

    The official code takes it from ``fuzzywuzzy``, which gives this with python-Levenshtein
    installed; without, it warns and falls back on ``difflib``, whose ratio is lower or equal.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not re.search("[`#]|//", line)), "")
    if line == answer:
        return 1.0
    if not line or not answer:
        return 0.0
    return float(round(_package("rapidfuzz.fuzz").ratio(line, answer))) / 100


METRICS: Mapping[str, Metric] = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge": rouge,
    "rouge_zh": rouge_zh,
    "classification": classification,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_zh,
    "count": count,
    "code_sim": code_sim,
}


def _f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    same = (Counter(prediction) & Counter(answer)).total()
    return 2 * same / (len(prediction) + len(answer)) if same else 0.0


def _english(text: str) -> list[str]:
    """Words, normalised as for SQuAD: articles go after punctuation, so "a-b" is "ab"."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _chinese(text: str) -> list[str]:
    """Words. Normalised one by one after the cut: punctuation and case do matter to jieba."""
    drop = set(string.punctuation + _CHINESE_PUNCTUATION)
    words = ("".join(c for c in word.lower() if c not in drop) for word in _cut(text))
    return [word for word in ("".join(word.split()) for word in words) if word]


def _share(prediction: str, number: str) -> float:
    numbers: list[str] = re.findall(r"\d+", prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def _paragraph(metric: str, answer: str) -> str:
    found = re.search(PARAGRAPH[metric], answer)
    if not found:
        raise InputError(f"answer={answer!r} must match {PARAGRAPH[metric]!r}")
    return found[1]


def _cut(text: str) -> list[str]:
    return list(_jieba().cut(text))


@cache
def _jieba() -> Any:
    jieba = _package("jieba")
    jieba.setLogLevel(logging.WARNING)  # it tells stderr how long its dictionary took
    return jieba


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"this LongBench metric needs the package {name.split('.')[0]}: "
            "pip install 'kvsketch[evaluation]'"
        ) from error
