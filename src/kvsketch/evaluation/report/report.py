"""The output of a run: a table for people, or one JSON object for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group

from kvsketch.evaluation.report.terminal import BETWEEN, bare_table, titled
from kvsketch.evaluation.runner.scales import Scale, scale_of

#: Columns of a results table. If a terminal is too narrow for all of them, the rightmost are left
#: out first. The first five are always shown.
_COLUMNS = ("method", "budget", "score", "95% CI", "kept", "cases", "tok/s", "KV kB", "slots")
_COLUMNS_WIDE = (*_COLUMNS, "peak kB", "prefill/s")
_ALWAYS = 5
#: The order of the columns in a table.
_ORDER = (
    *("method", "budget", "cases", "score", "95% CI", "slots", "KV kB", "kept"),
    *("peak kB", "prefill/s", "tok/s"),
)
#: The width below which the name of a method is folded.
_LEAST_NAME = 13


def results_tables(rows: Sequence[Mapping[str, Any]], width: int = 80) -> Iterator[Group]:
    """Tables of `sweep.aggregate` rows, one per task and group (lines, data set, length, ...).

    Args:
        width: columns of the terminal. A table shows as many columns as fit and cuts no number.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(in_words(row, ": "), []).append(row)
    for title, group in groups.items():
        yield _results_table(title, group, width)


def group_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What lies between task and protocol in one of ``sweep.aggregate``'s rows."""
    names = list(row)[list(row).index("task") + 1 : list(row).index("question")]
    return {name: row[name] for name in names}


def in_words(row: Mapping[str, Any], between: str = ", ") -> str:
    """The task and the group of such a row."""
    within = str(row["task"]).partition("/")[2]  # the task may say a part of the group already
    more = [
        f"{value} lines" if name == "lines" else f"{name} {value}"
        for name, value in group_of(row).items()
        if value != within
    ]
    return between.join(filter(None, [str(row["task"]), ", ".join(more)]))


def _results_table(title: str, rows: Sequence[Mapping[str, Any]], width: int) -> Group:
    """One table. A kB is 1,000 bytes per case. Peak memory and prefill speed need 100 columns."""
    tokens = sum(row["prompt_tokens"] for row in rows) / len(rows)
    scale = scale_of(rows[0]["task"])
    better = "; less is better" if scale.is_error else ""
    table = bare_table()
    cells = [_cells(scale, row) for row in rows]
    shown = _fitting(cells, width)
    for name in shown:
        if name == "method":  # a name that states a window may be long
            table.add_column(name, overflow="fold", min_width=_LEAST_NAME)
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        table.add_row(*(cell[name] for name in shown))
    question = rows[0]["question"]
    return titled(f"{title}; {tokens:,.0f} tokens, question {question}{better}", table)


def _cells(scale: Scale, row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "method": row["method"],
        "budget": str(row["budget"]) if row["tolerance"] is None else f"tol {row['tolerance']}",
        "cases": str(row["cases"]),
        "score": _share(scale, row["score"]),
        "95% CI": _interval(scale, row),
        "slots": f"{row['slots']:,.0f}",
        "KV kB": f"{row['kv_bytes'] / 1000:,.0f}",
        "kept": f"{row['kv_bytes'] / row['exact_kv_bytes']:.1%}",
        "peak kB": f"{row['peak_kv_bytes'] / 1000:,.0f}",
        "prefill/s": _rate(row["prefill_tokens_per_s"]),
        "tok/s": _rate(row["decode_tokens_per_s"]),
    }


def _fitting(rows: Sequence[Mapping[str, str]], width: int) -> list[str]:
    """The columns that fit into the terminal, in the order of the table."""

    def needed(name: str) -> int:
        longest = max(len(text) for text in (name, *(row[name] for row in rows)))
        return BETWEEN + (min(longest, _LEAST_NAME) if name == "method" else longest)

    names = list(_COLUMNS_WIDE if width >= 100 else _COLUMNS)
    while len(names) > _ALWAYS and sum(map(needed, names)) > width:
        names.pop()
    return [name for name in _ORDER if name in names]


def _share(scale: Scale, score: float) -> str:
    """A score in [0, 1], as in the store, or an error on its own scale."""
    return scale.shown(score) if scale.is_error else f"{score:.2f}"


def _interval(scale: Scale, row: Mapping[str, Any]) -> str:
    if scale.is_error:  # a single case has no interval
        return scale.interval(row["ci95"]) if row["answers"] > 1 else "-"
    return "-".join(f"{end:.2f}" for end in row["ci95"])


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def report(command: str, rows: Sequence[Mapping[str, Any]], **rest: Any) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {"command": command, "results": list(rows), **rest, **environment()}


def environment() -> dict[str, Any]:
    """Versions and hardware that the numbers were measured with."""
    import torch
    import transformers

    from kvsketch import __version__
    from kvsketch.kernels import native

    hardware: dict[str, Any] = {
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cpu_kernel": native.kernel(),
    }
    if torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
    return {
        "versions": {
            "kvsketch": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "hardware": hardware,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"


def dumps(value: Mapping[str, Any]) -> str:
    """JSON on one line. A NaN is not valid JSON and raises an error."""
    return json.dumps(value, allow_nan=False)
