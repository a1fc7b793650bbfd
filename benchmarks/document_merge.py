"""The loss of accuracy because the tokens of merged documents have not attended to each other.

    python -m benchmarks.document_merge --cases ../shared/data/longeval/200_lines.jsonl --json

A LongEval record is cut in two between lines. ``together``: it is read as one document.
``appended``: the second half is read after the compressed first half (``kvsketch append``).
``merged``: both halves are read separately and merged (``kvsketch merge``). All three caches have
about the same number of bytes and get the same questions, half of them about each half.
``divergence`` is the KL divergence from the exact cache of the whole record, in nats, the mean over
questions. It is that of the number's first token, after the right words of the answer.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache

from benchmarks.page import save
from benchmarks.prompts import ONE_HEAD, load
from benchmarks.records import (
    AskedOption,
    CasesOption,
    CountOption,
    JsonOption,
    LinesOption,
    OutOption,
    Record,
    records,
)
from kvsketch import SketchCache
from kvsketch.documents.answering import answers
from kvsketch.documents.document import Document, encoded, read
from kvsketch.documents.wording import Wording
from kvsketch.evaluation.report.report import dumps, environment
from kvsketch.hf.joining import join

WAYS = ("together", "appended", "merged")


def caches(model: Any, tokenizer: Any, record: Record, settings: Any) -> dict[str, SketchCache]:
    """A cache of the record for each of ``WAYS``."""
    first, second = record.halves()

    def fresh(text: str, special: bool = True) -> SketchCache:
        cache = SketchCache(model.config, **settings)
        read(model, tokenizer, encoded(model, tokenizer, text, special), cache)
        return cache

    appended = Document(model, tokenizer, fresh(first), Wording(), {})
    appended.append(second)
    merged = join(fresh(first), fresh(second), model)
    return {"together": fresh(record.text), "appended": appended.cache, "merged": merged}


@torch.no_grad()
def predictions(model: Any, tokenizer: Any, cache: Any, leads: list[str]) -> Tensor:
    """Log-probabilities of the token that follows each text, ``[texts, vocabulary]``."""
    found = []
    for lead in leads:
        twin = cache.fork() if isinstance(cache, SketchCache) else cache
        ids = encoded(model, tokenizer, "\n" + lead, special=False)
        logits = model(ids, past_key_values=twin, use_cache=True, logits_to_keep=1).logits
        found.append(logits[0, -1].double().log_softmax(-1))
        if twin is cache:
            cache.crop(-ids.shape[1])
    return torch.stack(found)


def main(
    cases: CasesOption = None,
    lines: LinesOption = 200,
    count: CountOption = 5,
    asked: AskedOption = 20,
    budgets: Annotated[str, typer.Option(help="Shares of the tokens kept.")] = "1.0,0.25,0.1",
    method: Annotated[str, typer.Option(help="A compression method.")] = "heavy_merge",
    seed: int = 0,
    out: OutOption = None,
    json: JsonOption = False,
) -> None:
    """Example: python -m benchmarks.document_merge --lines 200 --json"""
    console = Console(stderr=True)
    model, tokenizer = load(ONE_HEAD)
    chosen = records(cases, lines, count, asked, seed)
    results = []
    truths = []
    for record in chosen:
        exact = DynamicCache(config=model.config)
        with torch.no_grad():
            ids = encoded(model, tokenizer, record.text, special=True)
            model(ids, past_key_values=exact, use_cache=True, logits_to_keep=1)
        truths.append(predictions(model, tokenizer, exact, record.leads))
    for budget in map(float, budgets.split(",")):
        settings = {"method": method, "budget": budget, "seed": seed}
        settings |= {"bits": 16} if budget == 1 else {}
        totals = {way: {"right": 0, "divergence": 0.0, "kv_bytes": 0} for way in WAYS}
        for record, truth in zip(chosen, truths, strict=True):
            for way, cache in caches(model, tokenizer, record, settings).items():
                document = Document(model, tokenizer, cache, Wording(), {})
                found = answers(document, record.questions)
                texts = tokenizer.batch_decode(found, skip_special_tokens=True)
                ours = predictions(model, tokenizer, cache, record.leads)
                kl = (truth.exp() * (truth - ours)).sum(-1).mean()
                totals[way]["right"] += record.right(texts)
                totals[way]["divergence"] += float(kl) / len(chosen)
                totals[way]["kv_bytes"] += cache.nbytes()
        for way, row in totals.items():
            share = row["right"] / (len(chosen) * asked)
            results.append({"budget": budget, "way": way, "accuracy": share, **row})
            console.print(results[-1])
    shown = {"cases": cases.name if cases else "generated", "records": len(chosen), "asked": asked}
    shown |= {"method": method, "seed": seed}
    result = {"command": "document_merge", "results": results, **shown, **environment()}
    save(result, out)
    if json:
        print(dumps(result))


if __name__ == "__main__":
    typer.run(main)
