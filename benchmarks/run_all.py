"""Run the benchmarks whose results are in docs/results, and write the pages from these.

    make tables
    python -m benchmarks.run_all --list
    python -m benchmarks.run_all --only longeval_unseen,ruler_unseen --into results

Everything takes about a day on two cores. A result that is complete in the folder is not measured
again, so that an interrupted run continues where it stopped. With ``--again``, it is measured anew
and replaced at the end. Timings need a machine that does nothing else. The part of vLLM needs
``make .venv-vllm/.ready``.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks import page_beds
from benchmarks.page import DOCS

ROOT = DOCS.parent
RESULTS = DOCS / "results"
_PLOT = "--plot {figures}/"
_AGAIN = "kvzip+int4/reread,kvzip/reread,kvgrad/reread"
_LONG = (
    "--budgets 0.25,0.1,0.05 --methods exact,heavy_merge,heavy_merge@global+int4/local,"
    "heavy_merge@global+int4/sample,"
)

_FEWER = "--count 20 --budgets 0.25,0.1,0.05"
_ONE_HEAD = "--model longeval-one-head"
_ONE_LAYER = "--model ruler-one-layer"

#: The module and options of every result, by the name of its file.
COMMANDS = {
    "decode_speed": "decode_speed",
    "speed_decode": "speed --preset decode",
    "speed_bits": "speed --preset bits",
    "speed_compress": "speed --preset compress",
    "speed_prefill": "speed --preset prefill",
    "speed_end_to_end": "speed --preset end_to_end",
    "speed_layers": "speed --preset layers",
    "speed_gpu_token": "speed_gpu --part token",
    "speed_gpu_model": "speed_gpu --part model --requests 1",
    "speed_gpu_requests": "speed_gpu --part model --requests 16 --tokens 8192",
    "prefill_peak": "prefill_peak",
    "streaming_memory": "streaming_memory",
    "streaming_accuracy": "streaming_accuracy",
    "compression_time": "compression_time",
    "sessions_documents": "sessions --forms documents",
    "sessions_turns": "sessions --forms turns --methods "
    "exact,heavy_merge,h2o+int4,snapkv+int4,streaming_llm",
    "sessions_list": "sessions --forms list --model lists --count 50 --methods exact,heavy_merge,"
    "heavy_merge+16bit,h2o+int4,snapkv+int4,tova+int4,rkv+int4,triattention+int4,streaming_llm,"
    "merge_reduce",
    "sessions_system": "sessions --forms system --methods exact,heavy_merge,heavy_merge:16:32,"
    "h2o+int4,h2o:16:32+int4,streaming_llm,streaming_llm:16:32",
    "sessions_documents_long": "sessions --forms documents --lines 500 --count 50 --methods "
    "exact,heavy_merge,h2o+int4,snapkv+int4",
    "sessions_turns_long": "sessions --forms turns --lines 500 --count 50 --methods "
    "exact,heavy_merge,h2o+int4,snapkv+int4,rkv+int4,triattention+int4,streaming_llm",
    "sessions_system_long": "sessions --forms system --lines 500 --count 50 --model lists "
    "--methods exact,heavy_merge,heavy_merge:16:32,h2o+int4",
    "compaction": "compaction --count 400",
    "busy": "busy",
    "long_stream": "long_stream",
    "ray_throughput": "ray_throughput",
    "document_files": "document_files --lines 800 --count 2",
    "document_merge": "document_merge --cases ../shared/data/longeval/200_lines.jsonl",
    "growth": f"growth {_PLOT}growth.svg",
    "guarantee": f"guarantee {_PLOT}guarantee.svg",
    "attention_error": f"attention_error {_PLOT}attention_error.svg",
    "attention_error_balancekv": "attention_error --preset balancekv "
    f"{_PLOT}attention_error_balancekv.svg",
    "attention_error_spread": "attention_error --models spread --seeds 3",
    "figure2": f"figure2 {_PLOT}figure2.svg",
    "sketch_budget": f"sketch_budget {_PLOT}sketch_budget.svg",
    "ablation": "ablation",
    "tolerance": "tolerance",
    "tolerance_spread": "tolerance --models spread",
    "kl": "kl --texts 4",
    "kl_few": "kl --models ../shared/data/stories260K --shares 0.0625 --texts 24 --seed 1",
    "longeval_unseen": f"longeval {_FEWER}",
    "longeval_seen": f"longeval --question seen {_FEWER} "
    f"--methods exact,{','.join(page_beds.NAMED)},tova",
    "longeval_reread": f"longeval {_FEWER} --methods {_AGAIN},peer:attention_matching/reread,"
    "peer:attention_matching+int4/reread,heavy_merge@global+int4/reread,"
    "heavy_merge@global+int4/local,heavy_merge@global+int4/sample,heavy_merge@global+int4,"
    "heavy_merge",
    "longeval_reread_measured": f"longeval {_ONE_HEAD} {_FEWER} --methods "
    "heavy_merge@measured+int4/sample,heavy_merge@global+int4/sample",
    "longeval_unseen_300": f"longeval --lines 300 --count 20 {_LONG}{_AGAIN}",
    "longeval_unseen_400": f"longeval --lines 400 --count 50 {_LONG}"
    "heavy_merge@global+int4/reread,kvzip+int4/reread",
    **{
        f"longeval_unseen_{lines}_more": f"longeval --lines {lines} --count 50 --budgets 0.1,0.05 "
        "--methods heavy_merge,heavy_merge@global+int4/sample,heavy_merge@global+int4/reread,"
        "kvzip+int4/reread"
        for lines in (200, 250, 300, 350)
    },
    "reading": "reading --beside {results}/longeval_reread.json",
    "ruler_unseen": "ruler --count 6 --budgets 0.25,0.1,0.05 "
    "--methods exact,heavy_merge,heavy_merge@global+int4/sample,"
    "heavy_merge@global+int4/reread,kvzip+int4/reread",
    "ruler_unseen_more": "ruler --count 24 --budgets 0.1,0.05 --methods exact,heavy_merge",
    "ruler_one_layer_unseen": f"ruler {_ONE_LAYER} --count 12 "
    "--methods exact,heavy_merge@global+int4/sample,heavy_merge,"
    "kvzip/reread,kvgrad/reread,kvzip+int4/reread,snapkv",
    "ruler_one_layer_unseen_more": f"ruler {_ONE_LAYER} --count 6 --budgets 0.5,0.05 "
    "--methods exact,heavy_merge,"
    "heavy_merge@global+int4/sample,kvzip/reread,kvzip+int4/reread,snapkv,kvgrad/reread",
    "ruler_one_layer_seen": f"ruler {_ONE_LAYER} --question seen --count 6 --methods exact,"
    "heavy_merge,heavy_merge@global+int4,snapkv,snapkv@layer,chunkkv,kvzip+int4/reread",
    **{
        f"longeval_one_head_{question}": f"longeval {_ONE_HEAD} --question {question} {_FEWER} "
        f"--methods exact,{','.join(page_beds.NAMED)}"
        for question in page_beds.QUESTIONS
    },
    "model_families": "model_families",
    "structure": "structure",
    "vllm": "vllm_engine",
    "vllm_soak": "vllm_soak",
}
#: Results that need a GPU; a run without one leaves them out.
ON_GPU = ("speed_gpu_token", "speed_gpu_model", "speed_gpu_requests")
#: Benchmarks that write their result and their page in docs themselves, by the name of the result.
WITH_PAGE = {
    "longeval": "longeval_table",
    "inspect": "inspect_page",
    "retrieval": "retrieval_page",
}
#: The writers of the other pages.
PAGES = ("page_figures", "page", "page_documents", "page_papers")


def command(name: str, folder: Path) -> list[str]:
    """The arguments of the Python interpreter that measure a result. Figures are drawn in
    docs/figures, or in another ``folder`` of results."""
    figures = DOCS / "figures" if folder == RESULTS else folder
    module, *options = (
        part.format(figures=figures, results=folder) for part in shlex.split(COMMANDS[name])
    )
    return ["-m", f"benchmarks.{module}", *options, "--out", str(folder / f"{name}.json")]


def finished(path: Path) -> bool:
    """Whether a result is there and complete."""
    if not path.is_file():
        return False
    return bool(json.loads(path.read_text(encoding="utf-8")).get("complete", True))


def main(
    only: Annotated[str, typer.Option(help="Comma-separated names of results.")] = "",
    into: Annotated[
        Path | None,
        typer.Option(help="Folder of the results. The pages are written only without it."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure complete results anew.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Print the commands and stop.")] = False,
) -> None:
    """Example: python -m benchmarks.run_all --only longeval_unseen --into results"""
    names = only.split(",") if only else list(COMMANDS)
    unknown = [name for name in names if name not in COMMANDS]
    if unknown:
        raise typer.BadParameter(f"--only {unknown[0]!r} must be one of {', '.join(COMMANDS)}")
    folder = (into or RESULTS).resolve()
    console = Console(stderr=True)
    if not (show or only or torch.cuda.is_available()):
        names = [name for name in names if name not in ON_GPU]
        console.print(f"left out, since there is no GPU: {', '.join(ON_GPU)}")
    todo = [
        command(name, folder)
        for name in names
        if show or again or not finished(folder / f"{name}.json")
    ]
    if into is None and not only:
        missing = [
            module
            for name, module in WITH_PAGE.items()
            if show or again or not finished(RESULTS / f"{name}.json")
        ]
        todo += [["-m", f"benchmarks.{module}"] for module in (*missing, *PAGES)]
    if show:
        for arguments in todo:
            print(shlex.join(["python", *arguments]))
        return
    folder.mkdir(parents=True, exist_ok=True)
    with Progress(console=console) as progress:
        for arguments in progress.track(todo, description="benchmarks"):
            console.print(shlex.join(["python", *arguments]))
            done = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False)
            if done.returncode:
                raise typer.Exit(done.returncode)


if __name__ == "__main__":
    typer.run(main)
