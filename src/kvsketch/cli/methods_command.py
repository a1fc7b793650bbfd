"""`kvsketch methods`: the requirements, guarantees and options of each method.

Heavy imports happen inside, as in ``kvsketch.cli.app``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from kvsketch.cli.printing import print_json

#: the method that ``SketchCache`` and the commands use unless another is named
DEFAULT = "heavy_merge"
#: groups of methods, each with a line for every method
GROUPS: dict[str, dict[str, str]] = {
    "Merge tokens": {
        "heavy_merge": "most attended tokens unchanged, the others merged",
        "cluster_merge": "the most similar tokens merged; looks at no queries",
        "d2o": "H2O's tokens; others merged into the most similar one",
        "cam": "H2O's tokens; others' values added to later ones",
    },
    "Keep tokens by the attention of queries": {
        "h2o": "largest sum of attention so far",
        "observed_attention": "largest mean attention so far",
        "snapkv": "most attended by the last queries, smoothed",
        "pyramidkv": "SnapKV, with larger budgets for the first layers",
        "chunkkv": "SnapKV, in chunks of successive tokens",
        "criticalkv": "SnapKV, and how much values add to the output",
        "tova": "most attended by the newest query, in all heads",
        "rkv": "most attended by the last queries, least repeated later",
        "triattention": "most attended by the mean query from later positions",
        "expected_attention": "largest expected contribution to later outputs",
        "compactor": "attention within blocks, and keys unlike the others",
    },
    "Keep tokens without queries": {
        "streaming_llm": "the first and the last tokens only",
        "uniform": "a uniform sample, weighted without bias",
        "knorm": "keys of the smallest norm",
        "keydiff": "keys least similar to the mean key",
        "lagkv": "tokens that differ most from those that follow",
        "kcenter": "centers of a greedy k-center clustering of the keys",
    },
    "Halve the tokens, and double the mass of those that are kept": {
        "balancekv": "BalanceKV's random balancing, in blocks",
        "kernel_halving": "random balancing of pairs, after kernel thinning",
        "greedy_halving": "of each pair the token that balances better",
    },
    "Streaming sketches, whose whole state is bounded": {
        "subgen": "SubGen (ClusterGen), Algorithm 1",
        "subgen_coupled": "SubGen with one set of samples for both sums",
        "merge_reduce": "BalanceKV, Algorithm 3, over any of the halvings",
        "balancekv_streaming": "BalanceKV, Algorithm 1",
        "sliding_window": "the last tokens, and one slot for all before",
        "sliding_window_sampled": "the last tokens, and a sample of those before",
        "one_dimensional": "largest and smallest keys, for heads of one channel",
    },
    "Keep tokens by a second reading of the context (kvsketch.prefill)": {
        "kvzip": "most attended when the context is read again",
        "kvzip_plus": "KVzip, weighted by what values add to the output",
        "kvgrad": "KVzip, by gradients of the last hidden states",
    },
}
LINES = {name: line for group in GROUPS.values() for name, line in group.items()}
EPILOG = "Examples: kvsketch methods; kvsketch methods heavy_merge; kvsketch methods --json"


def methods_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Show only these, and explain their options."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, on one line.")] = False,
) -> None:
    """List the compression methods; of those that are named, what they need, what is proved about
    them, their sources and options."""
    from kvsketch.method_names import METHOD_NAMES, unknown_method

    for name in names or []:
        if name not in METHOD_NAMES:
            raise unknown_method(name)

    console = Console()
    if not names and not as_json:
        _list(console)
        console.print("`kvsketch methods NAME` explains a method and its options.", highlight=False)
        return

    from kvsketch.methods.registry import ALL_METHODS

    rows = [_row(name, ALL_METHODS[name]) for name in names or METHOD_NAMES]
    if as_json:
        print_json("methods", default=DEFAULT, methods=rows)
        return
    for row in rows:
        _show(row, console)
    console.print(
        "Options of a method: SketchCache(model.config, NAME, options={...}).", highlight=False
    )


def _row(name: str, cls: type[Any]) -> dict[str, Any]:
    doc = _plain(inspect.getdoc(cls) or "")
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):  # a docstring may leave options to that of its base class
        meanings |= _meanings(_plain(inspect.getdoc(base) or ""))
    taken = inspect.signature(cls).parameters.values()
    return {
        "name": name,
        "summary": LINES[name],
        "details": _first_sentence(doc),
        "queries": _queries(cls),
        "streams": _streams(cls),
        "guarantee": cls.guarantee or "none proved",
        "paper": cls.paper,
        "options": [
            {
                "name": p.name,
                "default": None if p.default is p.empty else p.default,
                "required": p.default is p.empty,
                "meaning": meanings.get(p.name, ""),
            }
            for p in taken
            if p.name != "seed"  # SketchCache and the commands have their own
        ],
    }


def _queries(cls: type[Any]) -> str:
    if cls.requires.second_reading == "required":
        return "needs the queries of a second reading (kvsketch.prefill)"
    return "needs the model's queries" if cls.requires.queries else "needs none"


def _streams(cls: type[Any]) -> str:
    from kvsketch.methods.sketches import Sketch

    if issubclass(cls, Sketch):
        return "as a streaming sketch: a budget bounds its whole state"
    if cls.requires.second_reading == "required":
        return "no: it reads the whole context twice; later tokens are compressed again"
    return "by compressing again whenever the budget is full"


def _plain(doc: str) -> str:
    """A docstring without the marks of its markup."""
    return re.sub(r":\w+:`([^`]*)`", r"\1", doc).replace("``", "")


def _first_sentence(doc: str) -> str:
    text = " ".join(doc.split("\n\n")[0].split())
    head, dot, _ = text.partition(". ")
    return head + "." if dot else text


def _meanings(doc: str) -> dict[str, str]:
    """The text of a docstring's ``Args``, by argument."""
    block = re.search(r"^Args:\n((?:    .*\n?|\n)*)", doc, flags=re.MULTILINE)
    if block is None:
        return {}
    found = re.split(r"^    (\w+): ", block.group(1), flags=re.MULTILINE)[1:]
    return {
        name: " ".join(text.split()) for name, text in zip(found[::2], found[1::2], strict=True)
    }


def _show(row: Mapping[str, Any], console: Console) -> None:
    """One method, with its options."""
    console.print(f"[bold]{escape(row['name'])}[/bold]", highlight=False)
    lines = [row["details"]]
    lines += [f"{what}: {row[what]}" for what in ("queries", "streams", "guarantee")]
    lines.append(f"source: {row['paper']}")
    for line in lines:
        console.print(Padding(escape(line), (0, 0, 0, 2), expand=False), highlight=False)
    for option in row["options"]:
        value = "required" if option["required"] else f"default {option['default']!r}"
        text = f"option {option['name']} ({value}): {option['meaning']}"
        console.print(Padding(escape(text), (0, 0, 0, 2), expand=False), highlight=False)
    console.print()


def _list(console: Console) -> None:
    """All methods, a line each."""
    for title, lines in GROUPS.items():
        console.print(f"[bold]{title}[/bold]", highlight=False)
        table = Table.grid(padding=(0, 0, 0, 2))
        table.add_column(no_wrap=True, min_width=22)
        table.add_column(overflow="fold")
        for name, line in lines.items():
            table.add_row(f"{name} (default)" if name == DEFAULT else name, line)
        console.print(table)
        console.print()
