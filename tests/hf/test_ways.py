"""Every way to call a model with a SketchCache either works or is refused by name."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import multiprocessing
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import (
    AttentionInterface,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    StaticCache,
    pipeline,
)
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvsketch
from families import EVERY_METHOD, VOCABULARY, build
from kvsketch import InputError, KVSketchError, SketchCache, Slots, UnsupportedError
from kvsketch.cache.stream import Stream
from kvsketch.hf import interface
from kvsketch.hf.layer import GUESSES
from kvsketch.hf.passing import passed
from kvsketch.methods.base import Compressor, keep_top
from model_sweep import Kept, Letters, masked, visible
from tiny_model import tiny_case, tiny_model, tiny_tokenizer

WINDOW: dict[str, Any] = {"sink": 2, "recent": 6}
SMALL: dict[str, Any] = {"budget": 20, **WINDOW}


def ids_of(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)


def greedy(model: Any, ids: torch.Tensor, cache: Any, new: int = 10, **kwargs: Any) -> Any:
    return model.generate(
        ids,
        attention_mask=kwargs.pop("attention_mask", torch.ones_like(ids)),
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=kwargs.pop("do_sample", False),
        **kwargs,
    )


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, cache: Any, **kwargs: Any) -> torch.Tensor:
    logits: torch.Tensor = model(ids, past_key_values=cache, use_cache=True, **kwargs).logits
    return logits


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def expected(llama: Any) -> torch.Tensor:
    ids = greedy(llama, ids_of(1, 40), SketchCache(llama.config, "snapkv", **SMALL))
    assert isinstance(ids, torch.Tensor)
    return ids


# --- no lasting changes of model or configuration ------------------------------------------------


def test_the_configuration_is_never_changed() -> None:
    model = build("gemma3")
    before = copy.deepcopy(vars(model.config))
    cache = SketchCache(model.config, "snapkv", **SMALL)
    greedy(model, ids_of(2, 40), cache)
    assert vars(model.config) == before
    assert not interface._UPDATED
    assert not interface._SHARED  # nor is a forward marked as running between calls


@pytest.mark.slow
def test_model_and_config_are_pickled_as_if_we_had_never_been(tmp_path: Path) -> None:
    """A process without kvsketch can load a pickled model and configuration that were used with a
    SketchCache."""
    model = build("llama")
    logits = forward(model, ids_of(1, 8), None)
    greedy(model, ids_of(1, 40), SketchCache(model.config, "snapkv", **SMALL))
    torch.save(model, tmp_path / "model.pt")
    (tmp_path / "config.pkl").write_bytes(pickle.dumps(model.config))
    torch.save((ids_of(1, 8), logits), tmp_path / "logits.pt")
    script = f"""
import pickle, sys, torch
sys.modules["kvsketch"] = None
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
config = pickle.load(open({str(tmp_path / "config.pkl")!r}, "rb"))
ids, logits = torch.load({str(tmp_path / "logits.pt")!r})
with torch.no_grad():
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(type(model)(config).eval()(ids).logits.shape and model(ids).logits, logits)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_other_caches_compile_without_a_graph_break(llama: Any) -> None:
    SketchCache(llama.config)  # our attention functions are registered
    caches = [StaticCache(config=llama.config, max_cache_len=64) for _ in range(2)]
    for cache in caches:
        forward(llama, ids_of(1, 20), cache)
    whole = torch.compile(llama.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        compiled = whole(ids_of(1, 1), past_key_values=caches[0]).logits
    torch.testing.assert_close(compiled, forward(llama, ids_of(1, 1), caches[1]))


def test_output_attentions_of_other_caches_stay(llama: Any) -> None:
    eager = build("llama", attention="eager")
    SketchCache(eager.config, "snapkv", **SMALL)
    out = eager(ids_of(1, 12), output_attentions=True)
    assert [a.shape for a in out.attentions] == [(1, 4, 12, 12)] * 2


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_a_context_read_in_inference_mode_goes_on_outside(llama: Any, method: str) -> None:
    """As if it had been read there, and the other way round."""

    def run(reading: Any, decoding: Any) -> torch.Tensor:
        cache = SketchCache(llama.config, method, **SMALL)
        with reading():
            forward(llama, ids_of(1, 40), cache)
        with decoding():
            found = [forward(llama, ids_of(1, 1, i), cache).detach() for i in range(8)]
        return torch.cat(found, 1)

    expected = run(torch.no_grad, torch.no_grad)
    modes = (torch.no_grad, torch.inference_mode)
    for reading, decoding in list(itertools.product(modes, repeat=2))[1:]:
        torch.testing.assert_close(run(reading, decoding), expected, atol=1e-4, rtol=1e-4)


# --- arguments of the attention function ----------------------------------------------------------


class Meddled:
    """The model's own attention calls, with ``change`` applied to their arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
        original = AttentionInterface.get_interface

        def get_interface(this: Any, name: str, default: Any) -> Any:
            kernel = original(this, name, default)
            return lambda *args, **kwargs: change(kernel, *args, **kwargs)

        monkeypatch.setattr(AttentionInterface, "get_interface", get_interface)


@pytest.mark.parametrize("given", [1.5, True, torch.ones(4)])
def test_an_argument_we_do_not_know_is_an_error_at_the_first_token(
    llama: Any, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    cache = SketchCache(llama.config, "snapkv", **SMALL)
    Meddled(monkeypatch, lambda kernel, *a, **k: kernel(*a, **{**k, "wobble": given}))
    with pytest.raises(UnsupportedError, match="LlamaAttention passes wobble= to attention"):
        forward(llama, ids_of(1, 40), cache)
    assert cache.get_seq_length() == 0, "nothing is left of the prompt"
    monkeypatch.undo()
    forward(llama, ids_of(1, 40), cache)


def test_an_argument_without_a_value_is_none(
    llama: Any, monkeypatch: pytest.MonkeyPatch, expected: torch.Tensor
) -> None:
    Meddled(monkeypatch, lambda kernel, *a, **k: kernel(*a, **{**k, "wobble": None}))
    assert torch.equal(
        greedy(llama, ids_of(1, 40), SketchCache(llama.config, "snapkv", **SMALL)), expected
    )


def test_two_attentions_over_parts_of_one_layer_are_refused(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(kernel: Any, module: Any, q: Any, k: Any, v: Any, *a: Any, **kw: Any) -> Any:
        halves = [half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1)]
        outs = [kernel(module, q, k, half, *a, **kw)[0] for half in halves]
        return sum(outs), None

    cache = SketchCache(llama.config, "snapkv", **SMALL)
    Meddled(monkeypatch, twice)
    with pytest.raises(UnsupportedError, match="changes keys or values between the cache"):
        forward(llama, ids_of(1, 40), cache)
    assert cache.get_seq_length() == 0


def test_a_second_attention_to_the_same_keys_is_refused(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(kernel: Any, *a: Any, **kw: Any) -> Any:
        kernel(*a, **kw)
        return kernel(*a, **kw)

    cache = SketchCache(llama.config, "snapkv", **SMALL)
    Meddled(monkeypatch, twice)
    with pytest.raises(UnsupportedError, match="changes keys or values"):
        forward(llama, ids_of(1, 40), cache)


def test_attention_without_the_interface_is_refused_at_the_second_layer(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = SketchCache(llama.config, "snapkv", **SMALL)
    monkeypatch.setattr(interface, "_ours", lambda kernel, name: kernel)
    with pytest.raises(UnsupportedError, match="layer 0 took keys and values, but its attention"):
        forward(llama, ids_of(1, 40), cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"is_causal": False}, "look ahead"),
        ({"sliding_window": 8}, "sliding_window=8 is shorter than the 40 tokens"),
        ({"position_bias": torch.zeros(1)}, "position_bias="),
    ],
)
def test_known_arguments_that_slots_cannot_honour(
    llama: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], says: str
) -> None:
    cache = SketchCache(llama.config, "snapkv", **SMALL)
    Meddled(monkeypatch, lambda kernel, *a, **k: kernel(*a, **{**k, **change}))
    with pytest.raises(UnsupportedError, match=says):
        forward(llama, ids_of(1, 40), cache)
    assert cache.get_seq_length() == 0


def test_a_lossless_cache_hands_every_argument_to_the_kernel(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def noting(kernel: Any, *a: Any, **k: Any) -> Any:
        return kernel(*a, **{**k, "sliding_window": 8})

    original = AttentionInterface._global_mapping["sdpa"]
    monkeypatch.setitem(
        AttentionInterface._global_mapping,
        "sdpa",
        lambda *a, **k: seen.append(k["sliding_window"]) or original(*a, **k),
    )
    Meddled(monkeypatch, noting)
    forward(llama, ids_of(1, 40), SketchCache(llama.config, "snapkv", budget=1.0))
    assert seen == [8, 8]


def test_output_attentions_is_refused_before_the_first_token() -> None:
    """output_attentions=True is refused for a cache that compresses, since weights over slots are
    not weights of tokens; with room for all tokens the weights are DynamicCache's."""
    model = build("llama", attention="eager")
    cache = SketchCache(model.config, "snapkv", **SMALL)
    with pytest.raises(UnsupportedError, match="output_attentions=True needs a weight per tok"):
        forward(model, ids_of(1, 40), cache, output_attentions=True)
    assert cache.get_seq_length() == 0
    roomy = SketchCache(model.config, "snapkv", budget=1000)
    exact = DynamicCache(config=model.config)
    with torch.no_grad():
        for ids in (ids_of(1, 40), ids_of(1, 1)):
            ours, theirs = (
                model(ids, past_key_values=c, output_attentions=True).attentions
                for c in (roomy, exact)
            )
            assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


# --- attention sinks in the softmax ---------------------------------------------------------------


SINKING: list[dict[str, Any]] = [
    {"budget": 0.5},
    {"budget": 0.5, "allocation": "even"},
    {"budget": 0.5, "allocation": [[0.6, 1.4]] * 2},
    {"method": "h2o", "budget": 0.5},
    {"method": "keydiff", "budget": 0.5},
    {"method": "uniform", "budget": 0.5},
]


@pytest.mark.parametrize("settings", SINKING)
@pytest.mark.parametrize("q", [1, 4])
def test_sinks_matter_after_compression(settings: dict[str, Any], q: int) -> None:
    """Changed sinks of compressed layers change the logits of a token, and of a chunk, after a
    compressed prompt."""
    import tiny_models

    model = tiny_models.build("gpt_oss")
    cache = SketchCache(model.config, **settings)
    forward(model, ids_of(2, 120), cache)
    compressed = [row["layer"] for row in cache.summary()["layers"] if row["compressed"]]
    assert compressed == [1, 2]
    found = []
    for more in (0.0, 2.0):
        for layer in compressed:
            model.model.layers[layer].self_attn.sinks.data += more
        found.append(forward(model, ids_of(2, q, 1), copy.deepcopy(cache)))
    assert float((found[0] - found[1]).abs().max()) > 1e-2


def test_sinks_matter_to_the_measured_error() -> None:
    import tiny_models

    model = tiny_models.build("gpt_oss")
    errors = []
    for more in (0.0, 4.0):
        for layer in model.model.layers[1:]:
            layer.self_attn.sinks.data += more
        cache = SketchCache(model.config, "keydiff", budget=0.25, keep=["errors"])
        forward(model, ids_of(1, 120), cache)
        forward(model, ids_of(1, 1), cache)
        errors.append(cache.error()[0])
    assert errors[0]["prompt"] != errors[1]["prompt"]
    assert errors[0]["now"] != errors[1]["now"]


# --- latents --------------------------------------------------------------------------------------


class Wrapped(torch.nn.Module):
    """A linear layer without a ``weight`` attribute, as adapters and quantisation may leave it."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.hidden, self.in_features = [linear], linear.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.hidden[0](x)
        return out


@pytest.mark.parametrize("method", ["snapkv", "heavy_merge", "uniform"])
def test_latents_are_expanded_by_whatever_the_model_has(method: str) -> None:
    import tiny_models

    model = tiny_models.build("deepseek_v3")
    found = []
    for wrapped in (False, True):
        if wrapped:
            for layer in model.model.layers:
                layer.self_attn.kv_b_proj = Wrapped(layer.self_attn.kv_b_proj)
        cache = SketchCache(model.config, method, budget=0.5, allocation="even", **WINDOW)
        forward(model, ids_of(2, 80), cache)
        assert all(layer["compressed"] for layer in cache.summary()["layers"])
        found.append(torch.cat([forward(model, ids_of(2, q, q), cache) for q in (1, 1, 5)], dim=1))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_bytes_of_latents_are_told_as_they_are() -> None:
    """A latent counts once before compression, and twice after it: as part of the key and as
    value."""
    import tiny_models

    model = tiny_models.build("deepseek_v3")
    text = model.config
    rank, rotated = text.kv_lora_rank, text.qk_rope_head_dim
    exact = SketchCache(model.config, "streaming_llm", budget=1.0)
    half = SketchCache(model.config, "streaming_llm", budget=0.5, **WINDOW)
    for cache in (exact, half):
        forward(model, ids_of(1, 80), cache)
        assert cache.exact_nbytes() == 80 * (rank + rotated) * 4 * len(cache.layers)
    assert exact.nbytes() == exact.exact_nbytes()
    assert half.nbytes() == 40 * (2 * rank + rotated) * 4 * len(half.layers)


# --- masks after compression ----------------------------------------------------------------------


def hiding(model: Any, method: str, hidden: list[int], **settings: Any) -> Any:
    """Logits of a token whose 2-D mask hides earlier tokens: of the cache, and of the exact
    cache."""
    ids = ids_of(1, 40)
    cache = SketchCache(model.config, method, allocation="even", **SMALL, **settings)
    forward(model, ids, cache)
    kept = visible(cache) if settings else {}
    mask = torch.ones(1, 41, dtype=torch.long)
    mask[0, hidden] = 0
    positions = torch.tensor([[40]])
    ours = forward(model, ids_of(1, 1, 1), cache, attention_mask=mask, position_ids=positions)
    exact = DynamicCache(config=model.config)
    now: dict[str, Kept] = {"kept": {}}
    with masked(model, exact, now):
        forward(model, ids, exact)
        now["kept"] = kept
        theirs = forward(model, ids_of(1, 1, 1), exact, attention_mask=mask, position_ids=positions)
    return ours, theirs


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
def test_a_mask_that_hides_kept_tokens_is_honoured(family: str) -> None:
    """Hidden tokens are found by their positions among the slots: a sink, kept tokens of the middle
    and recent ones."""
    model = build(family)
    if family == "opt":  # it derives positions from the mask
        model.model.decoder.embed_positions.weight.data.zero_()
    ours, theirs = hiding(model, "keydiff", [1, 20, 21, 22, 36, 37], keep=["positions"])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    shown, _ = hiding(model, "keydiff", [], keep=["positions"])
    assert float((shown - ours).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("method", "settings", "says"),
    [
        ("keydiff", {}, r"keep=\['positions'\]"),
        ("cluster_merge", {"keep": ["positions"]}, "represent several tokens"),
        ("uniform", {"keep": ["positions"]}, "represent several tokens"),
    ],
)
def test_a_mask_that_cannot_be_honoured_is_refused(
    llama: Any, method: str, settings: Any, says: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"hides 1 tokens that it showed.*{says}"):
        hiding(llama, method, [20], **settings)


def test_a_mask_that_shows_padding_again_is_refused(llama: Any) -> None:
    ids, mask = ids_of(2, 40), torch.ones(2, 41, dtype=torch.long)
    mask[0, :5] = 0
    cache = SketchCache(llama.config, "snapkv", **SMALL)
    forward(llama, ids, cache, attention_mask=mask[:, :40])
    with pytest.raises(UnsupportedError, match="unmasks 5 tokens that it masked when they came"):
        forward(llama, ids_of(2, 1), cache)
    assert cache.get_seq_length() == 40
    forward(llama, ids_of(2, 1), cache, attention_mask=mask)


def test_padding_that_is_shown_before_anything_was_compressed_is_kept(llama: Any) -> None:
    """Padding that a later mask shows again, before anything was compressed, is kept as other
    tokens, as in the full cache."""
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, :5] = 0
    cache = SketchCache(llama.config, "streaming_llm", budget=60, keep=["positions"], **WINDOW)
    forward(llama, ids_of(1, 40), cache, attention_mask=mask)
    forward(llama, ids_of(1, 1), cache)
    forward(llama, ids_of(1, 40, 1), cache)
    kept = visible(cache)[0]
    assert cache.layers[0].stream.compressed
    assert kept[..., :2].all(), "the first tokens are sinks"
    assert int(kept.sum(-1).min()) == 60


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("uneven", [False, True])
def test_a_tree_of_tokens_behind_a_compressed_prompt(attention: str, uneven: bool) -> None:
    """With the 4-D masks of speculative decoding every branch of a tree has the logits of its
    tokens read one after the other."""
    model = build("llama", attention=attention)
    settings = {**SMALL, "allocation": [[0.6, 1.4]] * 2} if uneven else SMALL
    cache = SketchCache(model.config, "snapkv", **settings)
    forward(model, ids_of(1, 40), cache)
    tokens = ids_of(1, 5, 1)  # 0 -> 1 -> 2 and 0 -> 3 -> 4
    branches = [[0, 1, 2], [0, 3, 4]]
    tree = torch.zeros(5, 5, dtype=torch.bool)
    for branch in branches:
        for place, token in enumerate(branch):
            tree[token, branch[: place + 1]] = True
    shown = torch.cat([torch.ones(5, 40, dtype=torch.bool), tree], dim=1)[None, None]
    additive = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
    depth = torch.tensor([[40, 41, 42, 41, 42]])
    ours = forward(
        model,
        tokens,
        copy.deepcopy(cache),
        attention_mask=shown if attention == "sdpa" else additive,
        position_ids=depth,
    )
    for branch in branches:
        alone = forward(model, tokens[:, branch], copy.deepcopy(cache))
        torch.testing.assert_close(ours[:, branch], alone, rtol=1e-4, atol=1e-4)


def test_a_mask_that_adds_numbers_to_scores_is_refused() -> None:
    model = build("llama", attention="eager")
    bias = torch.linspace(-1, 0, 40).expand(1, 1, 40, 40).tril()
    cache = SketchCache(model.config, "snapkv", **SMALL)
    with pytest.raises(UnsupportedError, match="attention_mask adds numbers"):
        forward(model, ids_of(1, 40), cache, attention_mask=bias)
    assert cache.get_seq_length() == 0


def test_padding_whose_keys_shine_is_not_seen(llama: Any) -> None:
    """A dead slot does not change attention even if its score is far above all others, where it
    could shift the maximum of the softmax."""
    from kvsketch.attention import attend_to
    from kvsketch.budget import Budget
    from kvsketch.cache import Stream, windowed
    from kvsketch.observed import Observed

    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 40, 16)
    keys[:, :, :5] = 100.0  # padding
    live = torch.ones(1, 40, dtype=torch.bool)
    live[:, :5] = False
    driver = Stream(windowed("uniform", 2, 4), Budget(38))
    driver.extend(Slots(keys, values))
    driver.mark_padding(live)
    driver.settle(None, prefill=True)
    assert driver.compressed
    driver.extend(Slots(*torch.randn(2, 1, 2, 1, 16)))
    query = torch.rand(1, 4, 1, 16) + 1
    slots = driver.slots
    assert float(slots.keys.max()) == 100, "a padded slot is still there, dead"
    out = attend_to(Observed(query, 1.0), driver.open(), padded=driver.padded)
    wide = Slots(slots.keys.double(), slots.values.double(), slots.masses().double())
    alive = wide.masses() > 0
    exact = kvsketch.attend(query.double(), wide.only(alive), scaling=1.0)
    assert float(exact.abs().max()) > 0
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


# --- kernels, configurations, processes -----------------------------------------------------------


def test_attention_implementation_changed_after_the_cache_was_made(expected: torch.Tensor) -> None:
    model = build("llama")
    cache = SketchCache(model.config, "snapkv", **SMALL)
    model.set_attn_implementation("eager")
    assert torch.equal(greedy(model, ids_of(1, 40), cache), expected)


def test_a_copy_of_the_configuration(llama: Any, expected: torch.Tensor) -> None:
    config = copy.deepcopy(llama.config)
    assert torch.equal(
        greedy(llama, ids_of(1, 40), SketchCache(config, "snapkv", **SMALL)), expected
    )


def padded_run(model: Any, cache: Any) -> torch.Tensor:
    """The last logits of a padded prompt, of decoded tokens and of a chunk."""
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :5] = 0
    found = [forward(model, ids_of(2, 40), cache, attention_mask=mask)[:, -1]]
    for step, q in enumerate((1, 1, 1, 6)):
        mask = torch.cat([mask, torch.ones(2, q, dtype=torch.long)], dim=1)
        found.append(forward(model, ids_of(2, q, step), cache, attention_mask=mask)[:, -1])
    return torch.stack(found)


def test_flash_attention_as_the_models_kernel(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with FlashAttention's calling convention (masks of padding only, or none) gives the
    logits of the default kernel. FlashAttention itself needs a GPU."""

    def flash(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        q, n = query.shape[2], key.shape[2]
        shown = torch.ones(q, n, dtype=torch.bool).tril(n - q)[None, None]
        if attention_mask is not None:
            assert attention_mask.dim() == 2
            shown = shown & attention_mask.bool()[:, None, None, :]
        key, value = (t.repeat_interleave(2, dim=1) for t in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=shown, scale=kwargs["scaling"]
        )
        return out.transpose(1, 2).contiguous(), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", flash)
    model = build("llama")
    model.config._attn_implementation = "flash_attention_2"
    for method in ("snapkv", "heavy_merge"):
        caches = [SketchCache(m.config, method, **SMALL) for m in (model, llama)]
        torch.testing.assert_close(padded_run(model, caches[0]), padded_run(llama, caches[1]))


@pytest.mark.slow
def test_flex_attention_as_the_models_kernel(llama: Any) -> None:
    """FlexAttention gives the logits of the default kernel without padding; torch's CPU build does
    not compile its mask with padding for any cache. The prompt has 64 tokens: for 40 and some
    other lengths, torch 2.13's own CPU kernel reads memory that it never wrote and may give NaN,
    with any cache and without a model."""
    model = build("llama")
    model.config._attn_implementation = "flex_attention"
    found = []
    for m in (model, llama):
        cache = SketchCache(m.config, "snapkv", **SMALL)
        found.append([forward(m, ids_of(2, q, q), cache)[:, -1] for q in (64, 1, 1, 6)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_flex_attention_masks_are_read() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    from kvsketch.hf.masks import Masks

    block = create_block_mask(
        lambda b, h, q, k: (q + 4 >= k) & ~((b == 0) & (k < 3)), 2, None, 5, 9, device="cpu"
    )
    view = Masks().read(block, 2, 5, 9)
    assert view.live is not None
    assert view.live.tolist() == [[False] * 3 + [True] * 6, [True] * 9]
    assert view.chunk is None


@pytest.mark.parametrize(
    "method",
    ["heavy_merge", *(pytest.param(x, marks=pytest.mark.slow) for x in ("snapkv", "subgen"))],
)
def test_a_pickled_cache_goes_on_in_a_new_process(tmp_path: Path, method: str) -> None:
    """A pickled cache continues with the same logits in a new process, with a model that was never
    used with a SketchCache."""
    model = build("llama")
    cache = SketchCache(model.config, method, budget=0.5, **WINDOW)
    forward(model, ids_of(1, 120), cache)
    (tmp_path / "cache.pkl").write_bytes(pickle.dumps(cache))
    torch.save((model, ids_of(1, 1, 7)), tmp_path / "model.pt")
    script = f"""
import pickle, torch
model, ids = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
cache = pickle.load(open({str(tmp_path / "cache.pkl")!r}, "rb"))
with torch.no_grad():
    logits = [model(ids, past_key_values=cache).logits for _ in range(3)]
torch.save(logits, {str(tmp_path / "logits.pt")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    for logits in torch.load(tmp_path / "logits.pt"):
        torch.testing.assert_close(logits, forward(model, ids_of(1, 1, 7), cache))


@pytest.mark.parametrize("method", [pytest.param("snapkv", marks=pytest.mark.slow), "subgen"])
def test_a_cache_is_an_argument_of_a_new_process(method: str) -> None:
    """torch shares a tensor with a process that begins later as long as it is there: the state of a
    random generator was not."""
    model = build("llama")
    cache = SketchCache(model.config, method, budget=0.5, **WINDOW)
    forward(model, ids_of(1, 120), cache)
    twin = pickle.loads(pickle.dumps(cache))
    streams = [one._sketches()[0].stream for one in (cache, twin)]
    own, other = (getattr(stream.method, "sketch", stream.method) for stream in streams)
    assert torch.equal(own.generator.get_state(), other.generator.get_state())
    process = multiprocessing.get_context("spawn").Process(target=str, args=(cache,))
    process.start()
    process.join(120)
    assert process.exitcode == 0


def compiled_run(model: Any, caches: Any, first: bool, **how: Any) -> None:
    """Compare a compiled forward with the plain one on a padded prompt, single tokens and a
    chunk."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model.forward, backend="eager", **how)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        for step, q in enumerate((40, 1, 1, 1, 1, 1, 1, 5)):
            mask = mask if step == 0 else torch.cat([mask, mask[:, -1:].expand(-1, q)], dim=1)
            ids, settings = ids_of(2, q, step), {"attention_mask": mask, "use_cache": True}
            call = model if step == 0 and not first else compiled
            ours = call(ids, past_key_values=caches[0], **settings).logits
            theirs = model(ids, past_key_values=caches[1], **settings).logits
            live = mask[:, -q:].bool()
            torch.testing.assert_close(ours[live], theirs[live], rtol=1e-4, atol=1e-4)


COMPILED: list[dict[str, Any]] = [
    {"method": "snapkv"},
    {"method": "h2o"},
    {"method": "heavy_merge", "allocation": [[0.6, 1.4]] * 2},
    {"method": "subgen"},
    {"method": "streaming_llm", "bits": 8},
]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param(family, settings, marks=pytest.mark.slow if family != "llama" or i > 0 else [])
        for family in ("llama", "opt", "eager")
        for i, settings in enumerate(COMPILED)
    ],
)
def test_a_compiled_forward_has_no_graph_break(family: str, settings: dict[str, Any]) -> None:
    """There is no graph break either, and at most three graphs, however many tokens follow."""
    if family == "opt" and "allocation" in settings:
        settings = {**settings, "allocation": [[0.6, 1.0, 1.0, 1.4]] * 2}
    model = build("llama" if family == "eager" else family, "eager" if family == "eager" else None)
    caches = [SketchCache(model.config, **{**SMALL, **settings}) for _ in range(2)]
    compiled_run(model, caches, first=False, fullgraph=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_a_prompt_in_a_graph(llama: Any) -> None:
    """A prompt may be the first forward that is compiled."""
    caches = [SketchCache(llama.config, "snapkv", **SMALL) for _ in range(2)]
    compiled_run(llama, caches, first=True, fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3"])
def test_other_caches_break_the_graph_and_are_right(family: str) -> None:
    import tiny_models

    model = tiny_models.build(family)
    caches = [SketchCache(model.config, "snapkv", **SMALL) for _ in range(2)]
    compiled_run(model, caches, first=False)


def test_a_prompt_that_a_graph_reads_is_asked_again(llama: Any) -> None:
    """A compiled graph shows the positions of a model, without which there is no echo."""
    torch._dynamo.reset()
    compiled = torch.compile(llama.forward, backend="eager", fullgraph=True)
    caches = [SketchCache(llama.config, budget=0.25, sink=2, recent=6) for _ in range(2)]
    for step, q in enumerate((120, 1, 1)):
        with torch.no_grad():
            ours = compiled(ids_of(1, q, step), past_key_values=caches[0], use_cache=True).logits
        torch.testing.assert_close(ours, forward(llama, ids_of(1, q, step), caches[1]))
        assert all(cache.summary()["allocation"] == "global" for cache in caches)


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": 0.25},
        {"budget": 40},
        {"budget": 0.25, "bits": 16},
        {"tolerance": 0.1},
        {"method": "cluster_merge", "budget": 0.25, "allocation": "measured"},
        {"method": "h2o", "budget": 30},
    ],
    ids=str,
)
def test_a_chunk_may_be_padding_alone(llama: Any, settings: dict[str, Any]) -> None:
    """As the first one of a long padded prompt: there is nothing to measure or to compress yet."""
    ids, mask = ids_of(2, 260), torch.ones(2, 260, dtype=torch.int64)
    mask[0, :130] = mask[1, :140] = 0
    cache, whole = (SketchCache(llama.config, **WINDOW, **settings) for _ in range(2))
    chunked = greedy(llama, ids, cache, 30, attention_mask=mask, prefill_chunk_size=130)
    assert torch.equal(chunked, greedy(llama, ids, whole, 30, attention_mask=mask))
    assert cache.nbytes() <= 1.2 * whole.nbytes()
    empty = SketchCache(llama.config, **WINDOW, **settings)
    forward(llama, ids[:, :99], empty, attention_mask=torch.zeros(2, 99, dtype=torch.int64))
    tokens = torch.cat([torch.zeros(2, 99), torch.ones(2, 30)], 1).long()
    for i in range(30):
        found = forward(llama, ids[:, i : i + 1], empty, attention_mask=tokens[:, : 100 + i])
        assert bool(found.isfinite().all())


class Reused(torch.fx.Interpreter):
    """Runs a graph and overwrites what an operation was given, as Inductor's graphs do."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "kvsketch" not in str(target):
            return super().call_function(target, args, kwargs)
        memory = [tensor.clone(memory_format=torch.contiguous_format) for tensor in args[:3]]
        found = super().call_function(target, (*memory, *args[3:]), kwargs)
        for tensor in memory:
            tensor.fill_(1e3)
        return found


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "h2o", "budget": 130},
        pytest.param({"budget": 0.25}, marks=pytest.mark.slow),
        pytest.param({"budget": 0.4, "allocation": "measured"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_graph_may_use_its_memory_again(llama: Any, settings: dict[str, Any]) -> None:
    """Queries and tokens wait until all layers were read, or until later tokens."""
    torch._dynamo.reset()
    backend = lambda graph, _: Reused(graph).run  # noqa: E731
    compiled = torch.compile(llama.forward, backend=backend, fullgraph=True)
    caches = [SketchCache(llama.config, **WINDOW, **settings) for _ in range(2)]
    for step, q in enumerate((120, *[1] * 30, 7)):
        with torch.no_grad():
            ours = compiled(ids_of(1, q, step), past_key_values=caches[0], use_cache=True).logits
        torch.testing.assert_close(ours, forward(llama, ids_of(1, q, step), caches[1]))


def test_a_graph_serves_many_caches_and_refuses_one_that_is_gone(llama: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(llama.forward, backend="eager", fullgraph=True)
    for _ in range(4):
        caches = [SketchCache(llama.config, "snapkv", **SMALL) for _ in range(2)]
        for cache in caches:
            forward(llama, ids_of(1, 40), cache)
        twin = copy.deepcopy(caches[0])
        for cache in (caches[0], twin):
            with torch.no_grad():
                ours = compiled(ids_of(1, 1), past_key_values=cache).logits
        torch.testing.assert_close(ours, forward(llama, ids_of(1, 1), caches[1]))
    assert not interface._UPDATED
    assert not interface._SHARED
    q, k = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 1, 16)
    with pytest.raises(UnsupportedError, match="SketchCache that no longer exists"):
        torch.ops.kvsketch.attend(q, k, k, None, 10**6, 0, "sdpa", "", True, None, None, None)


def test_a_graph_leaves_out_only_what_says_nothing() -> None:
    from kvsketch.hf.compiled import _says_nothing

    for name, value in (
        ("wobble", None),
        ("dropout", 0.0),
        ("is_causal", True),
        ("use_cache", True),
    ):
        assert _says_nothing(name, value)
    for name, value in (
        ("wobble", 1.5),
        ("dropout", 0.1),
        ("is_causal", False),
        ("sliding_window", 8),
        ("output_attentions", True),  # our operation returns no weights
    ):
        assert not _says_nothing(name, value)


@pytest.mark.slow
def test_generate_with_a_model_compiled_by_inductor(expected: torch.Tensor) -> None:
    torch._dynamo.reset()  # in transformers 5.24 all models begin with the same frame
    model = build("llama")
    model.forward = torch.compile(model.forward, fullgraph=True)
    cache = SketchCache(model.config, "snapkv", **SMALL)
    assert torch.equal(greedy(model, ids_of(1, 40), cache), expected)


# --- generate -------------------------------------------------------------------------------------


def test_one_context_many_questions(llama: Any) -> None:
    """Copies of a cache are independent of each other, and the original does not change."""
    context = SketchCache(llama.config, budget=0.5, **WINDOW)
    forward(llama, ids_of(1, 120), context)
    before = context.summary()
    answers = {}
    for question in (1, 2, 1):
        ids = torch.cat([ids_of(1, 120), ids_of(1, 6, question)], dim=1)
        answer = greedy(llama, ids, copy.deepcopy(context))
        assert torch.equal(answers.setdefault(question, answer), answer)
    assert context.summary() == before


def test_a_streamer_gets_every_token(llama: Any, expected: torch.Tensor) -> None:
    class Noting:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, tokens: torch.Tensor) -> None:
            self.seen += tokens.flatten().tolist()

        def end(self) -> None:
            self.seen.append(-1)

    streamer = Noting()
    cache = SketchCache(llama.config, "snapkv", **SMALL)
    greedy(llama, ids_of(1, 40), cache, streamer=streamer)
    assert streamer.seen == [*expected[0].tolist(), -1]


@pytest.mark.parametrize("method", ["snapkv", "heavy_merge", "uniform"])
def test_several_answers_of_one_prompt(llama: Any, method: str) -> None:
    """With num_return_sequences the answers of one prompt are sampled independently, in rows of
    the same number of slots."""
    cache = SketchCache(llama.config, method, budget=0.5, **WINDOW)
    torch.manual_seed(0)
    answers = greedy(llama, ids_of(1, 120), cache, num_return_sequences=3, do_sample=True, new=12)
    assert answers.shape == (3, 132)
    assert len({tuple(row) for row in answers.tolist()}) == 3
    held = [layer.stream.held for layer in cache.layers]
    assert all(layer.shape[0] == 3 and (layer == layer[0]).all() for layer in held)


def test_inputs_embeds(llama: Any, expected: torch.Tensor) -> None:
    embeds = llama.get_input_embeddings()(ids_of(1, 40)).detach()
    ids = llama.generate(
        inputs_embeds=embeds,
        attention_mask=torch.ones(1, 40, dtype=torch.long),
        past_key_values=SketchCache(llama.config, "snapkv", **SMALL),
        max_new_tokens=10,
        do_sample=False,
    )
    assert torch.equal(ids, expected[:, 40:])


def test_a_text_generation_pipeline() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer))
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = tiny_case(20).prompt
    settings = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    exact = pipe(text, **settings)
    lossless = SketchCache(model.config, "snapkv", budget=1.0)
    assert pipe(text, past_key_values=lossless, **settings) == exact
    tight = SketchCache(model.config, "snapkv", budget=0.2, **WINDOW)
    assert pipe(text, past_key_values=tight, **settings)[0]["generated_text"]
    assert tight.summary()["kv_bytes"] < 0.3 * tight.summary()["exact_kv_bytes"]


@pytest.mark.parametrize("assisted", ["prompt_lookup", "assistant"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
def test_assisted_decoding(family: str, assisted: str) -> None:
    """With room for all tokens assisted decoding gives the ids of ``DynamicCache``; a compressed
    cache counts only the accepted tokens and stays within its budget."""
    import tiny_models

    model = tiny_models.build("lfm2") if family == "lfm2" else build(family)
    helper = tiny_models.build("lfm2") if family == "lfm2" else build(family)
    how = (
        {"prompt_lookup_num_tokens": 3}
        if assisted == "prompt_lookup"
        else {"assistant_model": helper}
    )
    ids = ids_of(1, 40)
    exact = greedy(model, ids, DynamicCache(config=model.config), new=24, **how)
    roomy = SketchCache(model.config, "snapkv", budget=1000, **WINDOW)
    assert torch.equal(greedy(model, ids, roomy, new=24, **how), exact)
    for settings in (SMALL, {**SMALL, "allocation": [[0.6, 1.4]] * 2}):
        cache = SketchCache(model.config, "snapkv", **settings)
        assert greedy(model, ids, cache, new=24, **how).shape == exact.shape
        assert cache.get_seq_length() == 63
        assert cache.summary()["slots"] <= 22
        assert all(row["prompt"] is not None for row in cache.error())


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("snapkv", {}),
        ("h2o", {}),
        ("heavy_merge", {"allocation": "even"}),
        ("heavy_merge", {"budget": 0.5, "allocation": "measured"}),
        ("streaming_llm", {"bits": 8}),
        ("streaming_llm", {"allocation": [[0.6, 1.4]] * 2}),
        ("subgen", {}),
    ],
)
def test_tokens_taken_back_leave_nothing_behind(llama: Any, method: str, settings: Any) -> None:
    """After ``activate_past_recording``, tokens that are read and cropped have no effect on later
    logits."""
    held = []
    for extra in (0, 3):
        cache = SketchCache(llama.config, method, **{**SMALL, **settings})
        cache.activate_past_recording()
        forward(llama, torch.cat([ids_of(1, 120), ids_of(1, extra, 9)], dim=1), cache)
        cache.crop(-extra)
        for step in range(4):
            ids = torch.cat([ids_of(1, 2, step), ids_of(1, extra, 9)], dim=1)
            forward(llama, ids, cache)
            cache.crop(-extra)
        assert cache.get_seq_length() == 128
        if method != "heavy_merge":
            assert cache.summary()["slots"] < (60 if "bits" in settings else 30)
        held.append(forward(llama, ids_of(1, 1, 5), cache))
    torch.testing.assert_close(held[0], held[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_after_assisted_decoding_a_cache_is_compressed_again(family: str) -> None:
    """transformers does not say when it is over."""
    model = build(family)
    cache = SketchCache(model.config, "h2o", budget=40, sink=2, recent=6)
    ids = ids_of(1, 100)
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    ids = model.generate(
        ids, past_key_values=cache, max_new_tokens=8, prompt_lookup_num_tokens=3, **settings
    )
    assert cache._first.record_past
    settings["attention_mask"] = torch.ones_like(ids)
    window = DynamicSlidingWindowLayer(8)
    window.activate_past_recording()
    for _ in range(10):
        held = window.update(*torch.zeros(2, 1, 1, 1, 16))[0].shape[2]
    if family == "gemma3" and held > 8:
        pytest.skip("this version of transformers cannot decode with a window after it at all")
    model.generate(ids, past_key_values=cache, max_new_tokens=GUESSES + 20, **settings)
    assert not cache._first.record_past
    assert cache.summary()["slots"] <= 41


def test_caches_leave_inference_mode(llama: Any) -> None:
    """What was read there may not be written to outside."""

    def run(mode: Any, method: str) -> torch.Tensor:
        cache = SketchCache(llama.config, method, budget=40, sink=2, recent=6)
        with mode():
            llama(ids_of(1, 60), past_key_values=cache, use_cache=True)
            for step in range(5):
                llama(ids_of(1, 1, step), past_key_values=cache, use_cache=True)
            twin = cache.fork()
        found = [forward(llama, ids_of(1, 1, step), cache) for step in range(20)]
        assert torch.equal(forward(llama, ids_of(1, 1, 0), twin), found[0])
        return torch.cat(found)

    for method in ("heavy_merge", "snapkv", "subgen"):
        assert torch.equal(run(torch.inference_mode, method), run(torch.no_grad, method))


@pytest.mark.parametrize("prompt", [True, False])
def test_what_stops_while_the_last_layer_takes_its_tokens_is_in_the_middle(
    llama: Any, monkeypatch: pytest.MonkeyPatch, prompt: bool
) -> None:
    """All layers have as many tokens then, and none waits for its attention."""
    cache = SketchCache(llama.config, "h2o", **SMALL)
    if not prompt:
        forward(llama, ids_of(1, 60), cache)
    real, last = Stream.extend, cache._sketches()[-1].stream

    def extend(self: Stream, new: Slots) -> None:
        if self is last:
            self.seen += new.keys.shape[2]
            raise KeyboardInterrupt
        real(self, new)

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "extend", extend)
        patch.setattr("kvsketch.hf.decoding._LEAST", 1 << 40)
        with pytest.raises(KeyboardInterrupt):
            forward(llama, ids_of(1, 9 if prompt else 1), cache)
    with pytest.raises(UnsupportedError, match="stopped in the middle"):
        forward(llama, ids_of(1, 1), cache)
    cache.reset()
    forward(llama, ids_of(1, 60), cache)


def test_a_lone_token_taken_back_has_not_looked_at_anything(llama: Any) -> None:
    cache = SketchCache(llama.config, "h2o", **SMALL)
    cache.activate_past_recording()
    forward(llama, ids_of(1, 40), cache)
    cache.crop(0)
    before = [layer.stream.scores.of(layer.stream.slots).score.clone() for layer in cache.layers]
    forward(llama, ids_of(1, 1), cache)
    cache.crop(-1)
    for layer, score in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.stream.scores.of(layer.stream.slots).score, score)


@pytest.mark.parametrize(
    ("order", "change"),
    [
        ([1, 0], lambda cache: cache.reorder_cache(torch.tensor([1, 0]))),
        ([0, 0, 1, 1], lambda cache: cache.batch_repeat_interleave(2)),
        ([1], lambda cache: cache.batch_select_indices(torch.tensor([1]))),
    ],
)
def test_rows_take_their_padding_with_them(llama: Any, order: list[int], change: Any) -> None:
    mask = torch.ones(2, 41, dtype=torch.long)
    mask[0, :5] = 0
    cache = SketchCache(llama.config, "keydiff", **SMALL)
    forward(llama, ids_of(2, 40), cache, attention_mask=mask[:, :40])
    twin = copy.deepcopy(cache)
    change(twin)
    ours = forward(llama, ids_of(2, 1)[order], twin, attention_mask=mask[order])
    theirs = forward(llama, ids_of(2, 1), cache, attention_mask=mask)
    torch.testing.assert_close(ours, theirs[order], rtol=1e-4, atol=1e-4)


def test_tokens_taken_back_beside_padding(llama: Any) -> None:
    """A crop also takes back the padding mask of the cropped tokens."""
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :5] = 0
    found = []
    for extra in (0, 3):
        cache = SketchCache(llama.config, "keydiff", **SMALL)
        cache.activate_past_recording()
        for start, end in ((0, 40), (40, 42), (42, 44)):
            ids = torch.cat([ids_of(2, end - start, start), ids_of(2, extra, 9)], dim=1)
            forward(llama, ids, cache, attention_mask=mask[:, : end + extra])
            cache.crop(-extra)
        live = cache._forward.masks.live
        assert live is not None
        assert live.tolist() == mask[:, :44].bool().tolist()
        found.append(forward(llama, ids_of(2, 1, 1), cache, attention_mask=mask[:, :45]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_repeated_and_selected_rows(family: str) -> None:
    """Rows can be reordered, repeated and selected, with the states of linear attention of a layer
    that has both."""
    import tiny_models

    model = tiny_models.build(family)
    cache = SketchCache(model.config, "keydiff", **SMALL)
    forward(model, ids_of(2, 40), cache)
    for order, change in (
        ([1, 0], lambda c: c.layers[0].reorder_cache(torch.tensor([1, 0]))),
        ([0, 0, 1, 1], lambda c: c.layers[0].batch_repeat_interleave(2)),
        ([1], lambda c: c.layers[0].batch_select_indices(torch.tensor([1]))),
    ):
        twin = copy.deepcopy(cache)
        before = [t.clone() for t in twin.layers[0].tensors()]
        change(twin)
        for old, new in zip(before, twin.layers[0].tensors(), strict=True):
            assert torch.equal(old[order], new)


def test_crop_of_nothing_changes_nothing(llama: Any) -> None:
    cache = SketchCache(llama.config, "snapkv", **SMALL)
    greedy(llama, ids_of(1, 40), cache)
    before = cache.nbytes(), cache.get_seq_length()
    cache.crop(0)
    assert (cache.nbytes(), cache.get_seq_length()) == before


def test_a_conversation_with_left_padding(llama: Any) -> None:
    """In two turns of two padded rows a cache with room for all tokens equals ``DynamicCache``, and
    in a compressed one each row has the logits that it has alone."""
    first, second = torch.ones(2, 40, dtype=torch.long), torch.ones(2, 12, dtype=torch.long)
    first[0, :5] = 0
    second[1, :4] = 0
    turns = [(ids_of(2, 40), first), (ids_of(2, 12, 1), torch.cat([first, second], dim=1))]

    def talk(cache: Any, rows: slice) -> torch.Tensor:
        out = [
            forward(
                llama,
                ids[rows],
                cache,
                attention_mask=mask[rows],
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[rows, -ids.shape[1] :],
            )
            for ids, mask in turns
        ]
        return out[-1][:, -1]

    both = slice(0, 2)
    exact = talk(DynamicCache(config=llama.config), both)
    assert torch.equal(talk(SketchCache(llama.config, "keydiff", budget=1000), both), exact)
    tight = talk(SketchCache(llama.config, "keydiff", **SMALL), both)
    for row in range(2):
        one = slice(row, row + 1)
        alone = talk(SketchCache(llama.config, "keydiff", **SMALL), one)
        torch.testing.assert_close(tight[one], alone, rtol=1e-4, atol=1e-4)


def test_a_generate_that_would_drop_the_cache_says_so() -> None:
    """Phi-3 reads everything again when a text reaches the length at which its rotary frequencies
    change, which is refused. A prompt that is longer at once uses the right frequencies from the
    start."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8},
        pad_token_id=0,
        eos_token_id=None,
        initializer_range=0.3,
    )
    model = Phi3ForCausalLM(config).eval()
    exact = greedy(model, ids_of(1, 80), None)
    lossless = SketchCache(model.config, "snapkv", budget=1.0)
    assert torch.equal(greedy(model, ids_of(1, 80), lossless), exact)
    assert lossless.get_seq_length() == 89
    cache = SketchCache(model.config, "snapkv", **SMALL)
    greedy(model, ids_of(1, 80), cache)
    assert cache.get_seq_length() == 89
    cache.reset()
    greedy(model, ids_of(1, 50), cache, new=15)
    cache.reset()
    with pytest.raises(UnsupportedError, match="changes its rotary frequencies after 64 tokens"):
        greedy(model, ids_of(1, 50), cache, new=30)
    assert cache.get_seq_length() == 64


def test_an_assistant_that_reads_the_targets_keys_is_refused() -> None:
    """Gemma 4's assistant models attend to keys and values that the target's forward returns, which
    is refused."""
    import tiny_models

    model = tiny_models.build("gemma4_text")
    cache = SketchCache(model.config, "snapkv", **SMALL)
    with pytest.raises(UnsupportedError, match="return_shared_kv_states="):
        forward(model, ids_of(1, 40), cache, return_shared_kv_states=True)
    assert cache.get_seq_length() == 0


# --- training -------------------------------------------------------------------------------------


def test_training_mode_is_refused_and_a_forgotten_no_grad_is_not(llama: Any) -> None:
    model = build("llama")
    cache = SketchCache(model.config, budget=0.5, **WINDOW)
    model.train()
    with pytest.raises(UnsupportedError, match=r"call model\.eval\(\)"):
        model(ids_of(1, 120), past_key_values=cache)
    assert cache.get_seq_length() == 0
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken = passed(model, cache)
        model(ids_of(1, 120), **taken)
        for step in range(8):
            logits = model(ids_of(1, 1, step), **taken).logits
    assert logits.requires_grad
    assert not any(t.requires_grad for layer in cache.layers for t in layer.tensors())


# --- images ---------------------------------------------------------------------------------------

_TEXT: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def seeing(family: str) -> tuple[Any, dict[str, Any]]:
    """A tiny vision-language model, and a prompt with an image."""
    torch.manual_seed(0)
    text = ids_of(1, 60)
    if family == "gemma3":
        vision = {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        }
        kinds = ["full_attention", "full_attention"]
        config: PretrainedConfig = Gemma3Config(
            text_config={**_TEXT, "head_dim": 16, "layer_types": kinds},
            vision_config=vision,
            mm_tokens_per_image=4,
            image_token_index=110,
            boi_token_index=111,
            eoi_token_index=112,
        )
        model = Gemma3ForConditionalGeneration(config)
        text[0, 10:14] = 110
        inputs = {
            "input_ids": text,
            "pixel_values": torch.randn(1, 3, 16, 16),
            "token_type_ids": (text == 110).long(),
        }
    else:
        rope = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]}
        tokens = {
            "image_token_id": 110,
            "video_token_id": 113,
            "vision_start_token_id": 111,
            "vision_end_token_id": 112,
        }
        size = {"depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
        if family == "qwen2_vl":
            vision = {**size, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 1}
            cls, config_class = Qwen2VLForConditionalGeneration, Qwen2VLConfig
        else:
            vision = {
                **size,
                "hidden_size": 32,
                "intermediate_size": 32,
                "out_hidden_size": 64,
                "window_size": 16,
                "fullatt_block_indexes": [0],
            }
            cls, config_class = Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig
        config = config_class(
            text_config={**_TEXT, "rope_scaling": rope, "rope_parameters": rope},
            vision_config=vision,
            **tokens,
        )
        model = cls(config)
        text[0, 10], text[0, 11:15], text[0, 15] = 111, 110, 112
        grid = torch.tensor([[1, 4, 4]])
        inputs = {
            "input_ids": text,
            "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
            "image_grid_thw": grid,
            "mm_token_type_ids": (text == 110).int(),
        }
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.generation_config.eos_token_id = None
    return model.eval(), {**inputs, "attention_mask": torch.ones_like(text)}


@pytest.mark.parametrize("chunk_size", [None, 40])
@pytest.mark.parametrize("queries", ["prompt", "reread"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "gemma3"])
def test_a_text_read_by_a_model_that_sees(family: str, queries: str, chunk_size: Any) -> None:
    """``prefill`` gives the positions that ``generate`` gives."""
    model, ids = seeing(family)[0], ids_of(2, 100)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **settings)
    cache = SketchCache(model.config, budget=200)
    given = {"queries": queries, "chunk_size": chunk_size, "tokenizer": Letters()}
    kvsketch.prefill(model, ids[:, :90], cache, **given)
    assert torch.equal(model.generate(ids, past_key_values=cache, **settings), expected)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_text_is_read_without_the_positions_of_earlier_images(family: str) -> None:
    """Qwen-VL keeps in the model by how much the images of the last text have moved positions."""
    model, inputs = seeing(family)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ids = ids_of(1, 100)
    expected = model.generate(ids, **settings, output_logits=True, return_dict_in_generate=True)
    moved = {**inputs, "image_grid_thw": torch.tensor([[1, 16, 16]])}
    moved["input_ids"] = torch.cat([ids_of(1, 11), torch.full((1, 64), 110), ids_of(1, 9)], 1)
    moved["input_ids"][0, 10] = 111
    moved["pixel_values"] = torch.randn(256, 3 * 2 * 4 * 4)
    moved["mm_token_type_ids"] = (moved["input_ids"] == 110).int()
    moved["attention_mask"] = torch.ones_like(moved["input_ids"])
    model.generate(**moved, **settings)
    assert int(model.model.rope_deltas) < -40
    cache = SketchCache(model.config, budget=1.0, bits=16)
    kvsketch.prefill(model, ids[:, :90], cache)
    found = model.generate(
        ids, past_key_values=cache, **settings, output_logits=True, return_dict_in_generate=True
    )
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_prefill_refuses_places_of_images(family: str) -> None:
    model, inputs = seeing(family)
    cache = SketchCache(model.config, budget=0.5)
    with pytest.raises(InputError, match=r"image_token_i\w+=110, and prefill reads text only"):
        kvsketch.prefill(model, inputs["input_ids"], cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "gemma3"])
def test_prompts_with_images(family: str) -> None:
    """With room for all tokens the ids are those without a SketchCache; an evicting cache gives the
    logits of the full cache with the same tokens hidden."""
    model, inputs = seeing(family)
    settings = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    for budget in (1.0, 1000):
        cache = SketchCache(model.config, "snapkv", budget=budget)
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **settings), expected)
    cache = SketchCache(model.config, "keydiff", keep=["positions"], **SMALL)
    exact = DynamicCache(config=model.config)
    now: dict[str, Kept] = {"kept": {}}
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        assert all(layer["compressed"] for layer in cache.summary()["layers"])
        with masked(model, exact, now):
            model(**inputs, past_key_values=exact)
        for step in range(3):
            now["kept"] = visible(cache)
            ours = forward(model, ids_of(1, 1, step), cache)
            with masked(model, exact, now):
                theirs = forward(model, ids_of(1, 1, step), exact)
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert model.generate(
        **inputs, past_key_values=SketchCache(model.config, budget=0.5, **WINDOW), **settings
    ).shape == (1, 68)


# --- compressing: generate without a cache argument -----------------------------------------------


def test_compressing_gives_every_call_a_cache_and_is_undone(
    llama: Any, expected: torch.Tensor
) -> None:
    exact = llama.generate(ids_of(1, 40), max_new_tokens=10, do_sample=False)
    before = dict(vars(llama))
    with kvsketch.compressing(llama, "snapkv", **SMALL) as caches:
        for _ in range(2):
            ids = llama.generate(ids_of(1, 40), max_new_tokens=10, do_sample=False)
            assert torch.equal(ids, expected)
        assert [cache.get_seq_length() for cache in caches] == [49, 49]
        with torch.no_grad():
            out = llama(ids_of(1, 40))
        assert out.past_key_values is caches[2]
        mine = DynamicCache(config=llama.config)
        assert torch.equal(greedy(llama, ids_of(1, 40), mine), exact)
        llama.generate(ids_of(1, 40), max_new_tokens=2, use_cache=False)
        assert len(caches) == 3
    assert vars(llama) == before
    assert torch.equal(llama.generate(ids_of(1, 40), max_new_tokens=10, do_sample=False), exact)


def test_blocks_of_several_threads_end_in_any_order(llama: Any) -> None:
    """A block that ends while a later one goes on leaves the model to it, and the last one leaves
    it as it was."""
    before = dict(vars(llama))
    exact = llama.generate(ids_of(1, 40), max_new_tokens=10, do_sample=False)
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
        blocks = [kvsketch.compressing(llama, "snapkv", **SMALL) for _ in range(3)]
        caches = [block.__enter__() for block in blocks]
        kept = llama.generate
        for done, number in enumerate(order, 1):
            blocks[number].__exit__(None, None, None)
            llama.generate(ids_of(1, 40), max_new_tokens=2, do_sample=False)
            assert sum(map(len, caches)) == min(done, 2)
        assert vars(llama) == before
        for generate in (llama.generate, kept):  # also one that somebody kept
            ids = generate(ids_of(1, 40), max_new_tokens=10, do_sample=False)
            assert torch.equal(ids, exact)


def test_a_compiled_model_is_the_model_in_it(llama: Any, tmp_path: Path) -> None:
    compiled = torch.compile(llama, backend="eager")
    with kvsketch.compressing(compiled, "snapkv", **SMALL) as caches:
        compiled.generate(ids_of(1, 40), max_new_tokens=4, do_sample=False)
        with torch.no_grad():
            compiled(ids_of(1, 40))
    assert [cache.get_seq_length() for cache in caches] == [43, 40]
    caches[0].save(tmp_path / "one.kvs")
    assert SketchCache.load(tmp_path / "one.kvs", compiled).get_seq_length() == 43
    with pytest.raises(InputError, match="must be a transformers model, got Linear"):
        SketchCache.load(tmp_path / "one.kvs", torch.nn.Linear(1, 1))


def test_checkpointing_in_training_is_refused() -> None:
    """The model drops every cache then, and ``generate`` reads the last token alone."""
    model = build("llama").train()
    cache = SketchCache(model.config, budget=0.5)
    with mock.patch.object(type(model), "is_activation_checkpointing", True, create=True):
        with pytest.raises(UnsupportedError, match=r"gradient checkpointing.*call model\.eval\(\)"):
            greedy(model, ids_of(1, 40), cache, 2)
        greedy(model.eval(), ids_of(1, 40), cache, 2)
    assert cache.get_seq_length() == 41


@pytest.mark.slow
def test_float64_in_several_turns() -> None:
    """Slots in few bits are read in float32, and exact ones beside them are not."""
    model = build("llama").double()
    model.config.max_position_embeddings = 4096
    cache = SketchCache(model.config, budget=0.1)
    ids = ids_of(1, 400)
    for turn in range(3):
        ids = greedy(model, torch.cat([ids, ids_of(1, 200, turn)], 1), cache, 30)
    assert cache.get_seq_length() == ids.shape[1] - 1
    assert cache.nbytes() < 0.25 * cache.exact_nbytes()


def test_compressing_turns_the_cache_on(llama: Any, expected: torch.Tensor) -> None:
    """A model that was saved while it was trained often has it off; a call that asks for none gets
    none."""
    off = copy.deepcopy(llama.generation_config)
    off.use_cache = False
    settings: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    exact = llama.generate(ids_of(1, 40), **settings)
    with (
        mock.patch.object(llama, "generation_config", off),
        kvsketch.compressing(llama, "snapkv", **SMALL) as caches,
    ):
        assert torch.equal(llama.generate(ids_of(1, 40), **settings), expected)
        assert [cache.get_seq_length() for cache in caches] == [49]
        for none in ({"use_cache": False}, {"generation_config": off}):
            assert torch.equal(llama.generate(ids_of(1, 40), **settings, **none), exact)
        assert len(caches) == 1


def test_compressing_refuses_before_it_changes_anything(llama: Any) -> None:
    before = dict(vars(llama))
    with pytest.raises(InputError, match="kcentre"), kvsketch.compressing(llama, "kcentre"):
        pass
    with pytest.raises(InputError, match="model must be"), kvsketch.compressing(llama.config):
        pass
    assert vars(llama) == before


def test_continuous_batching_is_refused_in_it(llama: Any) -> None:
    """It brings a cache of its own, so that nothing would be compressed."""
    before, prompts = dict(vars(llama)), ids_of(2, 40).tolist()
    with kvsketch.compressing(llama, "snapkv", **SMALL):
        with kvsketch.compressing(llama, budget=0.5):
            pass
        with pytest.raises(UnsupportedError, match="generate_batch"):
            llama.generate_batch(prompts, max_new_tokens=2)
    assert vars(llama) == before


def test_compressing_is_undone_after_an_exception(llama: Any) -> None:
    before = dict(vars(llama))
    with pytest.raises(ZeroDivisionError), kvsketch.compressing(llama, "snapkv", **SMALL):
        1 / 0  # noqa: B018
    assert vars(llama) == before


# --- user-defined methods -------------------------------------------------------------------------


class Largest(Compressor):
    """A method that keeps the largest keys."""

    name = "largest"
    paper = "none"

    def __init__(self, power: float = 1.0, seed: int = 0) -> None:
        super().__init__(seed)
        self.power = power

    def reduce(self, slots: Slots, budget: Any, asked_again: bool) -> Slots:
        return keep_top(slots, slots.keys.norm(dim=-1) ** self.power, budget)


@pytest.mark.parametrize("method", [Largest, Largest(2.0), Largest(2.0, seed=3)])
@pytest.mark.parametrize("allocation", ["even", "measured"])
def test_a_method_of_ones_own(llama: Any, method: Any, allocation: str) -> None:
    cache = SketchCache(llama.config, method, budget=0.5, allocation=allocation, **WINDOW)
    ids = greedy(llama, ids_of(2, 120), cache)
    assert ids.shape == (2, 130)
    assert cache.summary()["method"] == "largest"
    assert cache.summary()["slots"] <= 0.5 * 130 + 2
    assert pickle.loads(pickle.dumps(cache)).summary() == cache.summary()


def test_a_class_takes_options_and_an_object_does_not(llama: Any) -> None:
    SketchCache(llama.config, Largest, options={"power": 2.0})
    with pytest.raises(InputError, match="give them to Largest itself"):
        SketchCache(llama.config, Largest(), options={"power": 2.0})
    with pytest.raises(InputError, match=r"options=.*do not fit method='largest'"):
        SketchCache(llama.config, Largest, options={"powr": 2.0})


@pytest.mark.parametrize("bad", [3, None, dict, torch.nn.Linear(1, 1)])
def test_what_is_no_method_is_named(llama: Any, bad: Any) -> None:
    with pytest.raises(InputError, match="method="):
        SketchCache(llama.config, bad)


# --- wrong input ----------------------------------------------------------------------------------


def test_a_cache_used_by_two_models(llama: Any) -> None:
    other, cache = build("llama"), SketchCache(llama.config, "snapkv", **SMALL)
    greedy(llama, ids_of(1, 40), cache)
    before = cache.get_seq_length(), cache.nbytes()
    with pytest.raises(InputError, match="holds the context of another model"):
        forward(other, ids_of(1, 1), cache)
    assert (cache.get_seq_length(), cache.nbytes()) == before
    forward(llama, ids_of(1, 1), cache)
    cache.reset()
    forward(other, ids_of(1, 40), cache)


def test_a_cache_of_another_models_configuration(llama: Any) -> None:
    short = copy.deepcopy(llama.config)
    short.num_hidden_layers = 1
    cache = SketchCache(short, "snapkv", **SMALL)
    with pytest.raises(InputError, match="num_hidden_layers=1; this model has 2"):
        forward(llama, ids_of(1, 40), cache)
    assert cache.get_seq_length() == 0
    with pytest.raises(InputError, match="configuration of 1 layers, which is not this model's"):
        cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 1)


def test_a_configuration_that_lies_about_its_heads(llama: Any) -> None:
    lying = copy.deepcopy(llama.config)
    lying.num_key_value_heads = 4
    cache = SketchCache(lying, "snapkv", allocation=[[0.5, 0.5, 1.5, 1.5]] * 2, **SMALL)
    with pytest.raises(InputError, match="of 4 KV heads, and these keys have 2"):
        forward(llama, ids_of(1, 40), cache)
    assert cache.get_seq_length() == 0


def test_two_threads_in_one_cache(llama: Any) -> None:
    """A second thread is refused, and the forward of the first one is not affected."""
    caches = [SketchCache(llama.config, "snapkv", **SMALL) for _ in range(2)]
    for cache in caches:
        forward(llama, ids_of(1, 40), cache)
    said: list[str] = []

    def intrude(*_: Any) -> None:
        def run() -> None:
            try:
                forward(llama, ids_of(1, 1), caches[0])
            except UnsupportedError as error:
                said.append(str(error))

        if not said:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

    hook = llama.model.layers[0].mlp.register_forward_pre_hook(intrude)
    try:
        disturbed = forward(llama, ids_of(1, 1, 1), caches[0])
    finally:
        hook.remove()
    assert len(said) == 1
    assert "another thread is in the middle of a forward" in said[0]
    assert torch.equal(disturbed, forward(llama, ids_of(1, 1, 1), caches[1]))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("compressed", [False, True])
def test_an_exception_in_the_middle_of_a_forward(family: str, compressed: bool) -> None:
    """After an exception in a forward the cache refuses tokens until reset() is called."""
    model = build(family)
    settings = SMALL if compressed else {"budget": 1000}
    cache = SketchCache(model.config, "snapkv", **settings)
    first = greedy(model, ids_of(1, 40), cache)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    hook = model.model.layers[0].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        forward(model, ids_of(1, 1), cache)
    hook.remove()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"stopped in the middle.*call reset\(\)"):
            forward(model, ids_of(1, 1), cache)
    cache.reset()
    assert torch.equal(greedy(model, ids_of(1, 40), cache), first)


def test_an_exception_in_the_kernel_itself(
    llama: Any, monkeypatch: pytest.MonkeyPatch, expected: torch.Tensor
) -> None:
    """The cache also needs reset() where the exception is in the last layer's attention, when all
    layers have the tokens already."""
    cache = SketchCache(llama.config, "snapkv", **SMALL)
    calls = []

    def fail(kernel: Any, *a: Any, **k: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return kernel(*a, **k)

    Meddled(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        forward(llama, ids_of(1, 40), cache)
    monkeypatch.undo()
    with pytest.raises(UnsupportedError, match=r"call reset\(\)"):
        forward(llama, ids_of(1, 1), cache)
    cache.reset()
    assert torch.equal(greedy(llama, ids_of(1, 40), cache), expected)
    other = build("llama")  # other models are not affected
    forward(other, ids_of(1, 8), DynamicCache(config=other.config))


def test_a_dropped_cache_is_freed(llama: Any) -> None:
    import weakref

    cache = SketchCache(llama.config, "snapkv", **SMALL)
    greedy(llama, ids_of(1, 40), cache)
    layer = weakref.ref(cache.layers[0])
    del cache
    gc.collect()
    assert layer() is None


def test_a_cache_is_not_copied_in_the_middle_of_a_forward(llama: Any) -> None:
    cache = SketchCache(llama.config, "snapkv", **SMALL)
    cache.update(*torch.randn(2, 1, 2, 4, 16, generator=torch.Generator().manual_seed(0)), 0)
    with pytest.raises(KVSketchError, match="middle of a forward"):
        copy.deepcopy(cache)
    cache.reset()
    copy.deepcopy(cache)


_SETTINGS: list[dict[str, Any]] = [
    {"budget": 0.3},
    {"budget": 60},
    {"budget": 0.3, "bits": 16},
    {"budget": 0.3, "allocation": "measured"},
    {"tolerance": 0.2},
    {"budget": 60, "prefill": "streaming"},
    {"method": "h2o", "budget": 0.3, "bits": 8},
]
_OF_METHODS = [{"method": name, "budget": 60} for name in EVERY_METHOD]


@contextlib.contextmanager
def defaults(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.bfloat16},
        {"device": "meta"},  # what is not given the cache's device has no numbers there
        *(pytest.param({"dtype": x}, marks=pytest.mark.slow) for x in (torch.half, torch.double)),
    ],
    ids=lambda other: str(*other.values()),
)
@pytest.mark.parametrize(
    "given",
    [*_SETTINGS, *(pytest.param(x, marks=pytest.mark.slow) for x in _OF_METHODS)],
    ids=lambda given: "-".join(map(str, given.values())),
)
def test_the_default_dtype_and_device_do_not_matter(
    llama: Any, given: dict[str, Any], other: dict[str, Any]
) -> None:
    """Scripts set them to load a model. Kernels write into memory of a known dtype."""
    ids, mask = ids_of(2, 200), torch.ones(2, 200, dtype=torch.int64)
    mask[0, :9] = 0
    found = []
    for now in ({}, other):
        with defaults(**now):
            cache = SketchCache(llama.config, **WINDOW, seed=0, **given)
            found.append((greedy(llama, ids, cache, 40, attention_mask=mask), cache))
    (tokens, one), (others, two) = found
    assert torch.equal(tokens, others)
    assert one.nbytes() == two.nbytes()
    for mine, theirs in zip(one._sketches(), two._sketches(), strict=True):
        assert torch.equal(mine.stream.slots.values, theirs.stream.slots.values)
        assert mine.stream.slots.values.dtype == theirs.stream.slots.values.dtype
