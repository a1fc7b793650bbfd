"""Imports go down, and the way of a token is the one that CONTRIBUTING describes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks import structure

ROOT = Path(__file__).resolve().parent.parent


def test_no_module_imports_in_a_circle_and_none_from_above():
    """Every import counts, also inside functions and of types only."""
    graph = structure.imports()
    assert len(graph) > 200
    assert structure.circles(graph) == []
    assert structure.upwards(graph) == []
    assert structure.mutual(graph) == []


def test_circles_and_imports_from_above_are_found(tmp_path):
    """A package in which each rule is broken once."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "methods").mkdir()
    (tmp_path / "hf" / "__init__.py").write_text("")
    (tmp_path / "hf" / "a.py").write_text("from kvsketch.hf import b\n")
    (tmp_path / "hf" / "b.py").write_text("def f():\n    from kvsketch.hf.a import x\n")
    (tmp_path / "methods" / "c.py").write_text("import kvsketch.hf.a\n")
    graph = structure.imports(tmp_path)
    assert structure.circles(graph) == [["kvsketch.hf.a", "kvsketch.hf.b"]]
    assert structure.upwards(graph) == [("kvsketch.methods.c", "kvsketch.hf.a")]


def test_every_room_has_a_floor():
    named = {name for names in structure.FLOORS for name in names}
    assert {structure.room(name) for name in structure.modules()} - {"kvsketch"} == named


def test_what_a_layer_has_is_held_in_few_ways_and_a_cache_has_few_arguments():
    assert structure.storage_types() == ["Layout", "Page", "Part", "SketchPage", "Stream"]
    assert len(structure.arguments()) <= 12


def test_a_name_is_that_of_one_class():
    assert structure.names_twice() == []


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by name: two of one name pass folder by folder and fail together."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_a_long_file_has_a_reason():
    assert structure.long_files().keys() == structure.LONG.keys()


def test_there_is_one_schedule_and_one_compression():
    assert structure.schedules() == ["Rhythm"]
    assert structure.compressions() == ["cache/compress.py"]
    assert len(structure.type_tests()) <= 5, structure.type_tests()


def test_contributing_names_every_file_that_a_token_passes():
    """Of real tokens with the default cache and with an even budget in 16 bits: of most, and of
    one that ``Forward`` runs."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    part = text.partition("## The path of a prompt and of a token")[2].partition("\n## ")[0]
    told = set(re.findall(r"[\w/]+\.py", part))
    ways = structure.ways()
    passed = {file for name in ways if "token" in name for file in ways[name]["files"]}
    assert passed <= told, passed - told


def test_a_token_passes_little():
    for name in ("token", "plain_token"):
        way = structure.ways()[name]
        assert len(way["classes"]) <= 6, way["classes"]
        assert len(way["files"]) <= 8, way["files"]
        assert len(way["functions"]) <= 20, way["functions"]


_MAKERS = {
    f"torch.{name}"
    for name in [
        "arange",
        "as_tensor",
        "empty",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "tensor",
        "zeros",
    ]
}


def test_the_engine_names_the_device_of_what_it_makes():
    """``torch.set_default_device("cuda")`` would move it there."""
    silent, made = [], 0
    for name, path in structure.modules().items():
        if structure.room(name) in {"cli", "evaluation", "theory"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _MAKERS:
                made += 1
                if "device" not in {keyword.arg for keyword in node.keywords}:
                    silent.append((path.name, node.lineno))
    assert made > 100
    assert silent == []


def test_a_call_that_enters_nothing_of_the_package_is_no_way():
    with pytest.raises(RuntimeError, match="no function of"):
        structure.travelled(lambda: None)
