"""The command line: reads options, calls the library, prints the results.

Heavy imports (torch, transformers) happen inside the commands, after every check that does not need
them, so that `--help` and usage errors are fast.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from typer.core import TyperGroup

from kvsketch.cli import (
    append_command,
    ask_command,
    chat_command,
    compress_command,
    eval_command,
    info_command,
    inspect_command,
    merge_command,
    methods_command,
    plan_command,
    report_command,
)
from kvsketch.cli.exit_codes import INTERRUPTED, USAGE_ERROR
from kvsketch.cli.printing import JsonOption, console_for, print_json
from kvsketch.cli.run_sweep import run_sweep
from kvsketch.errors import KVSketchError, unknown_name

GO_ON = """
Next:
  kvsketch eval longeval --lines 400 --num-cases 20 --budgets 0.5,0.1 --out run.jsonl
  kvsketch eval longeval --model YOUR_MODEL --question unseen
  kvsketch eval longbench needle ruler --model YOUR_MODEL --budgets 0.25 --out run.jsonl
  kvsketch methods"""

#: from typer's own click, which may differ from the installed one
_ClickError: type[Exception] = typer.BadParameter.__bases__[0]


class _Group(TyperGroup):
    """Turns KVSketchError and click's errors into one line and an exit code."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _errors_in_one_line():  # of the options before a command
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _errors_in_one_line(ctx), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            raise unknown_name("command", args[0], self.commands)
        return super().resolve_command(ctx, args)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line on standard error for what kvsketch itself warns of; other warnings as usual."""
    own = category.__module__.startswith("kvsketch")
    usual = warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(f"warning: {message}\n" if own else usual)


@contextmanager
def _errors_in_one_line(group: Any = None) -> Iterator[None]:
    try:
        yield
    except KVSketchError as error:
        message = str(error)
    except _ClickError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # `kvsketch` alone: a page of help
            raise
        said: Any = error
        if said.ctx is not None:
            path = said.ctx.command_path
        else:
            path = " ".join(["kvsketch", *([group.invoked_subcommand] if group else [])])
        message = f"{said.format_message().rstrip('.')}{_given(error)}; see `{path} --help`"
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    else:
        return
    print("error:", " ".join(line.strip() for line in message.splitlines()), file=sys.stderr)
    raise typer.Exit(USAGE_ERROR)


def _given(error: Exception) -> str:
    """The value that pydantic, which some versions of typer ask, does not name itself."""
    found: Any = getattr(error.__cause__, "errors", list)()
    return f", not {found[0]['input']!r}" if found else ""


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Keep the KV cache of long-context language models small, with measured error.",
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


@app.command(
    epilog="Example: kvsketch calibrate one.txt two.txt --model YOUR_MODEL --out curves.json"
)
def calibrate(
    prompts: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Text files, each one typical prompt.")
    ],
    out: Annotated[Path, typer.Option(help="File to write the curves to (JSON).")],
    model: Annotated[
        str,
        typer.Option(
            help="Model folder or Hugging Face id. In this package: spread (packaged) and "
            "ruler-one-layer for longeval and ruler, longeval-one-head for longeval."
        ),
    ] = "packaged",
    method: Annotated[str, typer.Option(help="See `kvsketch methods`.")] = "heavy_merge",
    follow: Annotated[
        int, typer.Option(help="Last tokens of each prompt; errors are measured on their queries.")
    ] = 64,
    sink: Annotated[int, typer.Option(help="First tokens that are always kept.")] = 4,
    recent: Annotated[int, typer.Option(help="Last tokens that are always kept.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of random methods.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    as_json: JsonOption = False,
) -> None:
    """Measure the error of each KV head at several sizes, for `--allocation` and SketchCache."""
    from kvsketch.evaluation.runner.calibration import calibrate_files
    from kvsketch.evaluation.runner.files import check_folder, try_folder
    from kvsketch.evaluation.runner.settings import Settings
    from kvsketch.writing import check_replaced

    settings = Settings(sink=sink, recent=recent, device=device, dtype=dtype)
    try_folder(out.parent, f"--out {out}: the folder")  # checked before minutes of measuring
    check_replaced(out, "--out", rb'\{"kvsketch_curves":', "a file of curves")
    curves = calibrate_files(model, prompts, method, follow, settings, seed, Console(stderr=True))
    check_folder(out.parent, f"--out {out}: the folder")  # created if it is missing, as by `eval`
    curves.save(out)
    layers, heads, _ = curves.error.shape
    needed = {t: float(curves.within(t)[0].mean()) for t in (0.02, 0.05, 0.1)}
    console = console_for(as_json)
    console.print(f"{layers} layers x {heads} KV heads, written to {out}")
    for tolerance, kept in needed.items():
        console.print(f"  tolerance {tolerance}: keeps {kept:.0%} of the tokens")
    console.print(
        f'Use it: SketchCache(model.config, "{method}", budget=0.25, allocation="{out}")',
        soft_wrap=True,
    )
    if as_json:
        given = {"out": str(out), "method": method, "seed": seed, "layers": layers, "heads": heads}
        kept_by_tolerance = {str(t): k for t, k in needed.items()}
        print_json("calibrate", **given, kept_by_tolerance=kept_by_tolerance)


for _name, _module in (
    ("compress", compress_command),
    ("info", info_command),
    ("ask", ask_command),
    ("chat", chat_command),
    ("append", append_command),
    ("merge", merge_command),
    ("eval", eval_command),
    ("methods", methods_command),
    ("inspect", inspect_command),
    ("report", report_command),
    ("plan", plan_command),
):
    app.command(_name, epilog=_module.EPILOG)(getattr(_module, f"{_name}_command"))


@app.command(epilog="Example: kvsketch demo --quick --json")
def demo(
    as_json: JsonOption = False,
    seed: Annotated[int, typer.Option(help="Seed of the generated cases.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two cases instead of 20, for a first look.")
    ] = False,
) -> None:
    """Compare the methods on long prompts: the bytes that each keeps and its accuracy."""
    from kvsketch.evaluation.runner.settings import Settings
    from kvsketch.evaluation.runner.setups import make_setups, parse_budget
    from kvsketch.evaluation.runner.sweep import Sweep
    from kvsketch.evaluation.tasks import Options, make_tasks

    count = 2 if quick else 20
    budgets = [parse_budget(budget) for budget in eval_command.BUDGETS_DEFAULT.split(",")]
    setups = make_setups(eval_command.METHODS_DEFAULT.split(","), budgets)
    tasks = make_tasks(["longeval"], Options(lines=[200], num_cases=count, seed=seed))
    sweep = Sweep.open("packaged", tasks, setups, Settings(), None)
    console_for(as_json).print(
        f"The small Llama in this package reads {count} records of 200 lines; each question is "
        "about the number in one line.\nThe exact cache keeps every token. Each method keeps the "
        "fraction in the column [bold]budget[/bold] and answers from that."
    )
    # JSON comes last on standard output; with --json this text goes to standard error.
    run_sweep(sweep, "demo", as_json, {**sweep.base, "cases": "generated"}, seed)
    console_for(as_json).print(GO_ON, soft_wrap=True, highlight=False)
