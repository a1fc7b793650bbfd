"""A cache that was saved and loaded continues with the same bits as one that was not."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM, OPTConfig

import kvsketch
import tiny_models
from families import CONFIGS, build
from kvsketch import (
    ALL_METHODS,
    Curves,
    InputError,
    RetrievalHeads,
    SketchCache,
    UnsupportedError,
    prefill,
)
from kvsketch.cache.sketch_page import SketchPage
from kvsketch.methods.registry import REREADING
from kvsketch.methods.snapkv import SnapKV
from kvsketch.page.page import Page
from kvsketch.slots import Slots
from model_sweep import Letters

WINDOW: dict[str, Any] = {"sink": 2, "recent": 6}
RAGGED = [[1.5, 0.5], [0.6, 1.4]]


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def ids_of(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 90, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, cache: Any, **more: Any) -> torch.Tensor:
    found: torch.Tensor = model(ids, past_key_values=cache, use_cache=True, **more).logits
    return found


@torch.no_grad()
def goes_on(model: Any, *caches: Any, steps: int = 20) -> list[list[torch.Tensor]]:
    """For each cache the logits of single tokens, a chunk and more tokens; the tokens are the
    model's own predictions."""
    rows = caches[0]._sketches()[0].token_shape[0]
    found = []
    for cache in caches:
        ids, logits = ids_of(rows, 1, 5), []
        for step in range(steps + 10):
            if step == steps:
                ids = ids_of(rows, 9, 6)
            logits.append(forward(model, ids, cache)[:, -1])
            ids = logits[-1].argmax(-1, keepdim=True)
        found.append(logits)
    return found


def same_after_loading(model: Any, cache: SketchCache, folder: Path) -> SketchCache:
    """Save and load a cache, and check that both and a fork continue with the same logits; returns
    a copy of the loaded cache from before that."""
    path = folder / "cache.kvs"
    cache.save(path)
    loaded = SketchCache.load(path, model)
    assert loaded.nbytes() <= cache.nbytes()
    assert loaded.error() == cache.error()
    first, twin = copy.deepcopy(loaded), cache.fork()
    kept, again, forked = goes_on(model, cache, loaded, twin)
    for one, two, three in zip(kept, again, forked, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    for one, two in zip(cache.summary()["layers"], loaded.summary()["layers"], strict=True):
        # A file does not store all empty slots, which count as bytes.
        assert two["kv_bytes"] <= one["kv_bytes"]
        assert {**one, "kv_bytes": 0} == {**two, "kv_bytes": 0}
    return first


def read(model: Any, cache: SketchCache, ids: torch.Tensor) -> SketchCache:
    if cache.method in REREADING:
        prefill(model, ids, cache, queries="reread", tokenizer=Letters())
    else:
        forward(model, ids, cache)
    return cache


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_method_goes_on_with_the_same_bits(method: str, llama: Any, tmp_path: Path) -> None:
    model = llama
    if method == "one_dimensional":
        torch.manual_seed(0)
        sizes = {"hidden_size": 4, "word_embed_proj_dim": 4}
        config = OPTConfig(**{**CONFIGS["opt"]().to_dict(), **sizes})
        model = AutoModelForCausalLM.from_config(config).eval()
    cache = SketchCache(model.config, method, budget=40, seed=3, keep=["errors"], **WINDOW)
    forward_ids = ids_of(2, 110)
    read(model, cache, forward_ids)
    goes_on(model, cache, steps=10)  # draws random numbers while decoding
    assert cache._sketches()[0].stream.compressed
    same_after_loading(model, cache, tmp_path)


FORMS: dict[str, tuple[str, dict[str, Any], type]] = {
    "tokens": ("snapkv", {"budget": 200, "bits": 16}, "tokens"),
    "waiting": ("heavy_merge", {"tolerance": 0.2}, "tokens"),
    "plain": ("snapkv", {"budget": 0.4}, "exact"),
    "masses": ("heavy_merge", {"budget": 0.4, "bits": 16, "allocation": "even"}, "exact"),
    "positions": ("snapkv", {"budget": 0.4, "keep": ["positions"]}, "exact"),
    "ragged": ("heavy_merge", {"budget": 0.4, "bits": 16, "allocation": RAGGED}, "exact"),
    "ragged snapkv": ("snapkv", {"budget": 40, "allocation": RAGGED}, "exact"),
    "measured": ("heavy_merge", {"budget": 0.4, "bits": 16}, "exact"),
    "tolerance": ("heavy_merge", {"tolerance": 0.3, "bits": 16}, "exact"),
    "8 bits": ("snapkv", {"budget": 0.4, "bits": 8}, "few bits"),
    "4 bits": ("heavy_merge", {"budget": 0.4, "bits": 4, "allocation": "even"}, "few bits"),
    "all in 4 bits": ("heavy_merge", {"budget": 1.0, "bits": 4}, "few bits"),
    "mixed bits": ("heavy_merge", {"budget": 0.4}, "few bits"),
    "ragged bits": ("heavy_merge", {"budget": 0.5, "bits": 8, "allocation": RAGGED}, "few bits"),
    "sketch": ("subgen", {"budget": 40}, "sketch"),
    "sketches": ("subgen_coupled", {"budget": 48, "allocation": RAGGED}, "sketches"),
    "one shot": ("snapkv", {"budget": 40, "keep": ["decoded"]}, "exact"),
    "streaming": ("uniform", {"budget": 40, "prefill": "streaming"}, "exact"),
    "pieces in few bits": (
        "heavy_merge",
        {"budget": 40, "prefill": "streaming", "bits": 8, "allocation": "even"},
        "few bits",
    ),
    "heads": ("streaming_llm", {"budget": 0.5, "allocation": "heads"}, "exact"),
    "curves": ("heavy_merge", {"budget": 0.4, "allocation": "curves", "bits": 16}, "exact"),
}


def form_of(page: Any) -> str:
    """How a layer holds what it has."""
    if isinstance(page, Page):
        few = "exact" if page.middle is None else "few bits"
        return "tokens" if page.exact.grows else few
    assert isinstance(page, SketchPage)
    return "sketch" if page.places is None else "sketches"


def made(model: Any, form: str) -> tuple[SketchCache, str]:
    method, settings, page = FORMS[form]
    settings = dict(settings)
    if settings.get("allocation") == "heads":
        settings["allocation"] = RetrievalHeads(torch.tensor([[0.1, 0.9], [0.8, 0.2]]))
    if settings.get("allocation") == "curves":
        error = torch.tensor([[[0.9, 0.1, 0.0]] * 2, [[0.2, 0.1, 0.0]] * 2], dtype=torch.float64)
        settings["allocation"] = Curves(error, torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64))
    return SketchCache(model.config, method, **WINDOW, **settings), page


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_goes_on_with_the_same_bits(
    form: str, rows: int, llama: Any, tmp_path: Path
) -> None:
    cache, page = made(llama, form)
    tokens = 60 if form == "waiting" else 150
    forward(llama, ids_of(rows, tokens), cache)
    for _ in range(3):
        forward(llama, ids_of(rows, 1), cache)
    assert form_of(cache._sketches()[-1].stream.page) == page
    loaded = same_after_loading(llama, cache, tmp_path)
    again = tmp_path / "again.kvs"
    loaded.save(again)  # the loaded cache as it was before it continued
    assert again.read_bytes() == (tmp_path / "cache.kvs").read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["tokens", "measured", "mixed bits", "sketch"])
def test_half_precision_goes_on_with_the_same_bits(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = build("llama").to(dtype)
    cache, _ = made(model, form)
    forward(model, ids_of(1, 150), cache)
    same_after_loading(model, cache, tmp_path)


@pytest.mark.parametrize("form", ["tokens", "plain", "masses", "mixed bits", "sketch"])
def test_padded_rows_go_on_with_the_same_bits(form: str, llama: Any, tmp_path: Path) -> None:
    mask = torch.ones(2, 150, dtype=torch.int64)
    mask[0, :40] = 0
    cache, _ = made(llama, form)
    forward(llama, ids_of(2, 150), cache, attention_mask=mask)
    cache.save(tmp_path / "padded.kvs")
    loaded = SketchCache.load(tmp_path / "padded.kvs", llama)
    for step in range(30):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], dim=1)
        one, two = (
            forward(llama, ids_of(2, 1, step), c, attention_mask=mask) for c in (cache, loaded)
        )
        assert torch.equal(one, two)


@pytest.mark.parametrize(("budget", "tokens"), [(0.1, 5), (0.5, 5)])
def test_a_sketch_of_a_few_tokens_can_be_loaded(
    budget: float, tokens: int, llama: Any, tmp_path: Path
) -> None:
    """Its window has held exact tokens, and all of them are in the sketch."""
    cache = SketchCache(llama.config, "subgen", budget=budget)
    forward(llama, ids_of(1, tokens), cache)
    for step in range(22 if budget < 0.5 else 0):
        forward(llama, ids_of(1, 1, step), cache)
    cache.save(tmp_path / "cache.kvs")
    loaded = SketchCache.load(tmp_path / "cache.kvs", llama)
    assert torch.equal(*(forward(llama, ids_of(1, 1), c) for c in (cache, loaded)))


@pytest.mark.parametrize("kind", [{}, {"new_decoder_architecture": True}, {"multi_query": False}])
def test_falcon_can_be_saved_with_one_kv_head_or_many(
    kind: dict[str, bool], tmp_path: Path
) -> None:
    sizes = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "alibi": False}
    model = FalconForCausalLM(FalconConfig(**sizes, num_attention_heads=4, **kind)).eval()
    cache = SketchCache(model.config, budget=0.4, **WINDOW)
    forward(model, ids_of(1, 150), cache)
    same_after_loading(model, cache, tmp_path)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mpt", "opt", "qwen3"])
def test_families_go_on_with_the_same_bits(family: str, tmp_path: Path) -> None:
    model = build(family)
    cache = SketchCache(model.config, budget=0.4, **WINDOW)
    forward(model, ids_of(2, 150), cache)
    same_after_loading(model, cache, tmp_path)


@pytest.mark.parametrize(
    "family",
    ["falcon_h1", "lfm2", "deepseek_v3", "qwen3_next", "gpt_oss", "gemma3n_text", "nemotron_h"],
)
def test_hybrids_latents_and_sinks_go_on_with_the_same_bits(family: str, tmp_path: Path) -> None:
    model = tiny_models.build(family)
    cache = SketchCache(model.config, "snapkv", budget=30, **WINDOW)
    forward(model, ids_of(1, 60), cache)
    same_after_loading(model, cache, tmp_path)


def test_the_file_is_safetensors_with_a_header(llama: Any, tmp_path: Path) -> None:
    cache, _ = made(llama, "mixed bits")
    forward(llama, ids_of(1, 150), cache)
    path = tmp_path / "cache.kvs"
    cache.save(path, about={"document": "a"})
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["kvsketch"])
        held = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert header["version"] == 4
    assert header["kind"] == "cache"
    assert header["summary"]["method"] == "heavy_merge"
    assert header["summary"]["tokens"] == 150
    assert 0 < header["summary"]["error"]["mean"] <= header["summary"]["error"]["largest"]
    assert SketchCache.load(path, llama).about == {"document": "a"}
    assert held <= 1.02 * cache.nbytes()


def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    llama: Any, tmp_path: Path
) -> None:
    path = tmp_path / "cache.kvs"
    cache = SketchCache(llama.config, "snapkv", budget=40, **WINDOW)
    with pytest.raises(UnsupportedError, match="empty"):
        cache.save(path)
    torn = SketchCache(llama.config, "snapkv", budget=40, **WINDOW)
    forward(llama, ids_of(1, 100), torn)
    keys = torch.zeros(1, 2, 1, 16)
    torn.update(keys, keys, 0)  # but no other layer
    with pytest.raises(UnsupportedError, match="in the middle of a forward"):
        torn.save(path)
    stopped = SketchCache(llama.config, "snapkv", budget=40, **WINDOW)
    forward(llama, ids_of(1, 100), stopped)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = llama.model.layers[1].self_attn.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(llama, ids_of(1, 1), stopped)
    hook.remove()
    with pytest.raises(UnsupportedError, match="in the middle of a forward, or stopped there"):
        stopped.save(path)
    own = SketchCache(llama.config, SnapKV(window=16), budget=40, **WINDOW)
    forward(llama, ids_of(1, 100), own)
    with pytest.raises(UnsupportedError, match="'snapkv' is a Compressor"):
        own.save(path)
    forward(llama, ids_of(1, 100), cache)
    cache.activate_past_recording()
    cache.save(path)  # nothing of its past can be removed yet
    path.unlink()
    forward(llama, ids_of(1, 3), cache)
    with pytest.raises(UnsupportedError, match=r"tokens that crop.. may remove"):
        cache.save(path)
    again = SketchCache(llama.config, "snapkv", budget=40, **WINDOW)
    forward(llama, ids_of(1, 100), again)
    with pytest.raises(InputError, match="JSON"):
        again.save(path, about={"what": object()})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [5, None, "", "a" * 300, "a\0b"], ids=repr)
def test_what_is_no_path_is_an_error_that_names_it(llama: Any, path: Any) -> None:
    cache = SketchCache(llama.config, budget=40)
    forward(llama, ids_of(1, 30), cache)
    with pytest.raises(InputError, match=r"path|written"):
        cache.save(path)
    with pytest.raises(InputError, match=re.escape(repr(path))):
        SketchCache.load(path, llama)


def test_numbers_of_numpy_are_saved_too(llama: Any, tmp_path: Path) -> None:
    numbers: dict[str, Any] = {
        "budget": np.int64(40),
        "sink": np.int32(2),
        "recent": np.int64(6),
        "bits": np.int64(16),
        "seed": np.int64(3),
        "prefill": np.int64(100),
    }
    cache = SketchCache(llama.config, "snapkv", options={"window": np.int64(8)}, **numbers)
    forward(llama, ids_of(1, 100), cache)
    same_after_loading(llama, cache, tmp_path)
    share = SketchCache(llama.config, "snapkv", budget=np.float32(0.5), **WINDOW)
    forward(llama, ids_of(1, 100), share)
    assert same_after_loading(llama, share, tmp_path).arguments["budget"] == 0.5
    odd = SketchCache(llama.config, "snapkv", budget=40, options={"window": 8}, **WINDOW)
    forward(llama, ids_of(1, 100), odd)
    odd.arguments["options"] = {"window": object()}
    with pytest.raises(UnsupportedError, match=r"options=.* cannot be represented in JSON"):
        odd.save(tmp_path / "odd.kvs")


@pytest.mark.parametrize("read", ["generate", "prefill", "compressing", "forked", "loaded"])
def test_other_weights_outside_of_attention_are_refused(
    llama: Any, tmp_path: Path, read: str
) -> None:
    """Keys depend on embeddings, norms and MLPs, too. A model is known that read the text by a call
    of ours or of transformers."""
    path, ids = tmp_path / "cache.kvs", ids_of(1, 100)
    cache = SketchCache(llama.config, "snapkv", budget=40, **WINDOW)
    if read == "prefill":
        kvsketch.prefill(llama, ids, cache)
    elif read == "compressing":
        with kvsketch.compressing(llama, "snapkv", budget=40, **WINDOW) as caches:
            forward(llama, ids, None)
        (cache,) = caches
    else:
        llama.generate(ids, past_key_values=cache, max_new_tokens=2)
    cache = cache.fork() if read == "forked" else cache
    cache.save(path)
    if read == "loaded":
        SketchCache.load(path, build("llama")).save(path)
    assert SketchCache.load(path, build("llama")).get_seq_length() >= 100
    for name in ("embed_tokens", "layers.0.mlp.down_proj", "layers.1.input_layernorm"):
        tuned = build("llama")
        tuned.model.get_submodule(name).weight.data.mul_(1.1)
        with pytest.raises(InputError, match="other weights"):
            SketchCache.load(path, tuned)


def test_quantised_weights_are_compared(llama: Any, tmp_path: Path) -> None:
    """Weights that are stored as buffers, or that are made of several tensors."""

    class Quantised(torch.nn.Module):
        def __init__(self, linear: Any) -> None:
            super().__init__()
            self.register_buffer("scale", linear.weight.detach().abs().amax() / 127)
            self.register_buffer("codes", (linear.weight.detach() / self.scale).round().char())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.codes * self.scale).mT

    def quantised(factor: float) -> Any:
        model = build("llama")
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.data.mul_(factor)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                one = getattr(layer.self_attn, name)
                setattr(layer.self_attn, name, Quantised(one))
        return model

    path = tmp_path / "cache.kvs"
    cache = SketchCache(llama.config, "snapkv", budget=40, **WINDOW)
    model = quantised(1.0)
    forward(model, ids_of(1, 100), cache)  # its attention alone is known
    cache.save(path)
    SketchCache.load(path, quantised(1.0))
    with pytest.raises(InputError, match="other weights"):
        SketchCache.load(path, quantised(2.0))


def test_another_model_or_tokenizer_is_refused(llama: Any, tmp_path: Path) -> None:
    from tiny_model import tiny_tokenizer

    path, tokenizer = tmp_path / "cache.kvs", tiny_tokenizer()
    cache = SketchCache(llama.config, "snapkv", budget=40, **WINDOW)
    forward(llama, ids_of(1, 100), cache)
    cache.save(path, tokenizer=tokenizer)
    SketchCache.load(path, llama, tokenizer=tokenizer)
    with pytest.raises(InputError, match="of another model"):
        SketchCache.load(path, build("qwen3"))
    tuned = build("llama")
    with torch.no_grad():
        tuned.model.layers[1].self_attn.k_proj.weight.mul_(1.1)
    with pytest.raises(InputError, match="other weights"):
        SketchCache.load(path, tuned)
    with pytest.raises(InputError, match="dtype=float32"):
        SketchCache.load(path, build("llama").to(torch.bfloat16))
    loaded = SketchCache.load(path, llama)
    loaded.save(path)
    with pytest.raises(InputError, match="other weights"):
        SketchCache.load(path, tuned)
    cache.save(path, tokenizer=tokenizer)
    other = tiny_tokenizer()
    other.add_tokens(["a new one"])
    with pytest.raises(InputError, match="another tokenizer"):
        SketchCache.load(path, llama, tokenizer=other)


@pytest.mark.parametrize("method", ["uniform", "heavy_merge", "subgen"])
def test_copies_of_a_fork_choose_what_one_would_choose(method: str, llama: Any) -> None:
    cache = SketchCache(llama.config, method, budget=40, seed=1, **WINDOW)
    forward(llama, ids_of(1, 110), cache)
    three = cache.fork(copies=3)
    (alone,) = goes_on(llama, cache)
    (side,) = goes_on_from_same(llama, three)
    for one, many in zip(alone, side, strict=True):
        torch.testing.assert_close(many, one.expand(3, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["snapkv", "chunkkv", "rkv"])
def test_rows_of_a_fork_have_the_scores_that_one_would_have(method: str) -> None:
    """How many decoded queries become scores together does not depend on the number of rows."""
    model = build("opt").double()
    cache = SketchCache(model.config, method, budget=128, seed=2)
    forward(model, ids_of(1, 200, 2), cache)
    three = cache.fork(copies=3)
    folds = [c._sketches()[0].stream.scores for c in (cache, three)]
    assert folds[0].row_bytes == folds[1].row_bytes
    for step in range(90):
        ids = ids_of(1, 1, 100 + step)
        alone = forward(model, ids, cache)
        side = forward(model, ids.expand(3, -1), three)
        torch.testing.assert_close(side, alone.expand(3, -1, -1), rtol=1e-9, atol=1e-9)


def goes_on_from_same(model: Any, cache: SketchCache) -> list[list[torch.Tensor]]:
    """As ``goes_on``, where the first token and the chunk are the same in all rows."""
    logits, ids = [], ids_of(1, 1, 5).expand(3, -1)
    for step in range(30):
        if step == 20:
            ids = ids_of(1, 9, 6).expand(3, -1)
        logits.append(forward(model, ids, cache)[:, -1])
        ids = logits[-1].argmax(-1, keepdim=True)
    return [logits]


def test_a_fork_leaves_the_first_as_it_was_and_shares_what_is_never_written(llama: Any) -> None:
    cache, _ = made(llama, "all in 4 bits")
    forward(llama, ids_of(1, 150), cache)
    twin = cache.fork()
    mine, theirs = (c._sketches()[0].stream.page for c in (cache, twin))
    assert mine.middle.packed["keys"].codes is theirs.middle.packed["keys"].codes
    assert mine.exact.fields["keys"].data_ptr() != theirs.exact.fields["keys"].data_ptr()
    held, before = cache._sketches()[0].stream.slots.map(torch.clone), cache.summary()
    goes_on(llama, twin)
    now = cache._sketches()[0].stream.slots
    for name, tensor in held.tensors().items():
        assert torch.equal(tensor, now.tensors()[name])
    assert cache.summary() == before
    assert twin.get_seq_length() > cache.get_seq_length()


def test_a_fork_of_tokens_has_its_own_padding() -> None:
    zeros = torch.zeros(1, 2, 5, 4)
    tokens = Page.of_tokens(Slots(zeros, zeros))
    tokens.mark_last(torch.tensor([[False, True, True]]))
    twin = copy.deepcopy(tokens)
    assert twin.slots.keys.data_ptr() == tokens.slots.keys.data_ptr()
    twin.mark_last(torch.tensor([[False, False]]))
    live = tokens.slots.masses()[0, 0] > 0
    assert live.tolist() == [True, True, False, True, True]
