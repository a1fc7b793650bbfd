"""The command line: reads options, hands them on, shows what comes back.

Heavy imports (torch, transformers) happen inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from kvsketch.evaluation.inspect_command import EPILOG as INSPECT_EXAMPLE
from kvsketch.evaluation.inspect_command import inspect_command
from kvsketch.evaluation.report_command import EPILOG as REPORT_EXAMPLE
from kvsketch.evaluation.report_command import report_command

if TYPE_CHECKING:
    from kvsketch.evaluation.sweep import Runner, Sweep

METHODS_DEFAULT = "exact,heavy_merge,streaming_llm,h2o,kcenter,uniform"
BUDGETS_DEFAULT = "0.65,0.25"
GO_ON = """
Go on with
  kvsketch eval longeval --lines 400 --num-cases 20 --budgets 0.5,0.1 --out run.jsonl
  kvsketch eval longeval --model YOUR_MODEL --question unseen
  kvsketch eval longbench needle ruler --model YOUR_MODEL --budgets 0.25 --out run.jsonl
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


def _config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Values of a YAML file become the defaults of this command's options."""
    if path is not None:
        from kvsketch.evaluation.configuration import read_config

        names = {p.name for p in ctx.command.params if p.name not in (None, "config", "help")}
        ctx.default_map = {**(ctx.default_map or {}), **read_config(path, names)}
    return path


@app.command(
    "eval",
    epilog="Example: kvsketch eval longeval --lines 200 --num-cases 20 --methods exact,heavy_merge "
    "--budgets 0.5,0.25 --question unseen --out run.jsonl",
)
def evaluate(
    tasks: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK...",
            help="longeval, longbench, longbench_e, needle, ruler. Files after --cases FILE are "
            "further case files.",
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.yaml",
            callback=_config,
            is_eager=True,
            help="Options from a file; those on the command line win.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model folder or Hugging Face id. Default: the packaged model.")
    ] = "packaged",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated, NAME[@even|@measured|@FILE][+int8|+int4]; see `kvsketch "
            "methods`."
        ),
    ] = METHODS_DEFAULT,
    budgets: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: 0.25 is a share of the tokens, 1024 slots per KV head. "
            f"[default: {BUDGETS_DEFAULT}, unless there are tolerances]"
        ),
    ] = None,
    tolerances: Annotated[
        str, typer.Option(help="Comma-separated measured errors instead of budgets, e.g. 0.05.")
    ] = "",
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds of random methods.")] = "0",
    allocation: Annotated[
        str | None,
        typer.Option(
            help="How a budget is spent over layers and heads: even, measured (on each prompt) or "
            "a file of `kvsketch calibrate`. [default: each method's own]"
        ),
    ] = None,
    question: Annotated[
        str, typer.Option(help="Is the question seen or unseen when the context is compressed?")
    ] = "seen",
    limit: Annotated[
        int | None, typer.Option(help="First N cases of each file, data set or length.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of generated cases.")] = 0,
    cases: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE...", help="longeval: case files in LongEval's own format."),
    ] = None,
    lines: Annotated[
        str | None,
        typer.Option(
            help="longeval: generate cases with this many lines, e.g. 200,300. [default: 200]"
        ),
    ] = None,
    num_cases: Annotated[
        int | None, typer.Option(help="Generated cases for each length. [default: 20]")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="longbench: folder of NAME.jsonl [default: the hub]; needle: of texts."),
    ] = None,
    datasets: Annotated[str, typer.Option(help="longbench: comma-separated. [default: all]")] = "",
    subtasks: Annotated[str, typer.Option(help="ruler: comma-separated. [default: all]")] = "",
    lengths: Annotated[
        str, typer.Option(help="needle, ruler: prompt lengths in tokens, e.g. 1000,2000.")
    ] = "1000,1800",
    depths: Annotated[
        str, typer.Option(help="needle: where it is hidden, 0 (start) to 1 (end).")
    ] = "0,0.25,0.5,0.75,1",
    form: Annotated[
        str, typer.Option(help="needle: sandwich, number, or line (for the packaged model).")
    ] = "sandwich",
    sink: Annotated[int, typer.Option(help="First tokens that are always kept.")] = 4,
    recent: Annotated[int, typer.Option(help="Last tokens that are always kept.")] = 32,
    prefill: Annotated[
        str, typer.Option(help="exact: compress after the prompt. streaming: while reading it.")
    ] = "exact",
    prefill_chunk_size: Annotated[
        int | None,
        typer.Option(help="Tokens read at once. [default: the whole prompt; streaming: 512]"),
    ] = None,
    one_shot: Annotated[
        bool, typer.Option("--one-shot", help="Compress the prompt only; keep answers exact.")
    ] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer. [default: the task's own]")
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Longer prompts are cut as the task says. [default: the model's limit]"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Cases answered at once.")] = 1,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="local|ADDRESS", help="Answer on a Ray cluster (pip install kvsketch[ray])."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Ray: models loaded at once.")] = 2,
    gpus: Annotated[float, typer.Option(help="Ray: GPUs per worker; fractions share one.")] = 0.0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="RUN.jsonl", help="Keep finished cases here, and resume from it."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, auto (transformers').")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object as the last line of standard output.")
    ] = False,
) -> None:
    """Answer the cases of one or more tasks with every method at every budget."""
    from kvsketch.evaluation.settings import Settings
    from kvsketch.evaluation.setups import make_setups, parse_budget
    from kvsketch.evaluation.sweep import Sweep
    from kvsketch.evaluation.tasks import Options, make_tasks

    settings = Settings(
        sink=sink,
        recent=recent,
        prefill=prefill,
        prefill_chunk_size=prefill_chunk_size,
        question=question,
        one_shot=one_shot,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
    )
    kept = _names(BUDGETS_DEFAULT if budgets is None and not tolerances else budgets or "")
    setups = make_setups(
        _names(methods),
        [parse_budget(b) for b in kept],
        _numbers("--tolerances", tolerances),
        [int(x) for x in _numbers("--seeds", seeds, whole=True)],
        allocation,
    )
    options = Options(
        cases=cases or [],
        lines=None if lines is None else _counts("--lines", lines),
        num_cases=num_cases,
        limit=limit,
        seed=seed,
        data=data,
        datasets=_names(datasets),
        subtasks=_names(subtasks),
        lengths=_counts("--lengths", lengths),
        depths=_numbers("--depths", depths),
        form=form,
    )
    chosen = make_tasks(tasks, options)
    sweep = Sweep.open(model, chosen, setups, settings, out)
    runner = None
    if ray is not None:
        from kvsketch.evaluation.ray_runner import RayRunner

        runner = RayRunner(ray, sweep.model, settings, workers, gpus)
    shown = {**sweep.base, "tasks": tasks, "cases": [str(f) for f in options.cases] or "generated"}
    _run(sweep, f"eval {' '.join(t.name for t in chosen)}", as_json, shown, seed, runner)


@app.command(
    epilog="Example: kvsketch calibrate one.txt two.txt --model YOUR_MODEL --out curves.json"
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

    settings = Settings(sink=sink, recent=recent, device=device, dtype=dtype)
    if not out.parent.is_dir():  # said now, not after minutes of measuring
        raise InputError(f"--out {out}: there is no folder {out.parent}")
    curves = calibrate_files(model, prompts, method, follow, settings, seed, Console(stderr=True))
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


app.command("inspect", epilog=INSPECT_EXAMPLE)(inspect_command)
app.command("report", epilog=REPORT_EXAMPLE)(report_command)


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
    from kvsketch.evaluation.settings import Settings
    from kvsketch.evaluation.setups import make_setups, parse_budget
    from kvsketch.evaluation.sweep import Sweep
    from kvsketch.evaluation.tasks import Options, make_tasks

    count = 2 if quick else 20
    setups = make_setups(
        METHODS_DEFAULT.split(","), [parse_budget(b) for b in BUDGETS_DEFAULT.split(",")]
    )
    tasks = make_tasks(["longeval"], Options(lines=[200], num_cases=count, seed=seed))
    sweep = Sweep.open("packaged", tasks, setups, Settings(), None)
    _console(as_json).print(
        f"A small Llama that ships with kvsketch reads {count} records of 200 lines and is asked "
        "for the number in one of them.\nThe exact cache keeps every token; each method keeps the "
        "share in the column [bold]budget[/bold] and answers from that."
    )
    # JSON comes last on standard output; with --json this text goes to standard error.
    _run(sweep, "demo", as_json, {**sweep.base, "cases": "generated"}, seed)
    _console(as_json).print(GO_ON, soft_wrap=True, highlight=False)


def _run(
    sweep: Sweep,
    command: str,
    as_json: bool,
    settings: Mapping[str, Any],
    seed: int,
    runner: Runner | None = None,
) -> None:
    """Runs `sweep` under a progress bar, then shows table and JSON, also when interrupted."""
    from kvsketch.evaluation.progress import run_with_progress
    from kvsketch.evaluation.report import dumps, report, results_tables

    interrupted = False
    with sweep.store:
        try:
            run_with_progress(sweep, runner)
        except KeyboardInterrupt:
            interrupted = True
    rows = sweep.rows()
    console = _console(as_json)
    for table in results_tables(rows, wide=console.width >= 100):
        console.print()
        console.print(table)
    if interrupted:
        _say_interrupted(sweep)
    if as_json:
        more = {"interrupted": True} if interrupted else {}
        print(dumps(report(command, rows, settings=settings, seed=seed, **more)))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _say_interrupted(sweep: Sweep) -> None:
    done = sweep.total() - sweep.remaining()
    kept = (
        f"kept in {sweep.store.path}; the same command goes on from there"
        if sweep.store.path
        else "not kept: give --out FILE to be able to resume"
    )
    print(f"interrupted: {done} of {sweep.total()} answers are done, {kept}", file=sys.stderr)


def _console(as_json: bool) -> Console:
    """People's output goes to standard error when standard output is for a program."""
    return Console(stderr=as_json)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _counts(option: str, text: str) -> list[int]:
    from kvsketch.errors import InputError

    counts = []
    for part in _names(text):
        if not part.isdecimal() or int(part) < 1:
            raise InputError(f"{option} {part!r} must be an int >= 1, or several with commas")
        counts.append(int(part))
    if not counts:
        raise InputError(f"{option} {text!r} names no length; give e.g. 200 or 200,300")
    return list(dict.fromkeys(counts))


def _numbers(option: str, text: str, whole: bool = False) -> list[float]:
    from kvsketch.errors import InputError

    try:
        return [int(part) if whole else float(part) for part in _names(text)]
    except ValueError as error:
        kind = "ints" if whole else "numbers"
        raise InputError(f"{option} {text!r} must be {kind}, with commas between") from error


def main() -> None:
    """Entry point of the command `kvsketch`."""
    app(prog_name="kvsketch")
