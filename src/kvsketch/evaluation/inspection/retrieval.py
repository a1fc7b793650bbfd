"""Which heads of a model read the answer, and how many of them must stay whole.

An allocation that finds the few heads that retrieve looks the better the fewer they are. Published
models have dozens of them (Wu et al. 2024, arXiv:2404.15574), and a quarter to a half of their KV
heads must keep all tokens (DuoAttention, arXiv:2410.10819). What is measured here says how far a
model is like that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from kvsketch.errors import InputError, UnsupportedError
from kvsketch.estimator import attention_scores
from kvsketch.evaluation.inspection.evidence import AskedCase, ask
from kvsketch.evaluation.inspection.inspection import choose_layers
from kvsketch.evaluation.inspection.measures import rounded
from kvsketch.evaluation.runner.encoding import Encoder, max_positions
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.tasks.base import Task, mean
from kvsketch.hf.interface import Kernel, watched
from kvsketch.hf.models import kv_heads_of
from kvsketch.hf.passing import passed_to_generate
from kvsketch.observed import causal
from kvsketch.slots import Slots

#: tokens that a head that does not stay whole keeps
SINK, RECENT = 16, 64
#: the share of the exact accuracy that must be left, and the least exact accuracy to measure with
LEFT, LEAST = 0.9, 0.5
#: the share of a token's attention from which on it reads
READS = 0.3
_CHUNK = 512  # queries at once, where heads differ in what they may see

Head = tuple[int, int]  # layer, KV head


def measure_retrieval(
    model: Any,
    tokenizer: Any,
    task: Task,
    *,
    sink: int = SINK,
    recent: int = RECENT,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure with the exact cache which KV heads read the answers of a task.

    The evidence of a case are the lines or sentences of its context that contain an answer. Only
    layers with full attention are measured.

    Args:
        model: a transformers causal language model.
        tokenizer: its tokenizer, one that knows where its tokens begin.
        task: whose answers stand in their contexts: LongEval, RULER's needles, ...
        sink, recent: the first and last tokens that a head keeps that does not stay whole.
        advance: called ``steps(...)`` times at most, to report progress.

    Returns:
        "cases", "accuracy" (exact), "sink", "recent"; "heads": for each KV head, "question" and
        "answer" (the largest share of its attention that a token of the question, or of the answer,
        puts on the evidence; the mean over cases), "removed" (accuracy with its output set to 0)
        and "restricted" (by how many nats an answer's token gets less likely while the head sees
        only first and recent tokens); "question_reads": the share of cases in which a token of the
        question puts at least ``READS`` on the evidence in some head; "layers_that_read": those in
        which some head puts as much, in the mean over cases; "whole": the least number of "heads"
        found that must stay whole for ``LEFT`` of the accuracy, its "share" of all, and "curve",
        pairs of a number of whole heads and the accuracy. Heads are left out in the order of what
        they read, and in the order of "restricted"; the better of both counts, so that the least
        number may be smaller still.

    Raises:
        InputError: a context without its answers, a model that answers less than ``LEAST`` right,
            or with a single KV head.
        UnsupportedError: its attention cannot be watched, or the tokenizer does not tell where
            tokens begin.
    """
    layers = {layer: kv_heads_of(model.config, layer) for layer in choose_layers(model.config)}
    heads = [(layer, head) for layer, count in layers.items() for head in range(count)]
    if len(heads) < 2:
        raise InputError("model has a single KV head: there are no others to compare it with")
    kernel = model.config.get_text_config(decoder=True)._attn_implementation
    if kernel not in ("sdpa", "eager"):
        raise UnsupportedError(
            f"heads cannot be restricted in attention of the kind {kernel!r}: load the model with "
            "attn_implementation='sdpa'"
        )
    encoder = Encoder(tokenizer, model.config, Settings())
    limit = max_positions(model.config) or sys.maxsize
    asked = [ask(case, task, encoder, limit, model.device) for case in task.cases()]
    trial = _Trial(model, tokenizer, task, asked, _Heads(layers, sink, recent), advance)
    exact = trial.accuracy()
    if exact < LEAST:
        raise InputError(
            f"the model answers {exact:.0%} of {len(asked)} cases of {asked[0].case.task} right "
            f"with the exact cache: at least {LEAST:.0%} are needed to tell which heads read"
        )
    read = trial.attention()
    loss = trial.loss()
    rows = []
    for layer, head in heads:
        shares = torch.stack([found[layer][:, head] for found in read]).mean(0)
        with trial.heads.removing((layer, head)):
            removed = trial.accuracy()
        with trial.heads.restricting([(layer, head)]):
            more = trial.loss() - loss
        row = {"question": shares[0], "answer": shares[1], "removed": removed, "restricted": more}
        rows.append({"layer": layer, "head": head, **{k: rounded(v) for k, v in row.items()}})
    reading = [{layer: max(found[layer][0].tolist()) for layer in layers} for found in read]
    return {
        "cases": len(asked),
        "tokens": round(mean([one.ids.shape[1] for one in asked])),
        "accuracy": rounded(exact),
        "sink": sink,
        "recent": recent,
        "heads": rows,
        "question_reads": rounded(mean([float(max(r.values()) >= READS) for r in reading])),
        "layers_that_read": [
            layer
            for layer in layers
            if any(
                max(row["question"], row["answer"]) >= READS
                for row in rows
                if row["layer"] == layer
            )
        ],
        "whole": _least_whole(trial, heads, rows, exact),
    }


def steps(cases: int, heads: int) -> int:
    """How often ``measure_retrieval`` calls ``advance`` at most."""
    return cases * (3 + 2 * heads + 2 * (heads.bit_length() + 1))


class _Heads:
    """What the heads of a model may do, as a function around its attention (``watched``).

    Args:
        layers: number of KV heads by layer.
        sink, recent: tokens that a restricted head sees.
    """

    def __init__(self, layers: Mapping[int, int], sink: int, recent: int) -> None:
        self.layers = layers
        self.sink, self.recent = sink, recent
        self.removed: Head | None = None
        self.restricted: dict[int, list[int]] = {}
        self.look: Callable[[int, Tensor, Tensor, Mapping[str, Any]], None] | None = None

    @contextmanager
    def removing(self, head: Head) -> Iterator[None]:
        """The output of a KV head (of all its query heads) is 0."""
        self.removed = head
        try:
            yield
        finally:
            self.removed = None

    @contextmanager
    def restricting(self, heads: Sequence[Head]) -> Iterator[None]:
        """KV heads see only the first and the recent tokens."""
        for layer, head in heads:
            self.restricted.setdefault(layer, []).append(head)
        try:
            yield
        finally:
            self.restricted = {}

    def __call__(
        self,
        kernel: Kernel,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layer = int(getattr(module, "layer_idx", -1))
        if self.look is not None and layer in self.layers:
            self.look(layer, query, key, kwargs)
        if layer not in self.restricted:
            out, weights = kernel(module, query, key, value, mask, *args, **kwargs)
            if self.removed is not None and self.removed[0] == layer:
                parts = out.view(*out.shape[:2], self.layers[layer], -1, out.shape[3]).clone()
                parts[:, :, self.removed[1]] = 0
                out = parts.flatten(2, 3)
            return out, weights
        count, group = key.shape[2], query.shape[1] // self.layers[layer]
        alone = torch.zeros(query.shape[1], dtype=torch.bool)
        for head in self.restricted[layer]:
            alone[head * group : (head + 1) * group] = True
        done = count - query.shape[2]
        outs = []
        for start in range(0, query.shape[2], _CHUNK):
            part = query[:, :, start : start + _CHUNK]
            end = done + start + part.shape[2]
            own = torch.arange(end - part.shape[2], end)[:, None]
            place = torch.arange(end)
            seen = (place <= own).expand(query.shape[1], -1, -1)
            near = (place < self.sink) | (place > own - self.recent)
            seen = torch.where(alone[:, None, None], seen & near, seen).to(query.device)
            hidden = torch.zeros_like(seen, dtype=query.dtype).masked_fill(
                ~seen, torch.finfo(query.dtype).min
            )
            given = (part, key[:, :, :end], value[:, :, :end], hidden[None])
            outs.append(kernel(module, *given, *args, **kwargs)[0])
        return torch.cat(outs, 1), None


@dataclass
class _Trial:
    """The model on all cases, with what its heads may do at the time. ``answers``: token ids of the
    exact cache's answers."""

    model: Any
    tokenizer: Any
    task: Task
    asked: Sequence[AskedCase]
    heads: _Heads
    advance: Callable[[], None]
    answers: Sequence[Tensor] = ()

    def accuracy(self) -> float:
        """Mean score of the answers. The first call is the exact cache's."""
        scores, answers = [], []
        for one in self.asked:
            with torch.inference_mode(), watched(self.model, self.heads):
                output = self.model.generate(
                    one.ids,
                    attention_mask=torch.ones_like(one.ids),
                    **passed_to_generate(DynamicCache(config=self.model.config)),
                    max_new_tokens=one.case.max_new_tokens,
                    do_sample=False,
                )
            answers.append(output[:, one.ids.shape[1] :])
            text = self.tokenizer.decode(answers[-1][0], skip_special_tokens=True)
            scores.append(self.task.score(one.case, text))
            self.advance()
        self.answers = self.answers or answers
        return mean(scores)

    def loss(self) -> float:
        """Mean -log p of the tokens of the exact cache's answers."""
        found = []
        for one, answer in zip(self.asked, self.answers, strict=True):
            logits = self._read(one, answer).logits[0, :-1].float()
            found.append(float(F.cross_entropy(logits, answer[0])))
            self.advance()
        return mean(found)

    def attention(self) -> list[dict[int, Tensor]]:
        """For each case and layer, ``[2, num_key_value_heads]``: the largest share of attention
        that a token of the question, and of the answer, puts on the evidence in a head."""
        found = []
        for one, answer in zip(self.asked, self.answers, strict=True):
            shares: dict[int, Tensor] = {}
            self.heads.look = functools.partial(_look, one, shares)
            try:
                self._read(one, answer)
            finally:
                self.heads.look = None
            found.append(shares)
            self.advance()
        return found

    def _read(self, one: AskedCase, answer: Tensor) -> Any:
        """The model's output at the last token of the prompt and the tokens of the answer."""
        ids = torch.cat([one.ids, answer], 1)
        with torch.inference_mode(), watched(self.model, self.heads):
            return self.model(ids, use_cache=False, logits_to_keep=answer.shape[1] + 1)


def _look(
    one: AskedCase,
    shares: dict[int, Tensor],
    layer: int,
    query: Tensor,
    key: Tensor,
    settings: Mapping[str, Any],
) -> None:
    """Put into ``shares`` what ``_Trial.attention`` returns of a layer."""
    share = _shares(query[:, :, one.question :], key, one.evidence, settings)
    asking = one.ids.shape[1] - one.question
    question, answer = share[..., :asking], share[..., asking:]
    shares[layer] = torch.stack([part.amax((0, 2, 3)) for part in (question, answer)])


def _shares(query: Tensor, key: Tensor, evidence: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Share of the attention of the last queries that the evidence gets,
    ``[1, num_key_value_heads, group, queries]``."""
    slots = Slots(key, key)
    mask = causal(query.shape[2], key.shape[2], key.device)
    softcap, sinks = settings.get("softcap"), settings.get("s_aux")
    scores = attention_scores(query, slots, settings.get("scaling"), softcap, mask, None)
    total = scores.logsumexp(-1)
    if sinks is not None:
        total = total.logaddexp(sinks.to(total).view(1, key.shape[1], -1, 1))
    return (scores[..., evidence.to(scores.device)] - total[..., None]).exp().sum(-1)


def _least_whole(
    trial: _Trial, heads: Sequence[Head], rows: Sequence[Mapping[str, Any]], exact: float
) -> dict[str, Any]:
    """The least number of heads found to keep ``LEFT`` of the accuracy while all others see only
    first and recent tokens."""
    orders = [
        sorted(range(len(heads)), key=lambda i: -max(rows[i]["question"], rows[i]["answer"])),
        sorted(range(len(heads)), key=lambda i: -rows[i]["restricted"]),
    ]
    curve: dict[int, float] = {len(heads): exact}
    best = len(heads)
    for order in orders:
        low, high = 0, best  # `high` heads are enough
        while low < high:
            count = (low + high) // 2
            with trial.heads.restricting([heads[i] for i in order[count:]]):
                accuracy = trial.accuracy()
            curve[count] = max(accuracy, curve.get(count, 0.0))
            if accuracy >= LEFT * exact:
                high = count
            else:
                low = count + 1
        best = high
    return {
        "heads": best,
        "share": rounded(best / len(heads)),
        "curve": [[count, rounded(accuracy)] for count, accuracy in sorted(curve.items())],
    }
