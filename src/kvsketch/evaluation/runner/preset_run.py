"""A preset put together with what a user adds: where the cases are, the model, what is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvsketch.errors import InputError, unknown_name
from kvsketch.evaluation.runner import loading
from kvsketch.evaluation.runner.encoding import max_positions
from kvsketch.evaluation.runner.presets import Preset
from kvsketch.evaluation.runner.setups import Setup
from kvsketch.evaluation.tasks import Case, Task

LONGEVAL_CASES = "github.com/DachengLi1/LongChat, longeval/evaluation/lines/testcases"


@dataclass(frozen=True)
class PresetRun:
    """What will be run.

    Attributes:
        tasks: of the cases that are there.
        setups: of a case.
        missing: what is not there, a line each.
        notes: how the paper is read, and where this run departs from it.
    """

    preset: Preset
    tasks: Sequence[Task]
    setups: Callable[[Case], Sequence[Setup]]
    missing: Sequence[str]
    notes: Sequence[str]


def plan(
    preset: Preset,
    *,
    data: Path | None,
    cases: Sequence[Path],
    datasets: Sequence[str],
    limit: int | None,
    seeds: Sequence[int],
    max_new_tokens: int | None,
) -> PresetRun:
    """Tasks and setups of the cases that are there.

    Raises:
        InputError: none of them is, or a data set that the paper's table does not have.
    """
    if preset.task == "longeval":
        tasks, missing, notes = _longeval(preset, data, cases, datasets, limit)
    else:
        tasks, missing, notes = _longbench(preset, data, datasets, limit)
    notes = [*preset.notes, *notes]
    if limit is not None:
        notes.append(f"Only the first {limit:,} cases of each (--limit); the paper's are all.")
    if max_new_tokens is not None:
        notes.append(f"Answers of at most {max_new_tokens:,} tokens (--max-new-tokens), not the "
                     "benchmark's own lengths.")  # fmt: skip
    by_lines = {lines: preset.setups(lines, seeds) for lines in preset.methods}
    return PresetRun(
        preset, tasks, lambda case: by_lines[case.group.get("lines", 0)], missing, notes
    )


def fitted_prompts(
    plan: PresetRun, model: str, max_new_tokens: int | None
) -> tuple[PresetRun, int | None]:
    """The paper's longest prompt, or None where the model's own positions allow less; the plan
    then says so. Reads the model's configuration.

    Raises:
        KVSketchError: it cannot be had.
    """
    wanted = plan.preset.max_prompt_tokens
    if wanted is None:
        return plan, None
    answers = max(case.max_new_tokens for task in plan.tasks for case in task.cases())
    positions = max_positions(loading.load_config(loading.resolve_model(model)))
    if positions is None or positions >= wanted + (max_new_tokens or answers):
        return plan, wanted
    note = (
        f"The model has {positions:,} positions: longer prompts lose their middle there, not at "
        f"the paper's {wanted:,} tokens."
    )
    return replace(plan, notes=[*plan.notes, note]), None


Found = tuple[list[Task], list[str], list[str]]


def _longeval(
    preset: Preset,
    data: Path | None,
    cases: Sequence[Path],
    datasets: Sequence[str],
    limit: int | None,
) -> Found:
    from kvsketch.evaluation.runner import longeval
    from kvsketch.evaluation.tasks.longeval import LongEval

    if datasets:
        raise InputError(f"--datasets {','.join(datasets)}: {preset.name} has no data sets")
    files = [f"{lines}_lines.jsonl" for lines in preset.methods]
    where = f"give the folder of {', '.join(files)} with --data ({LONGEVAL_CASES})"
    if data is not None and cases:
        raise InputError(f"--data {data} and --cases {cases[0]} exclude each other: give one")
    if data is None and not cases:
        raise InputError(f"--preset {preset.name}: LongEval's official cases are not here; {where}")
    paths = list(cases)
    if data is not None:
        paths = [data / name for name in files if (data / name).is_file()]
        if not paths:
            raise InputError(f"--data {data} holds no cases of {preset.name}: {where}")
    found = longeval.load_case_files(paths, limit)
    for case in found:
        if case.lines not in preset.methods:
            allowed = ", ".join(map(str, preset.methods))
            raise InputError(
                f"{case.where}: a record of {case.lines} lines is not in {preset.name}; its lines "
                f"are {allowed}"
            )
    there = {case.lines for case in found}
    missing = [f"{n} lines: {n}_lines.jsonl is not there" for n in preset.methods if n not in there]
    return [LongEval(found)], missing, []


def _longbench(
    preset: Preset, data: Path | None, datasets: Sequence[str], limit: int | None
) -> Found:
    from kvsketch.evaluation.tasks.longbench import LongBench

    for name in datasets:
        if name not in preset.datasets:
            raise unknown_name(f"--preset {preset.name}: --datasets", name, preset.datasets)
    extended = preset.task == "longbench_e"
    of: dict[bool, list[str]] = {True: [], False: []}  # from LongBench-E's records?
    missing, notes = [], []
    for name in preset.datasets:
        file = f"{name}_e.jsonl" if extended else f"{name}.jsonl"
        if datasets and name not in datasets:
            missing.append(f"{name}: left out by --datasets")
        elif data is None or (data / file).is_file():
            of[extended].append(name)
        elif extended and (data / f"{name}.jsonl").is_file():
            of[False].append(name)
            notes.append(
                f"{name}: {file} is not there, and LongBench's own {name}.jsonl stands in for "
                "LongBench-E's records."
            )
        else:
            missing.append(f"{name}: {file} is not there")
    if not any(of.values()):
        suffix = "_e.jsonl" if extended else ".jsonl"
        named = datasets or preset.datasets
        raise InputError(
            f"--data {data} holds no records of {preset.name} ({', '.join(named)}): give the "
            f"folder of LongBench's NAME{suffix}, or no --data for the Hugging Face Hub's archive"
        )
    tasks: list[Task] = [
        LongBench(names, data, split, limit, chat=preset.chat)
        for split, names in of.items()
        if names
    ]
    return tasks, missing, notes
