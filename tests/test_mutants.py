"""The list of mutants fits the code, so that ``make mutants`` says something."""

from __future__ import annotations

import re

import pytest

from mutants import LIST, ROOT, Mutant, listed

MUTANTS = listed()
#: what survived all tests when an expert reader tried
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
        compile(mutant.applied(source), mutant.file, "exec")


def test_a_list_that_does_not_fit_is_an_error():
    for source, old, new in (("a = 1", "b", "c"), ("a = a", "a", "b"), ("a = 1", "1", "1")):
        with pytest.raises(ValueError, match="its old text occurs"):
            Mutant("x", "file.py", old, new, ("tests/test_x.py",)).applied(source)


def test_there_are_enough_and_what_was_found_once_is_among_them():
    names = [mutant.id for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 60
    algorithms = [m for m in MUTANTS if re.search("src/kvsketch/(streaming|compressors)/", m.file)]
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
