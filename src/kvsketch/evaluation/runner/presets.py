"""The papers' tables as runs: what ``kvsketch eval --preset NAME`` answers, and with what.

Where a paper leaves something open, ``notes`` say how it is read here, and after what source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsketch.evaluation.report.published import (
    BALANCEKV_TABLE_1,
    CLUSTERGEN_TABLE_2,
    SUBGEN_TABLE_1,
)
from kvsketch.evaluation.runner.setups import Setup, make_setups


@dataclass(frozen=True)
class Preset:
    """One table of a paper.

    Attributes:
        name: as ``--preset`` takes it.
        table: what the paper printed (``published``).
        task: where its cases come from; "longbench_e" takes LongBench's own records of a data set
            where those of LongBench-E are not there, and says so.
        methods: as ``--methods`` takes them, each in the window that the paper gave it; by lines,
            where the paper's windows or budgets differ by length.
        budgets: of all methods; by lines, as above.
        options: what else the protocol says, by the name of ``kvsketch eval``'s option.
        max_prompt_tokens: longer prompts lose their middle; a model that has fewer positions cuts
            to what it takes.
        chat: whether a tokenizer's chat template is put around a question, as LongBench does.
        notes: what the paper does not say, and how it is read.
    """

    name: str
    table: Mapping[str, Any]
    task: str
    methods: Mapping[int, Sequence[str]]
    budgets: Mapping[int, int | float]
    options: Mapping[str, Any]
    max_prompt_tokens: int | None = None
    chat: bool = True
    notes: Sequence[str] = ()

    @property
    def datasets(self) -> tuple[str, ...]:
        """LongBench's data sets, in the paper's order."""
        return tuple(name for names in self.table.get("datasets", {}).values() for name in names)

    def setups(self, lines: int = 0, seeds: Sequence[int] = (0,)) -> list[Setup]:
        """What a case is answered with; ``lines`` of LongEval's record, else 0."""
        return make_setups(self.methods[lines], [self.budgets[lines]], seeds=seeds)


#: what all three tables have in common: the whole prompt is read, question and all, then compressed
#: once; the answer's own tokens are kept
_ONCE = {"question": "seen", "prefill": "exact", "one_shot": True}

#: SubGen's Table 1: what was kept of the tokens ("35% less") by lines
SUBGEN_SHARES = {200: 0.65, 300: 0.58, 400: 0.50}
#: and how long the prompts were in tokens (ClusterGen, section 4)
SUBGEN_TOKENS = {200: 5_000, 300: 7_000, 400: 9_000}
#: recent tokens beside the centers: the better of the two was printed (ClusterGen, section 4)
SUBGEN_RECENT = (2_048, 3_072)


def h2o_window(share: float) -> str:
    """H2O keeps half of its budget for recent tokens, its own default, and no first ones."""
    return f"h2o:0:{share / 2:g}"


def subgen_windows(lines: int) -> list[str]:
    """k-center with the paper's recent tokens, scaled with the prompt: its 2,048 of 5,000 tokens
    are 841 of 2,053."""
    return [f"kcenter:0:{recent / SUBGEN_TOKENS[lines]:.4f}" for recent in SUBGEN_RECENT]


_SUBGEN = Preset(
    name="subgen-table1",
    table=SUBGEN_TABLE_1,
    task="longeval",
    methods={
        lines: ["exact", "streaming_llm:4:0", h2o_window(share), *subgen_windows(lines)]
        for lines, share in SUBGEN_SHARES.items()
    },
    budgets=SUBGEN_SHARES,
    options=_ONCE,
    notes=(
        "kcenter keeps the paper's 2,048 or 3,072 recent tokens as shares of its 5,000, 7,000 and "
        "9,000 (another tokenizer needs fewer tokens for the same lines); the better of the two "
        "stands beside the paper, which printed the better one (ClusterGen, section 4).",
        "H2O keeps half of its budget for recent tokens, its own default; Sink keeps 4 first "
        "tokens, the rest recent. Neither paper says more.",
    ),
)

_BALANCEKV = Preset(
    name="balancekv-table1",
    table=BALANCEKV_TABLE_1,
    task="longbench_e",
    methods={
        0: [
            "exact",
            "pyramidkv:0:32",
            "snapkv:0:32",
            "streaming_llm:128:0",
            "uniform:32:32",
            "balancekv:32:32",
        ]
    },
    budgets={0: 0.25},
    options=_ONCE,
    max_prompt_tokens=100_000,
    chat=False,
    notes=(
        "balancekv: blocks of 256 tokens; half of the tokens goes in each of T = 2 rounds, and in "
        "a third, partial one what the 64 tokens always kept would add to the budget: every method "
        "holds 0.25.",
        "The windows, the prompts without a chat template and their limit of 100,000 tokens are "
        "those of the authors' run_longbench.py (ksheth96/BalanceKV: 32 first, 32 recent tokens); "
        "its own blocks are of 128 tokens unless told, the paper's of 256. SnapKV's and "
        "PyramidKV's 32 recent tokens and StreamingLLM's 128 first ones are MInference's "
        "settings, which the paper says it used.",
    ),
)

_CLUSTERGEN = Preset(
    name="clustergen-table2",
    table=CLUSTERGEN_TABLE_2,
    task="longbench",
    methods={0: ["exact", "streaming_llm:1024:1024", "kcenter:0:1024"]},
    budgets={0: 2_048},
    options=_ONCE,
    max_prompt_tokens=20_000,
    notes=(
        "The paper names no data sets: those of LongBench-E, with LongBench's own records, are "
        "taken, for the exact cache's scores of this very model in LongBench's README.md sum up to "
        "the paper's (69.1, 52.1, 57.2, 180.0, 108.3).",
        'Sink keeps 1,024 first and 1,024 recent tokens: the paper fixes "l, r to 1,024 for all '
        'datasets and both cache methods".',
        "That the prompt is compressed once is said of the line retrieval and taken over.",
    ),
)

PRESETS = {preset.name: preset for preset in (_CLUSTERGEN, _BALANCEKV, _SUBGEN)}
