"""The part ``loaded`` of ``benchmarks.vllm_engine``: documents that were compressed by
transformers after they were read exactly and again, and that vLLM loads.

    python -m benchmarks.vllm_engine --parts loaded --count 30 --json

LongEval cases of 200 lines, of which the document is all but the question: right answers with
``spread`` and 512 slots per KV head in 16, 8 and 4 bits, compared with the same pages compressed
by vLLM while it reads, and with vLLM's own cache. Loaded documents are asked about through ``vllm
serve`` and the openai client. Then the time to the first token of a prompt of
about 6,000 tokens, over that of vLLM's own cache: of a document that is loaded for the first time,
and later.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import torch

from benchmarks import vllm_engine as engine
from benchmarks.longeval import cases
from kvsketch.documents import document as documents
from kvsketch.documents.wording import Wording
from kvsketch.evaluation.runner.loading import load_model, load_tokenizer, resolve_model
from kvsketch.files.tokens import told as mark
from kvsketch.vllm.checks import CONNECTOR
from kvsketch.vllm.offline import cache_for, engine_of

CONTEXT = 8192
#: where a question begins
MARK = "\nNow the record is over."
_LONG, _REPEATS = 750, 5  # lines of about 6,000 tokens; how often it is asked about


class Documents:
    """LongEval documents in a folder, compressed for an engine.

    Args:
        folder: of the files.
        variables: of the engine.
        lines, count: of the cases.
        share: the part of a document's tokens that its file holds; the rest is read.
        model: name or folder.

    Attributes:
        rows: the cases.
        ids: the tokens of the documents.
        requests: a question about each.
    """

    def __init__(
        self,
        folder: Path,
        variables: dict[str, str],
        lines: int,
        count: int,
        share: float = 1.0,
        model: str = engine.MODEL,
    ) -> None:
        self.folder, self.variables = folder, variables
        path = resolve_model(model)
        self.model, tokenizer = load_model(path, "cpu", "float32"), load_tokenizer(path)
        self._tokenizer = tokenizer
        said = {name.removeprefix("KVSKETCH_").lower(): v for name, v in variables.items()}
        given: dict[str, Any] = {k: int(v) if v.isdecimal() else v for k, v in said.items()}
        self._sizes = engine_of(json.dumps({**given, "max_model_len": CONTEXT}))
        self.source, self.rows = cases(lines, count, 0)
        self.ids, self.requests = [], []
        for number, row in enumerate(self.rows):
            cut = row["prompt"].rfind(MARK)
            ids = tokenizer(row["prompt"][:cut])["input_ids"]
            ids, rest = ids[: int(share * len(ids))], ids[int(share * len(ids)) :]
            rest += tokenizer(row["prompt"][cut:], add_special_tokens=False)["input_ids"]
            self.put(number, ids)
            self.ids.append(ids)
            self.requests.append({"prompt": ids + rest, "max_tokens": 12})

    def put(self, number: int, ids: list[int]) -> None:
        """Compress a document into a file of this number, after a second reading: it is compressed
        once, however many requests load it."""
        cache = cache_for(*self._sizes, self.model.config, len(ids))
        documents.read(self.model, self._tokenizer, torch.tensor([ids]), cache, "reread")
        about = {"ids": mark(ids)}
        one = documents.Document(self.model, self._tokenizer, cache, Wording(), about)
        one.save(self.folder / f"{number}.kvs")

    def load(self, requests: list[engine.Job] | None = None, **more: Any) -> engine.Job:
        """The result of an engine that loads them."""
        asked = self.requests if requests is None else requests
        return load(self.folder, self.variables, asked, **more)

    def served(self) -> list[str]:
        """The answers of ``vllm serve`` to the openai client, with the documents.

        Raises:
            RuntimeError: a request did not start behind its document.
        """
        given = {"KVSKETCH_DOCUMENTS": str(self.folder), **self.variables}
        flags = ["--kv-transfer-config", json.dumps(CONNECTOR), "--max-num-seqs", "8"]
        with engine.served(given, self.folder / "log", *flags) as address:
            texts = engine.told(address, [one["prompt"] for one in self.requests])
            numbers = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
        if f"kvsketch:documents_total {float(len(self.rows))}" not in numbers:
            raise RuntimeError(numbers)
        return texts


def load(
    folder: Path, variables: dict[str, str], requests: list[engine.Job], **more: Any
) -> engine.Job:
    """The result of an engine that loads documents."""
    given = {"KVSKETCH_DOCUMENTS": str(folder), "VLLM_LOGGING_LEVEL": "WARNING", **variables}
    more = {"max_num_seqs": 8, "kv_transfer_config": CONNECTOR, **more}
    return engine.run(requests, given, **more)


def loaded(count: int) -> engine.Job:
    """The part loaded."""
    found: engine.Job = {"cases": count, "budget": 512, "right": {}}

    def texts(result: engine.Job) -> list[str]:
        return [one["text"] for one in result["answers"]]

    for bits in ("16", "8", "4"):
        variables = {"KVSKETCH_BUDGET": "512", "KVSKETCH_BITS": bits}
        with tempfile.TemporaryDirectory() as folder:
            made = Documents(Path(folder), variables, 200, count)
            told = made.served()
            streamed = texts(engine.run(made.requests, variables, max_num_seqs=8))
            found["right"][bits] = {
                "loaded": engine.right(made.rows, told),
                "read": engine.right(made.rows, streamed),
            }
            found["right"][bits]["file_bytes"] = (Path(folder) / "0.kvs").stat().st_size
    found["source"] = made.source
    stock = engine.run(made.requests, {}, max_num_seqs=8)
    found["right"]["stock"] = engine.right(made.rows, texts(stock))
    found["first_token"] = _first_token()
    return found


def _first_token() -> engine.Job:
    """Seconds to the first token of a long prompt."""
    variables = {"KVSKETCH_BUDGET": "1024", "KVSKETCH_BITS": "8"}
    with tempfile.TemporaryDirectory() as folder:
        made = Documents(Path(folder), variables, _LONG, 2)
        other, one = made.requests  # the first warms up
        asked = [other] + [one] * _REPEATS
        given = {"together": False, "enable_prefix_caching": False, "max_num_seqs": 8}
        results = {
            "stock": engine.run(asked, {}, **given),
            "read": engine.run(asked, variables, **given),
            "loaded": made.load(asked, **given),
        }
    times = {n: [a["first_seconds"] for a in r["answers"][1:]] for n, r in results.items()}
    stock = statistics.median(times["stock"])
    return {
        "tokens": len(one["prompt"]),
        "stock_seconds": stock,
        "read_over_stock": statistics.median(times["read"]) / stock,
        "loaded_first_over_stock": times["loaded"][0] / stock,
        "loaded_later_over_stock": statistics.median(times["loaded"][1:]) / stock,
        "seconds": times,
    }
