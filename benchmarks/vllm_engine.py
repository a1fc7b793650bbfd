"""kvsketch's pages in a real vLLM engine, compared with vLLM's own blocks.

    make .venv-vllm/.ready && python -m benchmarks.vllm_engine --json

Every engine is a process of ``.venv-vllm`` on a CPU (``benchmarks.engine_job``), with ``spread`` in
float32 unless stated otherwise. ``stock`` is vLLM's own backend. The parts are:

answers      LongEval questions with vLLM's own backend, the exact page and heavy_merge, sent to
             ``vllm serve`` by the openai client. heavy_merge also answers them offline, and with
             ``SketchCache`` in transformers (streaming prefill, the same budget). The results are
             the numbers of right and of equal answers.
sizes        The right answers to the same questions and the bytes of a page, in bfloat16, with
             heavy_merge at several budgets, in 16, 8 and 4 bits, with the same budget for every
             head or with budgets by curves measured on two other prompts. They are compared with
             vLLM's own cache in 16 bits and in FP8.
documents    Questions about documents that were sent before, with and without prefix caching: equal
             answers, reused tokens and the ratio of times.
chunks       Equal answers of heavy_merge with prompts in chunks of 64, 300 and 4,096 tokens.
mixed        Requests of mixed length at once, some aborted, with so few pages that others are
             preempted: answers equal to those of one request after the other.
concurrency  Requests of 12,000 tokens in the same memory: how many run at once, and the time of all
             of them, ours with ``PageScheduler``.
price        The time of one prompt of 12,000 tokens over that of vLLM's own backend: with vLLM's
             own scheduler, with which pages are compressed wherever they are full, and with
             ``PageScheduler``, with which they are compressed after whole pieces of a prompt.
prompts      The right answers to LongEval questions with both, in bfloat16.
throughput   Decoded tokens per second with 8 requests of 12,000 and of 1,000 tokens, ours in the
             model's dtype and in 8 bits. Runs of both backends alternate, and the median of the
             paired ratios is reported.
parallel     Answers of two ranks of tensor parallelism equal to those of one.
runner       Answers equal to those of vLLM's first model runner with what vLLM uses on CUDA, in
             Triton's interpreter (``benchmarks/interpreter``): the model runner V2, two stages of
             pipeline parallelism, and pages that are read by our Triton kernels.
guesses      The same answers with tokens guessed by n-grams (speculative decoding) as without, and
             the number of steps of the engine.
loaded       Documents compressed beforehand that are loaded, see ``benchmarks.vllm_documents``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json as jsonlib
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.longeval import cases
from benchmarks.page import save
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.evaluation.runner.loading import resolve_model
from kvsketch.evaluation.runner.longeval_cases import generate_cases

ROOT = Path(__file__).resolve().parent.parent
#: The Python that has vLLM: this one, or that of ``.venv-vllm``.
PYTHON = (
    Path(sys.executable)
    if importlib.util.find_spec("vllm")
    else ROOT / ".venv-vllm" / "bin" / "python"
)
MODEL = "spread"
#: a model with the same tokens, of the same size
GUESSING = "lists"
PARTS = (
    "answers",
    "sizes",
    "documents",
    "chunks",
    "mixed",
    "concurrency",
    "price",
    "prompts",
    "throughput",
    "parallel",
    "runner",
    "guesses",
    "loaded",
)
OURS = {"KVSKETCH_METHOD": "heavy_merge", "KVSKETCH_BUDGET": "1536"}
SMALL = {"KVSKETCH_METHOD": "heavy_merge", "KVSKETCH_BUDGET": "1024"}
Job = dict[str, Any]
#: Of an engine whose prompts are compressed in pieces.
PIECES: Job = {"scheduler_cls": "kvsketch.vllm.scheduler.PageScheduler"}
#: with which an engine guesses tokens
GUESSES: Job = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
}


def guessed_by(model: str, tokens: int = 4) -> Job:
    """With which an engine lets another model guess tokens."""
    given = {"method": "draft_model", "model": model, "num_speculative_tokens": tokens}
    return {"speculative_config": given}


#: On CUDA, vLLM's configuration selects our backend for layers of full attention.
FULL_ATTENTION: Job = {"backend_per_kind": {"full_attention": "CUSTOM"}}


def as_on_cuda(pages: bool = False) -> dict[str, str]:
    """Variables for ``run``: vLLM's model runner V2, in Triton's interpreter; with ``pages``, our
    Triton kernels, too."""
    path = [str(ROOT / "benchmarks" / "interpreter"), *os.environ.get("PYTHONPATH", "").split(":")]
    found = {"PYTHONPATH": ":".join(filter(None, path))}
    return {**found, "INTERPRETED_PAGES": "1"} if pages else found


def run(
    requests: list[Job],
    variables: dict[str, str],
    together: bool = True,
    preempt: int = 0,
    largest_file: int | None = None,
    **engine: Any,
) -> Job:
    """Run a job in a new engine, and return its result, with what the engine has "said". With
    ``preempt``, a request is preempted every so many steps; with ``largest_file``, no larger one
    can be written.

    Raises:
        RuntimeError: the engine failed. The message is its output.
    """
    given = {"model": resolve_model(MODEL), "dtype": "float32", "max_model_len": 8192}
    job = {"engine": {**given, **engine}, "requests": requests}
    job |= {"together": together, "preempt": preempt}
    job |= {} if largest_file is None else {"largest_file": largest_file}
    code, said = process(job, variables)
    if code:
        raise RuntimeError(said[-40_000:])
    # vLLM may still log after the result, about workers that end slowly.
    last = next(line for line in reversed(said.splitlines()) if line.startswith('{"vllm"'))
    found: Job = jsonlib.loads(last)
    return {**found, "said": said}


def new_process(job: Job, variables: dict[str, str]) -> tuple[int, str]:
    """Run a job in a new process; its status and what it has said."""
    done = subprocess.run(
        [str(PYTHON), "-m", "benchmarks.engine_job"],
        input=jsonlib.dumps(job),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**clean(), **variables},
        check=False,
    )
    return done.returncode, done.stderr + done.stdout


def clean() -> dict[str, str]:
    """The variables of this process, without ours."""
    return {k: v for k, v in os.environ.items() if not k.startswith("KVSKETCH_")}


#: what runs a job; tests start engines faster
process = new_process


def threads() -> int:
    """How many threads an engine has."""
    return int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))


def drawn(sizes: Iterable[int], new: int, seed: int = 0) -> list[Job]:
    """Requests with random prompts of these sizes, for ``new`` tokens each."""
    numbers = random.Random(seed)
    prompts = [[numbers.randrange(3, 2000) for _ in range(size)] for size in sizes]
    return [{"prompt": prompt, "max_tokens": new, "ignore_eos": True} for prompt in prompts]


def tokens_of(result: Job) -> list[Any]:
    """The tokens of the answers. None stands for an aborted request."""
    return [None if one is None else one["tokens"] for one in result["answers"]]


def same(one: Job, other: Job) -> int:
    """The number of answers that are equal in both runs, without aborted ones."""
    pairs = zip(tokens_of(one), tokens_of(other), strict=True)
    return sum(a is not None and a == b for a, b in pairs)


@contextlib.contextmanager
def served(variables: dict[str, str], log: Path, *arguments: str) -> Iterator[str]:
    """Run ``vllm serve`` with ``longeval-one-head``, under its name, on loopback. Yields
    the address of the server.

    Raises:
        RuntimeError: the server did not start. The message is its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(PYTHON.parent / "vllm"), "serve", str(resolve_model(MODEL))]
    command += ["--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", "8192"]
    command += ["--enforce-eager", "--host", "127.0.0.1", "--port", str(port), *arguments]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVSKETCH_")}
    environment = {**clean, "VLLM_CPU_KVCACHE_SPACE": "1", **variables}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=log.parent)
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(log.read_text()[-20_000:])
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait(60)


_ASK = """
import json, sys, openai
from concurrent.futures import ThreadPoolExecutor

address, model, tokens, prompts = json.load(sys.stdin)
client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")

def ask(prompt):
    given = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return client.completions.create(model=model, **given).choices[0].text

print(json.dumps(list(ThreadPoolExecutor(16).map(ask, prompts))))
"""


def told(address: str, prompts: list[str], tokens: int = 12) -> list[str]:
    """Greedy answers of a server, to sixteen requests at a time. The openai client is that of
    vLLM's environment."""
    done = subprocess.run(
        [str(PYTHON), "-c", _ASK],
        input=jsonlib.dumps([address, MODEL, tokens, prompts]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-20_000:])
    texts: list[str] = jsonlib.loads(done.stdout.splitlines()[-1])
    return texts


def right(rows: list[Any], texts: list[str]) -> int:
    """The number of answers that contain the right number."""
    return sum(str(row["expected_number"]) in t for row, t in zip(rows, texts, strict=True))


def answers(count: int, budget: int = 768) -> Job:
    """The part answers: LongEval cases of 200 lines."""
    source, rows = cases(200, count, 0)
    prompts = [row["prompt"] for row in rows]
    ours = {**OURS, "KVSKETCH_BUDGET": str(budget)}
    kinds = {"stock": {}, "exact": {"KVSKETCH_METHOD": "exact"}, "heavy_merge": ours}
    texts = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, variables in kinds.items():
            flags = ["--scheduler-cls", PIECES["scheduler_cls"]] if variables is ours else []
            with served(variables, Path(folder) / name, *flags) as address:
                texts[name] = told(address, prompts)
    asked = [{"prompt": p, "max_tokens": 12} for p in prompts]
    offline = run(asked, ours, max_num_seqs=16, **PIECES)
    theirs = transformers_answers(prompts, budget)
    differing = [
        {
            "case": i,
            "tokens": tokens,
            "vllm": a,
            "transformers": b,
            "expected": rows[i]["expected_number"],
        }
        for i, (a, (b, tokens)) in enumerate(zip(texts["heavy_merge"], theirs, strict=True))
        if a.strip() != b.strip()
    ]

    def equal(one: list[str], other: list[str]) -> int:
        return sum(a == b for a, b in zip(one, other, strict=True))

    return {
        "cases": len(rows),
        "source": source,
        "budget": budget,
        "exact_equal_to_stock": equal(texts["stock"], texts["exact"]),
        "served_equal_to_offline": equal(
            texts["heavy_merge"], [one["text"] for one in offline["answers"]]
        ),
        "right": {
            **{name: right(rows, texts[name]) for name in ("stock", "heavy_merge")},
            "heavy_merge in transformers": right(rows, [text for text, _ in theirs]),
        },
        "equal_to_transformers": len(rows) - len(differing),
        "differing": differing,
    }


def curves(folder: Path) -> str:
    """Measure its curves on two other prompts, generated cases of 210 lines."""
    from kvsketch.evaluation.runner.calibration import calibrate_files
    from kvsketch.evaluation.runner.settings import Settings

    files = []
    for number, row in enumerate(generate_cases(210, 2, 1)):
        files.append(folder / f"{number}.txt")
        files[-1].write_text(row["prompt"], encoding="utf-8")
    silent = Console(stderr=True, quiet=True)
    found = calibrate_files(MODEL, files, "heavy_merge", 32, Settings(), 0, silent)
    found.save(folder / "curves.json")
    return str(folder / "curves.json")


def sizes(count: int) -> Job:
    """The part sizes: right answers and the bytes of a page, in bfloat16, as models are served."""
    source, rows = cases(200, count, 0)
    asked = [{"prompt": row["prompt"], "max_tokens": 12} for row in rows]
    engine = {"max_num_seqs": 16, "dtype": "bfloat16"}
    stock: Job = {}
    for kind in ("auto", "fp8"):
        result = run(asked, {}, kv_cache_dtype=kind, **engine)
        blocks = -(-result["longest"] // result["block_size"])  # blocks of the longest request
        stock[kind] = {
            "right": right(rows, [one["text"] for one in result["answers"]]),
            "bytes": result["page_bytes"] * blocks,
        }
    found = []
    with tempfile.TemporaryDirectory() as folder:
        by_curves = {"KVSKETCH_ALLOCATION": curves(Path(folder))}
        for budget in (1536, 1024, 512):
            for bits in (16, 8, 4):
                for name, more in (("even", {}), ("curves", by_curves)):
                    variables = {**OURS, "KVSKETCH_BUDGET": str(budget), **more}
                    variables["KVSKETCH_BITS"] = str(bits)
                    result = run(asked, variables, **engine)
                    texts = [one["text"] for one in result["answers"]]
                    found.append(
                        {
                            "budget": budget,
                            "bits": bits,
                            "allocation": name,
                            "page_bytes": result["page_bytes"],
                            "right": right(rows, texts),
                        }
                    )
    return {
        "cases": len(rows),
        "source": source,
        "dtype": engine["dtype"],
        "stock": stock,
        "rows": found,
    }


def documents(count: int, questions: int = 4) -> Job:
    """The part documents: each document alone, then questions about it. A question is the last 60
    tokens of a prompt. For each further question, the document ends one token earlier."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MODEL))
    asked, lengths = [], []
    for row in cases(600, count, 0)[1]:
        prompt = tokenizer(row["prompt"]).input_ids
        document, question = prompt[:-60], prompt[-60:]
        lengths.append(len(document))
        asked.append({"prompt": document, "max_tokens": 1})
        for cut in range(questions):
            asked.append({"prompt": document[: len(document) - cut] + question, "max_tokens": 12})
    found: Job = {"documents": count, "questions": count * questions, "tokens": lengths}
    for name, variables in (("stock", {}), ("ours", SMALL)):
        off = run(asked, variables, together=False, enable_prefix_caching=False)
        on = run(asked, variables, together=False)
        found[name] = {
            "equal": same(off, on),
            "of": len(asked),
            "reused_tokens": on["reused_tokens"],
            "seconds_over_without": on["seconds"] / off["seconds"],
        }
    return found


def transformers_answers(prompts: list[str], budget: int) -> list[tuple[str, int]]:
    """The answers of ``SketchCache`` in transformers, and the number of tokens of each prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvsketch import SketchCache

    path = resolve_model(MODEL)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        cache = SketchCache(
            model.config,
            "heavy_merge",
            budget=budget,
            allocation="even",
            bits=16,
            prefill="streaming",
        )
        out = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        found.append((text, ids.shape[1]))
    return found


def chunks(count: int) -> Job:
    """The part chunks: the same requests with three chunk sizes of the prefill."""
    _, rows = cases(200, count, 0)
    asked = [{"prompt": row["prompt"], "max_tokens": 12} for row in rows]
    sizes = (64, 300, 4096)
    found = [run(asked, SMALL, max_num_seqs=16, max_num_batched_tokens=n) for n in sizes]
    equal = min(same(found[0], other) for other in found[1:])
    return {"requests": count, "sizes": list(sizes), "equal": equal}


def mixed(count: int, seed: int, longest: int = 6000, pages: int = 16) -> Job:
    """The part mixed: requests of 100 to 6,000 tokens, a quarter aborted, with few pages."""
    numbers = random.Random(seed)
    asked = []
    for number in range(count):
        prompt = [numbers.randrange(3, 2000) for _ in range(numbers.randrange(100, longest))]
        asked.append({"prompt": prompt, "max_tokens": numbers.randrange(8, 40), "ignore_eos": True})
        if number % 4 == 0:
            asked[-1]["abort"] = numbers.randrange(5, 120)
    engine = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    # There are pages for some of the requests only, and the others wait.
    crowd = run(asked, SMALL, preempt=10, num_gpu_blocks_override=pages, **engine)
    alone = run([{**r, "abort": None} for r in asked], SMALL, together=False, **engine)
    finished = [tokens is not None for tokens in tokens_of(crowd)]
    return {
        "requests": count,
        "aborted": finished.count(False),
        "finished": finished.count(True),
        "equal": same(crowd, alone),
        "preemptions": crowd["preemptions"],
        "most_running": crowd["most_running"],
        "free_pages": [crowd["free_before"], crowd["free_after"]],
    }


def concurrency(seed: int) -> Job:
    """The part concurrency: requests of 12,000 tokens in 300 MiB, ours with ``PageScheduler``."""
    asked = drawn([12_000] * 32, 250, seed)
    engine = {"max_model_len": 12_288, "max_num_seqs": 64, "kv_cache_memory_bytes": 300 * 2**20}
    stock, ours = run(asked, {}, **engine), run(asked, SMALL, **engine, **PIECES)
    sizes = {}
    for context in (2048, 16_000):
        page = run([], SMALL, **{**engine, "max_model_len": context})
        sizes[str(context)] = page["page_bytes"]
    return {
        "memory": engine["kv_cache_memory_bytes"],
        "tokens": 12_000,
        "requests": len(asked),
        "ran": {"stock": stock["most_running"], "ours": ours["most_running"]},
        "times": ours["most_running"] / stock["most_running"],
        "logged": {"stock": stock["concurrency"], "ours": ours["concurrency"]},
        "preemptions": {"stock": stock["preemptions"], "ours": ours["preemptions"]},
        "threads": threads(),
        "seconds": {"stock": stock["seconds"], "ours": ours["seconds"]},
        "page_bytes_by_context": sizes,
    }


def guesses(count: int) -> Job:
    """The part guesses: answers of 60 tokens, vLLM's own and ours, without guesses, with those of
    n-grams, and with those of another packaged model as large as the one that answers."""
    from transformers import AutoTokenizer

    _, found = cases(200, count, 0)
    asked = [{"prompt": r["prompt"], "max_tokens": 60, "ignore_eos": True} for r in found]
    end, rows = AutoTokenizer.from_pretrained(resolve_model(MODEL)).eos_token_id, []
    kinds = {"n-grams": GUESSES, "a model": guessed_by(resolve_model(GUESSING))}

    def until_end(tokens: list[int]) -> list[int]:
        return tokens[: tokens.index(end)] if end in tokens else tokens

    for budget, bits in ((0, 16), (1024, 16), (512, 16), (512, 4)):
        ours = {**OURS, "KVSKETCH_BUDGET": str(budget), "KVSKETCH_BITS": str(bits)}
        variables, more = (ours, PIECES) if budget else ({}, {})
        plain = run(asked, variables, max_num_seqs=16, **more)
        for name, given in kinds.items():
            guessed = run(asked, variables, max_num_seqs=16, **more, **given)
            both = plain, guessed
            ended = [[until_end(tokens) for tokens in tokens_of(one)] for one in both]
            rows.append(
                {
                    "budget": budget,
                    "bits": bits,
                    "by": name,
                    "equal": sum(a == b for a, b in zip(*ended, strict=True)),
                    "equal_beyond": same(plain, guessed),
                    "right": [right(found, [a["text"] for a in one["answers"]]) for one in both],
                    "steps": [len(one["steps"]) for one in both],
                    "seconds": [sum(step[0] for step in one["steps"]) for one in both],
                }
            )
    return {"cases": count, "tokens": 60, "guesses": GUESSES, "model": GUESSING, "rows": rows}


def price(rounds: int, seed: int) -> Job:
    """The part price: the time of one prompt."""
    seconds: dict[str, list[float]] = {"stock": [], "full": [], "pieces": []}
    kinds = (("stock", {}, {}), ("full", SMALL, {}), ("pieces", SMALL, PIECES))
    asked = drawn([12_000] * 4, 1, seed)
    for _ in range(rounds):
        for name, variables, more in kinds:
            given = {**variables, "VLLM_CPU_KVCACHE_SPACE": "4"}
            engine = {"max_model_len": 16_000, "max_num_seqs": 8, "enable_prefix_caching": False}
            result = run(asked, given, together=False, **engine, **more)
            ends = [i for i, (_, _, out) in enumerate(result["steps"]) if out]
            later = result["steps"][ends[0] + 1 :]  # the first prompt warms up
            seconds[name].append(sum(s for s, _, _ in later) / (len(ends) - 1))
    return {
        "tokens": 12_000,
        "piece": 1024,
        "rounds": rounds,
        "threads": threads(),
        "over_stock": {
            name: statistics.median(
                a / b for a, b in zip(seconds[name], seconds["stock"], strict=True)
            )
            for name in ("full", "pieces")
        },
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
    }


def prompts(count: int) -> Job:
    """The part prompts: right answers with both schedulers."""
    rows = []
    for lines, budgets in ((200, (1024, 512, 256)), (400, (1024, 512))):
        source, found = cases(lines, count, 0)
        requests = [{"prompt": row["prompt"], "max_tokens": 12} for row in found]
        for budget in budgets:
            for bits in (16, 4):
                variables = {**OURS, "KVSKETCH_BUDGET": str(budget), "KVSKETCH_BITS": str(bits)}
                one: Job = {"lines": lines, "source": source, "budget": budget, "bits": bits}
                for name, more in (("full", {}), ("pieces", PIECES)):
                    result = run(requests, variables, max_num_seqs=16, dtype="bfloat16", **more)
                    texts = [answer["text"] for answer in result["answers"]]
                    one |= {"page_bytes": result["page_bytes"], name: right(found, texts)}
                rows.append(one)
    return {"cases": count, "rows": rows}


def throughput(rounds: int, seed: int) -> list[Job]:
    """The part throughput: decoded tokens per second, over the steps in which 8 requests decode."""
    found = []
    pages = {16: SMALL, 8: {**SMALL, "KVSKETCH_BITS": "8"}}
    for tokens in (12_000, 1000):
        asked = drawn([tokens] * 8, 200, seed)
        engine = {"max_model_len": 16_000, "max_num_seqs": 8}
        rates: dict[int, list[float]] = {0: [], **{bits: [] for bits in pages}}
        for _ in range(rounds):
            for bits, variables in {0: {}, **pages}.items():
                given = {**variables, "VLLM_CPU_KVCACHE_SPACE": "4"}
                result = run(asked, given, **engine)
                steps = [s for s, _, out in result["steps"] if out == 8][5:-1]
                # The mean, unlike the median, includes compressions.
                rates[bits].append(8 * len(steps) / sum(steps))
        for bits in pages:
            pairs = [o / s for o, s in zip(rates[bits], rates[0], strict=True)]
            found.append(
                {
                    "tokens": tokens,
                    "bits": bits,
                    "rounds": rounds,
                    "ours_over_stock": statistics.median(pairs),
                    "ratios": pairs,
                    "stock_tokens_per_s": statistics.median(rates[0]),
                    "ours_tokens_per_s": statistics.median(rates[bits]),
                }
            )
    return found


def parallel(count: int) -> Job:
    """The part parallel: the same requests with one rank and with two."""
    _, rows = cases(200, count, 0)
    asked = [{"prompt": row["prompt"], "max_tokens": 12} for row in rows]
    one = run(asked, OURS, max_num_seqs=16)
    both = {**OURS, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    two = run(asked, both, max_num_seqs=16, tensor_parallel_size=2)
    return {"requests": count, "ranks": 2, "equal": same(one, two)}


def runner(count: int, seed: int) -> Job:
    """The part runner: the same requests with both of vLLM's model runners."""
    _, rows = cases(200, count, 0)
    asked = [{"prompt": row["prompt"], "max_tokens": 12} for row in rows]
    first = run(asked, OURS, max_num_seqs=16)
    second = run(asked, {**OURS, **as_on_cuda()}, max_num_seqs=16)
    stages = {**OURS, **as_on_cuda(), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    staged = run(asked, stages, max_num_seqs=16, pipeline_parallel_size=2)
    short = drawn([100 + 700 * number // count for number in range(count)], 8, seed)
    few = {**OURS, "KVSKETCH_BUDGET": "256"}
    plain = run(short, few, max_num_seqs=16)
    cuda = {"attention_config": FULL_ATTENTION, "max_num_seqs": 16}
    kernels = run(short, {**few, **as_on_cuda(pages=True)}, **cuda)
    return {
        "requests": count,
        "equal": same(first, second),
        "equal_in_two_stages": same(first, staged),
        "equal_by_triton": same(plain, kernels),
    }


def main(
    parts: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(PARTS)}.")] = ",".join(
        PARTS
    ),
    count: Annotated[int, typer.Option(help="LongEval cases.")] = 50,
    requests: Annotated[int, typer.Option(help="Requests of the part mixed.")] = 64,
    rounds: Annotated[int, typer.Option(help="Paired runs of the part throughput.")] = 3,
    seed: int = 0,
    out: Annotated[
        Path | None, typer.Option(help="Also write the JSON here. Keeps other parts.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.vllm_engine --parts answers --count 5 --json"""
    chosen = parts.split(",")
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        raise typer.BadParameter(f"--parts {unknown[0]!r} must be one of {', '.join(PARTS)}")
    if not PYTHON.is_file():
        raise typer.BadParameter(f"{PYTHON} is missing; run make .venv-vllm/.ready")
    torch.set_num_threads(1)
    console = Console(stderr=True)
    found: Job = {}
    processors: dict[str, str] = {}
    models: dict[str, str] = {}
    if out is not None and out.is_file():  # The parts that are not run are kept.
        before = jsonlib.loads(out.read_text(encoding="utf-8"))
        found, processors = before["results"], before.get("processors", {})
        models = before.get("models", {})
    from benchmarks.vllm_documents import loaded  # which imports this

    small = min(count, 12)
    todo = {
        "answers": lambda: answers(count),
        "sizes": lambda: sizes(count),
        "documents": lambda: documents(3),
        "chunks": lambda: chunks(small),
        "mixed": lambda: mixed(requests, seed),
        "concurrency": lambda: concurrency(seed),
        "price": lambda: price(rounds, seed),
        "prompts": lambda: prompts(count),
        "throughput": lambda: throughput(rounds, seed),
        "parallel": lambda: parallel(small),
        "runner": lambda: runner(small, seed),
        "guesses": lambda: guesses(count),
        "loaded": lambda: loaded(min(count, 30)),
    }
    for part in chosen:
        with console.status(part):
            found[part] = todo[part]()
        processors[part], models[part] = environment()["hardware"]["processor"], MODEL
        console.print(part, found[part])
        result = {"command": "vllm_engine", "results": found, "seed": seed, **environment()}
        result |= {"processors": processors, "models": models}
        save(result, out)  # after every part, so that an interrupted run keeps the finished ones
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
