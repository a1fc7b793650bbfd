"""The sections of docs/guarantees.md."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import made_with, table
from kvsketch.theory import coreset_size


def opening(grown: dict[str, Any], proved: dict[str, Any]) -> str:
    """The figure, the trials of the theorems, and what follows from them."""
    rows = [
        [
            r["sketch"],
            f"n={r['n']:,}, d={r['d']}, eps={r['eps']}"
            + (f", delta={r['delta']}" if "delta" in r else ""),
            f"{r['failures']} of {r['trials']}",
            f"{r['median_eps']:.3f}",
            r["verdict"].split(":")[0].removeprefix("needs "),
        ]
        for r in proved["results"][:8]
    ]
    slope = grown["exponents"]
    grows = ", ".join(f"{name} n^{slope[name]['bytes']:.2f}" for name in slope if name == "subgen")
    steps = slope.get("balancekv_streaming", {}).get("bytes_per_doubling")
    doubling = f"; BalanceKV adds {steps:,} bytes per doubling of the stream" if steps else ""
    failures = sum(r["failures"] for r in proved["results"])
    trials = sum(r["trials"] for r in proved["results"])
    real = [r for r in proved["real"] if "no fewer" not in r["subgen"]]
    return (
        "![Errors of the sketches against the theorems' bounds, and bits recovered from INDEX]"
        "(figures/guarantee.svg)\n\n"
        + table(["sketch", "regime", "failures", "median eps", "slots needed"], rows)
        + f"\n\nWhat follows: at the theorems' own sizes the bounds failed in {failures} of "
        f"{trials} trials, by a wide margin, and memory grows as proved ({grows}{doubling}). Those "
        f"sizes are of no use for a real model: at the norms of {len(proved['real'])} measured "
        f"layers the theorem saves memory in {len(real)}. And no sketch of a quarter of the slots "
        "reads back more than about a quarter of incompressible values.\n"
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
            f"{coreset_size(r['head_dim'], 0.5, _radius(r)):.1e}",
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
        + "\n\n### At a real model's norms\n\n"
        "The same calculators (eps = 0.5) at the largest query and key norms of each layer; delta "
        "is the radius at which n/8 balls cover every head's keys. The last column is newer: the "
        "order of the smallest subset of tokens that stands for all of them, sqrt(d) e^rho / eps "
        "with rho = query x key / sqrt(d) and constants of 1 (`kvsketch.theory.coreset_size`, "
        "[2605.05602](https://arxiv.org/abs/2605.05602)). A subset of that order always exists, "
        "and for some keys no smaller one does: it supersedes the papers' sizes, whose exponents "
        "are larger, and shows that the exponential in the norms belongs to the problem and not to "
        "an algorithm. Methods that work at these norms use that a model's keys are not the worst "
        "ones. How much that helps is what [2607.01520](https://arxiv.org/abs/2607.01520) bounds, "
        "by a cache's own compressibility; the space of a stream is bounded nearly tightly by "
        "[2606.07205](https://arxiv.org/abs/2606.07205). Neither is computed here.\n\n"
        + table(["model", "layer", "query", "key", "delta", "SubGen", "BalanceKV", "order"], real)
        + "\n\n### The barrier: INDEX\n\n"
        f"Alice writes {first['rows']} rows of bits into values under nearly orthogonal keys "
        f"(Theorem 6); Bob reads them back from {first['rows'] // 4} slots. The advantage is the "
        "share that he recovers beyond guessing. A method that keeps a quarter of the rows has an "
        "advantage of a quarter.\n\n"
        + table(["method", "slots", "bits right", "advantage"], index)
        + f"\n\n{made_with(result)}\n{theorems(result)}"
    )


def _radius(row: dict[str, Any]) -> float:
    """The largest score of a query and a key of these norms."""
    return float(row["query_norm"] * row["key_norm"] / row["head_dim"] ** 0.5)


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
