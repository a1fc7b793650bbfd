"""prefill: reads a context, perhaps a second time, before any of it is compressed."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from kvsketch.errors import AccuracyWarning, InputError, UnsupportedError, at_least
from kvsketch.hf.cache import SketchCache
from kvsketch.hf.identity import Origin
from kvsketch.hf.layer import SketchLayer
from kvsketch.hf.models import has_interface
from kvsketch.hf.other_layers import RESTORED, kept
from kvsketch.hf.parts import RereadPart, parts_of, sampled
from kvsketch.hf.passing import passed
from kvsketch.hf.second_reading import Again, ReadEnough, Reading
from kvsketch.hf.system_message import pin_system_message
from kvsketch.hf.weighing import weighed
from kvsketch.hf.wrapped import learns_prompts, transformers_model
from kvsketch.methods.registry import class_of

# Queries of all parts together that are kept to measure errors on.
_SAMPLE = 256
#: The longest answer to an expected question that is read with it, in tokens.
ANSWER = 32


def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: SketchCache,
    *,
    queries: str | Sequence[str] = "prompt",
    tokenizer: Any = None,
    attention_mask: Tensor | None = None,
    chunk_size: int | None = None,
    pin_system: bool = True,
    progress: bool | Callable[[int, int], None] = False,
) -> None:
    """Read a context into ``cache`` and compress it, by a choice of queries. Then call
    ``model.generate`` with the ids of the context followed by the question.

    Args:
        model: a transformers causal language model.
        input_ids: int64 ``[batch, tokens]``, the context.
        cache: an empty ``SketchCache``.
        queries: the queries used by the method, by measured budgets and by measured errors.
            "prompt": the queries of the context itself, as with ``generate`` alone. "reread": those
            of a second reading. The context is read again, 2,048 tokens at a time (kvgrad: 512),
            after an instruction to repeat it (KVzip, arXiv:2505.23416), while the whole first
            reading is in memory, uncompressed. This costs about a second prefill; the keys of the
            second reading are not kept. "local", ours: the same with 512 tokens at a time, which
            attend only to themselves and to the first four tokens; the longer the context, the more
            it saves. "sample", ours: reads 64 of every 384 tokens in this way (all tokens of a
            context of at most 384). Methods that score by the largest attention (kvzip,
            heavy_merge) predict the scores of the other tokens from these (``methods.learned``); if
            they have an echo (``cache.echo``), the scores are the echo's, corrected by the sample
            in every head. Other methods use the queries of the sample. It costs about a sixth. Rows
            of a batch are cut at the same columns, including padding. MPT, BLOOM and Falcon always
            attend to all of the first reading. A list of texts: expected questions, each as it
            would follow the context (with the chat template's words, if there is one). The model
            answers each from the uncompressed context, in at most 32 tokens, and the queries of
            question and answer are used: many models look at the evidence only while they answer.
        tokenizer: the model's tokenizer; needed except for "prompt".
        pin_system: with a tokenizer that has a chat template, never compress the system message
            with which the context begins (``cache.pin``), if it takes at most half of the budget
            and leaves room beside the recent tokens. Not with padding or a streaming sketch, nor if
            the template marks the beginning or the end of the message by white space only.
        attention_mask: int or bool ``[batch, tokens]``, 0 for padding on the left.
        chunk_size: number of tokens of the context to read at a time; default: all at once.
        progress: True shows a progress bar; or a function that is called with the number of tokens
            read and their total.

    Raises:
        InputError: an argument is out of range, or the text has places of images or sounds; nothing
            is changed.
        UnsupportedError: a method that cannot use the queries of a second reading, or layers that
            cannot remove its tokens.

    Warns:
        AccuracyWarning: ``allocation="measured"`` was asked for and there is a second reading:
            errors on its queries predict those on later ones badly (docs/errors.md); or the
            measured error is large; or the system message is too long to be pinned.

    Example:
        >>> cache = SketchCache(model.config, budget=0.1)                       # doctest: +SKIP
        >>> kvsketch.prefill(                                                   # doctest: +SKIP
        ...     model, context_ids, cache, queries="reread", tokenizer=tokenizer
        ... )
        >>> model.generate(ids, past_key_values=cache)                          # doctest: +SKIP
    """
    _check(model, input_ids, cache, chunk_size)
    whole = transformers_model(model)
    _check_text(model, input_ids)
    if learns_prompts(model):
        raise UnsupportedError(
            "prefill reads a text without the tokens that PEFT's prompt or prefix tuning puts "
            "before it: read it with model.generate(input_ids, past_key_values=cache)"
        )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if not isinstance(mask, Tensor):
        raise InputError(f"attention_mask must be a tensor, got {type(mask).__name__}")
    if mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask {tuple(mask.shape)} must be of the shape of input_ids, "
            f"{tuple(input_ids.shape)}"
        )
    method = class_of(cache.arguments["method"])
    parts = parts_of(queries, tokenizer, input_ids, mask, method.requires.part)
    if not parts and method.requires.second_reading == "required":
        raise UnsupportedError(
            f"method={cache.method!r} scores a context by a second reading: "
            "kvsketch.prefill(..., queries='reread')"
        )
    if queries in ("local", "sample") and method.requires.weights == "gradient":
        raise UnsupportedError(
            f"method={cache.method!r} needs gradients of a whole second reading, which "
            f"queries={queries!r} is not: use queries='reread' or a list of questions"
        )
    tokens = input_ids.shape[1]
    asked = not isinstance(queries, str)
    if parts:
        longest = max(part.ids.shape[1] for part in parts)
        _check_reread(cache, tokens + longest + (ANSWER if asked else 0))
        better = getattr(method, "allocation_reread", None)
        if better and cache.arguments["allocation"] == "measured" and not asked:
            _warn_of_measured(cache.method, better, str(queries))
    if pin_system and tokenizer is not None:
        pin_system_message(cache, tokenizer, input_ids, mask)
    forward, inner = cache._forward, model.base_model
    cache.origin = Origin(whole)
    _forget_images(model)
    if all(layer.settings.lossless for layer in forward.sketches):
        parts = []  # nothing will be compressed, so no queries are needed
    every = sum(part.ids.shape[1] + (ANSWER if asked else 0) for part in parts)
    weighs = method.requires.weights
    normal = torch.inference_mode(False) if weighs == "gradient" else nullcontext()
    with normal, _Bar(progress, tokens + every) as bar, torch.no_grad():
        try:
            cache.plan.read_again(bool(parts))
            echoed = 0 if sampled(parts) is None else tokens
            forward.reading = Reading(queries == "prompt", echoed)
            size = chunk_size or tokens
            for start in range(0, tokens, size):
                ids, seen = input_ids[:, start : start + size], mask[:, : start + size]
                inner(**_inputs(inner, ids, seen), **passed(inner, cache), use_cache=True)
                bar.advance(ids.shape[1])
            real, put_back = bool(mask.all()), kept(cache.layers)
            if asked:
                parts = [_answered(model, part, cache, mask, put_back) for part in parts]
                bar.advance(tokens + every - bar.done - sum(part.ids.shape[1] for part in parts))
            for part in parts:
                count = part.ids.shape[1]
                again = Again(
                    part.about,
                    kept=max(1, round(_SAMPLE * count / every)),
                    local=queries in ("local", "sample"),
                    # Falcon calls torch's kernel itself, with a mask over all tokens.
                    unmasked=real
                    and model.config._attn_implementation == "sdpa"
                    and has_interface(type(model)),
                    stops=weighs is None
                    and not any(hasattr(module, "_hf_hook") for module in inner.modules()),
                )
                forward.reading = reading = Reading(False, again=again)
                with suppress(ReadEnough), weighed(weighs, model, forward.sketches, reading):
                    seen = torch.cat([mask, part.mask], dim=1)
                    given = _inputs(inner, part.ids, seen)
                    inner(**given, **passed(inner, cache), use_cache=True)
                put_back()
                forward.masks.cut(tokens)
                bar.advance(count)
            forward.finish_reading(sampled(parts))
            cache.history.passed(input_ids, None, 0)
        except BaseException:
            forward.reading = None
            cache.reset()
            raise


def _warn_of_measured(method: str, better: str, queries: str) -> None:
    warnings.warn(
        f"allocation='measured' with queries={queries!r}: errors on the queries of a second "
        f"reading predict those on later queries badly, and with method={method!r} far fewer "
        f"answers are right than with allocation={better!r} (docs/errors.md), the one that you get "
        "without this argument",
        AccuracyWarning,
        stacklevel=3,
    )


def _check_text(model: Any, ids: Tensor) -> None:
    """Raise InputError if there are tokens in whose places the model expects images or sounds."""
    for name in ("image", "video", "audio"):
        for told in (f"{name}_token_id", f"{name}_token_index"):
            token = getattr(model.config, told, None)
            if isinstance(token, int) and bool((ids == token).any()):
                raise InputError(
                    f"input_ids have tokens of the model's {told}={token}, and prefill reads text "
                    "only: read a context with images or sounds by generate(**inputs, "
                    "past_key_values=cache, max_new_tokens=1)"
                )


def _forget_images(model: nn.Module) -> None:
    """Forget by how much the images of another text have moved the positions of its tokens, which
    Qwen-VL and others keep in the model, as ``generate`` does for an empty cache."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None  # type: ignore[assignment]


def _inputs(model: Any, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The inputs of a forward of these tokens, the last ones of the mask, as from ``generate``: it
    counts positions without padding. Models whose forward takes none count them themselves."""
    found = {"input_ids": ids, "attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        found["position_ids"] = positions[:, -ids.shape[1] :]
    return found


def _answered(
    model: PreTrainedModel,
    part: RereadPart,
    cache: SketchCache,
    mask: Tensor,
    put_back: Callable[[], None],
) -> RereadPart:
    """A question with the model's own greedy answer from the uncompressed context, as many tokens
    in every row. The cache is unchanged: ``put_back`` does so for what is not compressed."""
    told = model.generation_config.eos_token_id
    told = told if isinstance(told, list) else [-1 if told is None else told]
    ends = torch.tensor(told, device="cpu")
    ids = new = part.ids
    over = torch.zeros(len(ids), dtype=torch.bool, device="cpu")
    for _ in range(ANSWER):
        seen = torch.cat([mask, torch.ones_like(ids)], dim=1)
        found = model(**_inputs(model, new, seen), **passed(model, cache), use_cache=True)
        new = found.logits[:, -1:].argmax(-1)
        over |= torch.isin(new[:, 0].cpu(), ends)
        if bool(over.all()):
            break
        ids = torch.cat([ids, new], dim=1)
    cache._forward.crop(mask.shape[1] - cache.get_seq_length(), put_back)
    return replace(part, ids=ids, mask=torch.ones_like(ids))


class _Bar:
    """Shows progress, or calls a function.

    Args:
        progress: as for ``prefill``.
        total: tokens that will be read.
    """

    def __init__(self, progress: bool | Callable[[int, int], None], total: int) -> None:
        self._tell = None if isinstance(progress, bool) else progress
        self._bar = Progress(disable=progress is not True, transient=True)
        self._task = self._bar.add_task("Reading", total=total)
        #: tokens read
        self.done = 0
        self._total = total

    def advance(self, tokens: int) -> None:
        """Report that this many more tokens were read."""
        self.done += tokens
        self._bar.advance(self._task, tokens)
        if self._tell is not None:
            self._tell(self.done, self._total)

    def __enter__(self) -> _Bar:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)


def _check(model: Any, input_ids: Any, cache: SketchCache, chunk_size: int | None) -> None:
    if not hasattr(model, "base_model"):
        raise InputError(f"model must be a transformers model, got {type(model).__name__}")
    if not isinstance(cache, SketchCache):
        raise InputError(f"cache must be a SketchCache, got {type(cache).__name__}")
    if cache.get_seq_length():
        raise InputError(
            f"cache holds {cache.get_seq_length()} tokens already; prefill reads into an empty "
            "one: call reset()"
        )
    if not all(layer.settings.exact_prefill for layer in cache._forward.sketches):
        raise InputError(
            "cache was made with prefill='streaming', which compresses while it reads; "
            "kvsketch.prefill reads all of a context first: make it with prefill='exact'"
        )
    if not isinstance(input_ids, Tensor):
        raise InputError(
            f"input_ids must be an int64 tensor [batch, tokens], got {type(input_ids).__name__}; "
            "of a text: tokenizer(text, return_tensors='pt')['input_ids']"
        )
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"input_ids {input_ids.dtype} {tuple(input_ids.shape)} must be int64 [batch, tokens]"
        )
    if not input_ids.numel():
        raise InputError(f"input_ids {tuple(input_ids.shape)}: the context is empty")
    if chunk_size is not None:
        at_least("chunk_size", chunk_size, 1)


def _check_reread(cache: SketchCache, tokens: int) -> None:
    """Whether a second reading that ends at ``tokens`` tokens is possible."""
    cls = class_of(cache.arguments["method"])
    refused = cls.requires.queries and cls.requires.second_reading == "refused"
    if not cls.recompresses or refused:
        raise UnsupportedError(
            f"method={cache.method!r} cannot use the queries of a second reading; use "
            "queries='prompt', or a method such as heavy_merge, snapkv or kvzip"
        )
    if cache.max_positions is not None and tokens > cache.max_positions:
        raise InputError(
            f"input_ids: a second reading would end at position {tokens}, beyond the model's "
            f"{cache.max_positions} (max_position_embeddings); use queries='prompt', or a shorter "
            "context"
        )
    for layer in cache.layers:
        name = type(layer).__name__
        if not isinstance(layer, SketchLayer) and name not in RESTORED:
            raise UnsupportedError(
                f"queries: a {name} of this model cannot remove the tokens of a second reading; "
                "use queries='prompt'"
            )
        if cls.requires.weights == "gradient" and isinstance(layer, LinearAttentionLayer):
            raise UnsupportedError(
                f"method={cache.method!r} needs gradients, which cannot be computed through the "
                f"state of a {name}; use another method, such as kvzip"
            )
