"""One model family against the full cache: lossless, also through ``generate`` and after a second
reading, evicting, and with the default method.

The reference does not use our attention: it is transformers' ``DynamicCache`` and the model's own
kernel, whose mask hides, layer by layer and head by head, the tokens that the SketchCache evicted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import AttentionInterface

import kvsketch
from kvsketch import SketchCache
from kvsketch.hf.activations import capture_compressed

TOKENS, NEW, CHUNK = 40, 8, 8
#: the largest relative difference of float32 logits that counts as rounding
CLOSE = 2e-5
WINDOW = {"sink": 2, "recent": 6}
#: the tokens each layer's KV heads may see, by cache layer: bool ``[batch, kv_heads, tokens]``
Kept = dict[int, Tensor]


def prompt(padding: list[int], tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, row i left-padded by ``padding[i]``."""
    generator = torch.Generator().manual_seed(len(padding))
    ids = torch.randint(3, 101, (len(padding), tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row, width in enumerate(padding):
        ids[row, :width] = 0
        mask[row, :width] = 0
    return ids, mask


def steps(padding: list[int]) -> list[tuple[Tensor, Tensor]]:
    """The same stream for every cache: a prompt, decoded tokens and a chunk, each with the mask of
    all tokens so far."""
    ids, mask = prompt(padding, TOKENS + NEW + CHUNK)
    ends = [TOKENS, *range(TOKENS + 1, TOKENS + NEW + 1), TOKENS + NEW + CHUNK]
    starts = [0, *ends[:-1]]
    return [(ids[:, a:b], mask[:, :b]) for a, b in zip(starts, ends, strict=True)]


@torch.no_grad()
def run(model: Any, cache: Any, padding: list[int], before: Any = None) -> list[Tensor]:
    """The logits of every step; ``before(step)`` is called before each forward."""
    found = []
    for number, (ids, mask) in enumerate(steps(padding)):
        if before is not None:
            before(number)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **({"position_ids": positions} if takes_positions(model) else {}),
        )
        live = mask[:, -ids.shape[1] :].bool()
        found.append(out.logits[live])
    return found


def takes_positions(model: Any) -> bool:
    return "position_ids" in type(model).forward.__code__.co_varnames


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of logits, relative to the largest logit."""
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)
    )


def lossless(model: Any, padding: list[int], budgets: tuple[float, ...] = (1.0, 1000)) -> float:
    """The difference to ``DynamicCache`` with room for all tokens (0: the same kernel ran)."""
    expected = run(model, DynamicCache(config=model.config), padding)
    worst = 0.0
    for budget in budgets:
        cache = SketchCache(model.config, "h2o", budget=budget)
        worst = max(worst, difference(run(model, cache, padding), expected))
    return worst


class Letters:
    """A tokenizer for models that have none: every character is a token."""

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(c) % 90 for c in text]}


def answer(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """The tokens of a greedy answer through ``generate``."""
    found: Tensor = model.generate(
        ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    return found[:, ids.shape[1] :]


def generates(model: Any) -> bool:
    """Whether ``generate`` gives the same tokens as with ``DynamicCache`` with room for all, from a
    prompt that is read at once, and runs to its end with half of it."""
    if model.config.model_type.startswith("musicgen"):  # reads audio codes
        return True
    ids, _ = prompt([0, 0], 110)
    expected = answer(model, ids, DynamicCache(config=model.config))
    found = answer(model, ids, SketchCache(model.config, budget=1000))
    half = SketchCache(model.config, budget=0.5)
    assert answer(model, ids, half).shape == expected.shape
    assert any(layer.stream.compressed for layer in sketches(half))
    return torch.equal(found, expected)


def rereads(model: Any, *queries: Any) -> bool:
    """Whether a second reading leaves nothing behind, with each kind of queries: ``generate`` then
    gives the same tokens as with ``DynamicCache`` and the whole prompt; or, with Jamba, to which
    transformers gives another state in two steps, with ``DynamicCache`` and the same steps."""
    most = getattr(model.config, "max_position_embeddings", None) or 512
    ids, _ = prompt([0, 0], 110 if most > 400 else 40)
    caches = []
    for kind in queries:
        caches.append(SketchCache(model.config, budget=1000))
        kvsketch.prefill(model, ids[:, :-10], caches[-1], queries=kind, tokenizer=Letters())
        assert caches[-1].get_seq_length() == ids.shape[1] - 10
    exact = DynamicCache(config=model.config)
    if model.config.model_type == "jamba":
        with torch.no_grad():
            model.base_model(ids[:, :-10], past_key_values=exact, use_cache=True)
    expected = answer(model, ids, exact)
    return all(torch.equal(answer(model, ids, cache), expected) for cache in caches)


def captures(model: Any) -> bool:
    """Whether the keys on which curves are measured beforehand are those of the layers that a cache
    compresses, with the queries of all layers that read them."""
    ids, _ = prompt([0], TOKENS)
    cache = SketchCache(model.config, budget=1000)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    own, found = sketches(cache), capture_compressed(model, ids)
    assert len(found) == len(own)
    for layer, (slots, observed) in zip(own, found, strict=True):
        group = observed.queries.shape[1] // slots.keys.shape[1]
        assert group % layer.settings.readers == 0
        if not torch.equal(slots.keys, layer.stream.slots.keys):
            return False
    return True


def evicting(model: Any, padding: list[int], uneven: bool, method: str = "keydiff") -> float:
    """The difference to the full cache with the evicted tokens hidden."""
    settings: dict[str, Any] = {"budget": 20, "keep": ["positions"], **WINDOW}
    shares: Any = "even"
    if uneven:
        heads = heads_of(model)
        if min(heads) > 1:
            shares = [[0.6, *[1.0] * (count - 2), 1.4] for count in heads]
        elif len(heads) > 1:  # one KV head: budgets differ between layers, if there are two
            shares = [0.7, 1.3, *[1.0] * (len(heads) - 2)][: len(heads)]
    cache = SketchCache(model.config, method, allocation=shares, **settings)
    kept: list[Kept] = []
    found = run(model, cache, padding, lambda step: kept.append(visible(cache)))
    assert any(layer.stream.compressed for layer in sketches(cache))
    expected = reference(model, kept, padding)
    return difference(found, expected)


def sketches(cache: SketchCache) -> list[Any]:
    return [layer for layer in cache.layers if hasattr(layer, "stream")]


def heads_of(model: Any) -> list[int]:
    """The number of KV heads of every layer that is compressed."""
    cache = SketchCache(model.config, "streaming_llm", budget=1.0)
    with torch.no_grad():
        model(prompt([0])[0], past_key_values=cache, use_cache=True)
    return [layer.keys.shape[1] for layer in sketches(cache)]


def visible(cache: SketchCache) -> Kept:
    """The tokens that each layer still has."""
    found: Kept = {}
    for index, layer in enumerate(cache.layers):
        if not hasattr(layer, "stream") or not layer.stream.seen:
            continue
        rows, heads = layer.token_shape[:2]
        kept = torch.zeros(rows, heads, layer.stream.seen, dtype=torch.bool)
        slots = layer.stream.slots
        assert slots.positions is not None
        live = slots.masses() > 0
        for row in range(rows):
            for head in range(heads):
                kept[row, head, slots.positions[row, head][live[row, head]].long()] = True
        found[index] = kept
    return found


def reference(model: Any, kept: list[Kept], padding: list[int]) -> list[Tensor]:
    """Logits of the full cache, where every forward sees only the tokens kept before it."""
    now: dict[str, Kept] = {}
    cache = DynamicCache(config=model.config)
    with masked(model, cache, now):
        return run(model, cache, padding, lambda step: now.update(kept=kept[step]))


@contextmanager
def masked(model: Any, cache: DynamicCache, now: dict[str, Kept]) -> Iterator[None]:
    """While this context is open, attention of ``model`` hides the tokens that ``now`` lists as not
    kept in the layer whose keys it gets."""
    original = AttentionInterface.get_interface
    latents = "kv_lora_rank" in model.config.get_text_config(decoder=True).to_dict()

    def get_interface(self: Any, name: str, default: Any) -> Any:
        kernel = original(self, name, default)

        def attention(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *a: Any, **k: Any
        ) -> Any:
            mask = attention_mask
            for layer, kept in now["kept"].items():
                # latents are expanded between the cache and attention
                mine = module.layer_idx == layer if latents else cache.layers[layer].keys is key
                if mine:
                    mask = hide(mask, kept, query, key)
            return kernel(module, query, key, value, mask, *a, **k)

        return attention

    patched = home_of(model)
    AttentionInterface.get_interface = get_interface
    make = getattr(patched, "create_causal_mask", None) if adapted(model) else None
    if make is not None:  # no attention interface: hide in the mask of all layers

        def create(*args: Any, **kwargs: Any) -> Any:
            mask, kept = make(*args, **kwargs), next(iter(now["kept"].values()), None)
            if kept is None:
                return mask
            q = kwargs["inputs_embeds"].shape[1]
            return hide_old(mask, kept[:, :1], q, kwargs["inputs_embeds"])

        patched.create_causal_mask = create
    try:
        yield
    finally:
        AttentionInterface.get_interface = original
        if make is not None:
            patched.create_causal_mask = make


def adapted(model: Any) -> bool:
    return model.config.model_type in ("bloom", "falcon", "mpt")


def home_of(model: Any) -> Any:
    return sys.modules[type(model).__module__]


def hide(mask: Any, kept: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """``mask`` with the earlier tokens hidden that a KV head does not keep."""
    q, n = query.shape[2], key.shape[2]
    group = query.shape[1] // kept.shape[1]
    return hide_old(mask, kept.repeat_interleave(group, dim=1), q, query, n)


def hide_old(mask: Any, kept: Tensor, q: int, like: Tensor, n: int | None = None) -> Tensor:
    n = kept.shape[2] + q if n is None else n
    assert kept.shape[2] == n - q
    shown = torch.cat([kept, torch.ones(*kept.shape[:2], q, dtype=torch.bool)], dim=2)[:, :, None]
    causal = torch.ones(q, n, dtype=torch.bool).tril(n - q)
    if mask is None:
        return shown & causal
    if mask.dtype == torch.bool:
        return mask & shown
    return mask.masked_fill(~shown, torch.finfo(like.dtype).min)


def default(model: Any) -> None:
    """Check that the default method, in measured and in 16 bits, runs, stays within its budget and
    reports its error."""
    bytes_held = []
    for bits in (None, 16):
        cache = SketchCache(model.config, budget=0.5, bits=bits)
        ids, mask = prompt([0, 0], 120)
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            for _ in range(3):
                mask = torch.cat([mask, mask[:, :1]], dim=1)
                out = model(ids[:, :1], attention_mask=mask, past_key_values=cache, use_cache=True)
        assert bool(torch.isfinite(out.logits).all())
        summary = cache.summary()
        bytes_held.append(summary["kv_bytes"])
        assert summary["tokens"] == 123
        assert any(layer["compressed"] for layer in summary["layers"])
        for row in cache.error():
            assert row["prompt"] is not None
            assert all(0 <= error < 2 for error in row["prompt"])
    assert summary["slots"] <= 0.52 * 123 + 2
    assert bytes_held[0] <= 1.05 * bytes_held[1]


def everything(model: Any) -> dict[str, float | None]:
    """All differences of one family; ``uneven`` is None where budgets of heads cannot differ.

    Raises:
        AssertionError: the default method fails its checks.
    """
    method = "streaming_llm" if adapted(model) else "keydiff"
    paddings = ([0, 0], [9, 0, 3])
    found: dict[str, float | None] = {
        "lossless": max(lossless(model, padding) for padding in paddings),
        "evicting": max(evicting(model, padding, False, method) for padding in paddings),
        "uneven": None if adapted(model) else evicting(model, paddings[1], True),
    }
    default(model)
    return found
