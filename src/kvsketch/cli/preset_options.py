"""The option ``--preset``: finds a preset, checks that the other options agree with it, runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsketch.cli.run_sweep import run_sweep, runner_on
from kvsketch.errors import InputError, unknown_name
from kvsketch.evaluation.runner.presets import PRESETS, Preset

if TYPE_CHECKING:
    from kvsketch.evaluation.runner.settings import Settings

#: options of ``kvsketch eval`` that no paper's protocol determines
FREE = {
    *("config", "preset", "model", "limit", "data", "cases", "datasets", "seeds", "batch_size"),
    *("ray", "workers", "gpus", "out", "device", "dtype", "as_json", "prefill_chunk_size"),
    "max_new_tokens",
}


def find_preset(name: str, given: Mapping[str, Any]) -> Preset:
    """The preset by name, if nothing given contradicts it.

    Args:
        given: options that the user gave, by name, without those left at their default.

    Raises:
        InputError: an unknown preset, or an option that contradicts it; the message names both.
    """
    if name not in PRESETS:
        raise unknown_name("--preset", name, PRESETS)
    preset = PRESETS[name]
    for option, value in given.items():
        if option in FREE and not (option == "cases" and preset.task != "longeval"):
            continue
        if option in preset.options and preset.options[option] == value:
            continue
        raise InputError(
            f"--preset {name} and {_written(option, value)} exclude each other: "
            f"{_said(preset, option)}; omit one of the two"
        )
    return preset


def eval_preset(
    preset: Preset,
    model: str,
    settings: Settings,
    asked: dict[str, Any],
    ray: tuple[str, int, float] | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Answer the cases of a preset. ``asked``: the arguments of ``preset_run.plan`` that are
    options of the command."""
    from kvsketch.evaluation.runner.loading import resolve_model
    from kvsketch.evaluation.runner.preset_run import fitted_prompts, plan
    from kvsketch.evaluation.runner.sweep import Sweep
    from kvsketch.evaluation.tasks import Options

    Options(limit=asked["limit"])  # raises
    resolve_model(model)  # refuses a wrong name before any case is read
    new = settings.max_new_tokens
    found = plan(preset, **asked, max_new_tokens=new)
    found, longest = fitted_prompts(found, model, new)
    # Every method has its own sink and recent window, so the run has none.
    settings = replace(settings, max_prompt_tokens=longest, sink=0, recent=0)
    runner = runner_on(ray, model, settings)
    sweep = Sweep.open(model, found.tasks, found.setups, settings, out, preset.name)
    shown = {
        **sweep.base,
        "tasks": [preset.task],
        "cases": str(asked["data"] or "the published ones"),
    }
    run_sweep(sweep, f"eval --preset {preset.name}", as_json, shown, 0, runner, found)


def _written(option: str, value: Any) -> str:
    if option == "tasks":
        return "the task " + " ".join(value)
    name = "--" + option.replace("_", "-")
    if value is True:
        return name
    if isinstance(value, (list, tuple)):
        value = " ".join(map(str, value))
    return f"{name} {value}"


def _said(preset: Preset, option: str) -> str:
    """The preset's value of an option, in words."""
    name = "--" + option.replace("_", "-")
    if option in preset.options:
        value = preset.options[option]
        return f"the paper's is {name}" + ("" if value is True else f" {value}")
    if option == "tasks":
        return f"it runs {preset.task}"
    if option == "budgets":
        return "the paper kept " + ", ".join(map(str, preset.budgets.values()))
    if option == "methods":
        return "the paper's are " + ", ".join(next(iter(preset.methods.values())))
    if option in ("sink", "recent"):
        return "each method has its own window, " + ", ".join(next(iter(preset.methods.values())))
    if option == "max_prompt_tokens" and preset.max_prompt_tokens is not None:
        return f"the paper's is {name} {preset.max_prompt_tokens}"
    return "the paper's table has no such option"
