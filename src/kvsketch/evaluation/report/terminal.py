"""Tables for terminals of any width, in which no number is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

#: Columns of the terminal between two columns of a table.
BETWEEN = 2


def bare_table() -> Table:
    """An empty table without lines between its columns."""
    return Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)


def titled(title: str, table: Table) -> Group:
    """A table below its title, which may be wider than the table."""
    return Group(Text(title, style="italic"), table)


def tables_within(
    width: int,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    names: int = 1,
    left: Sequence[str] = ("method",),
) -> Iterator[Group]:
    """One table or, if the terminal is too narrow for all columns, several tables below each other,
    each with as many columns as fit.

    Args:
        width: columns of the terminal.
        names: the number of first columns that name a row. Every table starts with them.
        left: columns of text. All others have numbers, which are aligned to the right.
    """
    sizes = [BETWEEN + max(map(len, column)) for column in zip(header, *rows, strict=True)]
    parts: list[list[int]] = [[]]
    for column in range(names, len(header)):
        if parts[-1] and sum(sizes[:names]) + sum(sizes[i] for i in [*parts[-1], column]) > width:
            parts.append([])
        parts[-1].append(column)
    for number, part in enumerate(parts):
        table = bare_table()
        shown = [*range(names), *part]
        for column in shown:
            table.add_column(
                header[column],
                justify="left" if header[column] in left else "right",
                overflow="fold",
            )
        for row in rows:
            table.add_row(*(escape(row[column]) for column in shown))
        yield titled(f"{title} (continued)" if number else title, table)
