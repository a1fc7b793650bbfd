"""The measured part of docs/vllm.md."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import made_with, table


def block(result: dict[str, Any]) -> str:
    """What ``benchmarks.vllm_engine`` found."""
    found = result["results"]
    answers, crowd, many = found["answers"], found["mixed"], found["concurrency"]
    chunks, ranks = found["chunks"], found["parallel"]
    sizes = sorted(set(many["page_bytes_by_context"].values()))
    page = " or ".join(f"{size:,}" for size in sizes)
    contexts = " and ".join(f"{int(tokens):,}" for tokens in many["page_bytes_by_context"])
    rows = [
        [
            f"{row['tokens']:,}",
            f"{row['ours_over_stock']:.2f}",
            " / ".join(f"{ratio:.2f}" for ratio in row["ratios"]),
        ]
        for row in found["throughput"]
    ]
    right = answers["right"]
    free = " and ".join(map(str, crowd["free_pages"]))
    cut = ", ".join(f"{size:,}" for size in chunks["sizes"])
    took = many["seconds"]["ours"] / many["seconds"]["stock"]
    lines = [
        f"LongEval, {answers['cases']} {answers['source']} cases of 200 lines, about 2,050 tokens, "
        f"budget {answers['budget']:,}: the exact page gives vLLM's own answers, each token, in "
        f"{answers['exact_equal_to_stock']} of {answers['cases']}; `heavy_merge` gives those of "
        f"`SketchCache` (streaming prefill) in {answers['equal_to_transformers']}. Right answers: "
        f"vLLM {right['stock']}, `heavy_merge` {right['heavy_merge']}, in transformers "
        f"{right['heavy_merge in transformers']}. In transformers the last part of a prompt is "
        "compressed too, and decoding compresses in another rhythm, so that scores differ.",
        f"Prompts in chunks of {cut} tokens: {chunks['equal']} of {chunks['requests']} answers are "
        "the same.",
        f"{crowd['requests']} requests of 100 to 6,000 tokens at once in pages for "
        f"{crowd['most_running']}, {crowd['aborted']} aborted, {crowd['preemptions']} preemptions: "
        f"{crowd['equal']} of the {crowd['finished']} finished answers are those of the request "
        f"alone; free pages before and after: {free}.",
        f"{many['requests']} requests of {many['tokens']:,} tokens in {many['memory'] / 2**20:.0f} "
        f"MiB, budget 1,024: {many['ran']['ours']} ran at once, {many['ran']['stock']} in vLLM's "
        f"own blocks, and all were done in {took:.2f} of "
        f"the time; the engine says that {many['logged']['ours']:.1f} and "
        f"{many['logged']['stock']:.1f} fit. A page takes {page} bytes, whether requests have at "
        f"most {contexts} tokens.",
        f"Two ranks of tensor parallelism give the answers of one in {ranks['equal']} of "
        f"{ranks['requests']}.",
        "Decoded tokens a second over those of vLLM's own CPU backend, 8 requests at once, budget "
        "1,024, compressions included:",
        table(["tokens", "ours over vLLM's", "each pair"], rows),
        "The model is tiny (4 layers, heads of 32 channels), so that every operation shows. A "
        "prompt alone is read more slowly than by vLLM: its page is compressed every 256 tokens.",
        made_with(result),
    ]
    return "\n\n".join(lines)
