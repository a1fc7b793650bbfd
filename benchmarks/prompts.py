"""Prompts and texts that the error benchmarks share.

Every row states in ``queries`` which queries a method has seen before compression:

- agnostic: none that resemble those that are scored. LongEval: the question comes after
  compression. Other texts: the ``GAP`` tokens before those that are scored come after compression.
- aware: the queries right before those that are scored. LongEval: the question was read before
  compression. Other texts: the tokens that are scored follow the compression directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from kvsketch.evaluation.runner.loading import PACKAGED, load_model, load_tokenizer, resolve_model
from kvsketch.evaluation.runner.longeval_cases import generate_cases

PROTOCOLS = ("agnostic", "aware")
#: "agnostic": tokens between compression and what is scored, where a text has no question
GAP = 64
#: "The <REGISTER_CONTENT> in line aloof-infarction is <45834>" and one to spare
ANSWER_TOKENS = 18
_LINES = 200
_MARK = "\nNow the record is over."
STORIES = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "stories260K"


def default_models() -> list[str]:
    """The packaged model, and stories260K where it is beside the checkout."""
    return [PACKAGED, *([str(STORIES)] if STORIES.is_dir() else [])]


def load(name: str) -> tuple[Any, Any]:
    """Model (float32, CPU) and tokenizer of a folder, a hub id, or "packaged"."""
    folder = resolve_model(name)
    return load_model(folder, "cpu", "float32"), load_tokenizer(folder)


def sampled(model: Any, count: int, tokens: int, seed: int) -> Tensor:
    """Texts of the model itself, ``[count, tokens]``, sampled at temperature 1 from its first
    token: what it knows best."""
    torch.manual_seed(seed)
    start = torch.full((count, 1), int(model.config.bos_token_id or 1))
    return model.generate(
        start,
        attention_mask=torch.ones_like(start),
        max_new_tokens=tokens - 1,
        min_new_tokens=tokens - 1,
        do_sample=True,
        top_k=0,
    )


def line_prompts(tokenizer: Any, count: int, lines: int, seed: int) -> list[Tensor]:
    """LongEval prompts of our own generator, ``[1, tokens]`` each."""
    cases = generate_cases(lines, count, seed)
    return [tokenizer(case["prompt"], return_tensors="pt").input_ids for case in cases]


def from_files(tokenizer: Any, files: list[Path], limit: int) -> list[Tensor]:
    """The beginning of each text file, at most ``limit`` tokens."""
    texts = [file.read_text(encoding="utf-8") for file in files]
    return [tokenizer(text, return_tensors="pt").input_ids[:, :limit] for text in texts]


def protocol_of(source: str) -> str:
    """What holding back the end of ``prompts_for``'s prompts amounts to."""
    return "agnostic" if source.startswith("longeval") else "aware"


def prompts_for(
    name: str, model: Any, tokenizer: Any, count: int, seed: int, files: list[Path]
) -> tuple[str, list[Tensor]]:
    """What a model is asked about, and what that is called: the user's files, LongEval lines for
    the packaged model, else text sampled from the model."""
    limit = int(model.config.max_position_embeddings)
    if files:
        return "files", from_files(tokenizer, files, limit)
    if name == PACKAGED:
        return f"longeval-{_LINES}", line_prompts(tokenizer, count, _LINES, seed)
    tokens = min(limit, 2048)
    return "sampled", list(sampled(model, count, tokens, seed).split(1))


@dataclass(frozen=True)
class Text:
    """Token ids ``[1, n]``; the cache is compressed before token ``cut``, the others are fed one by
    one, and what they are followed by is scored from token ``asked`` on."""

    ids: Tensor
    cut: int
    asked: int


@dataclass(frozen=True)
class Asked:
    """A question about a record.

    Attributes:
        ids: of both, ``[1, tokens]``.
        record: how many tokens belong to the record.
        score: of an answer, in [0, 1].
        new_tokens: of the longest answer.
    """

    ids: Tensor
    record: int
    score: Callable[[str], float]
    new_tokens: int


def question_apart(tokenizer: Any, prompt: str) -> tuple[Tensor, int]:
    """Token ids of a LongEval prompt, and how many of them belong to the record."""
    cut = prompt.rfind(_MARK)
    record = tokenizer(prompt[:cut], return_tensors="pt").input_ids
    rest = tokenizer(prompt[cut:], return_tensors="pt", add_special_tokens=False).input_ids
    return torch.cat([record, rest], dim=1), record.shape[1]


def answered(
    model: Any, tokenizer: Any, count: int, lines: int, seed: int, queries: str = "agnostic"
) -> list[Text]:
    """LongEval prompts of our own generator with the exact cache's own greedy answers, which are
    what is scored."""
    texts = []
    for case in generate_cases(lines, count, seed):
        ids, record = question_apart(tokenizer, case["prompt"])
        asked = ids.shape[1]
        mask = torch.ones_like(ids)
        ids = model.generate(
            ids, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, do_sample=False
        )
        if int(ids[0, -1]) == model.config.eos_token_id:  # nothing follows it
            ids = ids[:, :-1]
        texts.append(Text(ids, record if queries == "agnostic" else asked, asked))
    return texts


def texts_for(
    name: str,
    model: Any,
    tokenizer: Any,
    count: int,
    seed: int,
    files: list[Path],
    follow: int,
    queries: str,
) -> tuple[str, list[Text]]:
    """As ``prompts_for``, with what is scored: the answers to LongEval prompts, the last ``follow``
    tokens of other texts."""
    if name == PACKAGED and not files:
        texts = answered(model, tokenizer, count, _LINES, seed, queries)
        return f"longeval-{_LINES}", texts
    source, found = prompts_for(name, model, tokenizer, count, seed, files)
    before = follow + (GAP if queries == "agnostic" else 0)
    return source, [Text(t, t.shape[1] - before, t.shape[1] - follow) for t in found]


@torch.no_grad()
def prefill(model: Any, ids: Tensor, cache: Cache) -> None:
    """Read a prompt in one go; a ``SketchCache`` compresses after it."""
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


@torch.no_grad()
def feed(model: Any, ids: Tensor, cache: Cache) -> Tensor:
    """Read tokens one by one, which no one-shot cache compresses after: log-probabilities of what
    follows each, ``[tokens, vocabulary]``."""
    steps = [
        model(token, past_key_values=cache, use_cache=True).logits[0, -1].log_softmax(-1)
        for token in ids.split(1, dim=1)
    ]
    return torch.stack(steps)
