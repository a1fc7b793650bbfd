"""``SketchLM``: lm-evaluation-harness's Hugging Face model, answering through a SketchCache.

What is compressed:

- Tasks that generate: the prompt, and then what is decoded, as in ``model.generate``.
- Tasks that score continuations (multiple choice): the context without its last token, read in one
  piece. That token and the continuation are then read through the compressed cache, so that every
  scored token is predicted from it, also where there is only one. The continuations of a context
  share its cache, so the question counts as seen. A context of one token leaves nothing to
  compress: such scores are exact.
- Tasks that score a whole text (wikitext's perplexity) have no context and are refused.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedModel

from kvsketch.arguments import PIECE
from kvsketch.errors import InputError, UnsupportedError, unknown_name
from kvsketch.evaluation.runner import hub
from kvsketch.evaluation.runner.harness_arguments import check_model_args
from kvsketch.evaluation.runner.setups import EXACT
from kvsketch.hf import SketchCache
from kvsketch.hf.passing import passed, passed_to_generate

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError(f"{error}; needed here: pip install 'kvsketch[lm-eval]'") from error

#: what ``from_pretrained`` takes, beside what the harness names itself
_LOADING = ("attn_implementation", "device_map")
_Request = tuple[Any, list[int], list[int]]  # (texts, context, continuation)

_log = logging.getLogger(__name__)


@register_model("kvsketch")
class SketchLM(HFLM):  # type: ignore[misc]
    """The harness's Hugging Face model with a ``SketchCache`` of its own for every prompt.

    Args:
        pretrained: as for ``--model hf``; so are all arguments not named here.
        method: as for ``SketchCache``, or "exact": as ``--model hf`` in every respect.
        budget: as for ``SketchCache``, like all that follow. ``prefill="streaming"`` reads prompts
            in chunks of 1,024 tokens.

    Raises:
        InputError: an unknown argument or a bad value, before any weights are loaded.
        UnsupportedError: a model SketchCache is not for, likewise.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        method: str = "heavy_merge",
        budget: int | float | None = None,
        tolerance: float | None = None,
        allocation: str | None = None,
        bits: int | str | None = None,
        sink: int = 4,
        recent: int | None = None,
        prefill: str = "exact",
        one_shot: bool = False,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        ours = [*inspect.signature(SketchLM.__init__).parameters][1:-1]
        theirs = [*inspect.signature(HFLM.__init__).parameters][1:-1]
        for name in kwargs:
            if name not in (*theirs, *_LOADING):
                raise unknown_name("model_args", name, {*ours, *theirs, *_LOADING})
        what: dict[str, Any] = {"method": method, "budget": budget, "tolerance": tolerance}
        what |= {"allocation": allocation, "bits": bits}
        what |= {"sink": sink, "recent": recent, "prefill": prefill}
        check_model_args(
            {**kwargs, **what, "one_shot": one_shot, "seed": seed, "pretrained": pretrained}
        )
        what |= {"keep": ["decoded"] if one_shot else [], "seed": seed}
        self._sketch: dict[str, Any] | None = None
        if method != EXACT:
            self._sketch = what
            self._new_cache(_config_of(pretrained, kwargs))  # raises
        #: bytes of the caches so far, summed: after an answer, or after a context to be scored
        self.kv_bytes = self.exact_kv_bytes = 0
        super().__init__(pretrained, **kwargs)
        if self._sketch is not None:
            self._new_cache(self.model.config)  # the kernel the weights came with may not do

    def get_model_info(self) -> dict[str, Any]:
        """As the harness's, with what was asked for and what it kept: bytes over all prompts."""
        info: dict[str, Any] = super().get_model_info()
        if self._sketch is not None:
            kept = {"kv_bytes": self.kv_bytes, "exact_kv_bytes": self.exact_kv_bytes}
            info["kvsketch"] = self._sketch | kept
        return info

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """
        Raises:
            UnsupportedError: any method but "exact".
        """
        if self._sketch is not None:
            raise UnsupportedError(
                "loglikelihood_rolling scores a whole text: there is no context to compress; use "
                f"method={EXACT}, or kvsketch eval perplexity"
            )
        scores: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)
        return scores

    def _new_cache(self, config: Any) -> SketchCache:
        assert self._sketch is not None
        return SketchCache(config, **self._sketch)

    def _note(self, cache: SketchCache) -> None:
        self.kv_bytes += cache.nbytes()
        self.exact_kv_bytes += cache.exact_nbytes()

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any
    ) -> Tensor:
        if self._sketch is None:
            exact: Tensor = super()._model_generate(context, max_length, stop, **kwargs)
            return exact
        cache = self._new_cache(self.model.config)
        if self._sketch["prefill"] == "streaming":
            kwargs["prefill_chunk_size"] = PIECE
        ids: Tensor = super()._model_generate(
            context, max_length, stop, **passed_to_generate(cache), **kwargs
        )
        self._note(cache)
        return ids

    def _loglikelihood_tokens(
        self, requests: list[_Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Log probability of each continuation, in nats, and whether it is the greedy one. A batch
        is continuations of one context; with ``batch_size=auto``, one."""
        if self._sketch is None:
            exact: list[tuple[float, bool]] = super()._loglikelihood_tokens(
                requests, disable_tqdm, override_bs
            )
            return exact
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            # cut from the left, as the harness does it
            kept = (context + continuation)[-(self.max_length + 1) :]
            if len(kept) < len(context) + len(continuation):
                _log.warning("context cut to the model's %d tokens", self.max_length)
            if len(kept) <= len(continuation):
                raise InputError(
                    f"a continuation of {len(continuation)} tokens leaves no context in "
                    f"max_length={self.max_length}"
                )
            groups[tuple(kept[: len(kept) - len(continuation)])].append(number)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0)
        # the longest first: what does not fit in memory should fail at once
        for shared, numbers in sorted(groups.items(), key=lambda group: -len(group[0])):
            found = self._scores(shared, [requests[number][2] for number in numbers])
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
            bar.update(len(numbers))
        bar.close()
        return answers

    def _scores(
        self, context: Sequence[int], continuations: Sequence[list[int]]
    ) -> list[tuple[float, bool]]:
        """Of the continuations of one context, which is read once."""
        rows = self.batch_size if isinstance(self.batch_size, int) else 1
        assert self._sketch is not None
        record = torch.tensor([context[:-1]], device=self.device)
        streaming = self._sketch["prefill"] == "streaming"
        chunk = PIECE if streaming else max(1, record.shape[1])
        found: list[tuple[float, bool]] = []
        half = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, half, half is not None):
            cache = self._new_cache(self.model.config)
            taken = passed(self.model, cache)
            for start in range(0, record.shape[1], chunk):
                part = record[:, start : start + chunk]
                self.model(part, **taken, use_cache=True, logits_to_keep=1)
            self._note(cache)
            for start in range(0, len(continuations), rows):
                batch = continuations[start : start + rows]
                last = start + rows >= len(continuations)
                mine = cache if last else copy.deepcopy(cache)
                found += self._through(mine, context[-1], batch)
        return found

    def _through(
        self, cache: SketchCache, first: int, continuations: Sequence[list[int]]
    ) -> list[tuple[float, bool]]:
        """Reads ``first`` and the continuations at once, one a row; padding comes after them, so
        no real token sees it."""
        if cache.get_seq_length() and len(continuations) > 1:
            cache.batch_repeat_interleave(len(continuations))
        asked = [[first, *tokens[:-1]] for tokens in continuations]
        width = max(map(len, asked))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in asked], device=self.device)
        logits = self.model(ids, **passed(self.model, cache), use_cache=True).logits
        scores = logits.log_softmax(-1, dtype=self.softmax_dtype)
        answers = []
        for row, tokens in zip(scores, continuations, strict=True):
            right = torch.tensor(tokens, dtype=torch.long, device=row.device)
            row = row[: len(tokens)]
            nats = float(row.gather(1, right[:, None]).sum())
            answers.append((nats, bool((row.argmax(-1) == right).all())))
        return answers


def _config_of(pretrained: str | PreTrainedModel, kwargs: dict[str, Any]) -> Any:
    """The model's configuration, without its weights."""
    if not isinstance(pretrained, str):
        return pretrained.config
    names = ("revision", "trust_remote_code", "subfolder", "gguf_file")
    given = {name: kwargs[name] for name in names if name in kwargs}
    try:
        return AutoConfig.from_pretrained(pretrained, **given)
    except (OSError, ValueError, KeyError) as error:
        reason = hub.reason_of(error)
        raise InputError(f"pretrained={pretrained!r} cannot be loaded: {reason}") from error
