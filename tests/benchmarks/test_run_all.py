"""The list of all benchmarks: it has every result of the documentation, as it was measured."""

from __future__ import annotations

import json
import subprocess

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import longeval, options, run_all, sessions
from kvsketch.evaluation.runner.setups import parse_method

#: Options whose values are in the result under the same name.
PLAIN = ("preset", "question", "lines", "count", "texts", "seed", "budgets", "shares")


def invoke(*arguments):
    app = typer.Typer(rich_markup_mode=None)
    app.command()(run_all.main)
    return CliRunner().invoke(app, list(arguments))


def stored(name):
    return json.loads((run_all.RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def given(name):
    """The options of a command."""
    words = run_all.command(name, run_all.RESULTS)[2:]
    return {key[2:]: value for key, value in zip(words[::2], words[1::2], strict=True)}


def test_every_result_has_a_command():
    files = {path.stem for path in run_all.RESULTS.glob("*.json")}
    assert files == {*run_all.COMMANDS, *run_all.WITH_PAGE}
    modules = (*run_all.WITH_PAGE.values(), *run_all.PAGES)
    assert {f"benchmarks/{name}.py" for name in modules} <= {
        path.relative_to(run_all.ROOT).as_posix() for path in run_all.ROOT.glob("benchmarks/*.py")
    }


@pytest.mark.parametrize("name", run_all.COMMANDS)
def test_a_result_was_measured_by_its_command(name):
    """The module, the methods and the other options agree with the settings in the stored file."""
    result, words = stored(name), given(name)
    assert result["command"] == run_all.COMMANDS[name].split()[0]
    for option in PLAIN:
        if option in words and option in result:
            value = result[option]
            values = value if isinstance(value, list) else [value]
            assert words[option].split(",") == [str(x) for x in values], option
    if result["command"] == "sessions":  # methods as `kvsketch eval` reads them
        asked = words.get("methods", sessions.METHODS).split(",")
        assert [parse_method(text).label for text in asked] == result["methods"]
    elif words.get("methods") or name == "longeval_unseen":
        asked = options.methods(words.get("methods", longeval.METHODS), others=["exact"])
        assert {method.label for method in asked} == set(result["methods"])


def test_finished_results_are_not_measured_again(monkeypatch, tmp_path):
    """A failing benchmark ends the run with its exit status; the next run begins with it."""
    (tmp_path / "growth.json").write_text("{}", encoding="utf-8")
    (tmp_path / "kl.json").write_text(json.dumps({"complete": False}), encoding="utf-8")
    ran = []

    def run(command, cwd, check):
        ran.append(command[2])
        return subprocess.CompletedProcess(command, 3 if command[2] == "benchmarks.kl" else 0)

    monkeypatch.setattr(run_all.subprocess, "run", run)
    arguments = ["--only", "growth,tolerance,kl,ablation", "--into", str(tmp_path)]
    assert invoke(*arguments).exit_code == 3
    assert ran == ["benchmarks.tolerance", "benchmarks.kl"]
    ran.clear()
    assert invoke(*arguments, "--again").exit_code == 3
    assert ran == ["benchmarks.growth", "benchmarks.tolerance", "benchmarks.kl"]
    listed = invoke(*arguments, "--list").output
    assert f"benchmarks.growth --plot {tmp_path}/growth.svg --out {tmp_path}/growth.json" in listed


def test_with_all_results_there_only_pages_are_written(monkeypatch):
    ran = []

    def run(command, cwd, check):
        ran.append(command[2].removeprefix("benchmarks."))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(run_all.subprocess, "run", run)
    assert invoke().exit_code == 0
    assert tuple(ran) == run_all.PAGES


def test_an_unknown_result_is_refused():
    done = invoke("--only", "kl,klo")
    assert done.exit_code == 2
    assert "--only 'klo' must be one of decode_speed" in done.output
