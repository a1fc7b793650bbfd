"""What `kvsketch inspect` shows of a result, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group

from kvsketch.evaluation.report.terminal import tables_within

#: layers with a column of their own
_COLUMNS = 6


def tables(result: Mapping[str, Any], width: int = 80) -> Iterator[Group]:
    """What is shown of a result: by layer, then by method.

    Args:
        width: columns of the terminal.
    """
    rows = result["layers"]
    yield from tables_within(
        width,
        "norms: mean (largest); radius / spread of n/8 balls",
        ("layer", "queries", "keys", "values", "|q||k|s", "keys r", "values r"),
        [
            [
                str(row["layer"]),
                *(
                    f"{row['norms'][kind]['mean']:.1f} ({row['norms'][kind]['max']:.1f})"
                    for kind in ("query", "key", "value", "score")
                ),
                *(f"{row['clusterability'][what]['eighth']:.2f}" for what in ("keys", "values")),
            ]
            for row in rows
        ],
    )
    yield from tables_within(
        width,
        "attention at the end; tokens a tolerance needs",
        ("layer", "entropy", "sinks", "recent", "90% on", "0.02", "0.05", "0.1"),
        [
            [
                str(row["layer"]),
                f"{row['attention']['entropy']:.2f}",
                f"{row['attention']['sink']:.0%}",
                f"{row['attention']['recent']:.0%}",
                f"{row['attention']['holding']:.0f} ({row['attention']['holding_share']:.0%})",
                *(f"{share:.0%}" for share in row["within"].values()),
            ]
            for row in rows
        ],
    )
    ranked = sorted(result["errors"].items(), key=lambda item: item[1])
    yield from tables_within(
        width,
        f"relative error, {result['kept']:.0%} kept",
        ("method", "mean", *(f"layer {row['layer']}" for row in rows[:_COLUMNS])),
        [
            [name, f"{mean:.3f}", *(f"{row['errors'][name]:.3f}" for row in rows[:_COLUMNS])]
            for name, mean in ranked
        ],
    )
