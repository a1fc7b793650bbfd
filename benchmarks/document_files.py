"""The size of the file of a compressed document compared with its prediction, and the time of
loading the file compared with that of reading the document.

    python -m benchmarks.document_files --cases ../shared/data/longeval/400_lines.jsonl --json

A LongEval record is read at ``--budget``, saved, and loaded in a new process, which answers the
same questions. ``same_in_a_new_process`` states whether its answers are the same.
``file_over_predicted`` and ``file_over_exact`` are the bytes of the file over the predicted ones
and over those of the exact cache. ``read_over_load_to_first_token`` is the median time from the
start of reading the record to the first token of an answer, over that from the start of loading the
file. The times are those of one machine, so that only their ratio is meaningful.
"""

from __future__ import annotations

import json as json_
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.page import save
from benchmarks.prompts import ONE_HEAD, load
from benchmarks.records import (
    AskedOption,
    CasesOption,
    CountOption,
    JsonOption,
    LinesOption,
    OutOption,
    records,
)
from kvsketch import SketchCache
from kvsketch.documents.answering import answers
from kvsketch.documents.document import Document, encoded, read
from kvsketch.documents.wording import Wording
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.hf.size import predicted_size

_ASK = """
import json, pathlib, sys
from kvsketch.cli.document_options import open_document
from kvsketch.documents.answering import answers
document = open_document(pathlib.Path(sys.argv[1]), None, "cpu")
print(json.dumps(answers(document, json.loads(sys.stdin.read()))))
"""


def main(
    cases: CasesOption = None,
    lines: LinesOption = 400,
    count: CountOption = 3,
    asked: AskedOption = 20,
    budget: Annotated[float, typer.Option(help="Share of the tokens that is kept.")] = 0.25,
    repeats: Annotated[int, typer.Option(help="Timed runs.")] = 5,
    seed: int = 0,
    out: OutOption = None,
    json: JsonOption = False,
) -> None:
    """Example: python -m benchmarks.document_files --lines 400 --json"""
    console = Console(stderr=True)
    model, tokenizer = load(ONE_HEAD)
    rows = []
    for record in records(cases, lines, count, asked, seed):
        ids = encoded(model, tokenizer, record.text, special=True)
        question = encoded(model, tokenizer, "\n" + record.questions[0], special=False)

        def first_token(cache: SketchCache, question: Any = question) -> None:
            with torch.no_grad():
                model(question, past_key_values=cache, use_cache=True, logits_to_keep=1)

        def prefilled(ids: Any = ids) -> SketchCache:
            cache = SketchCache(model.config, budget=budget, seed=seed)
            read(model, tokenizer, ids, cache)
            return cache

        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "record.kvs"
            document = Document(model, tokenizer, prefilled(), Wording(), {"model": ONE_HEAD})
            document.save(path)
            found = answers(document, record.questions)
            run = subprocess.run(
                [sys.executable, "-c", _ASK, path],
                input=json_.dumps(record.questions),
                capture_output=True,
                text=True,
                check=True,
            )
            again = json_.loads(run.stdout.splitlines()[-1])
            times: dict[str, list[float]] = {"read": [], "load": []}
            for _ in range(repeats):
                for kind, times_ in times.items():
                    start = time.perf_counter()
                    cache = prefilled() if kind == "read" else SketchCache.load(path, model)
                    first_token(cache)
                    times_.append(time.perf_counter() - start)
            size = path.stat().st_size
        texts = tokenizer.batch_decode(found, skip_special_tokens=True)
        cache = document.cache
        rows.append(
            {
                "tokens": ids.shape[1],
                "right": record.right(texts),
                "asked": asked,
                "same_in_a_new_process": found == again,
                "file_bytes": size,
                "file_over_predicted": round(size / predicted_size(cache), 4),
                "file_over_exact": round(size / cache.exact_nbytes(), 4),
                "read_over_load_to_first_token": round(
                    median(times["read"]) / median(times["load"]), 1
                ),
            }
        )
        console.print(rows[-1])
    settings = {"cases": cases.name if cases else "generated", "budget": budget, "seed": seed}
    result = {"command": "document_files", "results": rows, **settings, **environment()}
    save(result, out)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
