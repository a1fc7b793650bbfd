"""The system message with which a context begins: it is not compressed like any other text."""

from __future__ import annotations

import bisect
import warnings
from typing import Any

from torch import Tensor

from kvsketch.errors import AccuracyWarning
from kvsketch.hf.cache import SketchCache

_SYSTEM, _USER = "\ue000system\ue001", "\ue000user\ue001"


def pin_system_message(cache: SketchCache, tokenizer: Any, ids: Tensor, mask: Tensor) -> None:
    """Pin the system message of a chat template with which a context begins, unless the cache can
    pin nothing (a streaming sketch) or there is padding.

    Args:
        cache: empty.
        ids, mask: int64 ``[batch, tokens]``.

    Warns:
        AccuracyWarning: it takes more than half of the budget, or leaves no slot beside the recent
            tokens, and is not pinned.
    """
    stream = cache._sketches()[0].stream
    if stream.compressor is None or not bool(mask.all()):
        return
    end = system_tokens(tokenizer, ids)
    budget = cache.budget
    if not end or stream.pins:
        return
    most = None if budget is None else budget.slots(ids.shape[1])
    sink, recent = stream.method.around
    if most is not None and (2 * end > most or max(end, sink) + recent >= most):
        warnings.warn(
            f"the system message has {end} tokens, more than half of the budget of {most} or than "
            f"it has beside {recent} recent tokens: it is compressed like any other text",
            AccuracyWarning,
            stacklevel=3,
        )
        return
    cache.pin(0, end)


def system_tokens(tokenizer: Any, ids: Tensor) -> int:
    """How many tokens at the start of every row of ``ids`` ``[batch, tokens]`` are the system
    message of the tokenizer's chat template and what the template writes before it. 0: there is
    none, the rows differ, or the template marks its beginning or its end by white space only."""
    if not getattr(tokenizer, "chat_template", None):
        return 0
    said = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
    try:
        before, rest = tokenizer.apply_chat_template(said, tokenize=False).split(_SYSTEM)
        after, _ = rest.split(_USER)
    except Exception:  # errors that a template raises, or one that leaves out what it is told
        return 0
    start = tokenizer.bos_token or ""
    before, after = before.strip().removeprefix(start).strip(), after.strip()
    if not before or not after:
        return 0
    found = {_end(tokenizer, row, before, after) for row in ids.tolist()}
    return found.pop() if len(found) == 1 else 0


def _end(tokenizer: Any, ids: list[int], before: str, after: str) -> int:
    """The number of tokens of ``ids`` up to the first ``after``, if they begin with ``before``."""

    def text(count: int) -> str:
        said: str = tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False)
        return said

    whole = text(len(ids))
    start = whole.find(before)
    place = whole.find(after, start + len(before))
    # In front of it there may be tokens that begin a text.
    if start < 0 or place < 0 or whole[:start].replace(tokenizer.bos_token or "", "").strip():
        return 0
    return bisect.bisect_left(range(len(ids)), place, key=lambda count: len(text(count)))
