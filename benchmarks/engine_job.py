"""One vLLM engine in a separate process, started by ``benchmarks.vllm_engine`` and tests/engine.

    python -m benchmarks.engine_job < job.json

The process reads a job from standard input and writes its result as the last line. Environment
variables select the backend (``KVSKETCH_METHOD`` and so on; without them, it is vLLM's own). A job
is:

    {"engine": arguments of vllm.LLM,
     "requests": [{"prompt": text or token ids, "max_tokens": n,
                   "abort": the number of steps after which the request is aborted,
                   "n": number of answers, sampled at a temperature of 0.01 if more than 1,
                   "transfer": its ``kv_transfer_params``,
                   "adapter": the folder of a LoRA adapter}],
     "together": false,     # one request after the other instead of all at once
     "preempt": 10,         # preempt a request every 10 steps
     "largest_file": bytes} # longer files cannot be written, as on a full disk

    python -m benchmarks.engine_job --forks

reads lines of ``{"job": ..., "variables": ..., "said": a file}``. Every job runs in a fork of this
process, which has imported vLLM, and writes what it says to the file. Its ranks, if there are
several, are forks of that one. The answer to each line is a line with the status of that process.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import resource
import sys
import time
import traceback
from importlib import metadata
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class Engine:
    """An engine whose steps are called one by one."""

    def __init__(self, **arguments: Any) -> None:
        from vllm import LLM

        self.preempt = 0  # A request is preempted every so many steps. 0: never.
        self.llm = LLM(**{"enforce_eager": True, **arguments})
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.adapters: dict[Any, Any] = {}  # of LoRA, by their folders
        self.preempted = 0  # how often requests were
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preempted += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted
        self.reused = 0  # prompt tokens that came from the prefix cache
        self.longest = 0  # tokens of the longest request, prompt and answer
        self.steps: list[tuple[float, int, int]] = []  # seconds, requests and tokens of each step

    def concurrency(self) -> float:
        """How many requests of the longest context fit into memory, as the engine logs it."""
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        config = self.engine.vllm_config
        return float(
            get_max_concurrency_for_kv_cache_config(config, self.scheduler.kv_cache_config)
        )

    def page(self) -> dict[str, Any]:
        """The memory unit of the full-attention layers: the bytes of a request's page over all
        layers or, with vLLM's own backend, those of a block of tokens."""
        config = self.scheduler.kv_cache_config
        groups = config.kv_cache_groups
        full = [g for g in groups if getattr(g.kv_cache_spec, "sliding_window", None) is None]
        spec = full[0].kv_cache_spec
        if len(groups) == 1:  # The layers may differ in size.
            block = config.kv_cache_tensors[0].size // config.num_blocks
        else:
            block = spec.page_size_bytes * sum(len(group.layer_names) for group in full)
        return {
            "spec": type(spec).__name__,
            "page_bytes": block * getattr(spec, "blocks", 1),
            "block_size": spec.block_size,
        }

    def answer(self, requests: list[dict[str, Any]], together: bool) -> list[dict[str, Any] | None]:
        """Greedy answers, in the order of the requests. None stands for an aborted request."""
        from vllm.lora.request import LoRARequest

        folders = sorted({request["adapter"] for request in requests if "adapter" in request})
        self.adapters = {path: LoRARequest(path, 1 + i, path) for i, path in enumerate(folders)}
        found: list[dict[str, Any] | None] = []
        groups = [list(enumerate(requests))]
        if not together:
            groups = [[one] for one in enumerate(requests)]
        for group in groups:
            found += self._group([request for _, request in group])
        return found

    def _group(self, requests: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        done: dict[str, dict[str, Any]] = {}
        first: dict[str, float] = {}  # seconds to the first token
        begun = time.perf_counter()
        for number, request in enumerate(requests):
            prompt = request["prompt"]
            given = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
            several = request.get("n", 1)
            sampling = SamplingParams(
                n=several,
                temperature=0.0 if several == 1 else 0.01,  # vLLM refuses n > 1 at temperature 0.
                max_tokens=request["max_tokens"],
                ignore_eos=request.get("ignore_eos", False),
                stop=request.get("stop"),
                extra_args={"kv_transfer_params": request.get("transfer")},
                # Several answers are returned together, a single one token by token.
                output_kind=RequestOutputKind.CUMULATIVE
                if several == 1
                else RequestOutputKind.FINAL_ONLY,
            )
            adapter = self.adapters.get(request.get("adapter"))
            self.engine.add_request(str(number), given, sampling, lora_request=adapter)
        step = 0
        while self.engine.has_unfinished_requests():
            start = time.perf_counter()
            outputs = self.engine.step()
            running = len(self.scheduler.running)
            self.steps.append((time.perf_counter() - start, running, len(outputs)))
            step += 1
            for output in outputs:
                first.setdefault(output.request_id, time.perf_counter() - begun)
                if output.finished:
                    tokens = len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids)
                    self.longest = max(self.longest, tokens)
                    self.reused += output.num_cached_tokens or 0
                    one = output.outputs[0]
                    done[output.request_id] = {
                        "text": one.text,
                        "tokens": list(one.token_ids),
                        "first_seconds": first[output.request_id],
                        "transfer": output.kv_transfer_params,
                    }
                    if len(output.outputs) > 1:
                        done[output.request_id]["all"] = [o.text for o in output.outputs]
            if self.preempt and step % self.preempt == 0 and len(self.scheduler.running) > 1:
                self._preempt()
            gone = [str(i) for i, r in enumerate(requests) if r.get("abort") == step]
            gone = [name for name in gone if name not in done]
            if gone:
                self.engine.abort_request(gone)
        while self.scheduler.has_requests():  # pages that are being saved
            self.engine.step()
        return [done.get(str(number)) for number in range(len(requests))]

    def _preempt(self) -> None:
        """Preempt the request that came last, as the scheduler does when there are no more free
        blocks: it goes back into the queue."""
        request = self.scheduler.running.pop()
        self.scheduler._preempt_request(request, time.monotonic())


def forks() -> None:
    """Run jobs in forks of this process."""
    import vllm
    import vllm.v1.worker.cpu_worker
    from vllm.v1.executor import multiproc_executor

    assert vllm.LLM  # imported lazily
    # On a CPU vLLM starts new processes for ranks, since a fork does not have the threads of OpenMP
    # of its parent. Here there are none yet.
    assert multiproc_executor.get_mp_context
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    # Each engine collects garbage several times when it starts, and need not look at all of this.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        given = json.loads(line)
        child = os.fork()
        if child == 0:
            os.environ.update(given["variables"])
            out = os.open(given["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(out, stream)
            code = 1
            try:
                run(given["job"])
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            for rank in multiprocessing.active_children():
                rank.terminate()
                rank.join()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(job: dict[str, Any]) -> None:
    """Run a job and write its result."""
    if "kv_cache_memory_bytes" not in job["engine"]:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    start = time.perf_counter()
    engine = Engine(**job["engine"])
    begun = time.perf_counter() - start
    free = engine.pool.get_num_free_blocks()
    engine.preempt = job.get("preempt", 0)
    if "largest_file" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"],) * 2)
    start = time.perf_counter()
    answers = engine.answer(job["requests"], job.get("together", True))
    result = {
        "vllm": metadata.version("vllm"),
        "answers": answers,
        **engine.page(),
        "concurrency": engine.concurrency(),
        "seconds": time.perf_counter() - start,
        "start_seconds": begun,
        "steps": engine.steps,
        "most_running": max((running for _, running, _ in engine.steps), default=0),
        "preemptions": engine.preempted,
        "blocks": engine.pool.num_gpu_blocks,
        "free_before": free,
        "free_after": engine.pool.get_num_free_blocks(),
        "reused_tokens": engine.reused,
        "longest": engine.longest,
        "clears_blocks": bool(engine.scheduler.needs_kv_cache_zeroing),
    }
    if os.environ.get("KVSKETCH_STATS_DIR"):
        from kvsketch.vllm.metrics import total

        result["metrics"] = total()
    print(json.dumps(result))


if __name__ == "__main__":
    forks() if "--forks" in sys.argv else run(json.load(sys.stdin))
