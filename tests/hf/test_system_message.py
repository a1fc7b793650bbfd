"""The system message of a chat template is pinned by ``prefill``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import kvsketch
from kvsketch import SketchCache
from kvsketch.errors import AccuracyWarning
from kvsketch.evaluation.runner import loading
from kvsketch.hf.system_message import system_tokens

ROLES = (
    "{{ bos_token }}{% for m in messages %}about {{ m.role }} north {{ m.content }} south "
    "{% endfor %}{% if add_generation_prompt %}about assistant north {% endif %}"
)
SYSTEM = "brave calm dark early fair glad"


@pytest.fixture(scope="module")
def packaged() -> Any:
    folder = loading.resolve_model("packaged")
    return loading.load_model(folder, "cpu", "float32"), loading.load_tokenizer(folder)


def ids_of(tokenizer: Any, system: str | None, template: str = ROLES) -> torch.Tensor:
    tokenizer.chat_template = template
    said = [{"role": "user", "content": "line " * 300}]
    if system is not None:
        said.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(said, tokenize=False)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


def read(packaged: Any, ids: torch.Tensor, **given: Any) -> SketchCache:
    model, tokenizer = packaged
    own = {k: given.pop(k) for k in ("pin_system", "attention_mask") if k in given}
    cache = SketchCache(model.config, **{"budget": 64, **given})
    kvsketch.prefill(model, ids, cache, tokenizer=tokenizer, **own)
    return cache


def pinned(cache: SketchCache) -> int:
    return int(cache.summary()["pinned"])


def test_it_is_pinned_to_its_last_token(packaged: Any) -> None:
    tokenizer = packaged[1]
    ids = ids_of(tokenizer, SYSTEM)
    count = system_tokens(tokenizer, ids)
    assert tokenizer.decode(ids[0, :count]).endswith(f"{SYSTEM} ")
    cache = read(packaged, ids)
    assert pinned(cache) == count - 4  # the others are sinks
    cache = read(packaged, ids, allocation="even", bits=16)
    exact = SketchCache(packaged[0].config, budget=1.0, bits=16)
    kvsketch.prefill(packaged[0], ids, exact)
    for mine, theirs in zip(cache._sketches(), exact._sketches(), strict=True):
        assert torch.equal(
            mine.stream.slots.keys[:, :, :count], theirs.stream.slots.keys[:, :, :count]
        )


@pytest.mark.parametrize(
    "given",
    [
        {"pin_system": False},
        {"method": "subgen"},
        {"attention_mask": 1},
    ],
    ids=str,
)
def test_where_it_is_not(packaged: Any, given: dict[str, Any]) -> None:
    ids = ids_of(packaged[1], SYSTEM)
    if "attention_mask" in given:
        mask = torch.ones_like(ids)
        mask[0, 0] = 0
        given = {"attention_mask": mask}
    cache = read(packaged, ids, **given)
    assert given.get("method") == "subgen" or pinned(cache) == 0


def test_what_is_no_system_message(packaged: Any) -> None:
    tokenizer = packaged[1]
    assert system_tokens(tokenizer, ids_of(tokenizer, None)) == 0
    ids = ids_of(tokenizer, SYSTEM)
    both = torch.cat([ids, ids_of(tokenizer, SYSTEM + " hill")[:, : ids.shape[1]]])
    assert system_tokens(tokenizer, both) == 0
    assert system_tokens(tokenizer, both[:1].expand(2, -1)) > 0
    for template in (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ messages[-1].content }}",
        "{{ bos_token }}{% for m in messages %}{{ m.content }} line {% endfor %}",
    ):
        tokenizer.chat_template = template
        assert system_tokens(tokenizer, ids) == 0
    tokenizer.chat_template = None
    assert system_tokens(tokenizer, ids) == 0


def test_one_of_more_than_half_of_the_budget_is_named(packaged: Any) -> None:
    ids = ids_of(packaged[1], SYSTEM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = system_tokens(packaged[1], ids)
    with pytest.warns(AccuracyWarning, match=f"system message has {count} tokens, more than half"):
        cache = read(packaged, ids, budget=2 * count - 1, recent=2)
    assert pinned(cache) == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the system message")
        assert pinned(read(packaged, ids, budget=2 * count, recent=2)) == count - 4


def test_one_that_leaves_no_room_beside_the_recent_tokens_is_named(packaged: Any) -> None:
    """The budget is that of an earlier call, which must not fail now."""
    ids = ids_of(packaged[1], SYSTEM)
    count = system_tokens(packaged[1], ids)
    with pytest.warns(AccuracyWarning, match=f"beside {count} recent tokens"):
        cache = read(packaged, ids, budget=2 * count, recent=count)
    assert pinned(cache) == 0
    assert pinned(read(packaged, ids, budget=2 * count + 1, recent=count)) == count - 4
