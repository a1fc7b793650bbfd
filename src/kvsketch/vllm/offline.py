"""Caches whose heads have as many slots as an engine's pages, so that nothing is squeezed when a
document is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvsketch.budget import Budget
from kvsketch.cache.budgets import HeadBudgets
from kvsketch.cache.curves import model_shape
from kvsketch.documents.server import Server
from kvsketch.errors import InputError, at_least, unknown_name
from kvsketch.hf import SketchCache
from kvsketch.hf.models import kv_heads_of, layers_of
from kvsketch.vllm.settings import EXACT, PageSettings

_LENGTH = "max_model_len"
# What ``metrics`` shows; the escapes of its labels are those of JSON.
_SHOWN = re.compile(r'^kvsketch:engine_info\{settings="((?:[^"\\]|\\.)*)"\}', re.MULTILINE)


def engine_of(text: str) -> tuple[PageSettings, int]:
    """An engine's settings and its longest context.

    Args:
        text: JSON, or the path of a file of it: an object of the plugin's settings and
            ``max_model_len``. Or the address of a server, which shows its own.

    Raises:
        InputError: it is none of these, or a setting is unknown or not allowed.
    """
    if text.startswith(("http://", "https://")):
        shown = _SHOWN.search(Server(text, "--for-vllm").read("/metrics"))
        if shown is None:
            raise InputError(
                f"--for-vllm {text:.80} shows no settings of kvsketch on /metrics: the server has "
                "no pages, an older kvsketch, or --api-server-count above 1"
            )
        text = str(json.loads(f'"{shown[1]}"'))
    try:
        path = Path(text)
        inline = text.lstrip().startswith("{")
        said = json.loads(text if inline else path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--for-vllm {text:.80} is no JSON and no file of it: {error}") from error
    names = [field.name for field in fields(PageSettings) if field.name != "documents"]
    if not isinstance(said, dict) or _LENGTH not in said:
        raise InputError(f"--for-vllm {text:.80} must be a JSON object with {_LENGTH}")
    context = at_least(_LENGTH, said.pop(_LENGTH), 2)
    for name in said:
        if name not in names:
            raise unknown_name("--for-vllm setting", name, [*names, _LENGTH])
    return PageSettings(**said), context


def cache_for(settings: PageSettings, context: int, config: Any, tokens: int) -> SketchCache:
    """An empty cache for a document, with the sizes of the engine's pages.

    Args:
        settings: of the plugin.
        context: the engine's longest context, in tokens.
        config: of the model.
        tokens: of the document.

    Raises:
        InputError: the document leaves no token to a question, or a budget too small.
        UnsupportedError: a model that ``SketchCache`` refuses.
    """
    if tokens >= context:
        raise InputError(
            f"the document has {tokens} tokens, and {_LENGTH}={context} leaves none to a question"
        )
    rhythm, chosen = settings.rhythm(context), layers_of(config)[1]
    layers, heads = len(chosen), kv_heads_of(config, chosen[0])
    window: dict[str, Any] = {"sink": settings.sink, "recent": settings.recent}
    if settings.method == EXACT or tokens <= settings.whole(context):
        return SketchCache(config, budget=1.0, bits=16, **window)
    sizes = [[rhythm.middle] * heads] * layers
    if settings.allocation is not None:
        sizes = settings.sizes(context, layers, heads, model_shape(config))
    cache = SketchCache(
        config,
        settings.method,
        budget=min(tokens, rhythm.kept),
        allocation="even",
        bits=settings.bits,
        seed=settings.seed,
        **window,
    )
    for layer, own in zip(cache._sketches(), sizes, strict=True):
        slots = [min(tokens, rhythm.first + size) for size in own]
        value = min(max(slots), tokens - 1)  # a share applies to longer texts only
        budgets = HeadBudgets([[Budget(value, n / value) for n in slots]], measured=True)
        layer.stream.pace.given = None  # so that a file has these budgets
        layer.stream.pace.start(budgets)
    return cache
