"""Change the code on purpose and check that a test fails: ``make mutants``.

    python tests/mutants.py                 # all of them, about an hour on two cores
    python tests/mutants.py --only ID --only ID
    python tests/mutants.py --json

``mutants.yaml`` beside this file lists changes to the papers' files: an old text, which must occur
exactly once in its file, the new text, and the tests that should fail then. Each change is made to
a copy of the tree, one at a time; its tests run in a process that has imported torch already. A
change whose tests still pass survives: either a test is missing, or the change is equivalent, and
the list gives the reason. The exit code is 1 if a change survives that is not declared equivalent,
if one that is gets killed, or if the list does not fit the code.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import shutil
import signal
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
_LIBRARY = "src/kvsketch/kernels/native/attention.so"
# What every test imports, before Triton, which decides on its import whether it interprets kernels.
_PRELOADED = [
    *("triton", "torch", "pytest", "hypothesis", "yaml", "sympy"),
    *("transformers.cache_utils", "transformers.models.auto.modeling_auto"),
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"),
]
_ENVIRONMENT = {
    "PYTHONDONTWRITEBYTECODE": "1",  # two changes within a second would have the same .pyc
    "OMP_NUM_THREADS": "1",
    "HYPOTHESIS_PROFILE": "mutants",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "200",  # so that the summary has the reason
}
# Seconds after which the tests of a change count as failed (it may cause an endless loop).
_LIMIT = 300
# The same for all listed tests together, without a change.
_LIMIT_OF_ALL = 3600


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
    said = tree / "said.txt"
    context = multiprocessing.get_context("forkserver")
    child = context.Process(target=_tested, args=(tree, list(tests), said))
    child.start()
    child.join(limit)
    if child.exitcode is None:
        os.killpg(child.pid or 0, signal.SIGKILL)  # and what its tests started
        child.join()
        return 1, f"no end after {limit} seconds"
    lines = said.read_text(encoding="utf-8", errors="replace").splitlines()
    return child.exitcode, "\n".join(lines[-6:])


def _tested(tree: Path, tests: list[str], said: Path) -> None:
    """Run tests in this process, and leave it with pytest's exit code."""
    os.setsid()
    os.chdir(tree)
    os.environ.update(_ENVIRONMENT, PYTHONPATH=str(tree / "src"))
    os.environ.pop("TRITON_INTERPRET", None)
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(tree / "src"), str(tree)]
    with said.open("w", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
        import pytest

        code = pytest.main(["-x", "-q", "-m", "not pages", "-p", "no:cacheprovider", *tests])
        sys.stdout.flush()
        os._exit(int(code))


def outcome(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """The outcome "killed", "survived" or "error" (tests could not run), and pytest's last
    lines."""
    path, library = tree / mutant.file, tree / _LIBRARY
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(source), encoding="utf-8")
    of_the_library = path.suffix in (".cpp", ".h")
    before = library.read_bytes() if of_the_library else b""
    try:
        if of_the_library:
            compiled(tree)
        code, said = run(tree, mutant.tests)
    finally:
        path.write_text(source, encoding="utf-8")
        if of_the_library:
            library.write_bytes(before)
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
    os.environ.update(_ENVIRONMENT, TRITON_INTERPRET="1")  # of the process that imports torch
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
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
