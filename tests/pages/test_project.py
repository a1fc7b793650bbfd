"""The files around the code agree on the repository, the targets, the versions and the tools."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from kvsketch import __version__

pytestmark = pytest.mark.pages
ROOT = Path(__file__).resolve().parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
(REPOSITORY,) = re.findall(r'^Repository = "https://github\.com/([^"]+)"', PROJECT, re.MULTILINE)
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))


def test_there_is_one_repository() -> None:
    """Every file names the repository of pyproject.toml; whoever moves it finds the files here."""
    owner, name = REPOSITORY.split("/")
    files = [
        *("pyproject.toml", "mkdocs.yml", "CITATION.cff", "SECURITY.md", "README.md"),
        *("CONTRIBUTING.md", ".github/ISSUE_TEMPLATE/config.yml"),
    ]
    mentions = 0
    for file in files:
        text = (ROOT / file).read_text(encoding="utf-8")
        found = re.findall(r"github\.com/([\w-]+/kvsketch)\b", text)
        found += [f"{who}/{name}" for who in re.findall(r"([\w-]+)\.github\.io/kvsketch", text)]
        mentions += len(found)
        assert set(found) <= {REPOSITORY}, (file, owner)
    assert mentions >= 6


def test_github_runs_what_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    targets = re.findall(r"\b(?:make|part) ([a-z][\w-]+)", ci)
    (loop,) = re.findall(r"for name in ([^;]+); do part", ci)
    targets += loop.split()
    assert {"test", "newcomer", "test-slow", "test-vllm", "test-oldest"} <= set(targets)
    matrix = WORKFLOW["jobs"]["make"]["strategy"]["matrix"]
    assert set(targets) <= set(matrix["target"])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in matrix["target"]:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert {entry["target"] for entry in matrix["include"]} <= set(matrix["target"])
    tested = {entry["python"] for entry in matrix["include"]}
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert tested == {promised[0], promised[-1]}, "the oldest and the newest that is promised"
    assert f'requires-python = ">={promised[0]}"' in PROJECT
    (run,) = (s["run"] for s in WORKFLOW["jobs"]["make"]["steps"] if s.get("name"))
    assert run == "make ${{ matrix.target }}"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
def test_pyproject_and_the_rest_agree() -> None:
    import tomllib

    project = tomllib.loads(PROJECT)["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == __version__
    assert cited["license"] == project["license"]
    assert cited["repository-code"] == project["urls"]["Repository"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for requirement in project["optional-dependencies"]["docs"]:
        assert f"'{requirement}'" in makefile, requirement
    classifiers = project["classifiers"]
    assert len(set(classifiers)) == len(classifiers)


def test_templates_and_hooks_are_yaml() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    assert len(files) >= 6
    for file in files:
        assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict), file
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"] for repo in hooks["repos"] for hook in repo["hooks"]]
    lint = (ROOT / "Makefile").read_text(encoding="utf-8")
    for entry in entries:  # hooks run only tools that `make lint` runs
        tool = entry.split()[0].removeprefix(".venv/bin/")
        assert f"$(BIN)/{tool}" in lint
