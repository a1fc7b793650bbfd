"""The sections on the benefit and the cost of a second reading."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import made_with, table
from benchmarks.prompts import ONE_HEAD
from kvsketch.evaluation.runner.intervals import wilson_interval


def accuracies(result: dict[str, Any], names: list[str], costs: dict[str, Any]) -> str:
    """A table of accuracies: methods by the share of the bytes that is kept. The last column has
    the cost of the second reading, from the result of ``reading``."""
    seconds = cost_by_source(costs)
    budgets = sorted({r["budget"] for r in result["results"]}, reverse=True)
    rows = []
    for name in names:
        cells = []
        for budget in budgets:
            found = [r for r in result["results"] if (r["method"], r["budget"]) == (name, budget)]
            text = ""
            if found:
                low, high = found[0]["ci95"]
                text = f"{found[0]['accuracy']:.2f}" + f" ({low:.2f}-{high:.2f})"
            cells.append(text)
        rows.append([name, *cells, seconds.get(name.partition("/")[2] or "prompt", "")])
    return table(["kept", *map(str, budgets), "cost"], rows)


def cost_by_source(costs: dict[str, Any]) -> dict[str, str]:
    """The CPU time of a second reading over that of the first, by what is read again: measured on
    a packaged model, and extrapolated to 32 layers of the other model's shape."""
    found = {}
    for source in dict.fromkeys(row["queries"] for row in costs["results"]):
        packaged, large = (row for row in costs["results"] if row["queries"] == source)
        found[source] = (
            f"{packaged['second_over_first']:.2f} / {large['of_32_over_first']:.2f}"
            if packaged["second_over_first"]
            else "0"
        )
    return found


def what(result: dict[str, Any], costs: dict[str, Any]) -> str:
    count = result["results"][0]["cases"]
    whole = {row["method"]: row["whole_over_first"] for row in costs["peers"]}
    gradients = (
        "`kvgrad` also computes gradients: its whole prefill takes "
        f"{whole['kvgrad']:.1f} times the first reading, that of `kvzip` {whole['kvzip']:.1f}."
        if whole
        else ""
    )
    named = {row["method"].partition("/")[0].partition("+")[0] for row in result["results"]}
    peers = (
        "`peer:attention_matching` is its authors' own code ([2602.16284]"
        "(https://arxiv.org/abs/2602.16284)) with all queries of the second reading and with "
        "KVzip's budgets. "
        if "peer:attention_matching" in named
        else ""
    )
    return (
        f"LongEval, {result['lines']} lines, question unseen when the record was compressed: "
        f"accuracy of `{result['model']}` on {count} {result['source']} cases, at equal bytes. "
        "`/reread`: by the queries of a second reading (`kvsketch.prefill`); `/local`: of a "
        "second reading in parts of 512 tokens that attend only to themselves; `/sample`: of a "
        "second reading of a sixth of the tokens. `kvzip` uses KVzip's scores and budgets and "
        "keeps the tokens that kvpress's own code keeps "
        "(`tests/benchmarks/test_peers_of_models.py`), except that here, like every method, it "
        "also keeps the 32 recent tokens. As published it keeps none of them and loses most "
        "answers at 0.1 (`kvsketch eval longeval --methods kvzip --recent 0 --queries reread "
        "--question unseen`). `@global`: heads share the budget by scores. `+int4`, `+int8`: more "
        f"slots, in 4 or 8 bits. {peers}`cost`: the CPU time of the second reading over that of "
        f"the first, on `{ONE_HEAD}` / extrapolated to 32 layers of Llama 3 8B's shape. {gradients}"
    )


#: The part of the context that is read again, the smallest first.
READ_AGAIN = {
    "": "nothing",
    "sample": "a sixth of it",
    "local": "all of it, in separate parts",
    "reread": "all of it, as a whole",
}


def decisions(result: dict[str, Any]) -> str:
    """The method of highest accuracy at each budget, by the part that is read again. If several
    methods are best, it is the one measured first."""
    rows = []
    budgets = sorted({r["budget"] for r in result["results"] if r["budget"] < 1}, reverse=True)
    for source, words in READ_AGAIN.items():
        found = [r for r in result["results"] if r["method"].partition("/")[2] == source]
        cells = []
        for budget in budgets:
            here = [r for r in found if r["budget"] == budget]
            best = max(here, key=lambda r: r["accuracy"], default=None)
            cells.append("" if best is None else f"{best['method']}: {best['accuracy']:.2f}")
        if any(cells):
            rows.append([words, *cells])
    return table(["what is read again", *map(str, budgets)], rows)


def _best(result: dict[str, Any]) -> str:
    """The best methods at the smallest share, by what is read again."""
    least = min(r["budget"] for r in result["results"])
    rows = [r for r in result["results"] if r["budget"] == least]
    said = []
    for source, words in READ_AGAIN.items():
        found = [r for r in rows if r["method"].partition("/")[2] == source]
        if found:
            best = max(found, key=lambda r: r["accuracy"])
            said.append(f"{words} {best['accuracy']:.2f} (`{best['method']}`)")
    text = f"The best accuracy at {least:g} of the bytes, by what is read again: "
    return f"{text}{'; '.join(said)}.\n\n"


def longeval_reread(result: dict[str, Any], costs: dict[str, Any]) -> str:
    names = list(dict.fromkeys(r["method"] for r in result["results"]))
    return (
        f"## A second reading: LongEval, {result['lines']} lines, {result['count']} cases, "
        "question unseen\n\n"
        f"{_best(result)}"
        f"{what(result, costs)} With 95% intervals.\n\n"
        f"{accuracies(result, names, costs)}\n\n"
        "The best method at each share, by how much of the context may be read again (for the "
        "cost see `What a second reading costs`).\n\n"
        f"{decisions(result)}\n\n"
        f"{made_with(result)}\n"
    )


def together(results: list[dict[str, Any]]) -> dict[tuple[str, float], tuple[int, int]]:
    """The numbers of right answers and of cases in all of the results, by the method and the share
    of the bytes, where all of them have such a row."""
    found = [{(r["method"], r["budget"]): r for r in result["results"]} for result in results]
    keys = [key for key in found[0] if all(key in one for one in found)]
    rows = {key: [one[key] for one in found] for key in keys}
    return {
        key: (sum(round(r["accuracy"] * r["cases"]) for r in each), sum(r["cases"] for r in each))
        for key, each in rows.items()
    }


def in_short(results: list[dict[str, Any]], names: dict[str, str] | None = None) -> str:
    """The right answers of all lengths at the smallest share of the bytes.

    Args:
        names: the methods to name, and in which words; None: all.
    """
    found = together(results)
    least = min(budget for _, budget in found)
    here = {name: right for (name, budget), right in found.items() if budget == least}
    words = {name: f"`{name}`" for name in here} if names is None else names
    said = "; ".join(f"{text}: {here[name][0]}" for name, text in words.items() if name in here)
    cases = next(iter(here.values()))[1]
    lengths, each = ", ".join(str(result["lines"]) for result in results), results[0]["count"]
    return (
        f"Right answers at {least:.0%} of the bytes to {cases} questions ({each} each of {lengths} "
        f"lines): {said}."
    )


def all_lengths(results: list[dict[str, Any]]) -> str:
    """The cases of several lengths as one sample."""
    found = together(results)
    budgets = sorted({budget for _, budget in found}, reverse=True)
    each = [{(r["method"], r["budget"]): r["accuracy"] for r in one["results"]} for one in results]
    rows = []
    for name in dict.fromkeys(name for name, _ in found):
        cells = []
        for budget in budgets:
            right, cases = found[name, budget]
            low, high = wilson_interval(right, cases)
            apart = " / ".join(f"{one[name, budget]:.2f}" for one in each)
            cells += [f"{right / cases:.2f} ({low:.2f}-{high:.2f})", apart]
        rows.append([name, *cells])
    columns = [text for budget in budgets for text in (f"{budget:g}", f"{budget:g}, each length")]
    return (
        "\n## A second reading: all lengths together\n\n"
        f"{in_short(results)}\n\nThe same as one sample, with 95% intervals.\n\n"
        f"{table(['kept', *columns], rows)}\n"
    )


def _costs(costs: list[dict[str, Any]]) -> str:
    """The first paragraph of the section on costs."""
    large = {r["queries"]: r["of_32_over_first"] for r in costs if r["queries"] != "prompt"}
    said = ", ".join(f"`{source}` {ratio:.2f}" for source, ratio in large.items())
    return (
        "The time of a second reading over that of the first, extrapolated to 32 layers of Llama 3 "
        f"8B's shape: {said}.\n\n"
    )


def reading(result: dict[str, Any]) -> str:
    """The section on costs and accuracies, with a row for each kind of second reading."""
    costs, right = result["results"], result["accuracy"]
    models = list(dict.fromkeys(r["model"] for r in costs))
    columns = ["queries", *models, "32 such layers", "compressing"]
    rows = []
    for source in dict.fromkeys(r["queries"] for r in costs):
        mine = {r["model"]: r for r in costs if r["queries"] == source}
        cells = [f"{mine[model]['second_over_first']:.2f}" for model in models]
        cells.append(f"{mine[models[-1]]['of_32_over_first']:.2f}")
        cells.append(" / ".join(f"{mine[model]['compress_over_first']:.2f}" for model in models))
        rows.append([source, *cells])
    sources = list(dict.fromkeys(r["queries"] for r in right))
    found = {(r["method"], r["budget"], r["queries"]): r["accuracy"] for r in right}
    gains = [
        [
            f"{method} at {budget}",
            *(
                f"{found[method, budget, source]:.2f}" if (method, budget, source) in found else ""
                for source in sources
            ),
        ]
        for method, budget in dict.fromkeys((r["method"], r["budget"]) for r in right)
    ]
    cases = f" of {right[0]['lines']} lines, {right[0]['cases']} cases" if right else ""
    return (
        "## What a second reading costs, and what it gains\n\n"
        f"{_costs(costs)}"
        "CPU seconds of the second reading over those of reading the same "
        f"{result['tokens']:,} tokens once with an uncompressed cache, on {result['threads']} "
        "thread; medians of paired runs. Everything after the last layer's queries is skipped, "
        "which is half of a model of two layers. `32 such layers` is therefore extrapolated from "
        "31 times the first layer and once the last. `compressing`: the compression that follows, "
        "by `heavy_merge` at 0.1. "
        f"Accuracy: LongEval{cases}, question unseen, at equal bytes, as in the section before.\n\n"
        "`reread` is KVzip's: 2,048 tokens at a time against the whole uncompressed cache. At "
        f"{result['tokens']:,} tokens it computes 2.5 times as many pairs of query and key as the "
        "first reading, in which the causal mask hides half of them. This cost is inherent, and "
        "it dominates in the packaged models, whose heads of 32 dimensions spend most of the time "
        "in attention. `local`: 512 tokens at a time, which attend only to themselves and to the "
        "first four tokens. `sample`: 64 of every 384 tokens, in the same way; where `heavy_merge` "
        "has an echo, they correct its scores in every head, others predict the scores of the "
        "other tokens from these.\n\n"
        f"{table(columns, rows)}\n\nAccuracy, by what is read again:\n\n"
        f"{table(['method', *sources], gains)}\n\n{_peers(result)}{made_with(result)}\n"
    )


def _peers(result: dict[str, Any]) -> str:
    """The cost of the whole prefill with the methods that read the context a second time."""
    rows = result.get("peers", [])
    if not rows:
        return ""
    each = ", ".join(f"`{row['method']}` {row['whole_over_first']:.1f}" for row in rows)
    return (
        "Time of the whole prefill with `reread`, including compression, over that of the first "
        f"reading, on `{ONE_HEAD}`: {each}. `kvgrad` computes gradients.\n\n"
    )


def measured_after(result: dict[str, Any]) -> str:
    """The section on budgets by measured errors after a second reading."""
    names = list(dict.fromkeys(r["method"] for r in result["results"]))
    count = result["results"][0]["cases"]
    return (
        "## Budgets by measured errors after a second reading\n\n"
        f"LongEval, {result['lines']} lines, question unseen, {count} {result['source']} cases, "
        "equal bytes, 4 bits, a sixth of the context read again. After a second reading "
        "`heavy_merge` shares its budget by scores over all heads unless told otherwise "
        "(`@global`), and warns where errors measured on the queries of that reading are to share "
        "it (`@measured`).\n\n"
        f"{accuracies(result, names, {'results': []})}\n\n"
        f"{made_with(result)}\n"
    )
