"""The sections of docs/benchmarks.md."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import made_with, table

_TITLES = {
    "decode": "## Attention of one decoded token",
    "bits": "## One decoded token over slots in 16, 8 and 4 bits",
    "compress": "## Compressing a prompt",
    "prefill": "## Measuring and compressing, compared with a prefill",
    "end_to_end": "## The default method from end to end",
    "layers": "## Decoding with layers of a usual size",
}
_TEXTS = {
    "decode": (
        "32 query heads, 8 KV heads of 128. `slots`: with masses, the same number in every head. "
        "`ragged`: the same total, with heads from 0.25 to 2.25 of the mean. `plain`: torch's "
        "attention over the same number of plain tokens, called as models call it. `packed`: the "
        "same, called with the queries of a group as queries of one head, which is faster. "
        "`full`: torch's attention over all n tokens. `floor`: the bytes that must be read over "
        "the bandwidth of a copy, measured in the same run. Numbers are ratios of times, medians "
        "of pairs."
    ),
    "bits": (
        "The same heads, every slot with a mass. `over packed`: the compiled kernel over torch's "
        "attention over as many bfloat16 tokens, with the queries of a group packed; `avx2`: with "
        "those instructions alone; `torch`: without the compiled kernel. `ragged over even`: the "
        "same number of slots in heads from 0.25 to 2.25 of the mean over equally many in each. "
        "`floor`: the bytes that are read over the bandwidth of a copy. Ratios of times, medians "
        "of pairs."
    ),
    "compress": (
        "8 KV heads of 128, float32, 64 queries, compressed to an eighth of the tokens (k-center, "
        "which takes one step per centre, to 1,024). The exponent is that of time against tokens. "
        "SnapKV and KeyDiff are also compared with kvpress's code, and one round of block halving "
        "with the code of BalanceKV's authors, on the same tensors."
    ),
    "prefill": (
        "One layer of Llama 3 8B's size in bfloat16: seconds to measure errors for the budgets of "
        "its heads, and to compress, over those of its prefill. Peak: the peak bytes of the cache "
        "in a default prefill (`budget=0.25`), over an uncompressed cache."
    ),
    "end_to_end": (
        "Tokens per second of `generate` over those with `DynamicCache`, medians of pairs: the "
        "default at 1/8 of the bytes against the exact cache, and decoding from the same bytes at "
        "the start, over at least two compressions. Without tokens: decoding with an empty cache "
        "against the exact one, which no cache can exceed."
    ),
    "layers": (
        "Two random layers of Llama 3 8B's shape in bfloat16, MLP included. `of as many tokens`: "
        "the default against a `DynamicCache` of as many tokens as its budget. `of exact`: against "
        "the exact cache as transformers calls torch's attention; `of packed`: with the queries of "
        "a group as queries of one head, which is far faster. Without tokens: an empty cache "
        "against the exact one. Ratios of tokens per second."
    ),
}


#: The results of which the page's first table has a row.
SUMMARISED = (
    *("decode_speed", "speed_bits", "speed_end_to_end", "speed_layers", "speed_prefill"),
    "prefill_peak",
    *("streaming_memory", "ray_throughput"),
)


def opening(results: dict[str, dict[str, Any] | None]) -> str:
    """The figure, at most eight rows of what was measured, and what follows from them."""
    rows = {name: found["results"] for name, found in results.items() if found is not None}
    lines = []
    if "decode_speed" in rows:
        ratio = {r["method"]: r["ratio"] for r in rows["decode_speed"]}
        lines += [
            [f"decoding, tiny model, `{name}`, over DynamicCache", f"{ratio[name]:.2f}"]
            for name in ("heavy_merge", "heavy_merge+16bit", max(ratio, key=lambda n: ratio[n]))
            if name in ratio
        ]
    for row in rows.get("speed_bits", []):
        if (row["slots"], row["threads"]) == (16384, 1) and row["bits"] != 8:
            lines.append(
                [
                    f"one token over {row['slots']:,} slots in {row['bits']} bits, time over that "
                    "of torch's attention over as many bfloat16 tokens, 32 heads of 128",
                    f"{row['over_packed']:.2f}",
                ]
            )
    for row in rows.get("speed_end_to_end", [])[:1]:
        most = row["decode_speed_of_exact_without_tokens"]
        lines.append(
            [
                f"decoding after {row['tokens']:,} tokens of which 1/8 is kept, tiny model, over "
                f"the exact cache; an empty cache: {most:.2f}",
                f"{row['decode_speed_of_exact']:.2f}",
            ]
        )
    for row in rows.get("speed_layers", [])[:1]:
        lines.append(
            [
                f"decoding, {row['model']}, the default, over DynamicCache",
                f"{row['decode_speed_of_as_many_tokens']:.2f}",
            ]
        )
    read = [
        (f"{r['tokens']:,}", f"{r['prefill_speed_of_exact']:.2f}")
        for r in rows.get("speed_end_to_end", [])
        if "prefill_speed_of_exact" in r and r["model"] == "longeval-one-head"
    ]
    if read:
        lengths, ratios = zip(*sorted(read, key=lambda r: int(r[0].replace(",", ""))), strict=True)
        lines.append(
            [
                f"reading a prompt of {' / '.join(lengths)} tokens, tiny model, over the exact "
                "cache",
                " / ".join(ratios),
            ]
        )
    for row in rows.get("speed_layers", []):
        if "compressions_of_a_layer" in row:
            lines.append(
                [
                    f"reading a prompt of {row['tokens']:,} tokens, {row['model']}, over the exact "
                    "cache",
                    f"{row['prefill_speed_of_exact']:.2f}",
                ]
            )
    share = {r["what"]: r.get("share_of_prefill") for r in rows.get("speed_prefill", [])}
    if {"measuring", "heavy_merge to 0.25"} <= set(share):
        lines.append(
            [
                "measuring, then compressing to 0.25, over the prefill of such a layer",
                f"{share['measuring']:.1%}, then {share['heavy_merge to 0.25']:.1%}",
            ]
        )
    peak = {
        r["allocation"]: r["peak_over_exact"]
        for r in rows.get("prefill_peak", [])
        if (r["method"], r["budget"]) == ("heavy_merge", 0.25)
    }
    if {"measured", "even"} <= set(peak):
        lines.append(
            [
                'peak bytes of a prompt read at once at 0.25, default / `allocation="even"`',
                f"{peak['measured']:.2f} / {peak['even']:.2f} of the exact cache",
            ]
        )
    for row in rows.get("streaming_memory", []):
        if row["method"] == "heavy_merge":
            lines.append(
                [
                    f"peak bytes of a streaming prefill of {row['tokens']:,} tokens",
                    f"{row['peak_kv_bytes'] / row['exact_kv_bytes']:.3f} of the exact cache",
                ]
            )
    ray = results.get("ray_throughput")
    if ray is not None:
        lines.append(["two local Ray workers over one", f"{ray['ratio']:.2f}"])
    if not lines:
        return ""
    return (
        "![Decoding speed by method](figures/decoding.svg)\n\n"
        + table(["what, on a CPU", "measured"], lines)
        + "\n\nThese speeds, but those from end to end, and the peak are of `heavy_merge` with "
        'budgets by measured errors (`allocation="measured"`), its default before a prompt\'s own '
        "queries were asked again. "
        "What an echo costs is in [what compression costs](errors.md#what-a-second-reading-costs-"
        "and-what-it-gains): `compressing` after `prompt`.\n\n"
        "What follows: decoding after a long prompt is faster than with the exact cache. "
        "With a tiny model and a small budget, where every operation of ours is visible, it is a "
        "little slower than with an exact cache of the same bytes: what is left is the "
        "compression every few tokens. The prefill is slower; where its peak matters, use "
        '`allocation="even"`, a file of curves or `prefill="streaming"`. On a GPU, '
        "`generate` is slower than with the exact cache (below): what is gained there is memory.\n"
    )


def speed(result: dict[str, Any]) -> str:
    """The section, with a table for every kind of row."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in result["results"]:
        kinds.setdefault(tuple(row), []).append(row)
    tables = [
        table(
            [name.replace("_", " ") for name in kind],
            [[_cell(row[n]) for n in kind] for row in rows],
        )
        for kind, rows in kinds.items()
    ]
    preset = result["preset"]
    made = made_with(result) + f" {result['threads']} threads, {result['repeats']} pairs."
    return "\n\n".join([_TITLES[preset], _TEXTS[preset], *tables, made]) + "\n"


def busy(result: dict[str, Any]) -> str:
    """The time of a prompt and of decoded tokens where other processes keep the cores busy."""
    cells: dict[tuple[str, ...], list[str]] = {}
    rows, parts = result["results"], ("prompt", "decode")
    one = next(r for r in rows if (r["busy"], r["spins"], r["method"]) == (0, "default", "exact"))
    for row in rows:
        name = tuple(str(row[key]) for key in ("busy", "threads", "spins"))
        cells.setdefault(name, []).extend(f"{row[part] / one[part]:.1f}" for part in parts)
    header = ["busy processes", "threads", "`GOMP_SPINCOUNT`"]
    header += [f"{method}, {part}" for method in result["methods"] for part in parts]
    return (
        "## On a busy machine\n\n"
        "Wall-clock time of a prompt and of the tokens decoded after it, over that of the exact "
        "cache on the idle machine with all threads, while so many other processes compute "
        "without end.\n\n"
        + table(header, [[*name, *numbers] for name, numbers in cells.items()])
        + f"\n\n`python -m benchmarks.busy`: {result['tokens']:,} tokens on `{result['model']}`. "
        f"{made_with(result)}\n"
    )


def on_gpu(result: dict[str, Any]) -> str:
    """The attention of one token on a GPU."""
    rows = [
        [
            str(r["requests"]),
            f"{r['slots']:,}",
            str(r["bits"]),
            *(f"{r[name]:.3f}" for name in ("kernel_ms", "floor_ms", "fused_kernel_ms")),
            f"{r['kernel_ms'] / r['fused_kernel_ms']:.2f}",
            f"{r['call_ms']:.2f}",
            f"{r['fused_call_ms']:.2f}",
        ]
        for r in result["results"]
    ]
    names = ["requests", "slots", "bits", "kernel, ms", "floor, ms", "torch's, ms", "over torch's"]
    names += ["call, ms", "torch's call, ms"]
    few = [r["kernel_ms"] / r["fused_kernel_ms"] for r in result["results"] if r["bits"] == 4]
    floor = {r["bits"]: r["floor_ms"] for r in result["results"]}
    return (
        "## On a GPU\n\n"
        "The attention of one token of every request on a GPU "
        f"({result['hardware']['gpu']}), 32 query and 8 KV heads of 128, over slots with masses in "
        "16 (bfloat16), 8 and 4 bits, and torch's fused attention over as many bfloat16 tokens. "
        "Kernel: replayed in a CUDA graph. Call: with what Python and the launches take. Floor: "
        "the bytes that must be read over the bandwidth of a copy. Slots in 4 bits take "
        f"{min(few):.2f} to {max(few):.2f} of the time of torch's kernel in "
        f"{floor[4] / floor[16]:.2f} of the bytes of 16 bits.\n\n"
        + table(names, rows)
        + f"\n\n{made_with(result)}\n"
    )


def model_on_gpu(result: dict[str, Any]) -> str:
    """A whole model on a GPU, and how it compares with the exact cache."""
    rows, found = [], result["results"]
    exact = next(r for r in found if r["cache"] == "exact")
    for r in found:
        over = [f"{r[name] / exact[name]:.2f}" for name in ("prefill_s", "token_ms")]
        size = [f"{r[name] / 1e9:.2f}" for name in ("peak_bytes", "held_bytes")]
        times = f"{r['prefill_s']:.2f}", f"{r['token_ms']:.1f}"
        rows.append([r["cache"], times[0], over[0], times[1], over[1], *size])
    names = ["cache", "prefill, s", "over exact", "token, ms", "over exact", "peak, GB", "held, GB"]
    of = f"{exact['requests']} requests" if exact["requests"] > 1 else "one request"
    return (
        f"## A whole model on a GPU, {of} of {exact['tokens']:,} tokens\n\n"
        f"A model of Llama 3 8B's shape ({exact['layers']} layers, random bfloat16 weights) with "
        f"transformers on {result['hardware']['gpu']}, budget {result['budget']}. Token: of all "
        "requests together, with the compressions due in between; the exact cache with torch's "
        "flash attention. Peak and held: bytes beside the weights. Here kvsketch saves memory and "
        "costs time: a token is bound by the launches of small operations from Python, of which "
        "a compressed layer has more, and the time varies with the processor.\n\n"
        + table(names, rows)
        + f"\n\n{made_with(result)}\n"
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    return str(value)


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
        "## Decoding against DynamicCache with the same bytes\n\n"
        f"{first['tokens']} greedy tokens in bfloat16 from the bytes of {first['slots']} tokens; "
        "the ratio of tokens per second (above 1: faster than DynamicCache), median of paired "
        "runs. SketchCache compresses repeatedly and stays within its budget, while DynamicCache "
        "grows. The model is tiny (a layer takes a quarter of a millisecond), so the overhead of "
        "every operation "
        "is visible. The default, `heavy_merge`, stores more slots in the same bytes, in 8 or 4 "
        "bits, and compresses again and again. Layers of a usual size are measured under "
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


def streaming_accuracy(result: dict[str, Any]) -> str:
    """Right answers after a prompt that was compressed while it was read."""
    budgets = sorted({r["budget"] for r in result["results"]}, reverse=True)
    ways: dict[tuple[Any, ...], list[Any]] = {}
    for r in result["results"]:
        way = tuple(r.get(name) for name in ("method", "prefill", "allocation", "bits", "chunk"))
        ways.setdefault(way, []).append(r)
    rows = []
    for (method, prefill, allocation, bits, chunk), found in ways.items():
        by = {r["budget"]: r for r in found}
        given = [f'prefill="{prefill}"', f'allocation="{allocation}"', f"bits={bits}"]
        said = [text for text, is_ in zip(given, (True, allocation, bits), strict=True) if is_]
        rows.append(
            [
                method,
                f"`{', '.join(said)}`",
                f"{chunk:,}" if chunk else "all",
                *(str(by[budget]["right"]) for budget in budgets),
                " / ".join(f"{by[budget]['peak']:.2f}" for budget in budgets),
            ]
        )
    names = ["method", "settings", "chunk", *(f"right at {budget}" for budget in budgets)]
    return (
        "## Compressed while it is read\n\n"
        f"LongEval, {result['cases']} cases of {result['lines']} lines on `{result['model']}`; the "
        f"exact cache answers {result['exact_right']}. A streaming prefill is compressed in pieces "
        "of at most 1,024 tokens, all of whose queries are asked again. The peak is that of the "
        "cache, over the exact cache's bytes.\n\n"
        + table([*names, "peak / exact"], rows)
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
