"""Replace the rows of some methods in a stored result by rows of a later run, or add them.

    python -m benchmarks.kl --texts 4 --methods heavy_merge,keydiff --out /tmp/kl.json
    python -m benchmarks.replace_rows docs/results/kl.json /tmp/kl.json --control keydiff

After a change of one method, only its rows need another run. Both runs must have the same settings,
apart from the list of methods. Methods named in ``--control`` did not change and are in both runs:
their rows stay as they were, and the largest differences between the two runs are written beside
the rows, with the versions and hardware of the later run. ``benchmarks.markdown.made_with`` states
all of this below the tables.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.page import save

#: The fields that identify a row, as far as a benchmark has them.
KEYS = ("source", "subtask", "queries", "method", "kept", "budget")
#: The fields that may differ between the two runs. Those in ``RUN`` describe the later run.
_OTHER = ("methods", "results", "versions", "hardware", "complete", "again", "note")
RUN = ("versions", "hardware")


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """The values of ``KEYS`` that identify a row. Where there is a budget, what is kept is
    measured."""
    names = [name for name in KEYS if name != "kept" or "budget" not in row]
    return tuple(row.get(name) for name in names)


def replaced(before: dict[str, Any], later: dict[str, Any], control: list[str]) -> dict[str, Any]:
    """``before`` with its rows replaced by those of ``later``, except rows of the methods in
    ``control``. Methods that ``before`` lacks come last.

    Raises:
        ValueError: the settings differ, the later run is not complete, or it lacks a row.
    """
    names = (set(before) | set(later)) - set(_OTHER)
    differ = sorted(name for name in names if before.get(name) != later.get(name))
    if differ:
        raise ValueError(f"the runs differ in {', '.join(differ)}")
    if later.get("complete") is False:
        raise ValueError("the later run is not complete")
    found = {key(row): row for row in later["results"]}
    methods = list(dict.fromkeys(row["method"] for row in later["results"]))
    unknown = sorted(set(control) - set(methods))
    if unknown:
        raise ValueError(f"--control: the later run has no {', '.join(unknown)}")
    mine = [row for row in before["results"] if row["method"] in methods]
    missing = [key(row) for row in mine if key(row) not in found]
    if missing:
        raise ValueError(f"the later run lacks the row {missing[0]}")
    new = [name for name in methods if name not in control]
    differences: dict[str, float] = {}
    for row in mine:
        if row["method"] in control:
            for name, value in found[key(row)].items():
                if isinstance(value, float) and name not in (*KEYS, "seconds"):
                    far = abs(value - row[name])
                    differences[name] = max(differences.get(name, 0.0), round(far, 6))
    rows = [found[key(row)] if row["method"] in new else row for row in before["results"]]
    known = {row["method"] for row in before["results"]}
    rows += [row for row in later["results"] if row["method"] not in known]
    names = [*before["methods"], *(name for name in new if name not in before["methods"])]
    run = {name: later[name] for name in RUN}
    earlier = before.get("again", {})  # rows that were replaced before, on the same hardware
    kept = earlier["methods"] if earlier.get("hardware") == run["hardware"] else []
    rows_of = [*(name for name in kept if name not in new), *new]
    again = {"methods": rows_of, "control": control, "differences": differences, **run}
    return {**before, "methods": names, "results": rows, "again": again}


def main(
    before: Annotated[Path, typer.Argument(help="The stored result, which is changed.")],
    later: Annotated[Path, typer.Argument(help="The later run.")],
    control: Annotated[str, typer.Option(help="Comma-separated unchanged methods.")] = "",
) -> None:
    """Example: python -m benchmarks.replace_rows docs/results/kl.json kl.json --control keydiff"""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in (before, later)]
    try:
        result = replaced(*runs, [name for name in control.split(",") if name])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    save(result, before)
    print(f"{', '.join(result['again']['methods'])}: {result['again']['differences']}")


if __name__ == "__main__":
    typer.run(main)
