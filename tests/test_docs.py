"""docs/algorithms.md names files and tests: they must exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_table_of_algorithms_names_what_is_there():
    rows = [
        line.split(" | ")
        for line in (ROOT / "docs" / "algorithms.md").read_text().splitlines()
        if line.startswith("| ") and "`" in line
    ]
    assert len(rows) > 25
    checked = 0
    for _, files, tests in rows:
        for name in re.findall(r"`([\w/]+\.py)`", files):
            assert (ROOT / "src" / "kvsketch" / name).is_file(), name
        text = ""
        for found in re.finditer(r"`(?:(\w+\.py))?(?:::)?(test_\w+)?`", tests):
            file, test = found.groups()
            if file:
                text = (ROOT / "tests" / file).read_text()
            if test:
                assert f"def {test}(" in text, (file, test)
                checked += 1
    assert checked > 30
