"""Caches on a CUDA device answer as on the CPU. Run them on a machine with a GPU: ``make gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvsketch
from families import EVERY_METHOD, build
from kvsketch import SketchCache, packaged_model
from kvsketch.evaluation.runner.longeval import make_cases, read_answer
from tiny_model import small_llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOKENS, NEW = 300, 12
#: Settings of the default method, by what they use.
SETUPS: dict[str, dict[str, Any]] = {
    "default": {"budget": 0.3},
    "slots": {"budget": 90, "allocation": "even"},
    "16 bits": {"budget": 0.3, "bits": 16},
    "8 bits": {"budget": 0.3, "bits": 8},
    "4 bits": {"budget": 0.3, "bits": 4},
    "by scores": {"budget": 0.3, "allocation": "global"},
    "bounded": {"tolerance": 0.2, "budget": 0.5},
    "streaming": {"budget": 90, "prefill": "streaming"},
    "long answers": {"budget": 90, "prefill": "streaming", "bits": 4},
}
#: Families whose attention has something of its own: soft-capping, sliding windows, ALiBi.
FAMILIES = ["llama", "gemma2", "gemma3", "mpt", "opt"]


def answer(model: Any, tokens: int = TOKENS, batch: int = 1, new: int = NEW, **setup: Any) -> Any:
    """The tokens decoded after a random prompt, and the cache."""
    draw = torch.Generator().manual_seed(0)
    # No token twice: methods may choose between equal ones by rounding.
    ids = torch.stack([3 + torch.randperm(509, generator=draw)[:tokens] for _ in range(batch)])
    mask = torch.ones_like(ids)
    mask[1:, : tokens // 3] = 0
    ids, mask = ids.to(model.device), mask.to(model.device)
    cache = SketchCache(model.config, setup.pop("method", "heavy_merge"), **setup)
    out = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        prefill_chunk_size=64 if setup.get("prefill") == "streaming" else None,
    )
    return out[:, tokens:].tolist(), cache


def both(model: Any, **setup: Any) -> None:
    """Check that the answers on both devices are the same, and that the caches are of one size."""
    expected, here = answer(model.to("cpu"), **setup)
    found, there = answer(model.to("cuda"), **setup)
    assert found == expected
    assert there.layers[0].keys.device.type == "cuda"
    assert there.nbytes() == here.nbytes()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_method_answers_as_on_the_cpu(method: str, batch: int) -> None:
    """In float64, so that rounding on two devices cannot lead to other tokens."""
    model = small_llama(512).eval().double()
    if method == "expected_attention":  # most of whose scores are 0 with such large products
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data.mul_(0.05)
    both(model, method=method, budget=90, batch=batch)


@pytest.mark.parametrize("name", SETUPS)
def test_every_setting_answers_as_on_the_cpu(name: str) -> None:
    both(small_llama(512).eval().double(), **SETUPS[name])


@pytest.mark.parametrize("way", ["beams", "sampling", "fork"])
def test_every_way_to_generate_answers_as_on_the_cpu(way: str) -> None:
    model = small_llama(512).eval().double()
    ids = 3 + torch.randperm(509, generator=torch.Generator().manual_seed(2))[None, :TOKENS]
    found = []
    for device in ("cpu", "cuda"):
        model, ids = model.to(device), ids.to(device)
        cache = SketchCache(model.config, budget=0.3)
        if way == "fork":
            kvsketch.prefill(model, ids[:, :-1], cache)
            cache = cache.fork()
        extra = {"num_beams": 3 if way == "beams" else 1, "num_return_sequences": 1}
        if way == "sampling":  # of one token, so that two devices cannot draw others
            extra |= {"do_sample": True, "top_k": 1}
        out = model.generate(ids, past_key_values=cache, max_new_tokens=80, **extra)
        found.append(out[0, TOKENS:].tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [16, 4])
@torch.no_grad()
def test_every_kind_of_attention_is_that_of_the_cpu(family: str, bits: int) -> None:
    """In float32, where the Triton kernels read the slots."""
    ids = torch.randint(3, 90, (2, 200), generator=torch.Generator().manual_seed(0))
    found = []
    for device in ("cpu", "cuda"):
        model = build(family).eval().to(device)
        cache = SketchCache(model.config, "snapkv", budget=40, sink=2, recent=8, bits=bits)
        logits = [
            model(some.to(device), past_key_values=cache, use_cache=True).logits[:, -1].cpu()
            for some in (ids[:, :120], *ids[:, 120:140].split(1, dim=1), ids[:, 140:160])
        ]
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[1], found[0], rtol=2e-3, atol=2e-3)


@pytest.fixture(scope="module")
def spread() -> Any:
    name = packaged_model("spread")
    tokenizer = AutoTokenizer.from_pretrained(name)
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval(), tokenizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", ["prompt", "sample", "reread"])
def test_a_model_that_retrieves_answers_right(spread: Any, queries: str, dtype: Any) -> None:
    """LongEval with 200 lines, of which a fifth is kept."""
    model, tokenizer = spread
    model = model.to("cuda", dtype)
    right = {"exact": 0, "kept": 0}
    pytest.importorskip("wonderwords", reason="needs wonderwords, which names the lines")
    for case in make_cases([200], 6, 0):
        ids = tokenizer(case.prompt, return_tensors="pt").input_ids.to("cuda")
        cache = SketchCache(model.config, budget=0.2)
        kvsketch.prefill(model, ids[:, :-1], cache, queries=queries, tokenizer=tokenizer)
        for name, held in (("exact", DynamicCache(config=model.config)), ("kept", cache)):
            out = model.generate(ids, past_key_values=held, max_new_tokens=12, do_sample=False)
            text = tokenizer.decode(out[0, ids.shape[1] :])
            right[name] += read_answer(text) == case.expected
    assert right["exact"] >= 5
    assert right["kept"] >= right["exact"] - 1


def test_a_file_is_opened_on_either_device(tmp_path: Path) -> None:
    model = small_llama().eval().double()
    ids = torch.randint(3, 90, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    answers = []
    for made, read in (("cpu", "cpu"), ("cuda", "cpu"), ("cuda", "cuda"), ("cpu", "cuda")):
        model = model.to(made)
        cache = SketchCache(model.config, budget=0.3)
        kvsketch.prefill(model, ids.to(made), cache)
        cache.save(tmp_path / "cache.kvs")
        model = model.to(read)
        cache = SketchCache.load(tmp_path / "cache.kvs", model)
        more = torch.cat([ids, ids[:, :5]], dim=1).to(read)
        out = model.generate(more, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        answers.append(out[0, more.shape[1] :].tolist())
    assert answers == answers[:1] * 4
