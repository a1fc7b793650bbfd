"""LongEval records with many questions about each, for the benchmarks of compressed documents."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvsketch.evaluation.runner.longeval_cases import QUESTION, generate_cases

CasesOption = Annotated[
    Path | None,
    typer.Option(help="LongEval's own file. Default: generated."),
]
LinesOption = Annotated[int, typer.Option(help="Lines per generated record.")]
CountOption = Annotated[int, typer.Option(help="Records.")]
AskedOption = Annotated[int, typer.Option(help="Questions per record.")]
OutOption = Annotated[Path | None, typer.Option(help="Also write the JSON here.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")]

_LINE = re.compile(r"line (\S+): REGISTER_CONTENT is <(\d+)>\n")


@dataclass(frozen=True)
class Record:
    """A LongEval record with its questions.

    Attributes:
        text: the record, up to the question.
        questions: the questions, about evenly spaced lines.
        numbers: the right numbers.
        leads: each question with its answer, up to the number.
    """

    text: str
    questions: list[str]
    numbers: list[str]
    leads: list[str]

    def halves(self) -> tuple[str, str]:
        """The text cut in two between lines, about in the middle."""
        starts = [match.start() for match in _LINE.finditer(self.text)]
        at = starts[len(starts) // 2]
        return self.text[:at], self.text[at:]

    def right(self, answers: list[str]) -> int:
        """The number of answers that contain the right number."""
        pairs = zip(self.numbers, answers, strict=True)
        return sum(f"<{number}>" in answer for number, answer in pairs)


def records(cases: Path | None, lines: int, count: int, asked: int, seed: int) -> list[Record]:
    """The first records of a file in LongEval's own format, or generated ones.

    Args:
        asked: the number of questions about each record.
    """
    if cases is None:
        prompts = [case["prompt"] for case in generate_cases(lines, count, seed)]
    else:
        with cases.open(encoding="utf-8") as file:
            prompts = [json.loads(line)["prompt"] for line in file][:count]
    found = []
    for prompt in prompts:
        text = prompt[: prompt.index("\nNow the record is over")]
        pairs = _LINE.findall(text)
        some = [pairs[i * len(pairs) // asked] for i in range(asked)]
        questions = [QUESTION.format(key=key)[1:] for key, _ in some]
        leads = [
            q + f"The <REGISTER_CONTENT> in line {key} is <"
            for q, (key, _) in zip(questions, some, strict=True)
        ]
        found.append(Record(text, questions, [number for _, number in some], leads))
    return found
