"""The list of mutants fits the code, so that ``make mutants`` can run them."""

from __future__ import annotations

import json
import re
import sys

import pytest

import mutants
from mutants import LIST, ROOT, Mutant, listed

MUTANTS = listed()
#: mutants that survived all tests when an expert reader tried them
FOUND = {
    "issue-r-value-not-squared",
    "issue-half-the-key-exponent",
    "issue-denominator-on-k-v",
    "issue-bounded-denominator-on-k-v",
    "issue-line-9-with-n",
    "issue-signs-of-blocks-are-coins",
    "issue-contiguous-blocks",
    "issue-walks-delta-streaming",
    "issue-figure-2-128-sinks",
    "issue-chebyshev-1-instead-of-3",
}


def test_every_old_text_occurs_once_and_the_new_one_compiles():
    for mutant in MUTANTS:
        source = (ROOT / mutant.file).read_text(encoding="utf-8")
        changed = mutant.applied(source)
        if mutant.file.endswith(".py"):
            compile(changed, mutant.file, "exec")


def test_a_list_that_does_not_fit_is_an_error():
    for source, old, new in (("a = 1", "b", "c"), ("a = a", "a", "b"), ("a = 1", "1", "1")):
        with pytest.raises(ValueError, match="its old text occurs"):
            Mutant("x", "file.py", old, new, ("tests/test_x.py",)).applied(source)


def test_there_are_enough_and_what_was_found_once_is_among_them():
    names = [mutant.id for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 60
    algorithms = [m for m in MUTANTS if re.search("src/kvsketch/(cache|methods)/", m.file)]
    assert len(algorithms) >= 45
    assert {name for name in names if name.startswith("issue-")} == FOUND
    for mutant in MUTANTS:
        assert mutant.equivalent is None or len(mutant.equivalent) > 40


def test_the_tests_they_name_are_there():
    for test in {test for mutant in MUTANTS for test in mutant.tests}:
        name, _, case = test.partition("::")
        assert f"def {case.partition('[')[0]}" in (ROOT / name).read_text(encoding="utf-8"), test
    assert all(mutant.tests for mutant in MUTANTS)
    assert LIST.is_file()


@pytest.mark.parametrize(
    ("code", "equivalent", "exit_code"),
    [(1, None, 0), (0, None, 1), (0, "a reason", 0), (1, "a reason", 1), (2, None, 1)],
)
def test_the_script_changes_one_file_at_a_time_and_says_what_came_of_it(
    code, equivalent, exit_code, tmp_path, monkeypatch, capsys
):
    """The exit code is 0 only if equivalent mutants survive and all others are killed."""
    change = Mutant("one", "Makefile", "lint: setup", "lint: nothing", ("tests/x.py",), equivalent)
    seen = []

    def copied(to):
        to.mkdir()
        (to / "Makefile").write_text((ROOT / "Makefile").read_text())
        return to

    def run(tree, tests, limit=0):
        changed = "lint: nothing" in (tree / "Makefile").read_text()
        seen.append((changed, list(tests)))
        return (code if changed else 0), "said"

    monkeypatch.setattr(mutants, "listed", lambda: [change])
    monkeypatch.setattr(mutants, "copied", copied)
    monkeypatch.setattr(mutants, "run", run)
    monkeypatch.setattr(sys, "argv", ["mutants.py", "--json", "--jobs", "1", "--only", "one"])
    with pytest.raises(SystemExit) as done:
        mutants.main()
    assert int(done.value.code) == exit_code
    assert seen == [(False, ["tests/x.py"]), (True, ["tests/x.py"])]
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["outcome"] == {0: "survived", 1: "killed", 2: "error"}[code]
    assert "lint: nothing" not in (ROOT / "Makefile").read_text()


def test_nothing_is_said_where_the_tests_fail_without_a_change(monkeypatch):
    monkeypatch.setattr(mutants, "copied", lambda to: to)
    monkeypatch.setattr(mutants, "run", lambda tree, tests, limit: (1, "1 failed"))
    with pytest.raises(SystemExit, match="without any change"):
        list(mutants.measured(MUTANTS[:1], 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("assert True", 0, "1 passed"),
        ("assert False", 1, "1 failed"),
        ("while True: pass", 1, "no end after 3 seconds"),
    ],
)
def test_tests_run_in_a_process_of_their_own(body, code, said, tmp_path):
    (tmp_path / "test_x.py").write_text(f"def test_it():\n    {body}\n")
    found = mutants.run(tmp_path, ["test_x.py"], limit=60 if "assert" in body else 3)
    assert found[0] == code
    assert said in found[1]
