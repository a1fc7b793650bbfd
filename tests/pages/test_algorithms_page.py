"""docs/algorithms.md is complete: every numbered item of the four papers has a row, every row has a
test, and the files and tests that rows name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.pages
ROOT = Path(__file__).resolve().parents[2]
PAPERS = ROOT.parent / "shared" / "papers"
KINDS = "Algorithm|Definition|Lemma|Theorem|Corollary|Proposition|Remark|Claim|Fact|Observation"
ITEM = rf"({KINDS})\s+((?:[A-Z]\.)?\d+(?:\.\d+)*)"

#: the numbered items of each paper, and the section of the page that lists them
ITEMS = {
    "subgen.md": (
        "SubGen / ClusterGen",
        {"Algorithm 1", "Definition 1", "Lemma 1", "Lemma 2", "Theorem 1", "Corollary 1"},
    ),
    "clustergen.md": (
        "SubGen / ClusterGen",
        {"Algorithm 1", "Definition 2.1", "Theorem 2.2", "Definition B.1", "Lemma B.2"}
        | {"Lemma B.3", "Theorem B.4", "Corollary B.5"},
    ),
    "balancekv.md": (
        "BalanceKV",
        {f"Algorithm {i}" for i in range(1, 5)} | {f"Theorem 3.{i}" for i in range(1, 5)},
    ),
    "compression_barriers.txt": (
        "Compression Barriers",
        {"Algorithm 1", "Algorithm 2", "Remark 7", "Corollary 9", "Corollary 16"}
        | {f"Definition {i}" for i in (4, 10, 12, 18)}
        | {f"Lemma {i}" for i in (3, 13, 14, 21, 22)}
        | {f"Theorem {i}" for i in (1, 2, 5, 6, 8, 11, 15, 17, 19, 20, *range(23, 28))},
    ),
}


def rows() -> dict[str, list[list[str]]]:
    """The cells of each row, by the section of the table."""
    found: dict[str, list[list[str]]] = {}
    for line in (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| **"):
            section = found.setdefault(re.findall(r"\*\*(.+?)\*\*", line)[0], [])
        elif line.startswith("| ") and found:
            section.append([cell.strip() for cell in line.strip("| ").split(" | ")])
    return found


def named(text: str) -> set[str]:
    return {" ".join(found) for found in re.findall(ITEM, text)}


@pytest.mark.parametrize("paper", ITEMS)
def test_every_numbered_item_has_a_row(paper):
    section, items = ITEMS[paper]
    listed = set().union(*(named(row[0]) for row in rows()[section]))
    assert items <= listed, items - listed
    others = set().union(*(numbers for name, numbers in ITEMS.values() if name == section))
    assert listed == others, listed - others  # no row has an item of no paper of the section


@pytest.mark.parametrize("paper", ITEMS)
def test_the_list_of_items_is_the_papers_own(paper):
    """The items are those whose statement starts a line of the paper; citations do not."""
    path = PAPERS / paper
    if not path.is_file():
        pytest.skip(f"the papers are not part of the repository: {path} is not here")
    text = path.read_text(encoding="utf-8")
    stated = re.findall(rf"^[#*\s]*{ITEM}(?=[.:* (]|$)", text, flags=re.MULTILINE)
    assert {" ".join(found) for found in stated} == ITEMS[paper][1]


def test_every_row_names_files_and_tests_that_are_there():
    files = tests = 0
    for row in (row for section in rows().values() for row in section):
        assert len(row) == 3, row
        for name in re.findall(r"`([\w/]+\.py)`", row[1]):
            assert (ROOT / "src" / "kvsketch" / name).is_file(), name
            files += 1
        text = ""
        named_tests = re.findall(r"`(?:((?:\w+/)*test_\w+\.py))?(?:::)?(test_\w+)?`", row[2])
        for file, test in named_tests:
            if file:
                text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            if test:
                assert f"def {test}(" in text, (file, test)
                tests += 1
        if named(row[0]):  # a numbered item: a test of its own, or one line that says why not
            assert any(test for _, test in named_tests) or row[2].startswith("none: "), row
    assert files > 40
    assert tests > 60
