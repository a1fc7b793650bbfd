"""Jobs answered by models on a Ray cluster: one actor per worker, each with its own model."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvsketch.errors import InputError, KVSketchError
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.sweep import Job, answerer_of

if TYPE_CHECKING:
    from kvsketch.evaluation.tasks.base import Reply

#: a job whose worker died this often is considered the cause
_TRIES = 3
_CONNECT_SECONDS = 10


@dataclass
class RayRunner:
    """Gives jobs to ``workers`` actors as they become free, so the order of records is not fixed.
    Only the calling process writes the store. A worker that dies is replaced and its job is
    repeated; unfinished jobs are not recorded, so nothing is lost or duplicated.

    Args:
        address: "local" starts a cluster on this machine and stops it; else that of a running one
            ("auto", "ray://host:10001", "host:6379").
        model: folder or hub id, to be found on every machine.
        workers: models loaded at once, >= 1.
        gpus: GPUs per worker; a fraction shares one.
        threads: of torch, per worker; None: this machine's cores over the workers.

    Raises:
        InputError: Ray is not installed, or an argument is out of range.
    """

    address: str
    model: str
    settings: Settings
    workers: int = 2
    gpus: float = 0.0
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise InputError(f"--workers {self.workers} must be at least 1")
        if self.gpus < 0:
            raise InputError(f"--gpus {self.gpus} must be at least 0")
        if find_spec("ray") is None:
            raise InputError("--ray needs Ray: pip install 'kvsketch[ray]'")

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, list[Reply]]]:
        """
        Raises:
            KVSketchError: no such cluster, too few resources, or a job no worker survives.
        """
        import ray

        started = not ray.is_initialized()
        if started:
            self._connect()
        try:
            yield from self._answered(list(jobs))
        finally:
            if started:
                ray.shutdown()

    def _connect(self) -> None:
        import ray

        if self.address not in ("local", "auto"):
            self._reach()
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        # Ray's usage reports are telemetry: only if the user has enabled them.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            if self.address == "local":
                ray.init(
                    address="local",
                    num_cpus=max(self.workers, os.cpu_count() or 1),
                    include_dashboard=False,
                    **quiet,
                )
            else:
                ray.init(address=self.address, **quiet)
        except Exception as error:  # Ray raises of many kinds
            raise self._absent(error) from error

    def _reach(self) -> None:
        """Check that the address responds. Ray itself would wait for minutes, and then end this
        process."""
        host, _, port = self.address.removeprefix("ray://").rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise self._absent(error) from error

    def _absent(self, error: Exception) -> KVSketchError:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return KVSketchError(
            f"--ray {self.address}: no Ray cluster there ({reason}); start one with "
            "`ray start --head` and give its host:port, or give --ray local"
        )

    def _answered(self, jobs: list[Job]) -> Iterator[tuple[Job, list[Reply]]]:
        import ray

        worker = ray.remote(num_cpus=1, num_gpus=self.gpus)(_Worker)
        threads = self.threads or max(1, (os.cpu_count() or 1) // self.workers)
        waiting = deque((job, 1) for job in jobs)
        busy: dict[Any, tuple[Any, Job, int]] = {}

        def start(actor: Any) -> None:
            job, tries = waiting.popleft()
            busy[actor.answer.remote(job.cases, job.setup)] = (actor, job, tries)

        def new() -> Any:
            return worker.remote(self.model, self.settings, threads)

        for _ in range(min(self.workers, len(jobs))):
            start(new())
        while busy:
            done, _ = ray.wait(list(busy), num_returns=1)
            actor, job, tries = busy.pop(done[0])
            try:
                replies: list[Reply] = ray.get(done[0])
            except ray.exceptions.RayActorError as error:  # it died: another one does its job
                if tries == _TRIES:
                    raise KVSketchError(
                        f"a Ray worker died {_TRIES} times over the same case; what is finished is "
                        f"kept ({error})"
                    ) from error
                waiting.appendleft((job, tries + 1))
                actor = new()
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                if isinstance(cause, KVSketchError):
                    raise cause from error
                raise
            else:
                yield job, replies
            if waiting:
                start(actor)


class _Worker:
    """An actor: a model that answers."""

    def __init__(self, model: str, settings: Settings, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._answerer = answerer_of(model, settings)

    def answer(self, cases: Any, setup: Any) -> list[Reply]:
        return self._answerer.answer(cases, setup)
