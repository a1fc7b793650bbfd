"""Prompts and texts that several benchmarks share.

Every row states in ``queries`` which queries a method has seen before compression:

- agnostic: queries unseen. None of those that the method has seen resemble the scored ones. In
  LongEval, the question comes after compression. In other texts, the ``GAP`` tokens before the
  scored ones come after compression.
- aware: the queries right before the scored ones were seen. In LongEval, the question was read
  before compression. In other texts, the scored tokens directly follow the compression.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from kvsketch.evaluation.runner.loading import load_model, load_tokenizer, resolve_model
from kvsketch.evaluation.runner.longeval_cases import generate_cases
from kvsketch.models import PACKAGED_MODELS

#: The model of the benchmarks that measure time, memory or errors rather than answers.
ONE_HEAD = "longeval-one-head"
PROTOCOLS = ("agnostic", "aware")
#: The tokens between compression and the scored ones with "agnostic", in texts without a question.
GAP = 64
#: The tokens of "The <REGISTER_CONTENT> in line aloof-infarction is <45834>", and one more.
ANSWER_TOKENS = 18
_LINES = 200
_MARK = "\nNow the record is over."
STORIES = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "stories260K"


def default_models() -> list[str]:
    """``ONE_HEAD``, and stories260K if ../shared/data has it."""
    return [ONE_HEAD, *([str(STORIES)] if STORIES.is_dir() else [])]


def load(name: str) -> tuple[Any, Any]:
    """The model (float32, CPU) and the tokenizer of a folder, a hub id, or a packaged model."""
    folder = resolve_model(name)
    return load_model(folder, "cpu", "float32"), load_tokenizer(folder)


def sampled(model: Any, count: int, tokens: int, seed: int) -> Tensor:
    """Texts sampled from the model, ``[count, tokens]``, at temperature 1 from the bos token. The
    model predicts its own samples best."""
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
    """The first tokens of each text file, at most ``limit``."""
    texts = [file.read_text(encoding="utf-8") for file in files]
    return [tokenizer(text, return_tensors="pt").input_ids[:, :limit] for text in texts]


def protocol_of(source: str) -> str:
    """The protocol that results from holding back the end of the prompts of ``prompts_for``."""
    return "agnostic" if source.startswith("longeval") else "aware"


def prompts_for(
    name: str, model: Any, tokenizer: Any, count: int, seed: int, files: list[Path]
) -> tuple[str, list[Tensor]]:
    """The name of the source of a model's prompts, and the prompts: the user's files, or LongEval
    prompts for a packaged model, or else texts sampled from the model."""
    limit = int(model.config.max_position_embeddings)
    if files:
        return "files", from_files(tokenizer, files, limit)
    if name in PACKAGED_MODELS:
        return f"longeval-{_LINES}", line_prompts(tokenizer, count, _LINES, seed)
    tokens = min(limit, 2048)
    return "sampled", list(sampled(model, count, tokens, seed).split(1))


@dataclass(frozen=True)
class Text:
    """Token ids ``[1, n]``. The cache is compressed before token ``cut``, and the tokens from there
    on are fed one by one. The predictions of the cache are scored from token ``asked`` on."""

    ids: Tensor
    cut: int
    asked: int


@dataclass(frozen=True)
class Asked:
    """A question about a record.

    Attributes:
        ids: the token ids of the record, the question, and what is ``begun``, ``[1, tokens]``.
        record: the number of tokens of the record.
        score: gives the score of an answer, in [0, 1].
        new_tokens: the number of tokens of the longest answer.
        begun: the number of tokens of the answer that are given.
    """

    ids: Tensor
    record: int
    score: Callable[[str], float]
    new_tokens: int
    begun: int = 0


def question_apart(tokenizer: Any, prompt: str) -> tuple[Tensor, int]:
    """The token ids of a LongEval prompt, and the number of those that belong to the record."""
    cut = prompt.rfind(_MARK)
    record = tokenizer(prompt[:cut], return_tensors="pt").input_ids
    rest = tokenizer(prompt[cut:], return_tensors="pt", add_special_tokens=False).input_ids
    return torch.cat([record, rest], dim=1), record.shape[1]


def answered(
    model: Any, tokenizer: Any, count: int, lines: int, seed: int, queries: str = "agnostic"
) -> list[Text]:
    """LongEval prompts of our own generator, each with the greedy answer of the exact cache, which
    is scored."""
    texts = []
    for case in generate_cases(lines, count, seed):
        ids, record = question_apart(tokenizer, case["prompt"])
        asked = ids.shape[1]
        mask = torch.ones_like(ids)
        ids = model.generate(
            ids, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, do_sample=False
        )
        if int(ids[0, -1]) == model.config.eos_token_id:  # No token follows eos.
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
    """The prompts of ``prompts_for`` as texts of which a part is scored: the answers to LongEval
    prompts, and the last ``follow`` tokens of other texts."""
    if name in PACKAGED_MODELS and not files:
        texts = answered(model, tokenizer, count, _LINES, seed, queries)
        return f"longeval-{_LINES}", texts
    source, found = prompts_for(name, model, tokenizer, count, seed, files)
    before = follow + (GAP if queries == "agnostic" else 0)
    return source, [Text(t, t.shape[1] - before, t.shape[1] - follow) for t in found]


@torch.no_grad()
def prefill(model: Any, ids: Tensor, cache: Cache) -> None:
    """Read a prompt at once. A ``SketchCache`` compresses after it."""
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


@torch.no_grad()
def feed(model: Any, ids: Tensor, cache: Cache) -> Tensor:
    """Read tokens one by one, after which a one-shot cache does not compress again. Returns the
    log-probabilities of the token after each, ``[tokens, vocabulary]``."""
    steps = [
        model(token, past_key_values=cache, use_cache=True).logits[0, -1].log_softmax(-1)
        for token in ids.split(1, dim=1)
    ]
    return torch.stack(steps)
