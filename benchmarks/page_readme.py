"""The README's table, LongEval with the question unseen in words, and what follows from it. The
page on errors opens with the same table."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table
from benchmarks.page_figures import Scores, accuracies, best_reading
from benchmarks.page_reread import cost_by_source, in_short
from benchmarks.prompts import ONE_HEAD

#: The rows beside ours: a method's name in the results, and what it is in words.
PEERS = (
    ("kvzip/reread", "KVzip"),
    ("kvzip+int4/reread", "KVzip's choice of tokens in kvsketch's 4 bits"),
    ("kvgrad/reread", "KVgrad"),
)
#: What is not the work of others, by the beginning of the name.
OURS = ("exact", "cluster_merge", "heavy_merge", "int8", "int4", "peer:")


def named(found: Scores) -> list[tuple[str, str]]:
    """The rows of single methods: a name in the results, and what it is in words."""
    ours = [("exact", "exact cache (all bytes)"), ("heavy_merge", "kvsketch, its default")]
    again = best_reading([found], "/reread")
    if again is not None:
        bits = " 4 bits," if "int4" in again else ""
        ours.append((again, f"kvsketch,{bits} all of the context read again"))
    return [row for row in (*ours, *PEERS) if row[0] in found]


def compared(result: dict[str, Any]) -> list[str]:
    """The methods of other authors with their defaults, without caches that keep all tokens."""
    shares = [(r["method"], r.get("budget", r.get("kept"))) for r in result["results"]]
    names = dict.fromkeys(name for name, share in shares if share < 1)
    return [n for n in names if not {"@", "+", "/"} & set(n) and not n.startswith(OURS)]


def summary(unseen: dict[str, Any], reread: dict[str, Any], costs: dict[str, Any]) -> str:
    """The table. Its last row is the best of the methods in ``compared``."""
    found = accuracies([unseen, reread])
    budgets = sorted({r["budget"] for r in reread["results"] if r["budget"] < 1}, reverse=True)
    seconds = cost_by_source(costs)
    rows = []
    for name, words in named(found):
        scores = found[name]
        cells = [scores.get(budget, scores.get(1.0)) for budget in budgets]
        cost = seconds.get(name.partition("/")[2], "0")
        rows.append([words, *("-" if x is None else f"{x:.2f}" for x in cells), cost])
    best = []
    for budget in budgets:
        here = {name: found[name][budget] for name in compared(unseen) if budget in found[name]}
        top = max(here, key=lambda name: here[name], default=None)
        best.append("-" if top is None else f"{here[top]:.2f} ({top})")
    rows.append([f"best of {len(compared(unseen))} others that read once", *best, "0"])
    return table(["bytes kept", *(f"{budget:.0%}" for budget in budgets), "cost"], rows)


def caption(unseen: dict[str, Any]) -> str:
    count = unseen["results"][0]["cases"]
    return (
        f"The packaged model `{unseen['model']}` is trained for LongEval's line retrieval, so "
        "compare the rows with each other and measure your own task. Accuracy on "
        f"{count} {unseen['source']} cases of {unseen['lines']} lines; the question comes after "
        "compression; equal bytes for every method, keys and values counted at 2 bytes a number "
        "as in a 16-bit model. Cost: the time of the second reading over the first, on "
        f"`{ONE_HEAD}` / extrapolated to 32 layers of Llama 3 8B's shape."
    )


def block(
    unseen: dict[str, Any],
    reread: dict[str, Any],
    costs: dict[str, Any],
    lengths: list[dict[str, Any]],
) -> str:
    """The README's table with its caption, and what more cases of several ``lengths`` say."""
    words = {name: text for name, text in named(accuracies([unseen, reread])) if name != "exact"}
    more = f" {in_short(lengths, words)}" if lengths else ""
    return (
        f"{summary(unseen, reread, costs)}\n\n{caption(unseen)}{more} All methods, with intervals: "
        "[What compression costs](docs/errors.md)."
    )


def opening(unseen: dict[str, Any], reread: dict[str, Any], costs: dict[str, Any]) -> str:
    """The figure, the table and what follows from them, for the page on errors."""
    found = accuracies([unseen, reread])
    default, budgets = (
        found.get("heavy_merge", {}),
        sorted({r["budget"] for r in reread["results"]}),
    )
    follows = []
    if all(budget in default for budget in budgets):
        scores = ", ".join(f"{default[b]:.0%} at {b:.0%}" for b in reversed(budgets) if b < 1)
        follows.append(
            f"With one reading the default keeps these shares of the answers: {scores} of the "
            "bytes."
        )
    for name, _ in named(found):
        if "/reread" in name and name.startswith("heavy_merge"):
            least = min(found[name])
            cost = cost_by_source(costs).get("reread", "").rpartition(" / ")[2]
            follows.append(
                f"Reading all of the context again, at {cost or 'about once'} times the time of "
                f"the first reading in a large model, keeps {found[name][least]:.0%} at "
                f"{least:.0%} of the bytes."
            )
        elif "int4" in name and name.replace("+int4", "") in found:
            least = min(found[name])
            plain = found[name.replace("+int4", "")].get(least, 0.0)
            follows.append(
                f"With few bytes, bits matter more than the choice of tokens: KVzip's choice "
                f"keeps {plain:.0%} in 16 bits at {least:.0%} of the bytes, and "
                f"{found[name][least]:.0%} in 4 bits."
            )
    points = "\n".join(f"- {text}" for text in follows)
    return (
        "![Accuracy against the share of the exact cache's bytes, on LongEval and RULER]"
        f"(figures/accuracy.svg)\n\n{summary(unseen, reread, costs)}\n\n{caption(unseen)}\n\n"
        f"What follows:\n\n{points}\n"
    )
