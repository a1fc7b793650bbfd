"""The sections of docs/errors.md, except those on BalanceKV, a second reading and RULER."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import made_with, table
from benchmarks.page_readme import compared

#: Which queries a method has seen, in words. See benchmarks/prompts.py.
SEEN = {"agnostic": ", queries unseen", "aware": ", queries right before seen", None: ""}
EQUAL_BYTES = (
    "Equal bytes: every method gets the bytes of this share of the tokens, uncompressed. Slots "
    "with a mass take 4 bytes more, so there are fewer of them. Slots in fewer bits (`+int8`, "
    "`+int4`, or as chosen by measured errors) are more numerous. For a streaming sketch the "
    "whole state is counted. "
)
#: How methods are named. benchmarks/options.py parses these names.
SPENT = (
    "Methods are named as in `kvsketch eval --methods`. A bare name is the method as "
    "`SketchCache(model.config, name, budget=...)` runs it by default: `heavy_merge` with budgets "
    "and bits by the scores of an echo (`@global+measured`), every other method as `@even+16bit`. "
    "Single layers without their model have no echo: in their tables `heavy_merge` has budgets and "
    "bits by measured errors (`@measured+measured`). "
    "`@even`: the same budget for every head (for `pyramidkv`: for every head of a "
    "layer, by its own schedule over layers). `@measured`: the same bytes, allocated to heads and "
    "layers by errors measured on this prompt. `@calibrated`: allocated by errors measured "
    "beforehand on other prompts, by the file that `kvsketch calibrate` writes and `kvsketch "
    "eval` takes as `@FILE`. `+16bit`: slots in the model's 16 bits. "
)


def by_share(result: dict[str, Any], key: str, digits: int, name: str = "method") -> str:
    """A table for each source and protocol: methods by kept share, with their bytes per token."""
    parts = []
    groups = [(r["source"], r.get("queries")) for r in result["results"]]
    for source, queries in dict.fromkeys(groups):
        rows = [
            r for r in result["results"] if (r["source"], r.get("queries")) == (source, queries)
        ]
        shares = sorted({r["kept"] for r in rows if r["kept"] < 1}, reverse=True)
        lines = []
        for method in dict.fromkeys(r[name] for r in rows):
            found = {r["kept"]: r for r in rows if r[name] == method}
            cells = [_plus_minus(found.get(share), key, digits) for share in shares]
            if 1.0 in found:  # A quantised cache keeps all tokens.
                cells[0] = f"all tokens: {found[1.0][key]:.{digits}f}"
            sizes = [f"{r['bytes_per_token']:.0f}" for r in found.values()]
            lines.append([method, *cells, " / ".join(sizes)])
        header = [name, *(f"1/{round(1 / s)}" for s in shares), "bytes per token"]
        parts.append(f"**{source}{SEEN[queries]}**\n\n" + table(header, lines))
    return "\n\n".join(parts)


def _plus_minus(row: dict[str, Any] | None, key: str, digits: int) -> str:
    if row is None:
        return ""
    spread = f" ± {row['std']:.{digits}f}" if row.get("std") else ""
    return f"{row[key]:.{digits}f}{spread}"


def reading() -> str:
    """How to read the tables of the page."""
    return f"## How to read the tables\n\n{EQUAL_BYTES.strip()}\n\n{SPENT.strip()}\n"


def at_quarter(result: dict[str, Any], key: str, digits: int) -> str:
    """The first paragraph of a section on errors: the default's error and the lowest of others at
    a quarter of the bytes, or at the largest share that was measured below it."""
    shares = {r["kept"] for r in result["results"] if r["kept"] <= 0.25}
    others, share = compared(result), max(shares, default=0.0)
    said = []
    for source, queries in dict.fromkeys(
        (r["source"], r.get("queries")) for r in result["results"]
    ):
        rows = {
            r["method"]: r[key]
            for r in result["results"]
            if (r["source"], r.get("queries"), r["kept"]) == (source, queries, share)
        }
        theirs = {name: rows[name] for name in others if name in rows}
        if "heavy_merge" in rows and theirs:
            best = min(theirs, key=lambda name: theirs[name])
            said.append(
                f"{rows['heavy_merge']:.{digits}f} against {theirs[best]:.{digits}f} of `{best}` "
                f"({source}{SEEN[queries]})"
            )
    if not said:
        return ""
    return (
        f"At 1/{round(1 / share)} of the bytes, the default's error against the lowest of the "
        f"methods that are not ours: {'; '.join(said)}.\n\n"
    )


def attention_error(result: dict[str, Any]) -> str:
    return (
        "## Attention error on real activations\n\n"
        f"{at_quarter(result, 'relative_error', 3)}"
        "|z - exact|_F / |exact|_F of single layers, mean over layers and prompts ± standard "
        "deviation over seeds, by the kept share of the bytes between sinks and recent tokens. "
        f"All methods keep {result['sink']} sinks and {result['recent']} recent tokens. The "
        f"{result['follow']} queries come after compression and no method has seen them. In a "
        "LongEval prompt they contain the question. In other texts they are the continuation, and "
        "the queries right before them were seen. "
        "`peer:` rows run the authors' own code. Where a budget is smaller than a halving "
        "leaves, the older tokens are halved once more. `quantized_cache` is transformers' own "
        "with quanto; it keeps all tokens at its own bytes, as do `int8` and `int4`. kvpress's "
        "presses keep the same tokens as our methods of the same name, which "
        "`tests/benchmarks/test_peers.py` checks. Bytes are per token and KV head, bfloat16. "
        "`pyramidkv` is `snapkv` with a budget schedule over layers, which makes no difference "
        "in a single layer.\n\n"
        + by_share(result, "relative_error", 3)
        + "\n\n![error against the kept share](figures/attention_error.svg)\n\n"
        f"{made_with(result)}\n"
    )


def attention_error_balancekv(result: dict[str, Any]) -> str:
    return (
        "## The same, in the protocol of BalanceKV's figure 2\n\n"
        f"{at_quarter(result, 'relative_error', 3)}"
        f"{result['sink']} sinks, {result['recent']} recent tokens, {result['follow']} queries.\n\n"
        + by_share(result, "relative_error", 3)
        + "\n\n![error against the kept share](figures/attention_error_balancekv.svg)\n\n"
        f"{made_with(result)}\n"
    )


def kl(result: dict[str, Any]) -> str:
    return (
        "## Next-token KL to the exact cache\n\n"
        f"{at_quarter(result, 'kl', 4)}"
        "KL(exact || compressed) in nats, mean over texts and over tokens that are fed one by one "
        "after the prompt was compressed (teacher forcing), ± standard deviation over texts. The "
        "scored tokens are the exact cache's own answers to LongEval prompts, and the last "
        f"{result['follow']} tokens of other texts. *Queries unseen*: the question, or 64 tokens "
        "of another text, come between compression and the scored tokens. *Queries right before "
        "seen*: compression happens right before the scored tokens, after the question was read. "
        "Bytes are of the compressed prompt.\n\n"
        + by_share(result, "kl", 4)
        + f"\n\n{made_with(result)}\n"
    )


def kl_few(result: dict[str, Any]) -> str:
    share = result["shares"][0]
    return (
        f"### With few slots: {result['texts']} texts at 1/{round(1 / share)}\n\n"
        "At this share the differences between texts are as large as the mean, so that the few "
        "texts of the table above do not decide between methods. The same protocol, with other "
        "texts.\n\n" + by_share(result, "kl", 4) + f"\n\n{made_with(result)}\n"
    )


def _answered(result: dict[str, Any], budgets: list[float]) -> str:
    """The first paragraph of a section on LongEval."""
    right = {(r["method"], r["budget"]): r["accuracy"] for r in result["results"]}
    said = []
    for budget in budgets:
        theirs = {name: right[name, budget] for name in compared(result) if (name, budget) in right}
        if ("heavy_merge", budget) in right and theirs:
            best = max(theirs, key=lambda name: theirs[name])
            said.append(
                f"at {budget:.0%} of the bytes {right['heavy_merge', budget]:.2f} against "
                f"{theirs[best]:.2f} (`{best}`)"
            )
    if not said:
        return ""
    text = "The default's accuracy against the best of the other authors' methods, each with its "
    return f"{text}defaults: {'; '.join(said)}.\n\n"


def longeval(result: dict[str, Any]) -> str:
    budgets = sorted({r["budget"] for r in result["results"] if r["budget"] < 1}, reverse=True)
    rows = []
    for name in dict.fromkeys(r["method"] for r in result["results"]):
        found = {r["budget"]: r for r in result["results"] if r["method"] == name}
        cells = []
        for budget in budgets:
            row = found.get(budget, found.get(1.0))
            low, high = row["ci95"] if row else (0, 0)
            cells.append(f"{row['accuracy']:.2f} ({low:.2f}-{high:.2f})" if row else "")
        rows.append([name, *cells])
    count = result["results"][0]["cases"]
    how = (
        "The whole question is read with the record, before compression, as `generate` does with a "
        "prompt. The first token of an answer is then that of the exact cache, with any method (a "
        "token of `spread` has up to three digits). Compare with the table above for what a method "
        "gains from the question on this model."
    )
    also = ""
    if result["question"] == "unseen":
        how = "The question is read one token at a time after compression."
        also = (
            " KVzip and KVgrad, which read the context a second time, are in a section of their "
            "own."
        )
    return (
        f"## LongEval, {result['lines']} lines, question {result['question']} at compression\n\n"
        f"{_answered(result, budgets)}"
        f"Accuracy on {count} {result['source']} cases of `{result['model']}`, with 95% intervals, "
        f"by the share of the record's bytes that is kept. {how}"
        + "\n\n"
        + table(["method", *map(str, budgets)], rows)
        + f"\n\nThe other authors' methods run with their defaults: {', '.join(compared(result))}."
        f"{also}\n\n{made_with(result)}\n"
    )


SECOND_ORDER = (
    "A second-order correction was removed because it did not help. It multiplied u and m of a "
    "group by the factor that the spread of its keys adds to the mean of exp(score) under a "
    "Gaussian with diagonal covariance. `benchmarks/ablation.py` measured it while it was an "
    "option of `heavy_merge`: the error fell slightly at 1/8 and 1/16 of one source and rose "
    "everywhere else. A least-squares fit of u and m to queries of the prompt was removed, too. "
    "Where only the last queries score the tokens, it lowered this error by about a tenth. After "
    "an echo, which is the rule, it lowered neither KL (24 texts of stories260K; it was higher on "
    "prompts of LongEval) nor the errors of LongEval at 0.05, and it took time (measured with "
    "`benchmarks.kl` and `benchmarks.longeval` at the commit before its removal)."
)


def ablation(result: dict[str, Any]) -> str:
    return (
        "## Ablation: what each part of heavy_merge contributes\n\n"
        "Each row leaves a part of the method out; a larger error than the first row's is what the "
        "part contributes.\n\n"
        "Attention error as above, except that every head of every row has the same number of "
        "slots: the complete method is `heavy_merge@even`, and the 4 bytes of a mass come on "
        "top.\n\n" + by_share(result, "relative_error", 3, "part") + "\n\n" + SECOND_ORDER + "\n\n"
        f"{made_with(result)}\n"
    )


def _held(result: dict[str, Any]) -> str:
    """The first paragraph of the section on tolerances."""
    said = [
        f"{r['within']:.0%} of the heads with {r['kept']:.0%} of the slots ({r['source']})"
        for r in result["results"]
        if r["kind"] == "tolerance" and r["tolerance"] == 0.05
    ]
    if not said:
        return ""
    return (
        f"With `tolerance=0.05` the error on later tokens stayed within {result['slack']} times "
        f"that in {'; '.join(said)}.\n\n"
    )


def tolerance(result: dict[str, Any]) -> str:
    rows = [
        [
            r["source"],
            str(r["tolerance"]),
            f"{r['within']:.3f}",
            f"{r['median']:.3f} / {r['p95']:.3f} / {r['worst']:.3f}",
            f"{r['reported_median']:.3f}",
            f"{r['kept']:.2f}",
            f"{r['exact_heads']:.2f}",
            f"{r['bytes_per_token']:.0f}",
            str(r["layer_heads"]),
        ]
        for r in result["results"]
        if r["kind"] == "tolerance"
    ]
    head = ["source", "tolerance", f"within {result['slack']} x", "median / 95% / worst"]
    head += ["reported", "kept", "exact heads", "bytes per token", "layer-heads"]
    known = [
        [
            r["source"],
            f"{r['actual_median']:.3f}",
            *(" / ".join(f"{x:.2f}" for x in r[name]) for name in ("probe", "reservoir")),
        ]
        for r in result["results"]
        if r["kind"] == "running"
    ]
    return (
        "## A tolerance instead of a budget\n\n"
        f"{_held(result)}"
        "`SketchCache(tolerance=...)`, which runs `heavy_merge`, compresses a prompt. Then the "
        f"relative error of every layer and KV head is measured over the {result['follow']} tokens "
        "that follow, whose queries the method has not seen. "
        f"`within`: the share of heads (over all layers) whose error is at most {result['slack']} "
        "times the tolerance. `reported`: the median of `cache.error()` right after the prompt, "
        "on queries that the method had seen. `exact heads`: the share of heads that keep all "
        "tokens.\n\n"
        + table(head, rows)
        + "\n\nThe tracked error while a stream is compressed repeatedly (`heavy_merge@even`, "
        f"budget 0.25, {result['follow']} tokens one by one): the reported error over the error on "
        "the newest queries, at 5% / median / 95% of the heads of all layers. `probe` is what the "
        "package uses; `reservoir` is a sample of exact tokens of the same bytes, which mostly "
        "shows its own sampling error.\n\n"
        + table(["source", "actual, median", "probe / actual", "reservoir / actual"], known)
        + f"\n\n{made_with(result)}\n"
    )


def compression_time(result: dict[str, Any]) -> str:
    probe = [{"what": k} | v for k, v in result.get("probe", {}).items() if isinstance(v, dict)]
    numbers = {k: v for k, v in result.items() if isinstance(v, (int, float)) and k != "seed"}
    found = result.get("measuring")
    measuring = found and (
        "Measuring errors to allocate the budget (`@measured`, what "
        f"`{found['method']}` does without an echo) takes another {found['seconds']:.2f} s per "
        f"layer, {found['share_of_prefill']:.1%} of its prefill. This time does not grow "
        "with the prompt."
    )
    parts = [
        "## Time to compress",
        *([measuring] if measuring else []),
        "One layer of Llama 3 8B's size, compressed to the same budget for every head: "
        + ", ".join(f"{k.replace('_', ' ')} {_cell(v)}" for k, v in numbers.items())
        + ".",
        _plain(result["results"]),
        *(["Probing the error of a compressed layer:", _plain(probe)] if probe else []),
        made_with(result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _plain(rows: list[dict[str, Any]]) -> str:
    """A table of all fields of all rows."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name, "")) for name in columns] for row in rows]
    return table([name.replace("_", " ") for name in columns], cells)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
