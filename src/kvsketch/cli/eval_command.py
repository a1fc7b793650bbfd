"""`kvsketch eval`: reads options, runs the sweep, prints the results.

torch and transformers are imported after every check that does not need them (``Sweep.open``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvsketch.cli.printing import JsonOption, RecentOption
from kvsketch.cli.run_sweep import run_sweep, runner_on
from kvsketch.errors import InputError

METHODS_DEFAULT = "exact,heavy_merge,streaming_llm,h2o,kcenter,uniform"
BUDGETS_DEFAULT = "0.65,0.25"
EPILOG = (
    "Example: kvsketch eval longeval --lines 200 --num-cases 20 --methods exact,heavy_merge "
    "--budgets 0.5,0.25 --question unseen --out run.jsonl\n\n"
    "A paper's table: kvsketch eval --preset clustergen-table2 --model YOUR_MODEL --data FOLDER "
    "--out table2.jsonl"
)


def _config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Use the values of a YAML file as the defaults of this command's options."""
    if path is not None:
        from kvsketch.evaluation.runner.configuration import read_config

        names = {p.name for p in ctx.command.params if p.name not in (None, "config", "help")}
        ctx.default_map = {**(ctx.default_map or {}), **read_config(path, names)}
    return path


def eval_command(
    ctx: typer.Context,
    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK...",
            help="longeval, longbench, longbench_e, needle, ruler; kl, perplexity, attention_error "
            "(on teacher-forced continuations of texts). Files after --cases FILE are further "
            "case files.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.yaml",
            callback=_config,
            is_eager=True,
            help="Read options from this file; options on the command line take precedence.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE",
            help="Instead of a task: run a paper's table in the paper's protocol, next to its "
            "printed numbers: clustergen-table2, balancekv-table1 or subgen-table1. You can "
            "set --model, --data, --limit, --datasets, --seeds, --out and the options of "
            "the machine; the paper determines the rest.",
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Model folder or Hugging Face id. In this package: spread (packaged) and "
            "ruler-one-layer for longeval and ruler, longeval-one-head for longeval, lists for "
            "sessions."
        ),
    ] = "packaged",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated; NAME with any of :FIRST:LAST, @even, @measured, @layer, "
            "@global, @variance or @FILE, followed by +16bit, +int8, +int4 or +measured. FIRST "
            "and LAST are its own --sink and --recent, or fractions of the tokens; see `kvsketch "
            "methods`."
        ),
    ] = METHODS_DEFAULT,
    budgets: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated bytes to keep, in the model's own dtype: 0.25 of the exact "
            "cache's, or those of 1024 tokens per KV head; in fewer bits they hold more slots. "
            f"[default: {BUDGETS_DEFAULT}, unless there are tolerances]"
        ),
    ] = None,
    tolerances: Annotated[
        str,
        typer.Option(
            help="Comma-separated limits on the measured error, instead of budgets, e.g. 0.05."
        ),
    ] = "",
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds of random methods.")] = "0",
    allocation: Annotated[
        str | None,
        typer.Option(
            help="How a budget is divided among layers and heads: even, measured (on each "
            "prompt), layer or global (by the method's scores), variance (by layer), or a "
            "file of `kvsketch calibrate`. [default: each method's own]"
        ),
    ] = None,
    queries: Annotated[
        str,
        typer.Option(
            help="The queries that a compression uses: of the prompt, or of a second reading of "
            "the context (reread, local, sample; with --question unseen)."
        ),
    ] = "prompt",
    question: Annotated[
        str,
        typer.Option(help="Whether the question is seen or unseen when the context is compressed."),
    ] = "seen",
    limit: Annotated[
        int | None,
        typer.Option(help="Only the first N cases of each file, data set, subtask or length."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of generated cases.")] = 0,
    cases: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE...", help="longeval: case files in LongEval's own format."),
    ] = None,
    lines: Annotated[
        str | None,
        typer.Option(
            help="longeval, --form line: generate cases with this many lines, e.g. 200,300. "
            "[default: 200]"
        ),
    ] = None,
    num_cases: Annotated[
        int | None, typer.Option(help="Generated cases for each length. [default: 20]")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="longbench: folder of NAME.jsonl [default: the hub]; needle, ruler: folder of "
            "texts; kl, "
            "perplexity, attention_error: a .txt or .jsonl file, a folder of them, or "
            "hub:NAME[:CONFIGURATION[:SPLIT]]."
        ),
    ] = None,
    datasets: Annotated[str, typer.Option(help="longbench: comma-separated. [default: all]")] = "",
    subtasks: Annotated[str, typer.Option(help="ruler: comma-separated. [default: all]")] = "",
    lengths: Annotated[
        str,
        typer.Option(
            help="needle, ruler, kl, perplexity, attention_error: lengths in "
            "tokens, e.g. 1000,2000."
        ),
    ] = "1000,1800",
    depths: Annotated[
        str, typer.Option(help="needle: its positions, from 0 (start) to 1 (end).")
    ] = "0,0.25,0.5,0.75,1",
    form: Annotated[
        str | None,
        typer.Option(
            help="needle: sandwich, number, or line (for the packaged model); kl, perplexity, "
            "attention_error: text, or line."
        ),
    ] = None,
    sink: Annotated[int, typer.Option(help="Number of first tokens that are always kept.")] = 4,
    recent: RecentOption = None,
    prefill: Annotated[
        str,
        typer.Option(help="exact: compress after the prompt is read; streaming: while it is read."),
    ] = "exact",
    prefill_chunk_size: Annotated[
        int | None,
        typer.Option(help="Tokens read at once. [default: the whole prompt; streaming: 1024]"),
    ] = None,
    one_shot: Annotated[
        bool,
        typer.Option("--one-shot", help="Compress the prompt only; keep all tokens of answers."),
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Largest number of answer tokens, or measured tokens of a text. "
            "[default: the task's own]"
        ),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Cut longer prompts in the task's own way. [default: the model's limit]"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Cases that are answered in one batch.")] = 1,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="local|ADDRESS",
            help=r"Run on a Ray cluster (pip install kvsketch\[ray]).",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Ray: number of workers, each with its own model.")
    ] = 2,
    gpus: Annotated[
        float, typer.Option(help="Ray: GPUs per worker; with fractions, workers share a GPU.")
    ] = 0.0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.jsonl", help="Store finished cases in this file, and resume from it."
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="cpu, cuda, cuda:1; or auto, balanced, sequential: place the layers on all "
            "devices (needs accelerate)."
        ),
    ] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    as_json: JsonOption = False,
) -> None:
    """Answer the cases of one or more tasks with every method at every budget."""
    from kvsketch.evaluation.runner.settings import Settings
    from kvsketch.evaluation.runner.setups import make_setups, parse_budget
    from kvsketch.evaluation.runner.sweep import Sweep
    from kvsketch.evaluation.tasks import TASKS, Options, make_tasks
    from kvsketch.method_names import NEED_REREAD

    if preset is None and not tasks:
        raise InputError(
            f"Missing argument 'TASK...': {', '.join(TASKS)}; or give a paper's table with "
            "--preset; see `kvsketch eval --help`"
        )
    for name, value in (("workers", workers), ("gpus", gpus)):
        if ray is None and name in given_options(ctx):
            raise InputError(f"--{name} {value} is for Ray: give --ray local or an address")
    cluster = None if ray is None else (ray, workers, gpus)
    named = None
    if preset is not None:
        from kvsketch.cli.preset_options import eval_preset, find_preset

        named = find_preset(preset, given_options(ctx))
    settings = Settings(
        sink=sink,
        recent=recent,
        prefill=prefill,
        prefill_chunk_size=prefill_chunk_size,
        question=question,
        queries=queries,
        one_shot=one_shot or named is not None,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
    )
    if named is not None:
        asked: dict[str, Any] = {
            "data": data,
            "cases": cases or [],
            "datasets": _names(datasets),
            "limit": limit,
        }
        asked["seeds"] = [int(x) for x in _numbers("--seeds", seeds, whole=True)]
        eval_preset(named, model, settings, asked, cluster, out, as_json)
        return
    if budgets and tolerances:
        raise InputError(f"--budgets {budgets} and --tolerances {tolerances} exclude each other")
    kept = _names(BUDGETS_DEFAULT if budgets is None and not tolerances else budgets or "")
    setups = make_setups(
        _names(methods),
        [parse_budget(b) for b in kept],
        _numbers("--tolerances", tolerances),
        [int(x) for x in _numbers("--seeds", seeds, whole=True)],
        allocation,
    )
    for setup in setups:
        if queries == "prompt" and setup.method in NEED_REREAD:
            raise InputError(
                f"--methods {setup.method}: it scores a context by a second reading and needs "
                "--queries reread --question unseen"
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
    chosen = make_tasks(tasks or [], options, given_options(ctx))
    runner = runner_on(cluster, model, settings)
    sweep = Sweep.open(model, chosen, setups, settings, out)
    shown = {**sweep.base, "tasks": tasks, "cases": [str(f) for f in options.cases] or "generated"}
    run_sweep(sweep, f"eval {' '.join(t.name for t in chosen)}", as_json, shown, seed, runner)


def given_options(ctx: typer.Context) -> dict[str, Any]:
    """Options from the command line or ``--config``, by name."""
    return {
        name: value
        for name, value in ctx.params.items()
        if (source := ctx.get_parameter_source(name)) is not None
        and source.name in ("COMMANDLINE", "DEFAULT_MAP")
    }


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _counts(option: str, text: str) -> list[int]:
    counts = []
    for part in _names(text):
        if not part.isdecimal() or int(part) < 1:
            raise InputError(f"{option} {part!r} must be an int >= 1, or several with commas")
        counts.append(int(part))
    if not counts:
        raise InputError(f"{option} {text!r} is empty; give e.g. 200 or 200,300")
    return list(dict.fromkeys(counts))


def _numbers(option: str, text: str, whole: bool = False) -> list[float]:
    try:
        return [int(part) if whole else float(part) for part in _names(text)]
    except ValueError as error:
        kind = "ints" if whole else "numbers"
        raise InputError(f"{option} {text!r} must be {kind}, separated by commas") from error
