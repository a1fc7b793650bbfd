"""The parts of docs/vllm.md and README.md with the results of ``benchmarks.vllm_engine``."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import details, made_with, table
from kvsketch.page.schedule import Schedule

#: of the parts concurrency and throughput
SMALL_BUDGET = 1024
_ALLOCATIONS = {
    "even": "the same for every head",
    "curves": "divided among heads by errors measured beforehand",
}


def block(result: dict[str, Any], soak: dict[str, Any] | None) -> str:
    """The results of ``benchmarks.vllm_engine`` and ``benchmarks.vllm_soak``, for docs/vllm.md."""
    found = result["results"]
    answers, crowd, many = found["answers"], found["mixed"], found["concurrency"]
    chunks, ranks = found["chunks"], found["parallel"]
    sizes = sorted(set(many["page_bytes_by_context"].values()))
    page = " or ".join(f"{size:,}" for size in sizes)
    contexts = " and ".join(f"{int(tokens):,}" for tokens in many["page_bytes_by_context"])
    rows = [
        [
            f"{row['tokens']:,}",
            "as the model, 32" if row["bits"] == 16 else str(row["bits"]),
            f"{row['ours_over_stock']:.2f}",
            " / ".join(f"{ratio:.2f}" for ratio in row["ratios"]),
        ]
        for row in found["throughput"]
    ]
    right = answers["right"]
    free = " and ".join(map(str, crowd["free_pages"]))
    cut = ", ".join(f"{size:,}" for size in chunks["sizes"])
    took = many["seconds"]["ours"] / many["seconds"]["stock"]
    first = [
        "![Right answers by the bytes of a request, with budgets by curves and the same for every "
        "head](figures/served.svg)",
        lead(result),
        _follows(found["sizes"]["rows"]),
    ]
    lines = [
        f"LongEval, {answers['cases']} {answers['source']} cases of 200 lines, "
        f"budget {answers['budget']:,}, sent to `vllm serve` with the openai client: the "
        "exact page gives vLLM's own answers in "
        f"{answers['exact_equal_to_stock']} of {answers['cases']}; "
        f"`heavy_merge` gives its offline ones in {answers['served_equal_to_offline']}, and those "
        f"of `SketchCache` (streaming prefill) in {answers['equal_to_transformers']}. Right "
        f"answers: vLLM {right['stock']}, `heavy_merge` {right['heavy_merge']}, in transformers "
        f"{right['heavy_merge in transformers']}. {_differing(answers)}".strip(),
        *of_sizes(found["sizes"]),
        of_documents(found["documents"]),
        *_loaded(found.get("loaded")),
        *_soak(soak),
        *_guesses(found.get("guesses")),
        f"Prompts in chunks of {cut} tokens: {chunks['equal']} of {chunks['requests']} answers are "
        "the same.",
        f"{crowd['requests']} requests of 100 to 6,000 tokens at once, with memory for "
        f"{crowd['most_running']} pages, {crowd['aborted']} aborted, {crowd['preemptions']} "
        f"preemptions: {crowd['equal']} of the {crowd['finished']} finished answers equal those "
        f"of the same request run alone. Free pages before and after: {free}.",
        f"{many['requests']} requests of {many['tokens']:,} tokens in {many['memory'] / 2**20:.0f} "
        f"MiB, budget 1,024: {many['ran']['ours']} ran at once, {many['ran']['stock']} in vLLM's "
        f"own blocks, and all were finished in {took:.2f} of the time. By the engine's log, "
        f"{many['logged']['ours']:.1f} and {many['logged']['stock']:.1f} requests fit. A page "
        f"takes {page} bytes for contexts of at most {contexts} tokens.",
        f"Two ranks of tensor parallelism give the same answers as one rank in {ranks['equal']} "
        f"of {ranks['requests']} requests.",
        *_as_on_cuda(found.get("runner")),
        "Decoded tokens per second over those of vLLM's own CPU backend, 8 requests at once, "
        "budget 1,024, compressions included:",
        table(["tokens", "bits of ours", "ours over vLLM's", "each pair"], rows),
        "The models are tiny (4 or 6 layers, heads of 32 channels), so that the overhead of every "
        "operation is visible.",
        *_price(found.get("price")),
        *_prompts(found.get("prompts")),
        _processors(result["processors"]),
        made_with(result),
    ]
    return "\n\n".join([*first, details("All numbers, and how they were measured", *lines)])


def _price(found: dict[str, Any] | None) -> list[str]:
    """The price of a prompt with both schedulers."""
    if found is None:
        return []
    over, every = found["over_stock"], Schedule(sink=4, recent=32).rhythm(SMALL_BUDGET).every
    return [
        f"One prompt of {found['tokens']:,} tokens, budget 1,024: {over['full']:.2f} times vLLM's "
        f"own time with vLLM's scheduler, with which a page is compressed every {every} tokens, "
        f"and {over['pieces']:.2f} times with `PageScheduler` and pieces of {found['piece']:,} "
        f"tokens (runs of each in turn: {found['rounds']}, threads: {found['threads']})."
    ]


def _prompts(found: dict[str, Any] | None) -> list[str]:
    """Right answers with both schedulers."""
    if found is None:
        return []
    rows = [
        [
            f"{row['lines']}",
            f"{row['budget']:,}",
            str(row["bits"]),
            f"{row['page_bytes']:,}",
            str(row["full"]),
            str(row["pieces"]),
        ]
        for row in found["rows"]
    ]
    names = ["lines", "budget", "bits", "bytes of a request", "vLLM's scheduler", "PageScheduler"]
    return [
        f"Right answers to {found['cases']} LongEval questions with both, the same budget for "
        "every head, in bfloat16:",
        table(names, rows),
    ]


def _loaded(found: dict[str, Any] | None) -> list[str]:
    """Documents that were compressed before, against pages that vLLM compresses."""
    if found is None:
        return []
    right, first = found["right"], found["first_token"]
    each = "; ".join(
        f"in {bits} bits {right[bits]['loaded']} and {right[bits]['read']}"
        for bits in ("16", "8", "4")
    )
    return [
        f"Documents that were read exactly and again (`--queries reread`), compressed for pages of "
        f"budget {found['budget']} and loaded, and the same pages compressed while vLLM reads, "
        f"{found['cases']} {found['source']} LongEval cases of 200 lines whose question is not "
        f"part of the document, right answers through `vllm serve`: {each}; vLLM's own cache "
        f"{right['stock']}. The first token of an answer about {first['tokens']:,} tokens comes "
        f"after {first['loaded_first_over_stock']:.2f} of the time that vLLM's own cache "
        f"takes when the document is loaded for the first time, and "
        f"{first['loaded_later_over_stock']:.2f} later (budget "
        f"1,024 in 8 bits; compressed while it is read: {first['read_over_stock']:.1f})."
    ]


def _soak(result: dict[str, Any] | None) -> list[str]:
    """An engine that ran while documents came and went."""
    if result is None:
        return []
    found = result["results"]
    files, metrics = found["files"], found["metrics"]
    memory = [f"{size:,.0f}" for size in found["megabytes_by_minute"]]
    half = memory[len(memory) // 2]
    return [
        f"{found['minutes']:.0f} minutes of one engine with `PageScheduler`, vLLM's prefix cache "
        f"and {found['documents']} documents, of which files were added {files['added']:,}, "
        f"replaced {files['replaced']:,}, damaged {files['damaged']:,} and removed "
        f"{files['removed']:,} times (`benchmarks.vllm_soak`): {found['equal']:,} of "
        f"{found['finished']:,} finished answers equal those of the request alone, with its "
        f"document loaded or its prompt read; {metrics['documents']:,.0f} requests started behind "
        f"a document, {found['aborted']:,} were aborted, and there were {found['preemptions']:,} "
        f"preemptions. The process took {memory[0]} MB at the start, {half} after half of the time "
        f"and {memory[-1]} at the end, of which at most 1 GiB are converted documents; free pages "
        f"before and after: {found['free_before']} and {found['free_after']}."
    ]


def _guesses(found: dict[str, Any] | None) -> list[str]:
    """Answers with guessed tokens against those without."""
    if found is None:
        return []
    most = found["guesses"]["speculative_config"]["num_speculative_tokens"]
    each = [
        [
            "vLLM's own" if not row["budget"] else f"budget {row['budget']:,}, {row['bits']} bits",
            row["by"],
            f"{row['equal']} of {found['cases']}",
            f"{row['equal_beyond']}",
            " / ".join(map(str, row["right"])),
            " / ".join(map(str, row["steps"])),
            f"{row['seconds'][1] / row['seconds'][0]:.2f}",
        ]
        for row in found["rows"]
    ]
    return [
        f"Tokens guessed {most} at a time, by n-grams and by a model (`{found['model']}`, as large "
        f"as the one that answers), {found['cases']} LongEval cases of 200 lines, "
        f"{found['tokens']} tokens each, without and with guesses. "
        "The time is that of all steps, with guesses over without, in one run of each: "
        "only large differences mean something.",
        table(
            ["cache", "guesses by", "equal answers", "all tokens equal", "right", "steps", "time"],
            each,
        ),
    ]


def _as_on_cuda(found: dict[str, Any] | None) -> list[str]:
    """Whether what vLLM uses on CUDA gives the same answers."""
    if found is None:
        return []
    return [
        f"With what vLLM uses on CUDA, in Triton's interpreter, {found['requests']} requests are "
        f"answered as by vLLM's first model runner: {found['equal']} with the model runner V2, "
        f"{found['equal_in_two_stages']} with two stages of pipeline parallelism, and "
        f"{found['equal_by_triton']} of {found['requests']} shorter ones with pages that are read "
        "by our Triton kernels."
    ]


def _differing(answers: dict[str, Any]) -> str:
    """Why some answers are not those of ``SketchCache``."""
    tokens = [one["tokens"] for one in answers["differing"]]
    if not tokens:
        return ""
    each = " and ".join(f"{number:,}" for number in tokens)
    return (
        f"The prompts that are answered differently have {each} tokens. Both compress at the same "
        "tokens to slots that are equal to the bit if queries, keys and values are; the products "
        "of their layers are rounded differently."
    )


def _follows(rows: list[dict[str, Any]]) -> str:
    """What the sizes mean, at the smallest budget and number of bits."""
    least = min(row["budget"] for row in rows)
    bits = [row["bits"] for row in rows if row["budget"] == least]
    most, few = max(bits), min(bits)
    right = {
        (row["allocation"], row["bits"]): row["right"] for row in rows if row["budget"] == least
    }
    return (
        f"What follows for that model: with {least:,} slots, budgets by curves answer "
        f"{right['curves', few]} in {few} bits and {right['curves', most]} in {most}, equal ones "
        f"{right['even', few]} and {right['even', most]}; memory per request no longer grows with "
        "the prompt."
    )


def _processors(of_parts: dict[str, str]) -> str:
    """A sentence that states which parts of the benchmark were run on which processor."""
    parts: dict[str, list[str]] = {}
    for part, processor in of_parts.items():
        parts.setdefault(processor, []).append(part)
    said = "; ".join(f"{processor}: {', '.join(names)}" for processor, names in parts.items())
    return f"Parts of the benchmark by processor: {said}."


def lead(result: dict[str, Any]) -> str:
    """The README's summary: the fewest bytes at which no answer is lost, compared with FP8."""
    sizes, many = result["results"]["sizes"], result["results"]["concurrency"]
    model = result["models"]["sizes"]
    took = many["seconds"]["ours"] / many["seconds"]["stock"]
    whole, fp8 = sizes["stock"]["auto"], sizes["stock"]["fp8"]
    as_good = [row for row in sizes["rows"] if row["right"] >= whole["right"]]
    best = min(as_good, key=lambda row: row["page_bytes"])
    return (
        f"LongEval, {sizes['cases']} cases of 200 lines, `{model}`: vLLM's own cache "
        f"answers {whole['right']} correctly; ours answers as many with "
        f"{best['page_bytes'] / whole['bytes']:.0%} of its bytes (budget {best['budget']:,} in "
        f"{best['bits']} bits, {_ALLOCATIONS[best['allocation']]}), and vLLM's FP8 cache "
        f"{fp8['right']} with {fp8['bytes'] / whole['bytes']:.0%}. Of {many['requests']} requests "
        f"of {many['tokens']:,} tokens, {many['ran']['ours']} run at once in "
        f"{many['memory'] / 2**20:.0f} MiB (budget 1,024 in 32 bits), against "
        f"{many['ran']['stock']} with vLLM's own cache; all together take {took:.1f} times as "
        f"long (threads: {many['threads']}), and their prompts are compressed while they are read, "
        "in pieces."
        f"{_documents(result['results'].get('loaded'))} {result.get('note', '')}"
    ).strip()


def _documents(found: dict[str, Any] | None) -> str:
    """A sentence about documents that were compressed before."""
    if found is None:
        return ""
    bits, first = min(found["right"].keys() - {"stock"}, key=int), found["first_token"]
    return (
        " Documents that were compressed before are loaded: "
        f"{found['budget']} slots in {bits} bits answer {found['right'][bits]['loaded']} of "
        f"{found['cases']} questions, and the first token comes after "
        f"{first['loaded_first_over_stock']:.2f} of vLLM's own time."
    )


def of_sizes(found: dict[str, Any]) -> list[str]:
    """Right answers by the bytes of a page."""
    shown = {(r["budget"], r["bits"], r["allocation"]): r for r in found["rows"]}
    theirs = found["stock"]
    whole = theirs["auto"]["bytes"]
    budgets = sorted({budget for budget, _, _ in shown}, reverse=True)
    bits = sorted({bits for _, bits, _ in shown}, reverse=True)
    rows = [
        [
            f"{budget:,}",
            str(few),
            f"{shown[budget, few, 'even']['page_bytes'] / whole:.0%}",
            *(str(shown[budget, few, name]["right"]) for name in ("even", "curves")),
        ]
        for budget in budgets
        for few in bits
    ]
    names = ["budget", "bits", "bytes of a request", "the same for every head", "by curves"]
    return [
        "Right answers to the same questions by the bytes of a page, over the bytes of vLLM's "
        f"own blocks for such a request; model and cache in {found['dtype']}. vLLM's own cache "
        f"answers {theirs['auto']['right']} of {found['cases']} correctly, and in FP8, with "
        f"{theirs['fp8']['bytes'] / whole:.0%} of the bytes, {theirs['fp8']['right']}. Curves "
        "were measured on two other prompts.",
        table(names, rows),
    ]


def of_documents(found: dict[str, Any]) -> str:
    """The savings by prefix caching."""
    ours, stock = found["ours"], found["stock"]
    tokens = sum(found["tokens"]) // len(found["tokens"])
    return (
        f"{found['documents']} documents of about {tokens:,} tokens, each sent alone and then with "
        f"{found['questions'] // found['documents']} questions: {ours['reused_tokens']:,} tokens "
        f"were not read again (vLLM's own prefix caching: {stock['reused_tokens']:,}), "
        f"{ours['equal']} of {ours['of']} answers equal those without prefix caching (vLLM's own: "
        f"{stock['equal']}), and all were finished in {ours['seconds_over_without']:.2f} of the "
        f"time without it (vLLM's own: {stock['seconds_over_without']:.2f})."
    )
