"""Errors of a compressed cache on teacher-forced continuations: KL divergence, perplexity, and the
attention error of single layers.

The first ``record`` ids are the prompt, which is read as by ``generate``. The ids between them and
the last ``new_tokens`` are read next, in one piece (a question or a gap; nothing if the question is
seen). Then the text's own tokens are fed one at a time, as in decoding, and the model's predictions
are compared with those of the exact cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvsketch.evaluation.runner.encoding import EncodedCase
from kvsketch.evaluation.runner.replies import clock, costs, footprint, new_cache
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import Setup
from kvsketch.evaluation.tasks.base import Reply
from kvsketch.hf import SketchCache
from kvsketch.hf.activations import intercepted
from kvsketch.hf.layer import SketchLayer
from kvsketch.hf.passing import passed

#: the attention of single layers; everything else follows from the predictions
ATTENTION = "attention_error"


@dataclass(frozen=True)
class _Truth:
    """Predictions and attention outputs of the exact cache after the prompt of a case.

    Attributes:
        log_probs: of the next token after each token that is fed, ``[new_tokens, vocabulary]``.
        attention: by layer, ``[tokens after the prompt, heads * value_dim]``; only for ATTENTION.
    """

    log_probs: Tensor
    attention: Mapping[int, Tensor]


class Follower:
    """Evaluates continuations with a model, and caches the exact results of the last one."""

    def __init__(self, model: Any, settings: Settings) -> None:
        self.model = model
        self.settings = settings
        self._last: tuple[Any, _Truth] | None = None

    @torch.inference_mode()
    def reply(self, case: EncodedCase, setup: Setup) -> Reply:
        """The results of one cache on a case. ``measured`` by name:

        - "kl": KL(exact || cache) of the next token in nats, the mean over the tokens fed; "top1":
          the fraction of them after which both predict the same most likely token;
        - "nats": mean -log p of the text's own next token, "exact_nats" the exact cache's;
        - or, for attention: "error", the relative error |z - exact|_F / |exact|_F of a layer's
          output over heads and tokens fed, the mean over layers that can be compressed, and
          "worst_layer", the largest. Every layer gets the queries of the exact run, so the error of
          a layer does not affect the next one (except in a prompt read with a streaming prefill).
        """
        truth = self._truth(case)
        ids = torch.tensor([list(case.ids)], device=self.model.device)
        cache = new_cache(self.model.config, self.settings, setup, case.record)
        start = clock(self.model.device)
        self._read(ids[:, : case.record], cache)
        prefilled = clock(self.model.device)
        after = footprint(cache)
        resumed = clock(self.model.device)
        lean = not truth.attention
        measure = self._predictions if lean else self._attention
        measured = measure(ids, case, cache, truth)
        end, final = clock(self.model.device), footprint(cache)
        return Reply(
            text="",
            prompt_tokens=case.record,
            new_tokens=case.new_tokens,
            **costs(after, final),
            prefill_seconds=prefilled - start,
            # the time of comparing layers is not counted
            decode_tokens=case.new_tokens if lean else 0,
            decode_seconds=end - resumed if lean else 0.0,
            measured=measured,
        )

    def _predictions(
        self, ids: Tensor, case: EncodedCase, cache: Any, truth: _Truth
    ) -> dict[str, float]:
        asked = len(case.ids) - 1 - case.new_tokens
        found = []
        self._ask(ids[:, case.record : asked], cache)
        for i, exact in enumerate(truth.log_probs):
            at, right = asked + i, case.ids[asked + i + 1]
            ours = self._forward(ids[:, at : at + 1], cache).logits[0, -1].double().log_softmax(-1)
            kl = (exact.exp() * (exact - ours)).sum()
            same = (exact.argmax() == ours.argmax()).double()
            found.append(torch.stack([kl, same, -ours[right], -exact[right]]))
        # fetched once: a wait for the device per token would be part of the speed
        means = torch.stack(found).mean(0).tolist()
        return dict(zip(("kl", "top1", "nats", "exact_nats"), means, strict=True))

    def _attention(
        self, ids: Tensor, case: EncodedCase, cache: Any, truth: _Truth
    ) -> dict[str, float]:
        asked = len(case.ids) - 1 - case.new_tokens
        wrong: dict[int, Tensor | float] = {}
        right: dict[int, Tensor | float] = {}
        at = case.record

        def forced(module: nn.Module, out: Tensor) -> Tensor:
            """Records the error of ``out`` and returns the exact output."""
            layer = int(module.layer_idx)  # type: ignore[arg-type]
            exact = truth.attention[layer][at - case.record :][: out.shape[1]]
            if at >= asked:
                found = out.flatten(2)[0].double()
                wrong[layer] = wrong.get(layer, 0.0) + (found - exact).square().sum()
                right[layer] = right.get(layer, 0.0) + exact.double().square().sum()
            return exact.to(out.dtype).reshape(out.shape)

        with intercepted(self.model, forced):
            self._ask(ids[:, at:asked], cache)
            for at in range(asked, len(case.ids) - 1):
                self._forward(ids[:, at : at + 1], cache)
        # Sliding-window layers stay unchanged; with the exact cache, all do.
        exact = not isinstance(cache, SketchCache)
        layers = [n for n in right if exact or isinstance(cache.layers[n], SketchLayer)]
        pairs = [(float(wrong[layer]), float(right[layer])) for layer in layers]
        errors = [(w / r) ** 0.5 if r else 0.0 for w, r in pairs]
        return {"error": sum(errors) / len(errors), "worst_layer": max(errors)}

    def _truth(self, case: EncodedCase) -> _Truth:
        """The results of the exact cache; those of the last case are cached."""
        whole = case.measure == ATTENTION
        key = (tuple(case.ids), case.record, case.new_tokens, whole)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        self._last = None  # one at a time in memory
        ids = torch.tensor([list(case.ids)], device=self.model.device)
        cache = DynamicCache(config=self.model.config)
        self._read(ids[:, : case.record], cache)
        caught: dict[int, Tensor] = {}

        def noted(module: nn.Module, out: Tensor) -> Tensor:
            caught[int(module.layer_idx)] = out.flatten(2)[0].clone()  # type: ignore[arg-type]
            return out

        rest = ids[:, case.record : -1]
        if whole:
            with intercepted(self.model, noted):
                output = self._forward(rest, cache, case.new_tokens)
        else:
            output = self._forward(rest, cache, case.new_tokens)
        truth = _Truth(output.logits[0].double().log_softmax(-1), caught)
        self._last = (key, truth)
        return truth

    def _read(self, prompt: Tensor, cache: Any) -> None:
        """Prefill as in ``generate``."""
        for part in torch.split(prompt, self.settings.prefill_chunk_size or prompt.shape[1], dim=1):
            self._ask(part, cache)

    def _ask(self, ids: Tensor, cache: Any) -> None:
        if ids.shape[1]:
            self._forward(ids, cache, 1)

    def _forward(self, ids: Tensor, cache: Any, keep: int = 1) -> Any:
        taken = passed(self.model, cache)
        return self.model(ids, **taken, use_cache=True, logits_to_keep=keep)
