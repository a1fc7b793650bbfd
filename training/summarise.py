"""Rewrites the `curriculum` of a training_log.json from the run's own log.

    python -m training.summarise DIR/log.jsonl FOLDER/training_log.json

The log has a line every 25 steps; the last one of each stage is what is kept of it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def curriculum(log: Path) -> list[dict[str, object]]:
    last: dict[str, dict[str, object]] = {}
    for text in log.read_text().splitlines():
        line = json.loads(text)
        if "event" not in line:
            last[line["stage"]] = line
    wanted = ("stage", "step", "tokens", "length", "loss", "accuracy")
    return [{name: line[name] for name in wanted} for line in last.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, help="log.jsonl of a run")
    parser.add_argument("summary", type=Path, help="training_log.json to update")
    arguments = parser.parse_args()
    summary = json.loads(arguments.summary.read_text())
    summary["curriculum"] = curriculum(arguments.log)
    arguments.summary.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
