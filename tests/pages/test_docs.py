"""What the documentation names must exist: files, tests, commands and their options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from kvsketch.cli.app import app
from kvsketch.evaluation.runner.configuration import read_config
from kvsketch.evaluation.tasks import TASKS
from kvsketch.methods.registry import ALL_METHODS, SKETCHES

pytestmark = pytest.mark.pages
ROOT = Path(__file__).resolve().parents[2]


def commands(page: str) -> list[list[str]]:
    """The words of every ``kvsketch`` command in a page's shell blocks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in found if words and words[0] == "kvsketch"]


@pytest.mark.parametrize(
    "page", ["README.md", "docs/documents.md", "docs/evaluation.md", "docs/inspect.md"]
)
def test_commands_and_their_options_are_there(page):
    group = typer.main.get_command(app)
    found = commands(page)
    assert found
    for name, *words in found:
        options = {o for p in group.commands[name].params for o in (*p.opts, *p.secondary_opts)}
        given = {word.split("=")[0] for word in words if word.startswith("-")}
        assert given <= options, (page, name, given - options)
        if name == "eval":
            tasks = words[: next((i for i, w in enumerate(words) if w.startswith("-")), None)]
            assert set(tasks) <= set(TASKS)


def test_the_example_of_a_configuration_is_one(tmp_path):
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    path = tmp_path / "run.yaml"
    path.write_text(example, encoding="utf-8")
    names = {p.name for p in typer.main.get_command(app).commands["eval"].params}
    found = read_config(path, names)
    assert found["tasks"] == yaml.safe_load(example)["tasks"]
    assert found["budgets"] == "0.5,0.25,1024"


def test_every_method_of_others_is_in_the_table():
    """The table has a row for every method that is neither ours nor from one of the four papers."""
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))
    theirs = {"uniform", "kcenter", "balancekv", "kernel_halving", "greedy_halving"}
    assert rows == set(ALL_METHODS) - set(SKETCHES) - theirs - {"cluster_merge", "heavy_merge"}
    for name in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (ROOT / name).is_file()


def test_every_task_is_in_the_table():
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in TASKS)
