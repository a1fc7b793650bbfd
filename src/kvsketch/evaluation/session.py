"""One evaluation from names to rows: checks everything cheap first, then loads and runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsketch.evaluation import loading
from kvsketch.evaluation.answering import Answerer, new_cache
from kvsketch.evaluation.encoding import EncodedCase, Encoder
from kvsketch.evaluation.longeval import (
    Case,
    Setup,
    encode_cases,
    evaluate,
    outcomes_of,
    remaining,
    run_settings,
)
from kvsketch.evaluation.results import Outcome, ResultStore, aggregate
from kvsketch.evaluation.settings import Settings


@dataclass
class Session:
    """A run that can be stopped and looked at at any time.

    `setups` may depend on the record length: it maps lines to setups, or is one list for all.
    """

    model: str
    cases: Sequence[Case]
    setups: Sequence[Setup] | dict[int, Sequence[Setup]]
    settings: Settings
    header: Mapping[str, Any]
    store: ResultStore
    _answerer: Answerer | None = None
    _encoded: dict[str, EncodedCase] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        model: str,
        cases: Sequence[Case],
        setups: Sequence[Setup] | dict[int, Sequence[Setup]],
        settings: Settings,
        out: Path | None,
    ) -> Session:
        """Resolves the model and opens the store. Raises `KVSketchError`; loads no weights."""
        loading.check_device(settings.device)
        resolved = loading.resolve_model(model)
        config = loading.load_config(resolved)
        wanted = setups.values() if isinstance(setups, dict) else [setups]
        for setup in (setup for group in wanted for setup in group):
            # A cache that cannot be made is an error now, not after the weights are loaded.
            new_cache(config, settings, setup.method, setup.budget, prompt_length=1)
        name = model if model == loading.PACKAGED else resolved
        header = run_settings(settings, name, loading.fingerprint(resolved))
        return cls(resolved, cases, setups, settings, header, ResultStore(out, header))

    def groups(self) -> list[tuple[list[Case], Sequence[Setup]]]:
        """Cases of one length with their setups, shortest first."""
        lengths = sorted({case.lines for case in self.cases})
        return [
            (
                [case for case in self.cases if case.lines == lines],
                self.setups[lines] if isinstance(self.setups, dict) else self.setups,
            )
            for lines in lengths
        ]

    def remaining(self) -> int:
        return sum(remaining(self.store, cases, setups) for cases, setups in self.groups())

    def total(self) -> int:
        return sum(len(cases) * len(setups) for cases, setups in self.groups())

    def prepare(self) -> None:
        """Checks every prompt against the model's positions, then loads the weights; does nothing
        if the store holds all answers. Raises `KVSketchError`."""
        if not self.remaining():
            return
        tokenizer = loading.load_tokenizer(self.model)
        config = loading.load_config(self.model)
        self._encoded = encode_cases(Encoder(tokenizer, config, self.settings), self.cases)
        model = loading.load_model(self.model, self.settings.device, self.settings.dtype)
        self._answerer = Answerer(model, tokenizer, self.settings)

    def run(self, on_done: Callable[[Outcome], None] | None = None) -> None:
        """Answers what the store does not hold yet."""
        if self._answerer is None:
            self.prepare()
        if self._answerer is None:
            return
        for cases, setups in self.groups():
            evaluate(self._answerer, cases, self._encoded, setups, self.store, on_done)

    def rows(self) -> list[dict[str, Any]]:
        """`results.aggregate` rows of what is done so far."""
        return aggregate(
            outcome
            for cases, setups in self.groups()
            for outcome in outcomes_of(self.store, cases, setups)
        )
