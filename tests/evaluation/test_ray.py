"""Sweeps on a Ray cluster write the same store as without it, even if a worker dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_sweep import timeless

from kvsketch import InputError, KVSketchError
from kvsketch.evaluation.runner.ray_runner import RayRunner
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import make_setups
from kvsketch.evaluation.runner.store import Store
from kvsketch.evaluation.runner.sweep import Sweep
from kvsketch.evaluation.tasks.longeval import LongEval
from tiny_model import save_tiny_model, tiny_case

# Found, but not imported: that takes seconds, and only slow tests run it.
if find_spec("ray") is None:
    pytest.skip("pip install 'kvsketch[ray]'", allow_module_level=True)
SETTINGS = Settings(max_new_tokens=4, recent=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def sweep_of(folder: str, path: Path) -> Sweep:
    cases = [tiny_case(20, i) for i in range(10)]
    setups = make_setups(["exact", "uniform", "heavy_merge"], [0.5, 0.3])
    return Sweep.open(folder, [LongEval(cases)], setups, SETTINGS, path)


def worker_pids(does: str = "") -> list[int]:
    """Processes of the Ray actors that this process started, found by name and parents: other tests
    may run workers at the same time. ``does``: the method that they are running; "": any."""
    parents: dict[int, int] = {}
    workers = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
                if (entry / "cmdline").read_bytes().startswith(f"ray::_Worker{does}".encode()):
                    workers.append(int(entry.name))
            except OSError:
                continue

    def ours(pid: int) -> bool:
        while pid > 1:
            pid = parents.get(pid, 0)
            if pid == os.getpid():
                return True
        return False

    return [pid for pid in workers if ours(pid)]


@pytest.mark.slow
def test_a_worker_killed_mid_case_is_replaced_and_nothing_lost(folder: str, tmp_path: Path) -> None:
    """After one of two local workers is killed by SIGKILL, the store is that of a plain run, with
    each case once."""
    with sweep_of(folder, tmp_path / "plain.jsonl") as plain:
        plain.run(plain.jobs())
    wanted = timeless(Store(tmp_path / "plain.jsonl", write=False))
    sweep = sweep_of(folder, tmp_path / "ray.jsonl")
    killed: list[int] = []

    def kill_one(_: Any) -> None:
        if not killed and len(sweep.store) >= 5:
            # One that is still loading its model takes Ray minutes to notice on a busy machine.
            for pid in worker_pids(".answer")[:1]:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

    with sweep:
        sweep.run(sweep.jobs(), RayRunner("local", folder, SETTINGS, workers=2), kill_one)
    assert killed
    assert timeless(Store(tmp_path / "ray.jsonl", write=False)) == wanted
    assert (tmp_path / "ray.jsonl").read_bytes().count(b"\n") == len(wanted)


@pytest.mark.slow
def test_a_case_that_kills_every_worker_is_reported(folder: str, tmp_path: Path) -> None:
    sweep = sweep_of(folder, tmp_path / "ray.jsonl")
    done = threading.Event()

    def kill_all() -> None:
        while not done.is_set():
            for pid in worker_pids():
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)

    killer = threading.Thread(target=kill_all)
    killer.start()
    try:
        with pytest.raises(KVSketchError, match="died 3 times over the same case"), sweep:
            sweep.run(sweep.jobs(), RayRunner("local", folder, SETTINGS, workers=1))
    finally:
        done.set()
        killer.join()


@pytest.mark.slow
def test_no_cluster_there(folder: str, tmp_path: Path) -> None:
    sweep = sweep_of(folder, tmp_path / "ray.jsonl")
    with pytest.raises(KVSketchError, match=r"--ray 127\.0\.0\.1:1: no Ray cluster there"), sweep:
        sweep.run(sweep.jobs(), RayRunner("127.0.0.1:1", folder, SETTINGS))
    assert len(Store(tmp_path / "ray.jsonl", write=False)) == 0


@pytest.mark.parametrize(
    ("arguments", "word"), [({"workers": 0}, "--workers 0"), ({"gpus": -1.0}, "--gpus -1")]
)
def test_bad_arguments(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        RayRunner("local", "model", SETTINGS, **arguments)
