"""Cases x setups: what is left to answer, in which order, and what came out.

What answers them (torch, transformers) is imported where it is needed: all that can be refused
without is refused before.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvsketch import __version__
from kvsketch.arguments import check_arguments
from kvsketch.errors import InputError
from kvsketch.evaluation.runner import loading
from kvsketch.evaluation.runner.aggregates import aggregate
from kvsketch.evaluation.runner.encoding import EncodedCase, Encoder, max_positions
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import EXACT, Setup
from kvsketch.evaluation.runner.store import Record, Store, key_of
from kvsketch.evaluation.tasks.base import Case, Task
from kvsketch.models import PACKAGED_MODELS

if TYPE_CHECKING:
    from kvsketch.evaluation.runner.answering import Answerer
    from kvsketch.evaluation.tasks.base import Reply

#: setups of a case: the same for all, or depending on the case
Setups = Sequence[Setup] | Callable[[Case], Sequence[Setup]]


@dataclass(frozen=True)
class Job:
    """Cases that are answered together with one setup."""

    cases: tuple[EncodedCase, ...]
    setup: Setup
    keys: tuple[str, ...]


class Runner(Protocol):
    """Answers jobs, in any order: in this process, or elsewhere (``ray_runner``)."""

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, list[Reply]]]: ...


@dataclass
class Local:
    """Answers jobs one after the other with a model in this process."""

    model: str
    settings: Settings

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, list[Reply]]]:
        answerer = answerer_of(self.model, self.settings)
        for job in jobs:
            yield job, answerer.answer(job.cases, job.setup)


def answerer_of(model: str, settings: Settings) -> Answerer:
    """A model, loaded with its tokenizer."""
    from kvsketch.evaluation.runner.answering import Answerer

    tokenizer = loading.load_tokenizer(model)
    return Answerer(loading.load_model(model, settings.device, settings.dtype), tokenizer, settings)


@dataclass
class Sweep:
    """A run that can be stopped and looked at at any time.

    Attributes:
        model: folder or hub id, resolved.
        tasks: where the cases come from and what scores them.
        settings: what all answers have in common.
        base: the part of every identity that the run decides.
        store: where records go.
    """

    model: str
    tasks: Sequence[Task]
    setups: Setups
    settings: Settings
    base: Mapping[str, Any]
    store: Store
    _cases: list[list[Case]] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        model: str,
        tasks: Sequence[Task],
        setups: Setups,
        settings: Settings,
        out: Path | None,
        preset: str | None = None,
    ) -> Sweep:
        """Resolve the model, read all cases, make every cache once, open the store; loads no
        weights.

        Args:
            preset: its name becomes part of every answer's identity: what else it decides, such as
                chat templates, does not stand there.

        Raises:
            KVSketchError: anything that would fail later.
        """
        resolved = loading.resolve_model(model)
        cases = [task.cases() for task in tasks]
        every = [case for found in cases for case in found]
        wanted = dict.fromkeys(
            s for case in every for s in (setups(case) if callable(setups) else setups)
        )
        for setup in wanted:
            _check(setup, settings)
        store = Store(out)
        try:
            from kvsketch.evaluation.runner.replies import new_cache

            loading.check_device(settings.device)
            config = loading.load_config(resolved)
            for setup in wanted:
                # A cache that cannot be made is an error now, not after the weights are loaded.
                new_cache(config, settings, setup, prompt_length=1)
            base = {
                "model": model if model in PACKAGED_MODELS else resolved,
                "model_fingerprint": loading.fingerprint(resolved),
                "kvsketch": __version__,
                **settings.identity(),
                **({} if preset is None else {"preset": preset}),
            }
        except BaseException:
            store.discard()
            raise
        return cls(resolved, tasks, setups, settings, base, store, cases)

    def pairs(self) -> Iterator[tuple[Task, Case, Setup]]:
        """Everything asked for, in order: all setups see a case before the next one starts, so
        that an interrupted run compares them on the same cases."""
        for task, cases in zip(self.tasks, self._cases, strict=True):
            for case in cases:
                setups = self.setups(case) if callable(self.setups) else self.setups
                for setup in setups:
                    yield task, case, setup

    def identity(self, case: Case, setup: Setup) -> dict[str, Any]:
        """Everything the outcome depends on."""
        return {
            **self.base,
            "task": case.task,
            "case": case.id,
            "max_new_tokens": self.settings.new_tokens(case.max_new_tokens),
            **setup.identity(),
        }

    def key(self, case: Case, setup: Setup) -> str:
        return key_of(self.identity(case, setup))

    def total(self) -> int:
        return sum(1 for _ in self.pairs())

    def remaining(self) -> int:
        return sum(self.key(case, setup) not in self.store for _, case, setup in self.pairs())

    def jobs(self) -> list[Job]:
        """What the store does not hold yet, in batches. Every prompt is checked against the
        model's positions before any weights are loaded.

        Raises:
            KVSketchError: a prompt that does not fit.
        """
        left = [x for x in self.pairs() if self.key(x[1], x[2]) not in self.store]
        return list(self._batched(left, self._encoded(left))) if left else []

    def run(
        self,
        jobs: Sequence[Job],
        runner: Runner | None = None,
        on_done: Callable[[Record], None] | None = None,
    ) -> None:
        """Answer jobs, here or where ``runner`` does, and keep each record as it comes.

        Raises:
            KVSketchError: the store cannot be written.
        """
        if not jobs:
            return
        asked = {self.key(case, setup): (task, case, setup) for task, case, setup in self.pairs()}
        made = _made(elsewhere=runner is not None)
        runner = runner or Local(self.model, self.settings)
        for job, replies in runner.run(jobs):
            for key, reply in zip(job.keys, replies, strict=True):
                record = self._record(*asked[key], reply, made)
                self.store.add(record)
                if on_done is not None:
                    on_done(record)

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def done(self) -> list[Record]:
        """The answers so far, in order: of what was asked for, not of all the store holds."""
        keys = (self.key(case, setup) for _, case, setup in self.pairs())
        return [self.store.records[key] for key in keys if key in self.store]

    def rows(self) -> list[dict[str, Any]]:
        """What is done so far, one row per task, group and setup."""
        return aggregate(self.done())

    def _encoded(self, left: Sequence[tuple[Task, Case, Setup]]) -> dict[str, EncodedCase]:
        """Token ids by case id."""
        tokenizer = loading.load_tokenizer(self.model)
        encoder = Encoder(tokenizer, loading.load_config(self.model), self.settings)
        positions = max_positions(loading.load_config(self.model))
        found: dict[str, EncodedCase] = {}
        for task, case, _ in left:
            if case.id in found:
                continue
            new = self.settings.new_tokens(case.max_new_tokens)
            limit = self.settings.max_prompt_tokens or (positions or 10**9) - new
            if limit < 2:
                raise InputError(
                    f"{case.where}: an answer of {new} tokens leaves no room for a prompt in the "
                    f"model's {positions} positions; give --max-new-tokens"
                )
            whole = task.encoded(case, encoder, limit, new)
            found[case.id] = replace(whole, ids=array("i", whole.ids))
        return found

    def _batched(
        self, left: Sequence[tuple[Task, Case, Setup]], encoded: Mapping[str, EncodedCase]
    ) -> Iterator[Job]:
        """Up to ``batch_size`` neighbouring cases of one task and answer length at a time."""

        def together(part: tuple[Task, Case, Setup]) -> tuple[str, int, str]:
            case, new_tokens = part[1], self.settings.new_tokens(part[1].max_new_tokens)
            return case.task, new_tokens, repr(dict(case.group))

        for _, group in groupby(left, key=together):
            members = list(group)
            cases = list({case.id: case for _, case, _ in members}.values())
            wanted = {(case.id, setup) for _, case, setup in members}
            order = list({setup: None for _, _, setup in members})
            size = self.settings.batch_size
            for start in range(0, len(cases), size):
                batch = cases[start : start + size]
                for setup in order:
                    mine = [case for case in batch if (case.id, setup) in wanted]
                    if mine:
                        yield Job(
                            tuple(encoded[case.id] for case in mine),
                            setup,
                            tuple(self.key(case, setup) for case in mine),
                        )

    def _record(
        self, task: Task, case: Case, setup: Setup, reply: Reply, made: Mapping[str, Any]
    ) -> Record:
        return Record(
            self.identity(case, setup),
            {
                "score": task.graded(case, reply),
                "group": dict(case.group),
                "label": setup.label,
                "kept": setup.kept,
                "answers": list(case.answers),
                "made": made,
                # as the results of before there were sessions
                **{k: v for k, v in reply.__dict__.items() if k != "turns" or v},
                "measured": dict(task.measured(case, reply)),
            },
        )


def _made(elsewhere: bool) -> dict[str, Any]:
    """When, with which versions and on what a run's answers are made. On a cluster the hardware is
    not this machine's, and is left out."""
    from kvsketch.evaluation.report.report import environment

    found = environment()
    versions = {name: found["versions"][name] for name in ("torch", "transformers", "python")}
    hardware = {} if elsewhere else found["hardware"]
    return {"date": datetime.now(timezone.utc).date().isoformat(), **versions, **hardware}


def _check(setup: Setup, settings: Settings) -> None:
    if setup.method != EXACT:
        sink, recent = setup.window_of(settings.sink, settings.recent, 0)
        given = setup.goal() | {"sink": sink, "recent": recent, "prefill": settings.prefill}
        check_arguments(setup.method, **given)
