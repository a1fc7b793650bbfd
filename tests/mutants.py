"""Change the code on purpose and check that a test fails: ``make mutants``.

    python tests/mutants.py                 # all of them, about forty minutes on two cores
    python tests/mutants.py --only ID --only ID
    python tests/mutants.py --json

``mutants.yaml`` beside this file lists changes to the papers' files: an old text, which must occur
exactly once in its file, the new text, and the tests that should fail then. Each change is made to
a copy of the tree, one at a time. A change whose tests still pass survives: either a test is
missing, or the change is equivalent, and the list gives the reason. The exit code is 1 if a
change survives that is not declared equivalent, if one that is gets killed, or if the list does not
fit the code.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".yaml")
# Seconds after which the tests of a change count as failed (it may cause an endless loop).
_LIMIT = 300
# The same for all listed tests together, without a change.
_LIMIT_OF_ALL = 1800


@dataclass(frozen=True)
class Mutant:
    """One change of the code.

    Attributes:
        id: its name.
        file: the path of the changed file, from the root.
        old: a text that occurs once in the file.
        new: the text that replaces it.
        tests: arguments of pytest: files or node ids.
        equivalent: why no test can fail; None: a test must fail.
    """

    id: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str | None = None

    def applied(self, source: str) -> str:
        """``source`` with the change applied.

        Raises:
            ValueError: the old text does not occur exactly once, or the new text equals it.
        """
        found = source.count(self.old)
        if found != 1 or self.old == self.new:
            raise ValueError(f"{self.id}: its old text occurs {found} times in {self.file}")
        return source.replace(self.old, self.new)


def listed(path: Path = LIST) -> list[Mutant]:
    """All listed changes; a change without ``tests`` has those of its file."""
    found = []
    for part in yaml.safe_load(path.read_text(encoding="utf-8")):
        for entry in part["mutants"]:
            tests = tuple(entry.pop("tests", part.get("tests", ())))
            found.append(Mutant(file=part["file"], tests=tests, **entry))
    return found


def copied(to: Path) -> Path:
    """Copy the tree, without files that git ignores, to a folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    for name in names.decode().split("\0"):
        if name and (ROOT / name).is_file():
            target = to / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
    compiled(to)
    return to


def compiled(tree: Path) -> None:
    """Compile the kernel for CPUs of a tree."""
    build = tree / "src/kvsketch/kernels/native/build.py"
    subprocess.run([sys.executable, str(build)], check=True, capture_output=True)


def run(tree: Path, tests: Iterable[str], limit: int = _LIMIT) -> tuple[int, str]:
    """The exit code of pytest in ``tree`` (1: a test failed or took too long), and its last
    lines."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",  # two changes within a second would have the same .pyc
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_PROFILE": "mutants",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",  # so that the summary has the reason
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "not pages",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return 1, f"no end after {limit} seconds"
    return done.returncode, "\n".join(done.stdout.splitlines()[-6:])


def outcome(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """The outcome "killed", "survived" or "error" (tests could not run), and pytest's last
    lines."""
    path = tree / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(source), encoding="utf-8")
    try:
        if path.suffix in (".cpp", ".h"):
            compiled(tree)
        code, said = run(tree, mutant.tests)
    finally:
        path.write_text(source, encoding="utf-8")
        if path.suffix in (".cpp", ".h"):
            compiled(tree)
    return {0: "survived", 1: "killed"}.get(code, "error"), said


def measured(mutants: list[Mutant], jobs: int) -> Iterable[dict[str, object]]:
    """One row per change, as soon as it is finished."""
    with tempfile.TemporaryDirectory() as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            trees.put(copied(Path(folder) / str(number)))
        everything = sorted({test for mutant in mutants for test in mutant.tests})
        code, said = run(Path(folder) / "0", everything, _LIMIT_OF_ALL)
        if code:
            raise SystemExit(f"the tests fail without any change:\n{said}")

        def row(mutant: Mutant) -> dict[str, object]:
            tree, start = trees.get(), time.perf_counter()
            try:
                found, said = outcome(mutant, tree)
            finally:
                trees.put(tree)
            good = found == ("survived" if mutant.equivalent else "killed")
            seconds = round(time.perf_counter() - start, 1)
            return {**asdict(mutant), "outcome": found, "good": good, "s": seconds, "said": said}

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(row, mutants)


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="ID", help="this one (repeatable)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    given = parser.parse_args()
    mutants = listed()
    unknown = set(given.only or ()) - {mutant.id for mutant in mutants}
    if unknown or given.jobs < 1:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}" if unknown else "--jobs >= 1")
    mutants = [m for m in mutants if given.only is None or m.id in given.only]
    for mutant in mutants:
        mutant.applied((ROOT / mutant.file).read_text(encoding="utf-8"))
    rows, start = [], time.perf_counter()
    for row in measured(mutants, given.jobs):
        rows.append(row)
        word = f"{row['outcome']} {'' if row['good'] else '<-- wrong'}"
        print(f"[{len(rows)}/{len(mutants)}] {row['id']}: {word} ({row['s']} s)", flush=True)
        if row["outcome"] == "error":
            print(row["said"])
    print(f"\n{sum(row['outcome'] == 'killed' for row in rows)} of {len(rows)} killed")
    for row in rows:
        if row["outcome"] == "survived":
            print(f"survived: {row['id']}: {row['equivalent'] or 'A TEST IS MISSING'}")
    if given.json:
        seconds = round(time.perf_counter() - start)
        print(json.dumps({"command": "mutants", "seconds": seconds, "rows": rows}))
    sys.exit(not all(row["good"] for row in rows))


if __name__ == "__main__":
    main()
