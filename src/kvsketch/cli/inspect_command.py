"""`kvsketch inspect`: measure a model's activations, show them, keep them.

Heavy imports (torch, transformers) happen inside, as in ``kvsketch.cli``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from kvsketch.cli.eval_command import given_options
from kvsketch.cli.inspect_retrieval import (
    bar,
    check_given,
    check_result,
    retrieval_tables,
    run_retrieval,
    said,
    save_result,
)
from kvsketch.cli.inspect_tables import tables
from kvsketch.cli.printing import JsonOption, console_for
from kvsketch.errors import InputError
from kvsketch.evaluation.runner.files import check_folder, read_text
from kvsketch.models import PACKAGED_MODELS

if TYPE_CHECKING:
    from torch import Tensor

EPILOG = "Example: kvsketch inspect YOUR_MODEL prompt1.txt prompt2.txt --out inspected"
#: where no files are given: so many prompts, LongEval's with so many lines, others so many tokens
_PROMPTS, _LINES, _SAMPLED = 2, 100, 1024


def inspect_command(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(help="Model folder or Hugging Face id. Default: the packaged model."),
    ] = "packaged",
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="Text files, each one prompt. Default: LongEval prompts for the packaged model, "
            "else text sampled from the model.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write inspect.json and figures (.svg, .png) here."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, e.g. 0,3; a t-SNE is drawn of each. Default: all with full "
            "attention, a t-SNE of the first, the middle and the last."
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(help="Largest number of tokens read of each prompt.")
    ] = 2048,
    retrieval: Annotated[
        bool,
        typer.Option(
            "--retrieval",
            help="Measure instead which KV heads read the answers of a task, accuracy without each "
            "of them, and how many must see all tokens.",
        ),
    ] = False,
    task: Annotated[
        str,
        typer.Option(
            help="With --retrieval: longeval, needle or a subtask of RULER.", show_default=True
        ),
    ] = "longeval",
    lines: Annotated[int, typer.Option(help="With --task longeval: lines of a record.")] = 200,
    length: Annotated[int, typer.Option(help="With any other --task: tokens.")] = 2000,
    cases: Annotated[int, typer.Option(help="With --retrieval: cases that are answered.")] = 8,
    seed: Annotated[
        int, typer.Option(help="Seed of generated prompts, random methods and t-SNE.")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    as_json: JsonOption = False,
) -> None:
    """Measure a model's queries, keys and values: norms, clusters, attention, errors by method."""
    given = given_options(ctx)
    check_given(retrieval, given if files else {k: v for k, v in given.items() if k != "files"})
    if retrieval:
        found = run_retrieval(
            model,
            task=task,
            lines=lines,
            length=length,
            cases=cases,
            seed=seed,
            device=device,
            dtype=dtype,
            out=out,
        )
        _show(found, retrieval_tables, said(found), out, as_json)
        return
    result = run(
        model,
        files or [],
        layers=None if layers is None else _layers(layers),
        limit=limit,
        seed=seed,
        device=device,
        dtype=dtype,
        out=out,
    )
    readings = [
        f"[bold]{topic}[/bold] {text}" for topic, text in result["readings"].items() if text
    ]
    _show(result, tables, readings, out, as_json)


def _show(
    result: Mapping[str, Any],
    tables_of: Callable[[Mapping[str, Any], int], Iterator[Group]],
    readings: Sequence[str],
    out: Path | None,
    as_json: bool,
) -> None:
    from kvsketch.evaluation.report.report import dumps

    console = console_for(as_json)
    for table in tables_of(result, console.width):
        console.print()
        console.print(table)
    console.print()
    for text in readings:
        console.print(text, highlight=False)
    if out is not None:
        console.print(f"\nThe numbers (.json) and the figures are in {out}", soft_wrap=True)
    if as_json:
        print(dumps(result))


def run(
    model_name: str,
    files: Sequence[Path] = (),
    *,
    layers: Sequence[int] | None = None,
    limit: int = 2048,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    out: Path | None = None,
) -> dict[str, Any]:
    """What the command measures, shows and, where ``out`` is given, writes.

    Returns:
        ``inspection.inspect_model``'s result, with the model, where its prompts come from, the
        figures' names and captions, and the versions and hardware.

    Raises:
        InputError: files that cannot be read, are empty or too short; layers the model lacks; a
            folder that cannot be written; an option out of range. All but what needs the weights
            is said before they are loaded.
        UnsupportedError: a model whose attention cannot be caught, by name.
    """

    from kvsketch.evaluation.inspection.readings import LEAST_TOKENS
    from kvsketch.evaluation.report.report import environment
    from kvsketch.evaluation.runner import loading
    from kvsketch.evaluation.runner.encoding import max_positions
    from kvsketch.evaluation.runner.settings import Settings

    if limit < LEAST_TOKENS:
        raise InputError(f"--limit {limit} must be at least {LEAST_TOKENS}")
    Settings(device=device, dtype=dtype)  # raises
    texts = [_read(file) for file in files]
    check_result(out, "inspect.json", "inspect")
    folder = loading.resolve_model(model_name)

    # The following imports torch and transformers; all checks that do not need them are done.
    from kvsketch.evaluation.inspection import inspection
    from kvsketch.evaluation.inspection import measures as inspection_measures
    from kvsketch.hf.models import kv_heads_of

    loading.check_device(device)
    config = loading.load_config(folder)
    chosen = inspection.choose_layers(config, layers)
    positions = max_positions(config)
    if positions is not None and positions < LEAST_TOKENS:
        raise InputError(
            f"--model {model_name!r} has {positions} positions, at least {LEAST_TOKENS} are needed"
        )
    limit = limit if positions is None else min(limit, positions)
    tokenizer = loading.load_tokenizer(folder)
    source, prompts = "sampled", list["Tensor"]()
    if texts:
        source = "files"
    elif model_name in PACKAGED_MODELS:
        from kvsketch.evaluation.runner.longeval_cases import generate_cases

        source = f"longeval-{_LINES}"
        texts = [case["prompt"] for case in generate_cases(_LINES, _PROMPTS, seed)]
    for i, text in enumerate(texts):
        prompts.append(tokenizer(text, return_tensors="pt").input_ids[:, :limit])
        try:
            inspection.check_prompt(prompts[-1])
        except InputError as error:
            raise InputError(f"{files[i] if files else source}: {error}") from error
    projected = pictured(chosen, named=layers is not None)
    if out is None:
        projected = []  # a picture alone
    else:
        inspection_measures.require("matplotlib", "sklearn")
        check_folder(out, "--out")
    model = loading.load_model(folder, device, dtype)
    with bar() as progress:
        if not prompts:
            task = progress.add_task("sampling", total=None)
            prompts = sampled(model, _PROMPTS, min(limit, _SAMPLED), seed, chosen[:1])
            progress.remove_task(task)
        heads = sum(kv_heads_of(config, layer) for layer in projected)
        total = inspection.steps(len(prompts), len(chosen), len(inspection.METHODS), heads)
        task = progress.add_task("measuring", total=total)
        measured = inspection.inspect_model(
            model,
            prompts,
            layers=chosen,
            projected=projected,
            seed=seed,
            advance=lambda: progress.advance(task),
        )
    result = {
        "command": "inspect",
        "model": model_name,
        "source": source,
        "files": [str(file) for file in files],
        "tokens": [int(prompt.shape[1]) for prompt in prompts],
        "limit": limit,
        "seed": seed,
        "device": device,
        "dtype": dtype,
        **measured,
        "figures": {},
        **environment(),
    }
    if out is not None:
        from kvsketch.evaluation.inspection.figures import draw

        result["figures"] = draw(result, out)
        save_result(result, out / "inspect.json")
    return result


def pictured(layers: Sequence[int], named: bool) -> list[int]:
    """Layers whose KV heads get a t-SNE: those that were named (ClusterGen, appendix C.2), else the
    first, the middle and the last."""
    return sorted(layers if named else {layers[0], layers[len(layers) // 2], layers[-1]})


def sampled(model: Any, count: int, tokens: int, seed: int, layers: Sequence[int]) -> list[Tensor]:
    """Texts of the model itself, ``[1, tokens]`` each, sampled at temperature 1 from its first
    token: what it knows best.

    Args:
        layers: some that will be looked at: a model whose attention cannot be caught is refused
            before it writes anything.

    Raises:
        UnsupportedError: as ``inspection.catch``.
    """
    import torch

    from kvsketch.evaluation.inspection.inspection import catch

    first = model.config.get_text_config(decoder=True).bos_token_id
    start = torch.full((count, 1), 1 if first is None else int(first), device=model.device)
    catch(model, start[:1], layers)
    with torch.random.fork_rng():  # the caller's random numbers stay unchanged
        torch.manual_seed(seed)
        found = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            max_new_tokens=tokens - 1,
            min_new_tokens=tokens - 1,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    return list(found.split(1))


def _layers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise InputError(f"--layers {text!r} must be layers with commas, e.g. 0,3")
    return [int(part) for part in parts]


def _read(file: Path) -> str:
    text = read_text(file)
    if not text.strip():
        raise InputError(f"{file} is empty")
    return text
