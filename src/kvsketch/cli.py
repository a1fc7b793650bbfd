"""The command line: reads options, hands them on, shows what comes back.

Heavy imports (torch, transformers) happen inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

if TYPE_CHECKING:
    from kvsketch.evaluation.session import Session

METHODS_DEFAULT = "exact,heavy_merge,streaming_llm,h2o,kcenter,uniform"
BUDGETS_DEFAULT = "0.65,0.25"
GO_ON = """
Go on with
  kvsketch eval longeval --lines 400 --num-cases 20 --budgets 0.5,0.1 --out run.jsonl
  kvsketch eval longeval --model YOUR_MODEL --question unseen
  kvsketch methods"""
USAGE_ERROR, INTERRUPTED = 2, 128 + signal.SIGINT


class _Group(TyperGroup):
    """Turns the errors we raise on purpose into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        from kvsketch.errors import KVSketchError

        try:
            return super().invoke(ctx)
        except KVSketchError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(USAGE_ERROR) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Keeps the KV cache of long-context language models small while it streams.",
    epilog="Example: kvsketch demo",
)
eval_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure what compression costs in answers.",
    epilog="Example: kvsketch eval longeval --lines 200 --num-cases 5",
)
app.add_typer(eval_app, name="eval")


def _show_version(wanted: bool) -> None:
    if wanted:
        from kvsketch import __version__

        print(f"kvsketch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command("methods", epilog="Example: kvsketch methods --json")
def list_methods(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, on one line.")] = False,
) -> None:
    """List the compression methods and the papers they come from."""
    from kvsketch.evaluation.report import dumps
    from kvsketch.streaming import ALL_METHODS

    rows = [
        {"name": name, "summary": _first_sentence(cls.__doc__), "paper": cls.paper}
        for name, cls in ALL_METHODS.items()
    ]
    if as_json:
        print(dumps({"command": "methods", "methods": rows}))
        return
    table = Table()
    for column in ("name", "summary", "paper"):
        table.add_column(column, no_wrap=column == "name")
    for row in rows:
        table.add_row(*(escape(row[column]) for column in ("name", "summary", "paper")))
    Console().print(table)


def _first_sentence(doc: str | None) -> str:
    text = " ".join((doc or "").split("\n\n")[0].split())
    head, dot, _ = text.partition(". ")
    return head + "." if dot else text


@eval_app.command(
    "longeval",
    epilog="Example: kvsketch eval longeval --cases 200_lines.jsonl --methods exact,kcenter,h2o "
    "--budgets 0.65,0.25 --out run.jsonl --json",
)
def longeval(
    more_cases: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Further case files, after --cases FILE."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model folder or Hugging Face id. Default: the packaged model.")
    ] = "packaged",
    cases: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE...", help="Case files in LongEval's own format."),
    ] = None,
    lines: Annotated[
        str | None,
        typer.Option(help="Generate cases with this many lines, e.g. 200,300. [default: 200]"),
    ] = None,
    num_cases: Annotated[
        int | None, typer.Option(help="Generated cases for each length. [default: 20]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of generated cases and random methods.")] = 0,
    methods: Annotated[
        str, typer.Option(help="Comma-separated; see `kvsketch methods`.")
    ] = METHODS_DEFAULT,
    budgets: Annotated[
        str,
        typer.Option(
            help="Comma-separated: 0.25 is a share of the tokens, 1024 slots per KV head."
        ),
    ] = BUDGETS_DEFAULT,
    limit: Annotated[int | None, typer.Option(help="First N cases of each file.")] = None,
    sink: Annotated[int, typer.Option(help="First tokens that are always kept.")] = 4,
    recent: Annotated[int, typer.Option(help="Last tokens that are always kept.")] = 32,
    prefill: Annotated[
        str, typer.Option(help="exact: compress after the prompt. streaming: while reading it.")
    ] = "exact",
    prefill_chunk_size: Annotated[
        int | None,
        typer.Option(help="Tokens read at once. [default: the whole prompt; streaming: 512]"),
    ] = None,
    question: Annotated[
        str, typer.Option(help="Is the question seen or unseen when the record is compressed?")
    ] = "seen",
    one_shot: Annotated[
        bool, typer.Option("--one-shot", help="Compress the prompt only; keep answers exact.")
    ] = False,
    allocation: Annotated[
        str | None,
        typer.Option(
            help="How a budget is spent over layers and heads: even, measured (on each prompt) or "
            "a file of `kvsketch calibrate`. [default: each method's own]"
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer (LongEval: 100).")] = 32,
    batch_size: Annotated[int, typer.Option(help="Cases answered at once.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(metavar="RUN.jsonl", help="Keep finished cases here, and resume from it."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object as the last line of standard output.")
    ] = False,
) -> None:
    """Line retrieval: how many answers stay right when the KV cache gets small."""
    from kvsketch.errors import InputError
    from kvsketch.evaluation import longeval as task
    from kvsketch.evaluation.session import Session
    from kvsketch.evaluation.settings import Settings

    settings = Settings(
        sink=sink,
        recent=recent,
        prefill=prefill,
        prefill_chunk_size=prefill_chunk_size,
        question=question,
        one_shot=one_shot,
        allocation=allocation,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        device=device,
        dtype=dtype,
    )
    setups = task.make_setups(_names(methods), [task.parse_budget(b) for b in _names(budgets)])
    for name, value in (("--limit", limit), ("--num-cases", num_cases)):
        if value is not None and value < 1:
            raise InputError(f"{name} {value} must be at least 1")
    files = [*(cases or []), *(more_cases or [])]
    if files:
        if lines is not None or num_cases is not None:
            raise InputError("--cases reads files and --lines/--num-cases generate: give one")
        chosen = task.load_case_files(files, limit)
    else:
        count = min(num_cases or 20, limit or sys.maxsize)
        chosen = task.make_cases(_line_counts(lines or "200"), count, seed)
    session = Session.open(model, chosen, setups, settings, out)
    _run(session, "eval longeval", as_json, {"cases": [str(file) for file in files] or "generated"})


@app.command(
    epilog="Example: kvsketch calibrate prompt1.txt prompt2.txt --model YOUR_MODEL --out curves.json"
)
def calibrate(
    prompts: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Text files: prompts of your kind.")
    ],
    out: Annotated[Path, typer.Option(help="Where the curves go (JSON).")],
    model: Annotated[
        str, typer.Option(help="Model folder or Hugging Face id. Default: the packaged model.")
    ] = "packaged",
    method: Annotated[str, typer.Option(help="See `kvsketch methods`.")] = "heavy_merge",
    follow: Annotated[
        int, typer.Option(help="Last tokens of each prompt, held back as questions about the rest.")
    ] = 64,
    sink: Annotated[int, typer.Option(help="First tokens that are always kept.")] = 4,
    recent: Annotated[int, typer.Option(help="Last tokens that are always kept.")] = 32,
    seed: Annotated[int, typer.Option(help="Of random methods.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object as the last line of standard output.")
    ] = False,
) -> None:
    """Measure which layers and heads need their tokens, for `--allocation` and SketchCache."""
    from kvsketch.errors import InputError
    from kvsketch.evaluation.calibration import calibrate_files
    from kvsketch.evaluation.report import dumps
    from kvsketch.evaluation.settings import Settings

    settings = Settings(sink=sink, recent=recent, seed=seed, device=device, dtype=dtype)
    if not out.parent.is_dir():  # said now, not after minutes of measuring
        raise InputError(f"--out {out}: there is no folder {out.parent}")
    curves = calibrate_files(model, prompts, method, follow, settings, Console(stderr=True))
    curves.save(out)
    layers, heads, _ = curves.error.shape
    needed = {t: float(curves.within(t)[0].mean()) for t in (0.02, 0.05, 0.1)}
    console = _console(as_json)
    console.print(f"{layers} layers x {heads} KV heads, written to {out}")
    for tolerance, kept in needed.items():
        console.print(f"  tolerance {tolerance}: keeps {kept:.0%} of the tokens")
    console.print(
        f'Use it: SketchCache(model.config, "{method}", budget=0.25, allocation="{out}")',
        soft_wrap=True,
    )
    if as_json:
        print(
            dumps(
                {
                    "command": "calibrate",
                    "out": str(out),
                    "method": method,
                    "seed": seed,
                    "layers": layers,
                    "heads": heads,
                    "kept_by_tolerance": {str(t): k for t, k in needed.items()},
                }
            )
        )


@app.command(epilog="Example: kvsketch demo --quick --json")
def demo(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object as the last line of standard output.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the generated cases.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two cases: a look, not a result.")
    ] = False,
) -> None:
    """Show on real long prompts what each method keeps and what that costs in answers."""
    from kvsketch.evaluation import longeval as task
    from kvsketch.evaluation.session import Session
    from kvsketch.evaluation.settings import Settings

    count = 2 if quick else 20
    setups = task.make_setups(
        METHODS_DEFAULT.split(","), [task.parse_budget(b) for b in BUDGETS_DEFAULT.split(",")]
    )
    chosen = task.make_cases([200], count, seed)
    session = Session.open("packaged", chosen, setups, Settings(seed=seed), None)
    _console(as_json).print(
        f"A small Llama that ships with kvsketch reads {count} records of 200 lines and is asked "
        "for the number in one of them.\nThe exact cache keeps every token; each method keeps the "
        "share in the column [bold]budget[/bold] and answers from that."
    )
    # JSON comes last on standard output; with --json this text goes to standard error.
    _run(session, "demo", as_json, {"cases": "generated"})
    _console(as_json).print(GO_ON, soft_wrap=True, highlight=False)


def _run(session: Session, command: str, as_json: bool, settings: Mapping[str, Any]) -> None:
    """Runs `session` under a progress bar, then shows table and JSON, also when interrupted."""
    from kvsketch.evaluation.progress import run_with_progress
    from kvsketch.evaluation.report import dumps, report, results_table

    interrupted = False
    with session.store:
        try:
            run_with_progress(session)
        except KeyboardInterrupt:
            interrupted = True
    rows = session.rows()
    console = _console(as_json)
    for _, group in groupby(rows, key=lambda row: row["lines"]):
        console.print()
        console.print(results_table(list(group), wide=console.width >= 100))
    if interrupted:
        _say_interrupted(session)
    if as_json:
        shown = {**session.header, **settings}
        more = {"interrupted": True} if interrupted else {}
        print(dumps(report(command, rows, settings=shown, seed=session.settings.seed, **more)))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _say_interrupted(session: Session) -> None:
    done = session.total() - session.remaining()
    kept = (
        f"kept in {session.store.path}; the same command goes on from there"
        if session.store.path
        else "not kept: give --out FILE to be able to resume"
    )
    print(f"interrupted: {done} of {session.total()} answers are done, {kept}", file=sys.stderr)


def _console(as_json: bool) -> Console:
    """People's output goes to standard error when standard output is for a program."""
    return Console(stderr=as_json)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _line_counts(text: str) -> Sequence[int]:
    from kvsketch.errors import InputError

    counts = []
    for part in _names(text):
        if not part.isdecimal() or int(part) < 1:
            raise InputError(f"--lines {part!r} must be an int >= 1, or several with commas")
        counts.append(int(part))
    if not counts:
        raise InputError(f"--lines {text!r} names no length; give e.g. 200 or 200,300")
    return list(dict.fromkeys(counts))


def main() -> None:
    """Entry point of the command `kvsketch`."""
    app(prog_name="kvsketch")
