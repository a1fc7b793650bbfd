"""Every example runs in an empty folder, in under a minute, and prints what it should."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
#: patterns that the output must contain
SAID = {
    "generate.py": [
        r"DynamicCache: '\D*43514\D*'",
        r"SketchCache: '\D*43514\D*'",
        r"bytes are kept",
    ],
    "many_questions.py": [r"[45] of 5 right from \d+% of the bytes"],
    "own_method.py": [r"large_values +relative error of attention \d\.\d+", r"heavy_merge "],
    "compare.ipynb": [r"exact +1\.0 +1\.00 +100%", r"heavy_merge +0\.5 "],
}


def code_of(path: Path) -> str:
    if path.suffix == ".py":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_every_example_is_listed_and_tested() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".ipynb"}}
    assert files == set(SAID)
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"({name})" in listed for name in files)


def test_the_notebook_was_executed() -> None:
    cells = json.loads((EXAMPLES / "compare.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    text = "".join("".join(out.get("text", "")) for cell in code for out in cell["outputs"])
    assert all(re.search(pattern, text) for pattern in SAID["compare.ipynb"])
    assert "site-packages" not in json.dumps(cells)  # no folder of the machine that ran it


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_examples_run(name: str, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-c", code_of(EXAMPLES / name)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    for pattern in SAID[name]:
        assert re.search(pattern, done.stdout), done.stdout
    # the time of processors, since other programs may run on this machine
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 60
