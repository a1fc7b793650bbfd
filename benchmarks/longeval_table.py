"""Table 1 of SubGen (arXiv:2402.06082) on the packaged model.

    python -m benchmarks.longeval_table

The script answers the official 200, 300 and 400 line cases with the paper's methods, uniform
sampling and heavy_merge (as ``SketchCache`` runs it, and with all slots in 16 bits). The budgets
are the shares that the paper kept, 0.25 and 0.10. The question is seen when the record is
compressed, as in the paper; ``benchmarks.longeval`` has the other protocol, at equal bytes. The
results are accuracies, bytes and speeds. They are written
to docs/results/longeval.json and docs/longeval.md. All methods keep the first 4 and last 32 tokens.
H2O and k-center run a second time in the windows of their own papers (``presets``). Finished
answers are kept in build/longeval/, so that an interrupted run resumes where it stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import longeval_markdown as markdown
from benchmarks.longeval import MODEL
from kvsketch.errors import KVSketchError
from kvsketch.evaluation.report.report import report
from kvsketch.evaluation.runner.presets import SUBGEN_SHARES as PAPER_SHARES
from kvsketch.evaluation.runner.presets import h2o_window, subgen_windows
from kvsketch.evaluation.runner.progress import run_with_progress
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import Setup, make_setups
from kvsketch.evaluation.runner.sweep import Sweep
from kvsketch.evaluation.tasks import Options, make_tasks

ROOT = Path(__file__).resolve().parent.parent
OURS = ["heavy_merge", "heavy_merge+16bit"]
METHODS = ["exact", *OURS, "streaming_llm", "h2o", "kcenter", "uniform"]
QUICK = [method for method in METHODS if method not in OURS]
SMALL_SHARES = [0.25, 0.10]
#: of weights and caches: a share of the bytes is one of 16 bits a number, as real models have them
DTYPE = "bfloat16"


def setups_by_lines() -> dict[int, Sequence[Setup]]:
    """The runs for each number of lines: all methods at the share that the paper kept and at two
    smaller ones, then the papers' own windows, if they differ from the common 4 + 32 tokens."""
    return {
        lines: make_setups(METHODS, [share, *SMALL_SHARES]) + own_windows(lines, share)
        for lines, share in PAPER_SHARES.items()
    }


def own_windows(lines: int, share: float) -> list[Setup]:
    """H2O and k-center as their papers ran them. Sink's own window is 4 first tokens, with all
    others recent, which is ``streaming_llm`` in any window of 4 first tokens. k-center's recent
    tokens fit into the paper's shares only. Their number is a share of each prompt, and at 200
    lines there is another run with the same number for all prompts."""
    h2o = [make_setups([h2o_window(kept)], [kept])[0] for kept in (share, *SMALL_SHARES)]
    fixed = [f"kcenter:0:{markdown.FIXED_RECENT}"] if lines == 200 else []
    return h2o + make_setups([*subgen_windows(lines), *fixed], [share])


def case_files(data: Path) -> list[Path]:
    return [data / f"{lines}_lines.jsonl" for lines in PAPER_SHARES]


def default_data() -> Path:
    shared = Path(os.environ.get("KVSKETCH_DATA", ROOT.parent / "shared" / "data"))
    return shared / "longeval"


def again_by_lines(question: str) -> dict[int, Sequence[Setup]]:
    """The runs of ``--windows``: the papers' own windows and, with the question seen, the quick
    methods in the common window at the paper's shares. The latter check whether the rows that are
    kept from an earlier run are still right."""
    checked = QUICK if question == "seen" else []
    return {
        lines: [*(make_setups(checked, [share]) if checked else []), *own_windows(lines, share)]
        for lines, share in PAPER_SHARES.items()
    }


def some_methods(names: Sequence[str]) -> dict[int, Sequence[Setup]]:
    """The runs of ``--only``."""
    return {
        lines: make_setups(names, [share, *SMALL_SHARES]) for lines, share in PAPER_SHARES.items()
    }


def measure(
    data: Path,
    question: str,
    store: Path,
    limit: int | None,
    by_lines: Mapping[int, Sequence[Setup]] | None = None,
) -> Sweep:
    """Answers the cases of one protocol that `store` does not have yet. Raises `KVSketchError`."""
    # One shot, as in section 3.2: the prompt is compressed once, and the answer is kept unchanged.
    settings = Settings(question=question, one_shot=True, dtype=DTYPE)
    tasks = make_tasks(["longeval"], Options(cases=case_files(data), limit=limit))
    by_lines = by_lines or setups_by_lines()
    out = store / f"{question}.jsonl"
    sweep = Sweep.open(MODEL, tasks, lambda case: by_lines[case.group["lines"]], settings, out)
    with sweep.store:
        run_with_progress(sweep)
    return sweep


def with_earlier(
    rows: Sequence[Mapping[str, Any]], before: Mapping[str, Any]
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """An earlier run's rows, and after them the new rows that it lacks.

    Returns:
        The rows, of which those of this run have ``"run": "windows"``. Then a description of the
        earlier run: its versions and hardware, the number of rows that both runs have, and those of
        them whose accuracies differ.
    """
    names = ("question", "lines", "method", "budget")
    known = {tuple(row[n] for n in names): row for row in before["results"] if "run" not in row}
    new = [{**r, "run": "windows"} for r in rows if tuple(r[n] for n in names) not in known]
    pairs = [(row, known.get(tuple(row[n] for n in names))) for row in rows]
    both = [(now, then) for now, then in pairs if then is not None]
    checked = {
        "rows": len(both),
        "differing": [
            {**{n: now[n] for n in names}, "now": now["accuracy"], "then": then["accuracy"]}
            for now, then in both
            if now["accuracy"] != then["accuracy"]
        ],
    }
    origin = before.get("earlier") or {n: before[n] for n in ("versions", "hardware")}
    return [*known.values(), *new], {**origin, "checked": checked}


def replaced(
    rows: Sequence[Mapping[str, Any]], before: Mapping[str, Any], methods: Sequence[str]
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """An earlier run's rows with those of some methods replaced, for the questions of this run.

    Returns:
        The rows, of which those of this run have ``"run": "later"``. Then what is noted about the
        rows: under "later", the methods and questions replaced by this run and by those before it,
        and the versions and hardware of the run that measured the others.

    Raises:
        ValueError: a run before this one replaced the rows of other methods only.
    """
    questions = list(dict.fromkeys(row["question"] for row in rows))
    former = before.get("later", {**before, "methods": methods, "questions": []})
    if not set(methods) <= set(former["methods"]):
        raise ValueError(f"rows of {', '.join(former['methods'])} were replaced before")
    kept = [
        row
        for row in before["results"]
        if row["method"] not in methods or row["question"] not in questions
    ]
    later = {
        "methods": former["methods"],
        "questions": list(dict.fromkeys([*former["questions"], *questions])),
        **{name: former[name] for name in ("versions", "hardware")},
    }
    said = {name: before[name] for name in ("earlier",) if name in before}
    return [*kept, *({**row, "run": "later", "dtype": DTYPE} for row in rows)], {
        "later": later,
        **said,
    }


def write(results: Mapping[str, Any], docs: Path) -> list[Path]:
    """Writes the JSON and the page, and returns their paths."""
    (docs / "results").mkdir(parents=True, exist_ok=True)
    data, page = docs / "results" / "longeval.json", docs / "longeval.md"
    data.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    page.write_text(markdown.page(results), encoding="utf-8")
    return [data, page]


def main(
    data: Annotated[Path | None, typer.Option(help="Folder of the official case files.")] = None,
    limit: Annotated[int, typer.Option(help="Use the first N cases of each length.")] = 20,
    questions: Annotated[str, typer.Option(help="Protocols to run: seen, unseen.")] = "seen",
    store: Annotated[Path, typer.Option(help="Folder of the answers.")] = ROOT / "build/longeval",
    docs: Annotated[Path, typer.Option(help="Folder of the page.")] = ROOT / "docs",
    windows: Annotated[
        bool,
        typer.Option(
            "--windows",
            help="Run the papers' own windows, and the quick methods as a check; keep the other "
            "rows of docs/results/longeval.json.",
        ),
    ] = False,
    only: Annotated[
        str,
        typer.Option(
            help="Run these methods only, comma-separated; keep the other rows of "
            "docs/results/longeval.json."
        ),
    ] = "",
) -> None:
    """Run Table 1 (resumable) and write it into the documentation."""
    data = data or default_data()
    missing = [str(path) for path in case_files(data) if not path.is_file()]
    if missing:
        print(f"skipped: files of the official LongEval cases are missing: {', '.join(missing)}")
        return
    chosen = [name for name in only.split(",") if name]
    unknown = [name for name in chosen if name not in METHODS]
    if unknown or (chosen and windows):
        wrong = "--only and --windows exclude each other"
        if unknown:
            wrong = f"--only {unknown[0]!r} must be one of {', '.join(METHODS)}"
        typer.echo(f"error: {wrong}", err=True)
        raise typer.Exit(2)

    def runs(question: str) -> dict[int, Sequence[Setup]] | None:
        if windows:
            return again_by_lines(question)
        return some_methods(chosen) if chosen else None

    try:
        sweeps = {q: measure(data, q, store, limit, runs(q)) for q in questions.split(",")}
    except KVSketchError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    first = next(iter(sweeps.values()))
    rows: list[Mapping[str, Any]] = [row for sweep in sweeps.values() for row in sweep.rows()]
    more: dict[str, Any] = {}
    before: dict[str, Any] = {}
    if windows or chosen:
        before = json.loads((docs / "results" / "longeval.json").read_text(encoding="utf-8"))
    if windows:
        rows, more["earlier"] = with_earlier(rows, before)
    if chosen:
        try:
            rows, more = replaced(rows, before, chosen)
        except ValueError as error:
            typer.echo(f"error: --only {only}: {error}", err=True)
            raise typer.Exit(2) from None
    results = report(
        "benchmarks.longeval_table",
        rows,
        **more,
        paper=markdown.PAPER,
        settings={
            **dict(first.base),
            # of the rows that name no other
            "dtype": before["settings"]["dtype"] if before else DTYPE,
            "question": list(dict.fromkeys(row["question"] for row in rows)),
            "methods": METHODS,
            "cases": [path.name for path in case_files(data)],
        },
        seed=0,
    )
    for path in write(results, docs):
        print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
