"""The tasks by name, and how a command's options become cases. To add one: write its file, add a
line here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from kvsketch.errors import InputError, unknown_name
from kvsketch.evaluation.tasks.base import Case, Task

__all__ = ["TASKS", "Case", "Options", "Task", "make_tasks"]


@dataclass(frozen=True)
class Options:
    """What tasks are made from; each looks at its own part.

    Attributes:
        cases: longeval: case files instead of generated cases.
        lines: longeval, and texts of form "line": record lengths; sessions: of all records.
        num_cases: generated cases for each length, depth or subtask.
        limit: first so many of each file, data set, subtask or length.
        seed: of generated cases.
        data: longbench: folder; needle, ruler: folder of haystack texts; texts: ``load_texts``.
        datasets: longbench; none: all.
        subtasks: ruler; none: all.
        lengths: needle, ruler, texts: tokens.
        depths: needle: 0 to 1.
        form: needle: what is hidden; sessions, texts: what they are. None: "sandwich",
            "documents", "text".
    """

    cases: Sequence[Path] = ()
    lines: Sequence[int] | None = None
    num_cases: int | None = None
    limit: int | None = None
    seed: int = 0
    data: Path | None = None
    datasets: Sequence[str] = ()
    subtasks: Sequence[str] = ()
    lengths: Sequence[int] = (1000, 1800)
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    form: str | None = None

    def count(self, usual: int) -> int:
        """Generated cases of each kind: so many, unless told."""
        most = self.num_cases or usual
        return most if self.limit is None else min(most, self.limit)

    def __post_init__(self) -> None:
        for name, value in (("--limit", self.limit), ("--num-cases", self.num_cases)):
            if value is not None and value < 1:
                raise InputError(f"{name} {value} must be at least 1")


def _longeval(options: Options) -> Task:
    from kvsketch.evaluation.runner import longeval
    from kvsketch.evaluation.tasks.longeval import LongEval

    if options.cases:
        if options.lines is not None or options.num_cases is not None:
            raise InputError("--cases reads files and --lines/--num-cases generate: give one")
        return LongEval(longeval.load_case_files(options.cases, options.limit))
    return LongEval(longeval.make_cases(options.lines or [200], options.count(20), options.seed))


def _longbench(options: Options, extended: bool = False) -> Task:
    from kvsketch.evaluation.tasks.longbench import LongBench
    from kvsketch.evaluation.tasks.longbench_prompts import DATASETS

    every = [name for name, found in DATASETS.items() if found.extended or not extended]
    return LongBench(options.datasets or every, options.data, extended, options.limit)


def _needle(options: Options) -> Task:
    from kvsketch.evaluation.tasks.needle import Needle

    return Needle(
        options.lengths,
        options.depths,
        num_cases=options.num_cases or 1,
        form=options.form or "sandwich",
        haystack=options.data,
        seed=options.seed,
        limit=options.limit,
    )


def _ruler(options: Options) -> Task:
    from kvsketch.evaluation.tasks.ruler import SUBTASKS, Ruler

    return Ruler(
        options.subtasks or list(SUBTASKS),
        options.lengths,
        num_cases=options.count(10),
        haystack=options.data,
        seed=options.seed,
    )


def _texts(options: Options, name: str) -> Task:
    from kvsketch.evaluation.tasks.texts import Texts

    return Texts(
        name,
        options.lengths,
        num_cases=min((n for n in (options.num_cases, options.limit) if n), default=None),
        form=options.form or "text",
        data=None if options.data is None else str(options.data),
        lines=options.lines or [200],
        seed=options.seed,
    )


def _sessions(options: Options) -> Task:
    from kvsketch.evaluation.tasks.sessions import Sessions

    return Sessions(
        options.form or "documents",
        options.lines or [330],
        num_cases=options.count(10),
        seed=options.seed,
    )


TASKS: dict[str, Callable[[Options], Task]] = {
    "longeval": _longeval,
    "longbench": _longbench,
    "longbench_e": partial(_longbench, extended=True),
    "needle": _needle,
    "ruler": _ruler,
    "sessions": _sessions,
}

_LONGBENCH = {"data", "datasets", "limit"}
#: the options that each task uses
USED: dict[str, set[str]] = {
    "longeval": {"cases", "lines", "num_cases", "limit", "seed"},
    "longbench": _LONGBENCH,
    "longbench_e": _LONGBENCH,
    "needle": {"lengths", "depths", "num_cases", "limit", "form", "data", "seed"},
    "ruler": {"subtasks", "lengths", "num_cases", "limit", "data", "seed"},
    "sessions": {"lines", "num_cases", "limit", "form", "seed"},
}
for _name in ("kl", "perplexity", "attention_error"):
    TASKS[_name] = partial(_texts, name=_name)
    USED[_name] = {"lengths", "num_cases", "limit", "form", "data", "lines", "seed"}


def _check_used(chosen: Sequence[str], given: Collection[str]) -> None:
    """Raise InputError if none of the chosen tasks uses an option that was given."""
    for option in (field.name for field in fields(Options) if field.name in given):
        if not any(option in USED[task] for task in chosen):
            users = ", ".join(task for task in TASKS if option in USED[task])
            raise InputError(
                f"--{option.replace('_', '-')} has no effect on {', '.join(chosen)}; the tasks "
                f"that use it: {users}"
            )


def make_tasks(names: Sequence[str], options: Options, given: Collection[str] = ()) -> list[Task]:
    """Tasks by name. What is a file, and no task, is a further case file.

    Args:
        given: the names of the options that the user gave.

    Raises:
        InputError: an unknown task, an option that no chosen task uses, or anything a task refuses.
    """
    chosen = [name for name in names if name in TASKS or not Path(name).is_file()]
    files = [Path(name) for name in names if name not in chosen]
    for name in chosen:
        if name not in TASKS:
            raise unknown_name("task", name, TASKS)
    if not chosen:
        raise InputError(f"no task given; allowed: {', '.join(TASKS)}")
    _check_used(list(dict.fromkeys(chosen)), given)
    if files:
        if not options.cases:
            raise InputError(f"{files[0]} is not a task; case files follow --cases")
        options = Options(**{**options.__dict__, "cases": [*options.cases, *files]})
    return [TASKS[name](options) for name in dict.fromkeys(chosen)]
