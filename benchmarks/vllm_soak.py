"""A vLLM engine for half an hour, while documents come and go: is every answer right, and is memory
flat?

    python -m benchmarks.vllm_soak --minutes 30 --json

Requests about compressed documents, requests without one and long ones are sent to one engine
(in-process, with `PageScheduler` and vLLM's prefix cache), eight at a time; some are aborted, and
one is preempted every few steps. Meanwhile files are added to the folder of documents, replaced,
damaged and removed. Every finished answer is compared with those of the same request alone, with
its document loaded and with its prompt read: either may be right, as the file may have gone before
the request came. Prints how many equal neither, the process's memory by minute, and the free pages
before and after. It runs in vLLM's own environment (`make .venv-vllm/.ready`).
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import vllm_engine as engine
from benchmarks.page import save
from kvsketch.evaluation.report.report import dumps, environment

BUDGET, LINES, PIECE, AT_ONCE = 256, 80, 256, 8
_PLAIN, _LONG = 20, 120  # requests without a document; tokens of a long answer
_FILES, _ABORTED = 0.04, 0.0067  # how many files are changed and requests aborted in a step
_PREEMPTED = 9  # a request is preempted every so many steps


class Folder:
    """Files that come and go.

    Args:
        source: whole files, ``0.kvs`` and so on.
        folder: what the engine reads.
    """

    def __init__(self, source: Path, folder: Path, count: int, numbers: random.Random) -> None:
        self._source, self._folder, self._numbers = source, folder, numbers
        self._count = count
        self._never = list(range(count))  # which have never been added
        numbers.shuffle(self._never)
        self._present: list[int] = []
        self.done = dict.fromkeys(("added", "replaced", "damaged", "removed"), 0)

    def all_of_them(self) -> None:
        """Add every file."""
        for path in self._source.iterdir():
            shutil.copy(path, self._folder / path.name)

    def empty(self) -> None:
        """Remove every file."""
        for path in self._folder.iterdir():
            path.unlink()

    def change(self) -> None:
        """Change one file."""
        numbers, present = self._numbers, self._present
        what = numbers.choices(list(self.done), (4, 1, 1, 3 if len(present) > 20 else 1))[0]
        if what == "added" or not present:
            what = "added"
            number = self._never.pop() if self._never else numbers.randrange(self._count)
            self._put(number, lambda data: data)
            self._present = list({*present, number})
        else:
            number = numbers.choice(present)
            if what == "removed":
                (self._folder / f"{number}.kvs").unlink()
                present.remove(number)
            elif what == "damaged":
                cut = numbers.random() < 0.5
                self._put(number, (lambda d: d[: len(d) // 2]) if cut else _flipped)
            else:
                self._put(number, lambda data: data)
        self.done[what] += 1

    def _put(self, number: int, change: Any) -> None:
        """Write a file beside the folder, and move it there, as `kvsketch compress` does."""
        data = change((self._source / f"{number}.kvs").read_bytes())
        made = self._source.parent / "made"
        made.write_bytes(data)
        made.replace(self._folder / f"{number}.kvs")


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def megabytes() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def soak(minutes: float, count: int, seed: int, folder: Path) -> engine.Job:
    """Run an engine, and what was found.

    Args:
        count: of documents.
        folder: an empty one, for the files.
    """
    from benchmarks.engine_job import Engine
    from benchmarks.vllm_documents import CONTEXT, Documents
    from kvsketch.evaluation.runner.loading import resolve_model
    from kvsketch.vllm.checks import CONNECTOR

    numbers = random.Random(seed)
    source, shelf = folder / "source", folder / "shelf"
    source.mkdir()
    shelf.mkdir()
    variables = {"KVSKETCH_BUDGET": str(BUDGET)}
    made = Documents(source, variables, LINES, count)
    files = Folder(source, shelf, count, numbers)
    os.environ |= {**variables, "KVSKETCH_PIECE": str(PIECE), "KVSKETCH_DOCUMENTS": str(shelf)}
    os.environ["KVSKETCH_STATS_DIR"] = str(folder)
    running = Engine(
        model=resolve_model(engine.MODEL),
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=AT_ONCE,
        kv_transfer_config=CONNECTOR,
        **engine.PIECES,
    )
    free = running.pool.get_num_free_blocks()
    requests = [*made.requests, *engine.drawn([100 + 60 * i for i in range(_PLAIN)], 12, seed)]
    requests += [{**one, "max_tokens": _LONG, "ignore_eos": True} for one in requests]
    files.all_of_them()
    loaded = running.answer(requests, together=False)
    files.empty()
    time.sleep(1.5)  # times of files are coarse: the folder counts as changed for a second
    running.llm.reset_prefix_cache()
    read = running.answer(requests, together=False)
    known = [
        {tuple(one["tokens"]) for one in pair if one} for pair in zip(loaded, read, strict=True)
    ]
    differ = sum(len(answers) > 1 for answers in known)
    running.llm.reset_prefix_cache()
    found = _steps(running, requests, known, files, minutes * 60, numbers)
    from kvsketch.vllm.metrics import total

    return {
        "minutes": minutes,
        "documents": count,
        "budget": BUDGET,
        "requests_whose_two_answers_differ": differ,
        **found,
        "files": files.done,
        "metrics": total(),
        "free_before": free,
        "free_after": running.pool.get_num_free_blocks(),
    }


def _steps(
    running: Any,
    requests: list[engine.Job],
    known: list[set[tuple[int, ...]]],
    files: Folder,
    seconds: float,
    numbers: random.Random,
) -> engine.Job:
    """Send requests and change files for so many seconds."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    inside: dict[str, int] = {}
    memory, wrong = [megabytes()], list[int]()
    sent = finished = aborted = step = 0
    begun = time.monotonic()
    while inside or time.monotonic() - begun < seconds:
        while len(inside) < AT_ONCE and time.monotonic() - begun < seconds:
            which = numbers.randrange(len(requests))
            request = requests[which]
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=request["max_tokens"],
                ignore_eos=request.get("ignore_eos", False),
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            name = str(sent)
            running.engine.add_request(name, {"prompt_token_ids": request["prompt"]}, sampling)
            inside[name], sent = which, sent + 1
        for output in running.engine.step():
            if output.finished and output.request_id in inside:
                which = inside.pop(output.request_id)
                finished += 1
                if tuple(output.outputs[0].token_ids) not in known[which]:
                    wrong.append(which)
        step += 1
        if numbers.random() < _FILES:
            files.change()
        if step % _PREEMPTED == 0 and len(running.scheduler.running) > 1:
            running._preempt()
        if inside and numbers.random() < _ABORTED:
            name = numbers.choice(list(inside))
            running.engine.abort_request([name])
            del inside[name]
            aborted += 1
        if (time.monotonic() - begun) // 60 >= len(memory):
            memory.append(megabytes())
    while running.scheduler.has_requests():
        running.engine.step()
    memory.append(megabytes())
    half = memory[len(memory) // 2 :]
    return {
        "sent": sent,
        "finished": finished,
        "aborted": aborted,
        "preemptions": running.preempted,
        "steps": step,
        "equal": finished - len(wrong),
        "wrong": wrong,
        "megabytes_by_minute": memory,
        "growth_in_the_second_half": half[-1] / half[0] - 1,
    }


def main(
    minutes: Annotated[float, typer.Option(help="How long requests are sent.")] = 30.0,
    documents: Annotated[int, typer.Option(help="Number of documents.")] = 200,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Example: python -m benchmarks.vllm_soak --minutes 1 --documents 20 --json"""
    if importlib.util.find_spec("vllm") is None:  # in vLLM's environment
        command = [str(engine.PYTHON), "-m", "benchmarks.vllm_soak", *sys.argv[1:]]
        raise typer.Exit(subprocess.run(command, check=False).returncode)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as folder:
        found = soak(minutes, documents, seed, Path(folder))
    result = {"command": "vllm_soak", "model": engine.MODEL, "results": found, "seed": seed}
    result |= environment()
    if out is not None:
        save(result, out)
    print(
        f"{found['equal']} of {found['finished']} answers are those of the request alone; "
        f"{found['aborted']} aborted, {found['preemptions']} preemptions; free pages "
        f"{found['free_before']} and {found['free_after']}; memory "
        f"{found['growth_in_the_second_half']:+.1%} in the second half",
        file=sys.stderr,
    )
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
