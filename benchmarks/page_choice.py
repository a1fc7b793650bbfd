"""Writes docs/which-method.md, which recommends methods by need, from the files in docs/results/.

python -m benchmarks.page_choice
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import details, table, written_by
from benchmarks.page_figures import accuracies, best_reading
from kvsketch.methods.registry import ALL_METHODS

DOCS = Path(__file__).resolve().parent.parent / "docs"
RESULTS = DOCS / "results"
#: The share of the cache for which methods are recommended.
KEPT = 0.25
SOURCE = "spread:longeval-200"


def loaded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def at(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> list[Mapping[str, Any]]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def base(name: str) -> str:
    """The name of a method without the endings for its allocation, bits and queries."""
    return name.split("/")[0].split("@")[0].split("+")[0]


def accuracy(rows: Sequence[Mapping[str, Any]], chosen: str) -> str:
    """The accuracy of a recommended method with its interval, and the others that are as good."""
    (row,) = at(rows, method=chosen)
    low, high = row["ci95"]
    as_good = [r for r in rows if r["accuracy"] >= low and r["method"] != chosen]
    ranked = sorted(as_good, key=lambda r: (-r["accuracy"], r["method"]))[:3]
    listed = ", ".join(f"`{r['method']}` {r['accuracy']:.2f}" for r in ranked)
    beside = f"; as good within its interval: {listed}" if listed else ""
    return (
        f"LongEval, question unseen: `{chosen}` {row['accuracy']:.2f} ({low:.2f} to {high:.2f})"
        f"{beside}"
    )


def queryless(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of the methods that use no queries, by error."""
    names = {name for name, cls in ALL_METHODS.items() if not cls.requires.queries}
    return sorted(
        (r for r in rows if r["method"] in names), key=lambda r: float(r["relative_error"])
    )


def needs() -> str:
    """A table with a recommendation for each need."""
    unseen = at(loaded("longeval_unseen")["results"], budget=KEPT)
    again = [
        r
        for r in at(loaded("longeval_reread")["results"], budget=KEPT)
        if r["method"].endswith(("/reread", "/local"))  # a sample was measured with an echo
    ]
    errors = at(loaded("attention_error_spread")["results"], source=SOURCE, kept=KEPT)
    blind = queryless(errors)
    even = [r for r in blind if r["method"] != "exact"][:3]
    within = at(loaded("tolerance_spread")["results"], source=SOURCE)
    held = next(r for r in within if r["kind"] == "tolerance" and r["tolerance"] == 0.05)
    speeds = {r["method"]: float(r["ratio"]) for r in loaded("decode_speed")["results"]}
    fast = max(loaded("decode_speed")["results"], key=lambda r: float(r["ratio"]))
    compared = (fast["method"], "heavy_merge+16bit", "heavy_merge")
    many = loaded("vllm")["results"]["concurrency"]
    stream = sorted(loaded("streaming_memory")["results"], key=lambda r: int(r["peak_kv_bytes"]))
    exact = stream[0]["exact_kv_bytes"]
    default = next(r for r in stream if r["method"] == "heavy_merge")
    default_peak = default["peak_kv_bytes"] / exact
    rows = [
        [
            "A budget and no other requirement",
            "`SketchCache(model.config, budget=0.25)`",
            accuracy([r for r in unseen if r["method"] != "exact"], "heavy_merge"),
        ],
        [
            "The question is not known, and the default has no echo (GPT-2, OPT, BLOOM, MLA): the "
            "context is read again, in parts",
            '`bits=4` and `kvsketch.prefill(..., queries="local")`',
            accuracy(again, best_reading([accuracies([{"results": again}])], "/local") or ""),
        ],
        [
            "No queries are available, or they should not decide what is kept",
            f'`SketchCache(model.config, "{even[0]["method"]}", budget=0.25)`',
            "attention error: "
            + ", ".join(f"`{r['method']}` {r['relative_error']:.3f}" for r in even),
        ],
        [
            "A limit on the measured error instead of a number of bytes",
            "`SketchCache(model.config, tolerance=0.05)`",
            f"{held['within']:.0%} of the heads stayed within it on the tokens that followed, "
            f"with {held['kept']:.0%} of the slots kept",
        ],
        [
            "The prompt does not fit into memory uncompressed",
            '`prefill="streaming"` and `generate(prefill_chunk_size=1024)`',
            f"peak {default_peak:.1%} of the exact cache with `heavy_merge`, "
            f"{loaded('streaming_memory')['results'][0]['tokens']:,} tokens",
        ],
        [
            "Decoding speed on a CPU matters most",
            f'`SketchCache(model.config, "{fast["method"]}", budget=0.25)`, or the default where '
            "the answer may be anywhere in the prompt",
            "tokens per second over `DynamicCache`, tiny model: "
            + ", ".join(f"`{name}` {speeds[name]:.2f}" for name in compared if name in speeds),
        ],
        [
            "A proven guarantee for a stream of any length",
            "`kvsketch.methods.sketches`: `SubGen`, `BalanceKVStreaming`, `SlidingWindow`",
            "the theorems' bounds at the theorems' sizes: [guarantees](guarantees.md); at a real "
            "model's norms these are too large for use",
        ],
        [
            "Serving many requests",
            "the [plugin for vLLM](vllm.md)",
            f"{many['ran']['ours']} requests of {many['tokens']:,} tokens at once in "
            f"{many['memory'] / 2**20:.0f} MiB, on a CPU; {many['ran']['stock']} with "
            "vLLM's own cache",
        ],
    ]
    return table(["you have", "use", f"measured, at {KEPT:g} of the cache"], rows)


def everything() -> str:
    """A table of the methods measured in both ways, at the same share."""
    errors = {
        r["method"]: r["relative_error"]
        for r in at(loaded("attention_error_spread")["results"], source=SOURCE, kept=KEPT)
    }
    right = {r["method"]: r for r in at(loaded("longeval_unseen")["results"], budget=KEPT)}
    rows = []
    for name in sorted(set(errors) & set(right), key=lambda name: (float(errors[name]), name)):
        cls = ALL_METHODS.get(base(name))
        asks = "queries" if cls.requires.queries else "keys and values"
        low, high = right[name]["ci95"]
        rows.append(
            [
                f"`{name}`",
                asks,
                f"{errors[name]:.3f}",
                f"{right[name]['accuracy']:.2f} ({low:.2f} to {high:.2f})",
            ]
        )
    return table(["method", "looks at", "attention error", "LongEval, unseen (95%)"], rows)


def page() -> str:
    result = loaded("longeval_unseen")
    return (
        "# Which method for which need\n\n"
        f"{written_by('page_choice')}\n\nThe "
        "numbers are those of small models in the package, which retrieve lines. They compare "
        "the methods on that task and need not carry over to yours ([What these numbers can tell]"
        "(what-the-numbers-can-tell.md)): measure it with `kvsketch eval --model YOUR_MODEL` "
        "([evaluation](evaluation.md)).\n\n"
        "![Accuracy against the bytes that are kept](figures/accuracy.svg)\n\n"
        f"{needs()}\n\n"
        "## Methods compared\n\n"
        f"At {KEPT:g} of the cache: the relative error of single layers' attention, and the "
        f"accuracy, both of `{result['model']}`, the latter on {result['count']} LongEval cases "
        f"of {result['lines']} lines with the question unseen at compression. `@` names the "
        "allocation of the budget, `+` the number of bits of a slot's numbers. Intervals are "
        "Wilson's; methods whose intervals overlap much should be considered equal.\n\n"
        f"{details('All methods that were measured in both ways', everything())}\n\n"
        "`kvsketch methods` lists all methods, what each needs and what is proved about it. "
        "[Methods of other authors](methods.md) compares our versions with the authors' code. "
        "More tables: "
        "[What compression costs](errors.md), [Speed and memory](benchmarks.md).\n"
    )


def main() -> None:
    (DOCS / "which-method.md").write_text(page(), encoding="utf-8")
    print(f"wrote {DOCS / 'which-method.md'}")


if __name__ == "__main__":
    main()
