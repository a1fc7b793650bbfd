"""The LongEval results as Markdown, next to the numbers of SubGen's Table 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import details, folded, written_by
from kvsketch.evaluation.report.published import SUBGEN_TABLE_1 as PAPER

#: The recent tokens of a k-center row with the same number of them in every prompt: the share
#: 3,072 of 5,000, of the 2,053 tokens that a prompt of 200 lines has here on average.
FIXED_RECENT = 1261
#: The bytes of a token in Llama-2-7B's cache: 32 layers, 4,096 numbers each for keys and values,
#: in 16 bits.
_TOKEN_BYTES = 32 * 2 * 4096 * 2
NAMES = {
    "exact": "exact",
    "heavy_merge": "heavy_merge (ours)",
    "heavy_merge+16bit": "ours, 16 bits",
    "streaming_llm": "streaming_llm (Sink)",
    "h2o": "h2o (H2O)",
    "kcenter": "kcenter (SubGen)",
    "uniform": "uniform",
}
QUESTIONS = {
    "seen": (
        "Question seen",
        "The paper's protocol: the whole prompt, including the question, is read exactly and "
        "then compressed once, so methods that use attention have seen the question.",
    ),
    "unseen": (
        "Question unseen",
        "The record is read and compressed before the question, as in a cache that is kept for "
        "later questions.",
    ),
}


def page(results: Mapping[str, Any]) -> str:
    """The text of docs/longeval.md."""
    rows = results["results"]
    parts = ["# LongEval line retrieval", written_by("longeval_table"), *_opening(rows)]
    parts.append(details("Models, cases and the papers' windows", _intro(results)))
    for question in dict.fromkeys(row["question"] for row in rows):
        title, text = QUESTIONS[question]
        mine = [row for row in rows if row["question"] == question]
        parts += [f"## {title}", text]
        shares = _shares(mine)
        if question == "seen":
            parts.append(_ranking(mine, shares[0]))
        parts.append(f"Kept as in the paper's Table 1: {_kept(shares[0])}.")
        parts.append(_table(mine, shares[0], with_paper=question == "seen"))
        parts += _own(mine, shares[0], with_paper=question == "seen")
        for share in shares[1:]:
            parts += [f"Kept {next(iter(share.values()))}:", _table(mine, share, with_paper=False)]
            parts += _half(mine, share)
        parts += ["Speed and peak memory:", _costs(mine)]
    return folded("\n\n".join(parts)).rstrip("\n") + "\n"


def _opening(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The figure, accuracies with the question seen (the paper's in brackets), and what follows."""
    rows = [row for row in rows if row["question"] == "seen"] or rows
    shares = _shares(rows)[:2]
    table = []
    for method in _methods(rows):
        cells = [NAMES[method]]
        for index, share in enumerate(shares):
            for lines in share:
                row = _find(rows, method, share, lines)
                theirs = PAPER["results"].get(str(lines), {}).get(method)
                # The paper kept one share at each length, which is our largest.
                beside = f" ({theirs[1]:.2f})" if theirs and index == 0 else ""
                cells.append(f"{row['accuracy']:.2f}{beside}" if row else "")
        table.append(cells)
    header = [
        "method",
        *(f"{lines}: {kept:.2f}" for share in shares for lines, kept in share.items()),
    ]
    cases = max(row["cases"] for row in rows)
    return [
        "![Accuracy against the share of the bytes, by length of the record](figures/longeval.svg)",
        _markdown(header, table),
        f"The model is the packaged `{rows[0]['model']}`, which is trained for this very task "
        "([What these numbers can tell](what-the-numbers-can-tell.md)). "
        "Columns: lines of the record and share "
        f"that is kept; {cases} official cases per length, question seen; in brackets the numbers "
        f"of {PAPER['source']}, for {PAPER['model']}.",
        f"What follows: the order of the papers' methods here is not always the paper's. "
        f"{_ranking(rows, _shares(rows)[0])} {_own_note(rows)}".strip(),
    ]


def _own_note(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence about the papers' own windows."""
    share = _shares(rows)[0]
    best = [_own_best(rows, share, lines) for lines in share]
    if not all("kcenter" in scores for scores in best):
        return ""

    def each(method: str) -> str:
        return " / ".join(f"{scores[method]:.2f}" for scores in best)

    return (
        f"With the sink and recent tokens of their own papers, k-center gets {each('kcenter')} and "
        f"H2O {each('h2o')} at {' / '.join(map(str, share))} lines. "
    )


def _intro(results: Mapping[str, Any]) -> str:
    settings, versions, hardware = (results[k] for k in ("settings", "versions", "hardware"))
    rows = results["results"]
    tokens = ", ".join(
        f"{next(r['prompt_tokens'] for r in rows if r['lines'] == lines):,.0f} at {lines} lines"
        for lines in sorted({row["lines"] for row in rows})
    )
    note = f"{results['note']}\n\n" if "note" in results else ""
    return (
        f"{note}Model: the packaged `{rows[0]['model']}` "
        f"(weights {settings['model_fingerprint']}), greedy, "
        f"{settings['dtype']} on {settings['device']}. Cases: "
        f"{max(row['cases'] for row in rows)} official ones of each length. Mean prompt in "
        f"tokens: {tokens} (the paper's 7B model needs 5k, 7k and 9k). Every "
        f"method keeps the first {settings['sink']} and last "
        f'{settings["recent"]} tokens; under "In each paper\'s own window" what its paper kept. '
        "An answer is right if its last integer is the requested number, which is LongEval's own "
        "rule. Brackets are 95% Wilson intervals. KV MB are the bytes of live tensors per case "
        "after the prompt, 1 MB = 1,000,000 bytes.\n\n"
        f"The paper's numbers are from {PAPER['source']}, model {PAPER['model']}, "
        f"{PAPER['cases']} cases per length. The models differ, so compare the ranking of the "
        "methods and how much each loses, not the numbers themselves.\n\n"
        f"{_windows()}\n\n"
        f"kvsketch {versions['kvsketch']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, Python {versions['python']}, {hardware['processor']}, "
        f"{hardware['torch_threads']} threads per process. Speeds are shown relative to the exact "
        "cache in the same run."
        f"{_earlier(results)}{_later(results)}"
    )


def _earlier(results: Mapping[str, Any]) -> str:
    """A paragraph that states which rows are from an earlier run, if there are any."""
    earlier = results.get("earlier")
    if earlier is None:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in earlier["versions"].items())
    checked = earlier["checked"]["rows"]
    others = ", ".join(
        f"{NAMES[row['method']]} at {row['lines']} lines ({row['now']:.2f} now, {row['then']:.2f} "
        "then)"
        for row in earlier["checked"]["differing"]
    )
    same = "with the same result" + (f" except {others}" if others else "")
    return (
        "\n\nRows in a paper's own window are from one run; all others, and all speeds "
        f"and peaks, are from another ({versions}, {earlier['hardware']['processor']}). Of "
        f"those, {checked} were answered again in the first run, {same}."
    )


def _later(results: Mapping[str, Any]) -> str:
    """A paragraph that states which rows are newer than the others, if there are any."""
    later = results.get("later")
    if later is None:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in later["versions"].items())
    questions = later.get("questions", QUESTIONS)
    which = "" if set(questions) == set(QUESTIONS) else f" with the question {questions[0]}"
    return (
        f"\n\nRows of {', '.join(f'`{name}`' for name in later['methods'])}{which} are from later "
        f"runs, the others from an earlier one ({versions}, {later['hardware']['processor']}). "
        f"Speeds of different runs are not compared.{_dtypes(results)}"
    )


def _dtypes(results: Mapping[str, Any]) -> str:
    """Sentences on the rows whose model had another dtype than the others'."""
    own = results["settings"]["dtype"]
    told: dict[tuple[str, str], dict[str, None]] = {}
    for row in results["results"]:
        if row.get("dtype", own) != own:
            told.setdefault((row["method"], row["dtype"]), {})[row["question"]] = None
    return "".join(
        f" The model of `{method}`, question {' and '.join(questions)}, was in {dtype}, in which a "
        f"share of the bytes is one of 16 bits a number, those of the others in {own}."
        for (method, dtype), questions in told.items()
    )


def _table(rows: Sequence[Mapping[str, Any]], share: Mapping[int, float], with_paper: bool) -> str:
    header = ["method"]
    for lines in share:
        header += [f"{lines} lines: KV MB", "accuracy"] + (
            ["paper: GB, accuracy"] * int(with_paper)
        )
    table = []
    for method in _methods(rows):
        cells = [NAMES[method]]
        for lines in share:
            row = _find(rows, method, share, lines)
            cells += [_bytes(row), _accuracy(row)] if row else ["", ""]
            if with_paper:
                theirs = PAPER["results"].get(str(lines), {}).get(method)
                cells.append(f"{theirs[0]:.3f}, {theirs[1]:.2f}" if theirs else "")
        table.append(cells)
    return _markdown(header, table)


def _windows() -> str:
    """What the papers state about their windows, and what follows from their bytes."""
    results = PAPER["results"]

    def tokens(lines: str, method: str) -> str:
        return f"{results[lines][method][0] * 2**30 / _TOKEN_BYTES:,.0f}"

    kept, whole = (
        ", ".join(tokens(lines, method) for lines in results)
        for method in ("streaming_llm", "exact")
    )
    return (
        "The papers' own windows: SubGen keeps recent tokens without stating how many. "
        "ClusterGen, section 4, has the same table and states the number: the better of r = 2,048 "
        "and 3,072, where r does not exceed the compressed length. Here r is the same share of "
        "each prompt as it is of the paper's 5,000, 7,000 or 9,000 tokens. H2O gives half of its "
        "budget to recent tokens (its own default; neither paper states it), Sink all but 4 first "
        "ones, as `streaming_llm` always does. Two notes: ClusterGen's text calls (l + k)/n = "
        "0.35 at 5k what its table calls 35% less. If the printed GB are 2^30 bytes and the cache "
        f"is Llama-2-7B's in 16 bits, they are {kept} tokens kept of {whole}, so about 3,072, "
        "4,096 and 4,608 tokens and an answer. At 200 lines r = 3,072 then leaves no budget for "
        "centers, and the paper's 0.86 belongs to r = 2,048."
    )


def _own(
    rows: Sequence[Mapping[str, Any]], share: Mapping[int, float], with_paper: bool
) -> list[str]:
    """A table of each method in its paper's window and in the 4 + 32 tokens of the other tables."""
    windows = list(dict.fromkeys(row["method"] for row in rows if ":" in row["method"]))
    if not windows:
        return []
    header = ["method"]
    for lines in share:
        header += [f"{lines} lines: recent kept", "own window", "4 + 32"]
        header += ["paper"] * int(with_paper)
    table = []
    for method, place in (("streaming_llm", 0), ("h2o", 0), ("kcenter", 0), ("kcenter", 1)):
        cells = [NAMES[method] + ("", ", r = 3,072 of the paper's")[place]]
        if method == "kcenter" and place == 0:
            cells = [NAMES[method] + ", r = 2,048 of the paper's"]
        for lines, kept in share.items():
            found = _own_rows(rows, method, lines, kept)
            row = found[place] if place < len(found) else None
            common = _find(rows, method, share, lines)
            cells += [_recent(row, kept) if row else "", _accuracy(row) if row else ""]
            cells.append(f"{common['accuracy']:.2f}" if common else "")
            if with_paper:
                cells.append(f"{PAPER['results'][str(lines)][method][1]:.2f}")
        table.append(cells)
    said = [
        "In each paper's own window:",
        _markdown(header, table),
    ]
    if with_paper:
        said.append(_own_ranking(rows, share))
    return [*said, *_fixed(rows, share)]


def _half(rows: Sequence[Mapping[str, Any]], share: Mapping[int, float]) -> list[str]:
    """A sentence about H2O's own window at a share that is not in the paper."""
    found = {lines: _own_rows(rows, "h2o", lines, kept) for lines, kept in share.items()}
    if not all(found.values()):
        return []
    parts = (f"{_accuracy(mine[0])} at {lines} lines" for lines, mine in found.items())
    return [f"H2O with half of its budget for recent tokens: {', '.join(parts)}."]


def _own_rows(
    rows: Sequence[Mapping[str, Any]], method: str, lines: int, kept: float
) -> list[Mapping[str, Any]]:
    """The rows of a method in its paper's windows, the shortest window first. Sink has one row."""
    if method == "streaming_llm":
        found = _find(rows, method, {lines: kept}, lines)
        return [found] if found else []
    mine = [
        row
        for row in rows
        if row["method"].startswith(f"{method}:0:0.")
        and (row["lines"], row["budget"]) == (lines, kept)
    ]
    return sorted(mine, key=lambda row: float(row["method"].rpartition(":")[2]))


def _recent(row: Mapping[str, Any], kept: float) -> str:
    if row["method"] == "streaming_llm":
        return f"{row['slots'] - 4:,.0f} of {row['slots']:,.0f}"
    recent = float(row["method"].rpartition(":")[2]) * row["prompt_tokens"]
    return f"{recent:,.0f} of {row['slots']:,.0f}"


def _own_best(
    rows: Sequence[Mapping[str, Any]], share: Mapping[int, float], lines: int
) -> dict[str, float]:
    """Accuracies in the papers' windows. Of k-center's, the better one counts, as in the paper."""
    found = {
        m: _own_rows(rows, m, lines, share[lines]) for m in ("streaming_llm", "h2o", "kcenter")
    }
    return {m: max(row["accuracy"] for row in mine) for m, mine in found.items() if mine}


def _own_ranking(rows: Sequence[Mapping[str, Any]], share: Mapping[int, float]) -> str:
    parts = []
    for lines in share:
        theirs = {m: v[1] for m, v in PAPER["results"][str(lines)].items()}
        parts.append(
            f"{lines} lines: {_order(_own_best(rows, share, lines))} (paper: {_order(theirs)})"
        )
    return (
        "Ranking in the papers' windows; for k-center the better r, as in the paper. "
        + "; ".join(parts)
        + "."
    )


def _fixed(rows: Sequence[Mapping[str, Any]], share: Mapping[int, float]) -> list[str]:
    """A sentence about k-center with the same number of recent tokens in every prompt."""
    for row in rows:
        if row["method"] == f"kcenter:0:{FIXED_RECENT}":
            return [
                f"With {FIXED_RECENT:,} recent tokens in every prompt of {row['lines']} lines, "
                "instead of the same share of each prompt, k-center gets "
                f"{_accuracy(row)}."
            ]
    return []


def _costs(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["lines", "method", "kept", "slots", "KV MB", "peak KV MB"]
    header += ["prefill speed / exact", "decode speed / exact"]
    # Times of different runs cannot be compared.
    exact = {(row["lines"], row.get("run")): row for row in rows if row["method"] == "exact"}
    return _markdown(
        header,
        [
            [
                str(row["lines"]),
                row["method"],
                str(row["budget"]),
                f"{row['slots']:,.0f}",
                f"{row['kv_bytes'] / 1e6:.2f}",
                f"{row['peak_kv_bytes'] / 1e6:.2f}",
                _ratio(row, exact.get((row["lines"], row.get("run"))), "prefill_tokens_per_s"),
                _ratio(row, exact.get((row["lines"], row.get("run"))), "decode_tokens_per_s"),
            ]
            for row in rows
            if row.get("run") != "windows"
        ],
    )


def _shares(rows: Sequence[Mapping[str, Any]]) -> list[dict[int, float]]:
    """The budgets, largest first. Each maps a number of lines to the share kept at that length."""
    by_lines: dict[int, list[float]] = {}
    for row in rows:
        shares = by_lines.setdefault(row["lines"], [])
        if row["method"] != "exact" and row["budget"] not in shares:
            shares.append(row["budget"])
    ranked = {lines: sorted(shares, reverse=True) for lines, shares in sorted(by_lines.items())}
    depth = min(len(shares) for shares in ranked.values())
    return [{lines: shares[i] for lines, shares in ranked.items()} for i in range(depth)]


def _kept(share: Mapping[int, float]) -> str:
    return ", ".join(f"{value:.2f} at {lines} lines" for lines, value in share.items())


def _methods(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The methods that were measured in the window common to all methods."""
    present = {row["method"] for row in rows}
    return [method for method in NAMES if method in present]


def _find(
    rows: Sequence[Mapping[str, Any]], method: str, share: Mapping[int, float], lines: int
) -> Mapping[str, Any] | None:
    budget = 1.0 if method == "exact" else share[lines]
    for row in rows:
        if (row["method"], row["lines"], row["budget"]) == (method, lines, budget):
            return row
    return None


def _bytes(row: Mapping[str, Any]) -> str:
    saved = 1 - row["kv_bytes"] / row["exact_kv_bytes"]
    of = f" in {row['dtype']}" if "dtype" in row else ""
    return f"{row['kv_bytes'] / 1e6:.2f}" + (f" ({saved:.0%} less{of})" if saved > 0 else "")


def _accuracy(row: Mapping[str, Any]) -> str:
    low, high = row["ci95"]
    return f"{row['accuracy']:.2f} [{low:.2f}, {high:.2f}]"


def _ratio(row: Mapping[str, Any], exact: Mapping[str, Any] | None, key: str) -> str:
    """A speed relative to the exact cache on the same cases in the same run."""
    return f"{row[key] / exact[key]:.2f}" if exact and row[key] and exact[key] else "-"


def _ranking(rows: Sequence[Mapping[str, Any]], share: Mapping[int, float]) -> str:
    """The ranking of the methods at each length, here and in the paper."""
    parts = []
    for lines in share:
        ours = {m: r["accuracy"] for m in _methods(rows) if (r := _find(rows, m, share, lines))}
        theirs = {m: v[1] for m, v in PAPER["results"].get(str(lines), {}).items()}
        order = [_order(scores) for scores in (ours, theirs) if scores]
        parts.append(f"{lines} lines: {order[0]} (paper: {order[-1]})")
    return "Ranking by accuracy, without exact. " + "; ".join(parts) + "."


def _order(scores: Mapping[str, float]) -> str:
    """Methods from best to worst. Equal ones are joined by "="."""
    compressed = {method: score for method, score in scores.items() if method != "exact"}
    return " > ".join(
        " = ".join(method for method in compressed if compressed[method] == score)
        for score in sorted(set(compressed.values()), reverse=True)
    )


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---" if name == "method" else "---:" for name in header]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])
