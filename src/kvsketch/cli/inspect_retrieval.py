"""`kvsketch inspect --retrieval`: which heads of a model read the answers of a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvsketch.errors import InputError, unknown_name
from kvsketch.evaluation.report.terminal import tables_within
from kvsketch.evaluation.runner.files import check_folder, try_folder
from kvsketch.writing import check_replaced, save_bytes

#: options of `kvsketch inspect` that only `--retrieval` uses, and those that it does not use
_OWN, _OTHERS = ("task", "lines", "length", "cases"), ("files", "layers", "limit")
_FILE = "retrieval.json"


def check_given(retrieval: bool, given: Mapping[str, Any]) -> None:
    """Raise InputError for an option that has no effect."""
    for name in _OTHERS if retrieval else _OWN:
        if name in given:
            shown = "FILE" if name == "files" else f"--{name}"
            raise InputError(
                f"{shown} has no effect {'with' if retrieval else 'without'} --retrieval"
            )
    if retrieval:
        name = "length" if given.get("task", "longeval") == "longeval" else "lines"
        if name in given:
            raise InputError(f"--{name} has no effect on --task {given.get('task', 'longeval')}")


def check_result(out: Path | None, name: str, command: str) -> None:
    """Raise InputError, before any work, where a result cannot be written into a folder."""
    if out is not None:
        try_folder(out, "--out")
        begins = rb'\{"command": "%s",' % command.encode()
        check_replaced(out / name, "--out", begins, f"a result of `kvsketch {command}`")


def save_result(result: Mapping[str, Any], path: Path) -> None:
    """Write what was measured as JSON."""
    from kvsketch.evaluation.report.report import dumps

    save_bytes(path, f"{dumps(result)}\n".encode(), str(path))


def bar() -> Progress:
    """A progress bar on standard error, which is gone in the end."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True)


def run_retrieval(
    model_name: str,
    *,
    task: str = "longeval",
    lines: int = 200,
    length: int = 2000,
    cases: int = 8,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    out: Path | None = None,
) -> dict[str, Any]:
    """What the command measures, shows and, where ``out`` is given, writes there.

    Args:
        task: "longeval", "needle" or a subtask of RULER.
        lines: of a LongEval record.
        length: tokens of any other task.
        cases: how many of them are generated from ``seed``.

    Returns:
        ``retrieval.measure_retrieval``'s result with what was asked for, the versions and the
        hardware.

    Raises:
        InputError, UnsupportedError: as ``measure_retrieval``; an unknown task, an option out of
            range or a folder that cannot be written, before the weights are loaded.
    """
    from kvsketch.evaluation.report.report import environment
    from kvsketch.evaluation.runner import loading
    from kvsketch.evaluation.runner.settings import Settings
    from kvsketch.evaluation.tasks import Options, make_tasks
    from kvsketch.evaluation.tasks.ruler import SUBTASKS

    allowed = ("longeval", "needle", *SUBTASKS)
    if task not in allowed:
        raise unknown_name("task", task, allowed)
    for name, value in (("--cases", cases), ("--lines", lines), ("--length", length)):
        if value < 1:
            raise InputError(f"{name} {value} must be at least 1")
    Settings(device=device, dtype=dtype)  # raises
    check_result(out, _FILE, "inspect --retrieval")
    if task == "longeval":
        options = Options(lines=[lines], num_cases=cases, seed=seed)
    elif task == "needle":
        depths = [(i + 0.5) / cases for i in range(cases)]
        options = Options(lengths=[length], depths=depths, form="line", seed=seed)
    else:
        options = Options(lengths=[length], subtasks=[task], num_cases=cases, seed=seed)
    (made,) = make_tasks([task if task in allowed[:2] else "ruler"], options)
    folder = loading.resolve_model(model_name)

    # The following imports torch and transformers; all checks that do not need them are done.
    from kvsketch.evaluation.inspection import measures, retrieval
    from kvsketch.evaluation.inspection.inspection import choose_layers
    from kvsketch.hf.models import kv_heads_of

    loading.check_device(device)
    config = loading.load_config(folder)
    heads = sum(kv_heads_of(config, layer) for layer in choose_layers(config))
    if out is not None:
        measures.require("matplotlib")
        check_folder(out, "--out")
    tokenizer = loading.load_tokenizer(folder)
    model = loading.load_model(folder, device, dtype)
    with bar() as progress:
        shown = progress.add_task("removing heads", total=retrieval.steps(cases, heads))
        measured = retrieval.measure_retrieval(
            model, tokenizer, made, advance=lambda: progress.advance(shown)
        )
    size = {"lines": lines} if task == "longeval" else {"length": length}
    result = {
        "command": "inspect --retrieval",
        "model": model_name,
        "task": task,
        **size,
        "seed": seed,
        "device": device,
        "dtype": dtype,
        **measured,
        **environment(),
    }
    if out is not None:
        from kvsketch.evaluation.inspection.figures import draw_retrieval

        draw_retrieval(result, out)
        save_result(result, out / _FILE)
    return result


def retrieval_tables(result: Mapping[str, Any], width: int = 80) -> Iterator[Group]:
    """A row for each KV head."""
    yield from tables_within(
        width,
        f"largest share of attention on the evidence; without the head ({result['accuracy']:.0%} "
        f"with all)",
        ("layer", "KV head", "question", "answer", "accuracy", "nats more"),
        [
            [
                str(row["layer"]),
                str(row["head"]),
                f"{row['question']:.2f}",
                f"{row['answer']:.2f}",
                f"{row['removed']:.2f}",
                f"{row['restricted']:+.3f}",
            ]
            for row in result["heads"]
        ],
        names=2,
    )


def said(result: Mapping[str, Any]) -> Sequence[str]:
    """What follows from a result, in sentences."""
    from kvsketch.evaluation.inspection.retrieval import LEFT, READS

    worst = min(result["heads"], key=lambda row: row["removed"])
    layers = ", ".join(map(str, result["layers_that_read"])) or "none"
    whole = result["whole"]
    return (
        f"Without one KV head, at worst layer {worst['layer']}, head {worst['head']}: "
        f"{worst['removed']:.2f} of the answers are right, {result['accuracy']:.2f} with all.",
        f"Layers in which a head puts {READS} of a token's attention on the evidence: {layers}. "
        f"A token of the question does so in {result['question_reads']:.0%} of the cases.",
        f"{whole['heads']} of {len(result['heads'])} KV heads ({whole['share']:.0%}) that see all "
        f"tokens are enough for {LEFT:.0%} of the accuracy, where the others see the first "
        f"{result['sink']} and the last {result['recent']}.",
    )
