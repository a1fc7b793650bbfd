"""In how many bits slots are stored: prices, the choice of bits, and the cache that uses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from kvsketch import InputError, SketchCache, Slots
from kvsketch.cache.curves import Curves
from kvsketch.cache.measure import measure
from kvsketch.cache.storage import CHOICES, Price, best_at, bits_of, choose
from kvsketch.page.page import Page
from kvsketch.page.quantized import FULL, Bits
from tiny_models import with_buffer

WINDOW = 20


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def ids_of(rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 101, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def read(model: Any, ids: torch.Tensor, cache: SketchCache) -> SketchCache:
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def bits_in(cache: SketchCache) -> list[Bits]:
    return [layer.stream.pace.bits for layer in cache.layers]


def some_slots(n: int, mass: bool, dtype: torch.dtype = torch.bfloat16) -> Slots:
    g = torch.Generator().manual_seed(n)
    keys, values = torch.randn(2, 1, 2, n, 24, generator=g).to(dtype)
    return Slots(keys, values, torch.rand(1, 2, n, generator=g) + 0.5 if mass else None)


@pytest.mark.parametrize("bits", CHOICES, ids=str)
@pytest.mark.parametrize("mass", [False, True])
def test_a_price_is_what_a_page_takes(bits: Bits, mass: bool) -> None:
    """A cost is the bytes of a page in few bits, masses included, over those of the keys and values
    of a token in the dtype of the model."""
    kept = 150
    for dtype in (torch.bfloat16, torch.float32):
        slots = some_slots(kept, mass, dtype)
        few = sum(t.nbytes for t in Page(slots, None, 0, bits, 4, 16).tensors())
        token = sum(t.nbytes for t in Page(some_slots(100, False, dtype)).tensors()) / 100
        price = Price.of(slots, bits, WINDOW)
        assert float(price.cost(torch.tensor(kept))) == pytest.approx(few / token, rel=1e-6)
        assert Price.of(slots, FULL, WINDOW) == Price()
        counted = Price.of(some_slots(kept, True, dtype), bits, WINDOW)
        assert Price.of(slots, bits, WINDOW, columns=1) == counted


@given(
    slots=st.floats(0.1, 5000),
    slot=st.floats(0.05, 1.5),
    window=st.integers(0, 50),
    whole=st.floats(1.0, 1.5),
)
def test_what_a_cost_buys_costs_it(slots: float, slot: float, window: int, whole: float) -> None:
    price = Price(slot, 2.0, window, whole)
    kept = torch.tensor(slots, dtype=torch.float64)
    assert float(price.buys(price.cost(kept))) == pytest.approx(slots, rel=1e-9)
    exact = whole * min(slots, window)
    middle = max(0.0, slots - window)
    assert float(price.cost(kept)) == pytest.approx(exact + slot * middle + 2.0 * (middle > 0))
    assert torch.equal(Price().cost(kept), kept)
    assert torch.equal(Price().buys(kept), kept)


def curves_of(errors: list[float], costs: list[float]) -> Curves:
    return Curves(torch.tensor([[errors]]), torch.tensor(costs))


WIDE = [0.1, 0.5, 1.0]
NARROW = [0.05, 0.25, 0.5]


def test_a_layer_that_bears_few_bits_leaves_its_bytes_to_one_that_does_not() -> None:
    """A layer whose errors are due to dropped slots gets few bits, one whose errors are due to
    rounding gets 16."""
    slots = [curves_of([1.0, 0.5, 0.0], WIDE), curves_of([1.0, 0.5, 0.01], NARROW)]
    bits = [curves_of([0.9, 0.1, 0.0], WIDE), curves_of([2.0, 1.5, 1.4], NARROW)]
    assert choose([slots, bits], 0.5) == [1, 0]
    assert choose([bits, slots], 0.5) == [0, 1]
    assert choose([slots, bits], 0.001) == [1, 1], "nothing fits: the cheapest"
    assert choose([slots, bits], 1.0) == [0, 0]
    assert best_at([slots, slots], 0.5) == 1
    assert best_at([bits], 0.5) == 0
    assert best_at([slots], 1.0) == 0
    assert best_at([slots], 0.01) == 1, "below all that was measured more slots are better"


def test_noise_in_the_curves_makes_no_level_worse_than_one_below_it() -> None:
    noisy = [curves_of([1.0, 0.1, 0.2], WIDE), curves_of([1.0, 0.15, 0.3], NARROW)]
    assert choose([noisy], 1.0) == [0]
    assert best_at([noisy], 1.0) == 0


@pytest.mark.parametrize("bits", [3, True, "few", None, 4.5])
def test_other_bits_are_refused(llama: Any, bits: Any) -> None:
    with pytest.raises(InputError, match=r"must be one of 16 .*, 8 or 4, or 'measured'"):
        bits_of(bits)
    if bits is not None:
        with pytest.raises(InputError, match="or 'measured'"):
            SketchCache(llama.config, bits=bits)


def test_bits_have_names() -> None:
    assert [str(bits_of(bits)) for bits in (16, 8, 4)] == ["16", "8", "4"]
    assert str(Bits(8, 4)) == "8/4"
    assert bits_of("measured") is None
    assert bits_of(Bits(8, 4)) == Bits(8, 4)


@pytest.mark.parametrize("allocation", ["measured", "even", "layer", "global"])
@pytest.mark.parametrize("budget", [0.5, 0.25, 0.1, 60])
def test_the_bytes_are_those_of_the_budget_and_the_error_is_smaller(
    llama: Any, allocation: str, budget: Any
) -> None:
    ids, goal = ids_of(1, 600), {"budget": budget, "allocation": allocation}
    plain = read(llama, ids, SketchCache(llama.config, **goal, bits=16))
    cache = read(llama, ids, SketchCache(llama.config, **goal))
    said, before = cache.summary(), plain.summary()
    assert said["bits"] == "measured"
    assert [x["bits"] for x in said["layers"]] == [x._asdict() for x in bits_in(cache)]
    assert set(bits_in(cache)) <= set(CHOICES)
    assert said["slots"] > 1.1 * before["slots"]
    tokens = (budget if isinstance(budget, int) else 600 * budget) / 600
    assert said["kv_bytes"] <= 1.03 * tokens * said["exact_kv_bytes"]
    assert said["kv_bytes"] > (0.8 if said["slots"] < 599 else 0.4) * before["kv_bytes"]
    # Nothing else says what rounding costs, and attention of random weights is so even that merging
    # costs next to nothing, less than rounding the last tokens.
    if budget in (0.1, 60) and allocation == "measured":
        mean = [sum(sum(row["prompt"]) for row in found.error()) for found in (cache, plain)]
        assert mean[0] < 2 * mean[1]


def test_decoding_stays_within_the_bytes(llama: Any) -> None:
    caches = [SketchCache(llama.config, budget=100, bits=bits) for bits in (None, 16)]
    few, plain = (read(llama, ids_of(1, 300), cache) for cache in caches)
    chosen = bits_in(few)
    highest = [0, 0]
    for token in ids_of(1, 150, seed=2)[0].tolist():
        for number, cache in enumerate((few, plain)):
            read(llama, torch.tensor([[token]]), cache)
            highest[number] = max(highest[number], cache.nbytes())
    assert highest[0] <= 1.02 * highest[1]
    assert bits_in(few) == chosen


def test_layers_in_few_bits_have_their_shares(llama: Any) -> None:
    shares = [0.5, 1.0, 1.5]
    cache = SketchCache(llama.config, "uniform", budget=0.25, bits=8, allocation=shares)
    layers = read(llama, ids_of(1, 800), cache).summary()["layers"]
    for layer, share in zip(layers, shares, strict=True):
        assert layer["kv_bytes"] == pytest.approx(share * layers[1]["kv_bytes"], rel=0.02)


def test_what_fits_stays_as_it_is(llama: Any) -> None:
    ids = ids_of(1, 200)
    exact = llama(ids).logits
    whole = SketchCache(llama.config, budget=1.0)
    roomy = SketchCache(llama.config, budget=250)
    with torch.no_grad():
        for cache in (whole, roomy):
            assert torch.equal(llama(ids, past_key_values=cache).logits, exact)
            assert bits_in(cache) == [FULL] * 3
            assert not any(layer.stream.compressed for layer in cache.layers)
    for token in ids_of(1, 100, seed=3)[0].tolist():
        read(llama, torch.tensor([[token]]), roomy)
    assert all(layer.stream.compressed for layer in roomy.layers)
    assert set(bits_in(roomy)) <= set(CHOICES), "decoding reached the budget, and then bits"
    roomy.reset()
    assert bits_in(roomy) == [FULL] * 3


def test_a_short_prompt_is_not_measured(llama: Any) -> None:
    cache = read(llama, ids_of(1, 60), SketchCache(llama.config, budget=40))
    assert bits_in(cache) == [FULL] * 3
    assert cache.summary()["slots"] == 40


def test_a_tolerance_takes_fewer_bytes_and_is_held(llama: Any) -> None:
    ids = ids_of(1, 600)
    for bound in (None, 0.5):
        goal = {"tolerance": 0.05, "budget": bound}
        few = read(llama, ids, SketchCache(llama.config, **goal))
        plain = read(llama, ids, SketchCache(llama.config, **goal, bits=16))
        assert few.nbytes() < (0.9 if bound is None else 1.05) * plain.nbytes()
        assert set(bits_in(few)) <= {FULL, *CHOICES}
        if bound is None:
            assert max(max(row["prompt"]) for row in few.error()) <= 0.05


@pytest.mark.parametrize("bound", [None, 0.6])
def test_a_tolerance_below_what_rounding_errs_takes_more_bits(llama: Any, bound: Any) -> None:
    """Bits are not chosen if rounding alone exceeds the tolerance in a head that keeps all
    slots."""
    ids, chosen = ids_of(1, 600), {}
    for tolerance in (0.0001, 0.01, 0.3):
        cache = read(llama, ids, SketchCache(llama.config, tolerance=tolerance, budget=bound))
        chosen[tolerance] = bits_in(cache)
        if bound is None:
            assert max(max(row["prompt"]) for row in cache.error()) <= tolerance
    assert chosen[0.0001] == [FULL] * 3
    assert set(chosen[0.01]) <= {FULL, Bits(8, 8)}
    assert Bits(4, 4) in chosen[0.3]


def test_all_rows_of_a_batch_share_their_bits(llama: Any) -> None:
    cache = read(llama, ids_of(3, 400), SketchCache(llama.config, budget=0.3))
    assert set(bits_in(cache)) <= set(CHOICES)
    held = [layer.stream.held for layer in cache.layers]
    assert any(len(set(map(tuple, rows.tolist()))) > 1 for rows in held), "slots are a row's own"


def test_only_rounding_is_what_is_measured_at_all_tokens(llama: Any) -> None:
    """Where all slots are kept, fewer bits have more error. At the smallest size the measured error
    counts more than twice what the held-out queries show."""
    cache = SketchCache(llama.config, budget=0.3, allocation="measured")
    stream = cache.layers[0].stream
    found: list[Any] = []
    hand_down = cache.plan.hand_down

    def look(*arguments: Any) -> bool:
        if not found:
            found.extend([*measure(stream, None, CHOICES), measure(stream, None)[0]])
        return hand_down(*arguments)

    cache.plan.hand_down = look  # type: ignore[method-assign]
    read(llama, ids_of(1, 500), cache)
    curves, prices, plain = found
    last = [float(curves[bits][0].error[..., -1].sum()) for bits in CHOICES]
    assert last[0] < 0.1 * min(last[1:]), "8 bits are next to nothing"
    costs = [float(curves[bits][0].kept[-1]) for bits in CHOICES]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] < 1
    assert [prices[bits].slot for bits in CHOICES] == sorted(
        (prices[bits].slot for bits in CHOICES), reverse=True
    )
    merged = [curves[bits][0].error[..., 0].sum() for bits in CHOICES]
    once = plain[FULL][0].error[..., 0].sum()
    assert float(merged[0]) > 2 * float(once)


def test_what_cannot_choose_is_refused(llama: Any, tmp_path: Any) -> None:
    with pytest.raises(InputError, match=r"bits='measured'.*sketch"):
        SketchCache(llama.config, "subgen", budget=0.5, bits="measured")
    path = tmp_path / "curves.json"
    error, relative = torch.rand(2, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    Curves(error, torch.tensor([0.1, 1.0]), relative).save(path)
    with pytest.raises(InputError, match="bits='measured' and a tolerance"):
        SketchCache(llama.config, tolerance=0.1, allocation=path, bits="measured")
    streamed = SketchCache(llama.config, budget=60, prefill="streaming")
    assert streamed.bits == "measured"
    assert SketchCache(llama.config, "snapkv", budget=60).bits == 16
    assert SketchCache(llama.config, budget=60).bits == "measured"


@pytest.mark.parametrize(("bits", "allocation"), [(4, "global"), (4, "even"), (8, "global")])
def test_decoding_takes_a_fortieth_more_than_the_budget_at_most(
    llama: Any, bits: int, allocation: str
) -> None:
    """In few bits the tokens since the last compression take the bytes of several slots each."""
    cache = SketchCache(llama.config, budget=160, bits=bits, allocation=allocation)
    read(llama, ids_of(1, 360), cache)
    of_a_token = cache.exact_nbytes() / 360
    sizes = []
    for token in ids_of(1, 140, seed=4)[0].tolist():
        read(llama, torch.tensor([[token]]), cache)
        streams = [layer.stream for layer in cache._sketches()]
        sizes.append(sum(t.nbytes for s in streams for t in s.page.tensors()) / of_a_token)
    assert 160 * 0.9 < max(sizes) <= 160 * 1.025 + 1


def test_layers_of_which_every_slot_fits_are_bounded_once(llama: Any) -> None:
    """In few bits: the time of a layer does not grow with the layers before it."""
    config = LlamaConfig(**{**llama.config.to_dict(), "num_hidden_layers": 6})
    torch.manual_seed(0)
    model, bounds = LlamaForCausalLM(config).eval(), []
    cache = SketchCache(config, budget=0.2, bits=4)
    for layer in cache.layers:
        stream = layer.stream

        def spend(*arguments: Any, stream: Any = stream, before: Any = stream.spend) -> None:
            if arguments[1]:
                bounds.append(stream)
                assert stream.held.tolist() == [[700, 700]]
            before(*arguments)

        stream.spend = spend
    read(model, ids_of(1, 700), cache)
    assert len(bounds) == len(set(map(id, bounds))) > 1
    assert float(cache.nbytes()) < 0.25 * cache.exact_nbytes()


@pytest.mark.parametrize(
    ("bits", "by", "budget"),
    [
        ("measured", "measured", 0.2),
        (8, "measured", 0.2),
        (4, "measured", 0.12),
        (16, "global", 0.2),
    ],
)
def test_no_head_loses_what_it_holds_while_the_others_are_measured(
    llama: Any, bits: Any, by: str, budget: float
) -> None:
    """Layers that are compressed to one bound, to another one and finally to their budgets have as
    many live slots in every head as counted, and never fewer than sinks and recent tokens."""
    config = LlamaConfig(**{**llama.config.to_dict(), "num_hidden_layers": 6})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for number, layer in enumerate(model.model.layers):  # so that heads and layers differ
        layer.self_attn.k_proj.weight.data[:32] *= 2 + 2 * number
    spent: list[Any] = []
    cache = with_buffer(SketchCache(config, budget=budget, bits=bits, allocation=by), 2)
    for layer in cache.layers:
        stream = layer.stream

        def spend(*arguments: Any, stream: Any = stream, before: Any = stream.spend) -> None:
            before(*arguments)
            spent.append((stream, arguments[0].slots(stream.seen, 1), arguments[1]))
            assert torch.equal((stream.slots.masses() > 0).sum(-1), stream.held)
            assert bool((stream.held >= sum(stream.around)).all())

        stream.spend = spend
    read(model, ids_of(1, 700), cache)
    again = [s for s, _, provisional in spent if provisional]
    assert len(again) > len(set(map(id, again))), "some layer has more than one bound"
    assert any(len(set(s.held.flatten().tolist())) > 1 for s, *_ in spent), "heads differ"
    for token in ids_of(1, 60, seed=4)[0].tolist():  # the budget grows with the tokens
        read(model, torch.tensor([[token]]), cache)
        for layer in cache.layers:
            stream = layer.stream
            assert torch.equal((stream.slots.masses() > 0).sum(-1), stream.held)
            assert bool((stream.held >= sum(stream.around)).all())
