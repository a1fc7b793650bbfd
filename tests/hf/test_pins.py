"""Pinned tokens are never compressed, wherever they are, and count in the budget."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

from kvsketch import InputError, SketchCache, UnsupportedError
from kvsketch.cache.pins import Pins
from kvsketch.cli.app import app
from kvsketch.files.format import read as read_file
from kvsketch.hf.joining import join
from kvsketch.page.quantized import FULL
from kvsketch.vllm.saved import saved_of
from tiny_models import build

SPANS = ((2, 8), (100, 130), (250, 260))
BUDGET = 120


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def ids_of(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (rows, tokens), generator=generator)


def read(model: Any, cache: Any, ids: torch.Tensor, *sizes: int) -> Any:
    with torch.no_grad():
        for part in ids.split(list(sizes), dim=1):
            model(part, past_key_values=cache, use_cache=True)
    return cache


def check(model: Any, cache: SketchCache, ids: torch.Tensor) -> None:
    """Sinks, then the pinned tokens, are as in the exact cache, in every layer and head."""
    exact = read(model, DynamicCache(config=model.config), ids, ids.shape[1])
    wanted = [*range(4), *range(4, 8), *range(100, 130), *range(250, 260)]
    for layer, whole in zip(cache._sketches(), exact.layers, strict=True):
        slots = layer.stream.page.read()
        live = slots.live()
        for row in range(len(ids)):
            for head in range(slots.keys.shape[1]):
                for name, held in (("keys", slots.keys), ("values", slots.values)):
                    found = held[row, head]
                    if live is not None:
                        found = found[live[row, head]]
                    theirs = getattr(whole, name)[row, head, wanted]
                    # slots of other layers depend on what the ones before made of their tokens
                    close = 1e-6 if layer is cache._sketches()[0] else torch.inf
                    assert float((found[: len(wanted)] - theirs).abs().max()) <= close


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"bits": 16},
        {"budget": 0.3},
        {"prefill": "streaming", "bits": 16},
        {"allocation": "even", "bits": 4},
        pytest.param({"prefill": "streaming"}, marks=pytest.mark.slow),
        pytest.param({"method": "snapkv"}, marks=pytest.mark.slow),
        pytest.param({"method": "uniform", "bits": 8}, marks=pytest.mark.slow),
        pytest.param({"method": "cluster_merge"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_they_stay_through_prompts_and_answers(llama: Any, given: dict[str, Any]) -> None:
    ids = ids_of(2, 460)
    cache = SketchCache(llama.config, **{"budget": BUDGET, **given})
    for span in SPANS:
        cache.pin(*span)
    read(llama, cache, ids, 90, 110, 100, 100, *[1] * 60)
    check(llama, cache, ids)
    assert cache.summary()["pinned"] == 44
    budget = cache.budget
    assert budget is not None
    few = cache._first.stream.pace.bits != FULL and given.get("prefill") != "streaming"
    window = 48 + (budget.slots(460) // 8 if few else 32)
    assert (window < 80) == few
    for layer in cache._sketches():
        assert sum(layer.stream.around) == window
        price = layer.stream.pace.budget.price
        assert price.window == (window if price.fixed else 0)
    if "budget" not in given:
        held = torch.stack([x.stream.held for x in cache._sketches()]).double()
        free = SketchCache(llama.config, **{"budget": BUDGET, **given})
        read(llama, free, ids, 90, 110, 100, 100, *[1] * 60)
        other = torch.stack([x.stream.held for x in free._sketches()]).double()
        most = max(float(other.mean()), BUDGET)
        assert float(held.mean()) <= most + 3, "they count in the budget"
        allowed = cache.exact_nbytes() * BUDGET / 460  # of which all tokens may need less
        assert cache.nbytes() <= 1.1 * max(free.nbytes(), allowed)


def test_decoded_tokens_stay_where_only_the_newest_are_compressed(llama: Any) -> None:
    ids = ids_of(1, 1100)
    cache = SketchCache(llama.config, budget=230, bits=4, allocation="even")
    cache.pin(1000, 1010)
    read(llama, cache, ids, 500, *[1] * 600)
    assert cache._sketches()[0].stream.page.middle.count >= 512
    exact = DynamicCache(config=llama.config)
    with torch.no_grad():
        for one in ids.split([500, *[1] * 600], dim=1):
            llama(one, past_key_values=exact, use_cache=True)
    keys = cache._sketches()[0].stream.page.read().keys
    wanted = exact.layers[0].keys[:, :, [*range(4), *range(1000, 1010)]]
    torch.testing.assert_close(keys[:, :, :14], wanted, rtol=0, atol=1e-6)


def test_padding_does_not_move_them(llama: Any) -> None:
    ids, pad = ids_of(2, 300), 20
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    cache = SketchCache(llama.config, budget=BUDGET, bits=16)
    cache.pin(100, 130)
    exact = DynamicCache(config=llama.config)
    with torch.no_grad():
        for one in (cache, exact):
            llama(ids, attention_mask=mask, past_key_values=one, use_cache=True)
    for row, sinks in ((0, range(4)), (1, range(pad, pad + 4))):
        wanted = exact.layers[0].keys[row, :, [*sinks, *range(100, 130)]]
        slots = cache._sketches()[0].stream.page.read()
        live = slots.live()
        for head, keys in enumerate(slots.keys[row]):
            found = keys if live is None else keys[live[row, head]]
            torch.testing.assert_close(found[:34], wanted[head], rtol=0, atol=1e-6)


def test_a_saved_cache_keeps_its_pins(llama: Any, tmp_path: Any) -> None:
    ids = ids_of(1, 460)
    cache = SketchCache(llama.config, budget=BUDGET)
    for span in SPANS:
        cache.pin(*span)
    read(llama, cache, ids[:, :240], 240)  # the last span is still to come
    cache.save(tmp_path / "cache.kvs")
    loaded = SketchCache.load(tmp_path / "cache.kvs", llama)
    with pytest.raises(UnsupportedError, match="compressed already"):
        loaded.pin(150, 160)
    twin = copy.deepcopy(cache)
    for one in (cache, loaded, twin):
        read(llama, one, ids[:, 240:], 120, *[1] * 100)
        check(llama, one, ids)
    for mine, theirs in zip(cache._sketches(), loaded._sketches(), strict=True):
        assert torch.equal(mine.stream.slots.keys, theirs.stream.slots.keys)
    cache.reset()
    assert cache.summary()["pinned"] == 0


def test_bad_spans_change_nothing(llama: Any) -> None:
    cache = SketchCache(llama.config, budget=60)
    cache.pin(10, 20)
    for span, named in (
        ((15, 18), "overlaps"),
        ((5, 11), "overlaps"),
        ((30, 30), "start < end"),
        ((-1, 3), "start < end"),
        ((1.0, 3), "two ints"),
        ((30, 50), r"pinned tokens are 66, and budget=60"),
    ):
        with pytest.raises(InputError, match=named):
            cache.pin(*span)  # type: ignore[arg-type]
    assert cache.summary()["pinned"] == 10
    ids = ids_of(1, 200)
    read(llama, cache, ids, 200)
    with pytest.raises(UnsupportedError, match="tokens before 193 are compressed already"):
        cache.pin(185, 195)
    cache.pin(194, 199)
    read(llama, cache, ids_of(1, 60, seed=2), *[1] * 60)
    assert cache.summary()["pinned"] == 15
    with pytest.raises(UnsupportedError, match="streaming sketch"):
        SketchCache(llama.config, "subgen", budget=100).pin(0, 5)


def test_what_cannot_keep_them_refuses_them(llama: Any, tmp_path: Any) -> None:
    cache, other = (SketchCache(llama.config, budget=BUDGET) for _ in range(2))
    cache.pin(100, 110)
    for one in (cache, other):
        read(llama, one, ids_of(1, 300), 300)
    with pytest.raises(UnsupportedError, match="pinned tokens"):
        join(cache, other, llama)
    cache.save(tmp_path / "cache.kvs")
    _, state = read_file(tmp_path / "cache.kvs", "cache")
    with pytest.raises(UnsupportedError, match="pinned tokens"):
        saved_of(state, llama.config.num_hidden_layers)


def test_tokens_that_are_slots_no_more_are_refused(llama: Any) -> None:
    """A budget too small for the recent window keeps fewer of the last tokens, and of slots that
    were made elsewhere it is not known which are tokens."""
    small = SketchCache(llama.config, budget=0.1, bits=16, allocation="even")
    read(llama, small, ids_of(1, 200), 200)
    with pytest.raises(UnsupportedError, match="compressed already"):
        small.pin(175, 178)
    small.pin(190, 195)
    stream = SketchCache(llama.config, budget=60)._sketches()[0].stream
    given = small._sketches()[0].stream
    stream.adopt(given.slots, 200, given.pace.budget, given.pace.bits)
    with pytest.raises(UnsupportedError, match="compressed already"):
        stream.pin(190, 195)


def test_where_they_are_is_counted_once() -> None:
    pins = Pins(4, 32)
    pins.add(0, 10)
    pins.add(50, 60)
    assert [pins.count(n, 32) for n in (30, 42, 90, 200)] == [0, 6, 14, 16]
    assert pins.tokens == 16


def test_text_is_pinned_by_the_command(tmp_path: Any) -> None:
    torch.set_num_threads(1)
    lines = [f"line word{i}-thing: REGISTER_CONTENT is <{1000 + i}>" for i in range(60)]
    (tmp_path / "doc.txt").write_text("\n".join(lines))
    out = tmp_path / "doc.kvs"
    command = ["compress", str(tmp_path / "doc.txt"), "-o", str(out), "--budget", "400", "--json"]
    run = CliRunner().invoke(app, [*command, "--pin", lines[20], "--pin", lines[40]])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout.splitlines()[-1])
    assert 10 < found["pinned"] < 60
    for part, named in (("not there", "0 times"), ("line", "60 times"), (" ", "nothing")):
        run = CliRunner().invoke(app, [*command, "--pin", part])
        assert run.exit_code != 0
        said = " ".join(run.output.split())
        assert "exactly once" in said
        assert named in said
