"""Writes docs/benchmarks.md, docs/guarantees.md, docs/errors.md and docs/which-method.md from the
JSON that benchmarks left in docs/results/.

    python -m benchmarks.page

``benchmarks.run_all`` has the command of every result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import page_balance, page_choice, page_reread, page_ruler, page_vllm
from benchmarks.markdown import made_with, table
from benchmarks.page_speed import speed

DOCS = Path(__file__).resolve().parent.parent / "docs"


def save(result: dict[str, Any], out: Path | None) -> None:
    """Write a benchmark's JSON to the file of ``--out``, completely or not at all."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        new = out.with_name(out.name + ".new")
        new.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        new.replace(out)


def decode_speed(result: dict[str, Any]) -> str:
    rows = [
        [
            r["method"],
            f"{r['ratio']:.2f}",
            f"{min(r['ratios']):.2f} - {max(r['ratios']):.2f}",
            str(len(r["ratios"])),
        ]
        for r in result["results"]
    ]
    first = result["results"][0]
    return (
        "## Decoding against DynamicCache at the same number of slots\n\n"
        f"{first['tokens']} greedy tokens from {first['slots']} slots; the ratio of tokens per "
        "second (above 1: faster than DynamicCache), median of paired runs. SketchCache "
        "compresses repeatedly and stays within its budget, while DynamicCache grows. The model "
        "is tiny (a layer takes a quarter of a millisecond), so the overhead of every operation "
        "is visible. The default, `heavy_merge`, stores more slots in the same bytes, in 8 or 4 "
        "bits, and dequantizes them for every token. Layers of a usual size are measured under "
        "`The default method from end to end`.\n\n"
        + table(["method", "ratio", "least - most", "pairs"], rows)
        + f"\n\n{made_with(result)}\n"
    )


def prefill_peak(result: dict[str, Any]) -> str:
    budgets = list(dict.fromkeys(r["budget"] for r in result["results"]))
    peaks = {
        (r["method"], r["allocation"], r["budget"]): r["peak_over_exact"] for r in result["results"]
    }
    names = list(dict.fromkeys((method, way) for method, way, _ in peaks))
    rows = [
        [f"{method}@{way}", *(f"{peaks[method, way, budget]:.2f}" for budget in budgets)]
        for method, way in names
    ]
    return (
        "## Peak of a prompt read at once\n\n"
        f'{result["tokens"]:,} tokens, `prefill="exact"`; the peak bytes of the cache over the '
        "bytes of the exact cache, by budget. If budgets are known beforehand (`@even`), each "
        "layer is compressed as soon as its attention is computed. Budgets measured on this prompt "
        "(`@measured`, heavy_merge's default) depend on all layers: until the last layer is "
        "measured, each layer is compressed to the most that its heads may need.\n\n"
        + table(["method", *map(str, budgets)], rows)
        + f"\n\n{made_with(result)}\n"
    )


def streaming_memory(result: dict[str, Any]) -> str:
    rows = [
        [
            r["method"],
            f"{r['peak_kv_bytes']:,}",
            f"{r['bound_bytes']:,}",
            f"{r['exact_kv_bytes']:,}",
            f"{r['seconds_over_exact']:.2f}",
        ]
        for r in result["results"]
    ]
    first = result["results"][0]
    return (
        "## Peak of a streaming prefill\n\n"
        f"{first['tokens']:,} tokens in chunks of {first['chunk']} at a budget of "
        f"{first['budget']} slots; the peak bytes of all tensors in the cache. The bound is budget "
        "+ chunk slots in every layer. Every head has the same budget, which is always the case "
        "in a streaming prefill without curves. Time is relative to the same chunked prefill with "
        "DynamicCache.\n\n"
        + table(["method", "peak KV bytes", "bound", "exact cache", "time / exact"], rows)
        + f"\n\n{made_with(result)}\n"
    )


def ray_throughput(result: dict[str, Any]) -> str:
    rows = [
        [
            str(r["pair"] + 1),
            f"{r['ratio']:.2f}",
            *(f"{r['seconds_to_start'][workers]:.1f}" for workers in ("1", "2")),
        ]
        for r in result["results"]
    ]
    return (
        "## Two local Ray workers over one\n\n"
        f"`kvsketch eval longeval --ray local`, {result['cases']} cases of {result['lines']} lines "
        "with the exact cache and with snapkv, one core per worker. The ratio is that of answers "
        f"per second after the first answers; its median is {result['ratio']:.2f}. Ray and the "
        "models take some seconds to start.\n\n"
        + table(["pair", "ratio", "start of one, s", "of two, s"], rows)
        + f"\n\n{made_with(result)}\n"
    )


def growth(result: dict[str, Any]) -> str:
    last = max(r["n"] for r in result["results"])
    longest = {r["sketch"]: r for r in result["results"] if r["n"] == last}
    rows = [
        [
            name,
            f"{found['bytes']:.2f}",
            f"{found['bytes_per_doubling']:,}",
            f"{found['log2_fit_r2']:.2f}",
            f"{found['update_us_per_token']:.2f}",
            f"{longest[name]['bytes']:,}",
            f"{longest[name]['update_us_per_token']:.1f}",
        ]
        for name, found in result["exponents"].items()
    ]
    header = ["sketch", "bytes ~ n^", "bytes per doubling", "R² of a + b log2 n", "time ~ n^"]
    million = result["million"]
    return (
        "## Growth with the stream\n\n"
        "Keys in sqrt(n) clusters, one KV head, head_dim 64 (1 for one_dimensional), chunks of "
        f"{result['chunk']}, up to {last:,} tokens. Exponents are log-log slopes. BalanceKV's "
        "bytes are linear in log2(n): every doubling of the stream adds the same number of bytes "
        "(the table has R² of that line). The 1-d sketch is built for a given n, whose square "
        "root determines its size.\n\n"
        + table([*header, f"bytes at {last:,}", "µs per token there"], rows)
        + "\n\n![bytes and time against tokens](figures/growth.svg)\n\n"
        f"SubGen takes in {million['n']:,} tokens x 8 heads (1,000 clusters, t = 8, s = 512, "
        f"head_dim 64, chunks of {result['chunk']}) in {million['seconds']:.0f} s on this "
        f"machine, in {million['bytes'] / 1e6:.1f} MB.\n\n{made_with(result)}\n"
    )


def guarantee(result: dict[str, Any]) -> str:
    rows = []
    for r in result["results"]:
        asked = f"s={r['s']:,}, t={r['t']}" if "s" in r else f"t={r['batch_size']:,}"
        regime = f"n={r['n']:,}, d={r['d']}, r={r['r']}"
        if "delta" in r:
            regime += f", delta={r['delta']}, m={r['clusters']}"
        rows.append(
            [
                r["sketch"],
                regime,
                f"{r['eps']}",
                asked,
                r["verdict"],
                f"{r['failures']} of {r['trials']}",
                _rate(r),
                f"{r['median_eps']:.3f}",
                f"{r['largest_eps']:.3f}",
            ]
        )
    head = ["sketch", "regime", "eps", "calculated", "which", "failures", "rate (95%)"]
    real = [
        [
            r["model"],
            str(r["layer"]),
            f"{r['query_norm']:.1f}",
            f"{r['key_norm']:.1f}",
            f"{r['delta']:.2f}",
            r["subgen"],
            r["balancekv"],
        ]
        for r in result["real"]
    ]
    index = [
        [r["method"], str(r["slots"]), f"{r['fraction']:.3f}", f"{r['advantage']:.3f}"]
        for r in result["index"]
    ]
    first = result["index"][0]
    return (
        "## The theorems' bounds, at the theorems' parameters\n\n"
        "Each trial is an independent sketch of the same stream and its own query; it fails if the "
        "error exceeds eps times the bound's norm (SubGen: operator norm, Theorem 1; BalanceKV: "
        "Frobenius, Theorem 3.1). The intervals are exact binomial. The last two columns are the "
        "smallest eps for which the bound held, in the median and in the worst trial. They show "
        "how conservative the constants are.\n\n"
        + table([*head, "median eps", "largest eps"], rows)
        + "\n\n![errors against the bound, and bits recovered](figures/guarantee.svg)\n\n"
        "### At a real model's norms\n\n"
        "The same calculators (eps = 0.5) at the largest query and key norms of each layer; delta "
        "is the radius at which n/8 balls cover every head's keys.\n\n"
        + table(["model", "layer", "query", "key", "delta", "SubGen", "BalanceKV"], real)
        + "\n\n### The barrier: INDEX\n\n"
        f"Alice writes {first['rows']} rows of bits into values under nearly orthogonal keys "
        f"(Theorem 6); Bob reads them back from {first['rows'] // 4} slots. The advantage is the "
        "share that he recovers beyond guessing. A method that keeps a quarter of the rows has an "
        "advantage of a quarter.\n\n"
        + table(["method", "slots", "bits right", "advantage"], index)
        + f"\n\n{made_with(result)}\n{theorems(result)}"
    )


def theorems(result: dict[str, Any]) -> str:
    """The parts of ``benchmarks.theorems``, each with its seed, versions and hardware."""
    even = result["break_even"]
    best = min(r["tokens"] for r in even if r["constant"] == 30 and r["norm_ratio"] is None)
    one = min(r["tokens"] for r in even if r["constant"] == 30 and r["norm_ratio"] == 1)
    norms = {None: "any", 1.0: "one"}
    covering, first = result["covering"], result["merge_and_reduce"][0]
    sections = {
        "break_even": (
            "### From how many tokens on BalanceKV's Theorem 3.1 saves memory\n\n"
            "The least n for which the theorem requires fewer than n slots, calculated over all n "
            "(`kvsketch.theory.break_even`) at failure probability 0.01. The first row is the "
            "best possible case: with the paper's constant of the walk (30) and no knowledge of "
            f"the value norms, the theorem saves nothing below {best:,} tokens; "
            f"if all values are known to have the same norm, it saves nothing below {one:,}. The "
            "proof of Theorem 3.4 needs only the constant 1.",
            table(
                ["eps", "r", "d", "constant", "value norms", "saves from n ="],
                [
                    [
                        f"{r['eps']}",
                        f"{r['r']}",
                        f"{r['d']}",
                        f"{r['constant']:.0f}",
                        norms[r["norm_ratio"]],
                        f"{r['tokens']:,}",
                    ]
                    for r in even
                ],
            ),
        ),
        "saves": (
            "### Where it saves memory\n\n"
            "Two such regimes were run (eps = 1, constant 30). Values have one norm in the first "
            "and are Gaussian in the second, where one sketch answers all queries, so that no "
            "interval is given. `slots held` counts the slots of the fullest head at the end. "
            "`bytes held / exact` is the sketch's whole state over the keys and values of all "
            "tokens.",
            table(
                [
                    "regime",
                    "calculated",
                    "which",
                    "failures",
                    "rate (95%)",
                    "median eps",
                    "largest eps",
                    "slots held",
                    "bytes held / exact",
                ],
                [
                    [
                        f"n={r['n']:,}, d={r['d']}, r={r['r']}",
                        f"t={r['batch_size']:,}, T={r['levels']}, {r['buckets']} buckets",
                        r["verdict"],
                        f"{r['failures']} of {r['trials']} ({r['sketches']} sketches)",
                        "-" if r["ci95"] is None else _rate(r),
                        f"{r['median_eps']:.4f}",
                        f"{r['largest_eps']:.4f}",
                        f"{r['slots_held']:,}",
                        f"{r['bytes_held'] / r['exact_bytes']:.2f}",
                    ]
                    for r in result["saves"]
                ],
            ),
        ),
        "merge_and_reduce": (
            "### MergeAndReduce: BalanceKV's Theorem 3.3\n\n"
            "Unnormalised sums for values of one norm: z_j on (k, v) and on (k, 1), evaluated "
            f"after {first['steps']} steps j, which need not end a batch. A trial is one sketch "
            "and one query. It fails if the error of either sum exceeds eps j e^(-r^2/sqrt(d)) "
            "at any of the steps (the theorem is about one step at a time).",
            table(
                [
                    "regime",
                    "eps",
                    "calculated",
                    "which",
                    "failures",
                    "rate (95%)",
                    "median eps",
                    "largest eps",
                ],
                [
                    [
                        f"n={r['n']:,}, d={r['d']}, r={r['r']}",
                        f"{r['eps']}",
                        f"t={r['batch_size']:,}, T={r['levels']}",
                        r["verdict"],
                        f"{r['failures']} of {r['trials']}",
                        _rate(r),
                        f"{r['median_eps']:.4f}",
                        f"{r['largest_eps']:.4f}",
                    ]
                    for r in result["merge_and_reduce"]
                ],
            ),
        ),
        "covering": (
            "### Few dimensions: Compression Barriers, Theorem 15\n\n"
            "The most clusters of radius e/3 that SubGen finds among keys of norm at most 1 "
            f"({covering[0]['trials']} streams of {covering[0]['n']:,} keys each): uniform in the "
            "ball, on its surface, and farthest first, the order that yields many clusters. The "
            "other columns are the proven bound (`kvsketch.theory.clusters_in_ball`), Lemma 14's "
            "e^d, and the slots that `SubGen.for_ball` uses at eps = 0.9, r = 1 for a stream of "
            "any length.",
            table(
                ["d", "in the ball", "surface", "farthest first", "at most", "e^d", "slots"],
                [
                    [
                        f"{r['d']}",
                        f"{r['inside']}",
                        f"{r['surface']}",
                        f"{r['farthest_first']}",
                        f"{r['proven']}",
                        f"{r['e_to_the_d']}",
                        f"{r['slots']:,}",
                    ]
                    for r in covering
                ],
            ),
        ),
        "sparsity": (
            "### Sparsity does not help: Compression Barriers, Corollary 16\n\n"
            "The sparsity of the INDEX instance. All of Alice's queries are 0, so almost all "
            "entries of QK^T are 0; in Bob's row only one weight matters. The INDEX table above "
            "is the other half of the argument: a quarter of the slots still answers only a "
            "quarter of his questions.",
            table(
                ["rows", "entries of QK^T that are 0", "least own weight", "other weights > 0.01"],
                [
                    [
                        f"{r['rows']:,}",
                        f"{r['zero_share']:.3%}",
                        f"{r['own_weight']:.3f}",
                        f"{r['others_beyond_1_percent']}",
                    ]
                    for r in result["sparsity"]
                ],
            ),
        ),
    }
    return "".join(
        f"\n{text}\n\n{shown}\n\n{made_with(result['environments'][part])}\n"
        for part, (text, shown) in sections.items()
    )


def _rate(row: dict[str, Any]) -> str:
    """A failure rate with its exact binomial interval."""
    low, high = row["ci95"]
    return f"{row['failure_rate']:.3f} ({low:.4f}-{high:.4f})"


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
    "and bits chosen by measured errors (`@measured+measured`), every other method as "
    "`@even+16bit`. `@even`: the same budget for every head (for `pyramidkv`: for every head of a "
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


def attention_error(result: dict[str, Any]) -> str:
    return (
        "## Attention error on real activations\n\n"
        "|z - exact|_F / |exact|_F of single layers, mean over layers and prompts ± standard "
        "deviation over seeds, by the kept share of the bytes between sinks and recent tokens. "
        f"All methods keep {result['sink']} sinks and {result['recent']} recent tokens. The "
        f"{result['follow']} queries come after compression and no method has seen them. In a "
        "LongEval prompt they contain the question. In other texts they are the continuation, and "
        "the queries right before them were seen. "
        + EQUAL_BYTES
        + SPENT
        + "`peer:` rows run the authors' own code. Where a budget is smaller than a halving "
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
        f"{result['sink']} sinks, {result['recent']} recent tokens, {result['follow']} queries.\n\n"
        + by_share(result, "relative_error", 3)
        + "\n\n![error against the kept share](figures/attention_error_balancekv.svg)\n\n"
        f"{made_with(result)}\n"
    )


def kl(result: dict[str, Any]) -> str:
    return (
        "## Next-token KL to the exact cache\n\n"
        "KL(exact || compressed) in nats, mean over texts and over tokens that are fed one by one "
        "after the prompt was compressed (teacher forcing), ± standard deviation over texts. The "
        "scored tokens are the exact cache's own answers to LongEval prompts, and the last "
        f"{result['follow']} tokens of other texts. *Queries unseen*: the question, or 64 tokens "
        "of another text, come between compression and the scored tokens. *Queries right before "
        "seen*: compression happens right before the scored tokens, after the question was read. "
        + EQUAL_BYTES
        + SPENT
        + "Bytes are of the compressed prompt.\n\n"
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
        "The question is read with the record, before compression. Compare with the table above "
        "for what a method gains from it on this model."
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
        f"Accuracy on {count} {result['source']} cases of the packaged model, with 95% intervals, "
        "by the share of the record's bytes that is kept. "
        + EQUAL_BYTES
        + SPENT
        + how
        + "\n\n"
        + table(["method", *map(str, budgets)], rows)
        + f"\n\nThe other authors' methods run with their defaults: {', '.join(compared(result))}."
        f"{also}\n\n{made_with(result)}\n"
    )


def reading_costs() -> dict[str, Any]:
    """The result of ``benchmarks.reading``, without rows if it is not there."""
    path = DOCS / "results" / "reading.json"
    if not path.is_file():
        return {"results": [], "peers": []}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def second_reading(result: dict[str, Any]) -> str:
    """LongEval after a second reading, with its cost."""
    return page_reread.longeval_reread(result, reading_costs())


SECOND_ORDER = (
    "A second-order correction was removed because it did not help. It multiplied u and m of a "
    "group by the factor that the spread of its keys adds to the mean of exp(score) under a "
    "Gaussian with diagonal covariance. `benchmarks/ablation.py` measured it while it was an "
    "option of `heavy_merge`. With the least-squares fit the error rose at every kept share and "
    "for both sources. Without the fit it fell slightly at 1/8 and 1/16 of one source and rose "
    "everywhere else."
)


def ablation(result: dict[str, Any]) -> str:
    return (
        "## Ablation: what each part of heavy_merge contributes\n\n"
        "Attention error as above, except that every head of every row has the same number of "
        "slots: the complete method is `heavy_merge@even`, and the 4 bytes of a mass come on "
        "top.\n\n" + by_share(result, "relative_error", 3, "part") + "\n\n" + SECOND_ORDER + "\n\n"
        f"{made_with(result)}\n"
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
        "`SketchCache(tolerance=...)`, which runs `heavy_merge`, compresses a prompt. Then the "
        f"relative error of every layer and KV head is measured over the {result['follow']} tokens "
        "that follow, whose queries the method has not seen. "
        f"`within`: the share of heads (over all layers) whose error is at most {result['slack']} "
        "times the tolerance. `reported`: the median of `cache.error()` right after the prompt, "
        "on queries that the method had seen. `exact heads`: the share of heads that keep all "
        "tokens.\n\n"
        + table(head, rows)
        + "\n\n`track_error` while a stream is compressed repeatedly (`heavy_merge@even`, budget "
        f"0.25, {result['follow']} tokens one by one): the reported error over the error on the "
        "newest queries, at 5% / median / 95% of the heads of all layers. `probe` is what the "
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
        "Measuring errors to allocate the budget (`@measured`, the default of "
        f"`{found['method']}`) takes another {found['seconds']:.2f} s per layer, "
        f"{found['share_of_prefill']:.1%} of its prefill. This time does not grow with the prompt."
    )
    parts = [
        "## Time to compress",
        "One layer of Llama 3 8B's size, compressed to the same budget for every head: "
        + ", ".join(f"{k.replace('_', ' ')} {_cell(v)}" for k, v in numbers.items())
        + ".",
        _plain(result["results"]),
        measuring or "",
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


PAGES: dict[str, tuple[str, dict[str, Callable[[dict[str, Any]], str]]]] = {
    "benchmarks.md": (
        "# Speed and memory",
        {
            "decode_speed": decode_speed,
            **{
                f"speed_{preset}": speed
                for preset in ("decode", "compress", "prefill", "end_to_end")
            },
            "prefill_peak": prefill_peak,
            "streaming_memory": streaming_memory,
            "sketch_budget": page_balance.sketch_budget,
            "ray_throughput": ray_throughput,
        },
    ),
    "guarantees.md": (
        "# What the papers promise, measured",
        {"growth": growth, "guarantee": guarantee},
    ),
    "errors.md": (
        "# What compression costs, method by method",
        {
            "attention_error": attention_error,
            "attention_error_balancekv": attention_error_balancekv,
            "figure2": page_balance.figure2,
            "kl": kl,
            "kl_few": kl_few,
            "longeval_unseen": longeval,
            "longeval_seen": longeval,
            "longeval_reread": second_reading,
            "longeval_unseen_300": second_reading,
            "longeval_unseen_400": second_reading,
            "reading": page_reread.reading,
            "ruler_unseen": page_ruler.ruler,
            "ruler_unseen_more": page_ruler.ruler,
            "ruler_seen": page_ruler.ruler,
            "tolerance": tolerance,
            "ablation": ablation,
            "compression_time": compression_time,
        },
    ),
}


#: The methods that have a row of their own in the README's table.
SHOWN = ("exact", "heavy_merge", "heavy_merge+16bit", "heavy_merge@calibrated+int4")
#: All other methods are in its last row.
OURS = ("exact", "cluster_merge", "heavy_merge")


def compared(result: dict[str, Any]) -> list[str]:
    """The methods of other authors with their defaults, without caches that keep all tokens."""
    names = dict.fromkeys(r["method"] for r in result["results"] if r["budget"] < 1)
    return [name for name in names if not {"@", "+"} & set(name) and name not in OURS]


def readme_block(result: dict[str, Any]) -> str:
    """The README's table of ``longeval_unseen``: our methods, and the best ``compared`` one."""
    budgets = sorted({r["budget"] for r in result["results"] if r["budget"] < 1}, reverse=True)

    def accuracy(name: str, budget: float) -> float:
        found = {r["budget"]: r["accuracy"] for r in result["results"] if r["method"] == name}
        return float(found.get(budget, found.get(1.0)))

    others = compared(result)
    rows = [[name, *(f"{accuracy(name, b):.2f}" for b in budgets)] for name in SHOWN]
    best = []
    for budget in budgets:
        top = max(others, key=lambda name: accuracy(name, budget))
        best.append(f"{accuracy(top, budget):.2f} ({top})")
    rows.append(["best of the compared methods", *best])
    count = result["results"][0]["cases"]
    labels = dict.fromkeys(r["method"] for r in result["results"])
    spent = [f"`{x}`" for x in labels if x.partition("@")[0] in others and "@" in x]
    also = f" ({', '.join(spent)}: see [docs/errors.md](docs/errors.md))" if spent else ""
    return (
        table(["kept", *(f"{b}" for b in budgets)], rows)
        + f"\n\nLongEval, {result['lines']} lines, question unseen when the record was compressed: "
        f"accuracy of the packaged model on {count} {result['source']} cases, at equal bytes. "
        "`heavy_merge` is the default of `SketchCache(model.config, budget=...)`: errors "
        "measured on each prompt determine the budget of every head and layer and the bits of "
        "its slots. `+16bit`: the budgets only. `@calibrated`: by errors measured beforehand on "
        "other prompts (`kvsketch calibrate`). `+int4`: slots in 4 bits.\n\nCompared in the "
        f"last row: {', '.join(others)}; each with its defaults in `SketchCache`, none with a "
        f"measured budget{also}. KVzip and KVgrad, which read the context a second time, are in "
        "the next table."
    )


def write_readme(name: str, text_between: str, readme: Path) -> None:
    """Replace the block between the marks of that name in a file."""
    text = readme.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin in text and end in text:
        before, rest = text.split(begin, 1)
        after = rest.split(end, 1)[1]
        block = f"{begin}\n{text_between}\n{end}"
        readme.write_text(f"{before}{block}{after}", encoding="utf-8")


def main() -> None:
    for page, (title, sections) in PAGES.items():
        parts = [f"{title}\n\nWritten by `python -m benchmarks.page`; do not edit.\n"]
        for name, section in sections.items():
            path = DOCS / "results" / f"{name}.json"
            if not path.is_file():
                print(f"skipped: {path} is not there; benchmarks/run_all.py measures it")
                continue
            result = json.loads(path.read_text(encoding="utf-8"))
            if not result.get("complete", True):
                print(f"skipped: {path} is not complete; the same command continues it")
                continue
            parts.append(section(result))
            if name == "longeval_unseen":
                write_readme("unseen", readme_block(result), DOCS.parent / "README.md")
            if name == "longeval_reread":
                block = page_reread.readme_block(result, reading_costs())
                write_readme("reread", block, DOCS.parent / "README.md")
        (DOCS / page).write_text("\n".join(parts), encoding="utf-8")
        print(f"wrote {DOCS / page}")
    served = DOCS / "results" / "vllm.json"
    if served.is_file():
        result = json.loads(served.read_text(encoding="utf-8"))
        write_readme("vllm", page_vllm.block(result), DOCS / "vllm.md")
        write_readme("vllm", page_vllm.lead(result), DOCS.parent / "README.md")
    page_choice.main()


if __name__ == "__main__":
    main()
