"""Runs of decoded tokens at which nothing is due give what ``Forward`` gives, to the bit."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from families import VOCABULARY, build
from kvsketch import InputError, SketchCache, UnsupportedError
from kvsketch.hf import decoding
from kvsketch.hf.decoding import Decoding
from kvsketch.kernels import cpu, native
from kvsketch.observed import Observed
from tiny_models import with_buffer

SMALL: dict[str, Any] = {"budget": 40, "sink": 2, "recent": 6}


def ids_of(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def cache_of(model: Any, method: str = "heavy_merge", **given: Any) -> SketchCache:
    cache: SketchCache = with_buffer(SketchCache(model.config, method, **SMALL, **given), 8)
    return cache


@contextmanager
def counted() -> Iterator[list[int]]:
    """The layers whose token was part of a run."""
    layers: list[int] = []
    real = Decoding.take

    def take(self: Decoding, index: int, *args: Any) -> Any:
        found = real(self, index, *args)
        if found is not None:
            layers.append(index)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoding, "take", take)
        yield layers


@contextmanager
def by_forward() -> Iterator[None]:
    """Every token is run by ``Forward``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "_LEAST", 1 << 40)
        yield


@torch.no_grad()
def step(model: Any, cache: Any, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    found: torch.Tensor = model(ids, past_key_values=cache, use_cache=True, **given).logits
    return found


def decoded(model: Any, cache: Any, batch: int = 1, tokens: int = 30, **given: Any) -> torch.Tensor:
    """Logits of a prompt's end and of decoded tokens."""
    out = [step(model, cache, ids_of(batch, 70), **given)[:, -1:]]
    for i in range(tokens):
        out.append(step(model, cache, ids_of(batch, 1, i + 1), **given))
    return torch.cat(out, 1)


def contents(cache: SketchCache) -> list[torch.Tensor]:
    streams = [layer.stream for layer in cache._sketches()]
    slots = [t for stream in streams for t in stream.slots.tensors().values()]
    return slots + [t for stream in streams for t in stream.scores.queries.tensors()]


@pytest.mark.parametrize(
    ("family", "method", "given"),
    [
        ("llama", "heavy_merge", {}),
        ("llama", "heavy_merge", {"bits": 4, "allocation": "even"}),
        ("llama", "heavy_merge", {"bits": 16}),
        ("llama", "h2o", {"bits": 8}),
        ("llama", "kcenter", {}),
        ("llama", "snapkv", {"allocation": "measured"}),
        ("llama", "uniform", {"keep": {"decoded"}}),
        ("gemma2", "heavy_merge", {}),
        ("opt", "heavy_merge", {"bits": 4}),
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_run_is_what_the_forward_does(
    family: str, method: str, given: dict[str, Any], batch: int
) -> None:
    model = build(family)
    with counted() as layers:
        cache = cache_of(model, method, **given)
        found = decoded(model, cache, batch)
    other = cache_of(model, method, **given)
    with by_forward(), counted() as none:
        expected = decoded(model, other, batch)
    full = len(cache._sketches()) == len(cache.layers)  # other layers have no runs
    assert not none
    assert bool(layers) == full
    assert torch.equal(found, expected)
    for mine, theirs in zip(contents(cache), contents(other), strict=True):
        assert torch.equal(mine, theirs)
    assert cache.nbytes() == other.nbytes()
    assert cache.peak_nbytes == other.peak_nbytes


def test_most_tokens_are_part_of_a_run(llama: Any) -> None:
    cache = cache_of(llama)
    with counted() as layers:
        decoded(llama, cache, tokens=64)
    assert len(layers) >= 0.8 * 64 * len(cache.layers)


def test_torch_s_kernels_run_it_as_well(llama: Any) -> None:
    with native.switched(False), counted() as layers:
        found = decoded(llama, cache_of(llama))
    with native.switched(False), by_forward():
        expected = decoded(llama, cache_of(llama))
    assert layers
    assert torch.equal(found, expected)


def test_another_kernel_within_a_run(llama: Any) -> None:
    def run(cache: SketchCache) -> torch.Tensor:
        out = []
        step(llama, cache, ids_of(1, 70))
        for i in range(12):
            with native.switched(i % 3 > 0):
                out.append(step(llama, cache, ids_of(1, 1, i)))
        return torch.cat(out)

    with by_forward():
        expected = run(cache_of(llama))
    assert torch.equal(run(cache_of(llama)), expected)


def test_queries_of_another_dtype_are_not_misread(llama: Any) -> None:
    """A prepared kernel knows the dtype of the queries that it was made for."""
    cache = cache_of(llama)
    decoded(llama, cache, tokens=6)
    parts = cache._sketches()[0].stream.page.open()
    query = torch.randn(1, 4, 1, 16)
    half = query.bfloat16()
    kernel = cpu.Prepared(Observed(half, 0.25), parts, False)
    first = kernel.attend(Observed(half, 0.25))
    assert first is not None
    other = kernel.attend(Observed(query, 0.25))
    assert other is None or torch.allclose(other, first.float(), atol=0.1)


def test_a_token_that_is_not_plain_is_for_the_forward() -> None:
    """The mask of an eager model, or of padding, comes with every token."""
    model = build("llama", attention="eager")
    found = decoded(model, cache_of(model))
    with by_forward():
        expected = decoded(model, cache_of(model))
    assert torch.equal(found, expected)


def test_padding_within_a_run(llama: Any) -> None:
    """A mask that hides an earlier token is applied, whatever ran before."""

    def run(cache: SketchCache) -> torch.Tensor:
        out = decoded(llama, cache, 2, tokens=9)
        mask = torch.ones(2, 80, dtype=torch.int64)
        mask[0, 79] = 0
        hidden = step(llama, cache, ids_of(2, 1, 50), attention_mask=mask)
        return torch.cat([out, hidden], 1)

    found = run(cache_of(llama))
    with by_forward():
        assert torch.equal(found, run(cache_of(llama)))


class Interrupted(Exception):
    pass


@contextmanager
def kernel_changed(change: Any, layer: int | None = None) -> Iterator[None]:
    """The attention of one layer, or of all, is called through ``change``."""
    original = AttentionInterface.get_interface
    calls = []

    def get_interface(this: Any, name: str, default: Any) -> Any:
        kernel = original(this, name, default)
        calls.append(0)
        if layer not in (None, len(calls) - 1):
            return kernel

        def changed(*args: Any, **given: Any) -> Any:
            return change(kernel, *args, **given)

        return changed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionInterface, "get_interface", get_interface)
        yield


@pytest.mark.parametrize("layer", [0, 1])
def test_the_forward_takes_over_in_any_layer(llama: Any, layer: int) -> None:
    """An argument that only ``Forward`` knows how to treat, in the middle of a token."""

    def other(kernel: Any, *args: Any, **given: Any) -> Any:
        mask = torch.ones(1, 1, 1, 75, dtype=torch.bool)
        return kernel(*args[:4], mask, **given)

    def run(cache: SketchCache) -> torch.Tensor:
        out = [decoded(llama, cache, tokens=4)]
        with kernel_changed(other, layer):
            out.append(step(llama, cache, ids_of(1, 1, 60)))
        out += [step(llama, cache, ids_of(1, 1, 61 + i)) for i in range(20)]
        return torch.cat(out, 1)

    cache = cache_of(llama)
    with counted() as layers:
        found = run(cache)
    assert layers
    with by_forward():
        expected = run(cache_of(llama))
    assert torch.equal(found, expected)
    assert cache.get_seq_length() == 95


@pytest.mark.parametrize("both", [False, True])
def test_sinks_and_soft_capping_within_a_run(llama: Any, both: bool) -> None:
    """Sinks may also become others, as in a layer that shares its kernel."""
    sinks = [torch.linspace(-1, 1, 4), torch.linspace(2, -1, 4)]

    def run(cache: SketchCache) -> torch.Tensor:
        out, calls = [decoded(llama, cache, tokens=2)], []

        def more(kernel: Any, *args: Any, **given: Any) -> Any:
            calls.append(0)
            extra = {"softcap": 3.0} if both else {}
            return kernel(*args, **given, s_aux=sinks[len(calls) // 8 % 2], **extra)

        with kernel_changed(more):
            out += [step(llama, cache, ids_of(1, 1, i)) for i in range(30)]
        return torch.cat(out, 1)

    with counted() as layers:
        found = run(cache_of(llama))
    assert len(layers) > 30
    with by_forward():
        expected = run(cache_of(llama))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layer", [0, 1])
def test_what_is_refused_is_refused_in_a_run(llama: Any, layer: int) -> None:
    def unknown(kernel: Any, *args: Any, **given: Any) -> Any:
        return kernel(*args, **given, colour="blue")

    cache = cache_of(llama)
    decoded(llama, cache, tokens=4)
    with kernel_changed(unknown, layer), pytest.raises(UnsupportedError, match="colour"):
        step(llama, cache, ids_of(1, 1))
    if layer:  # some layers have the token, and cannot give it back
        with pytest.raises(UnsupportedError, match="reset"):
            step(llama, cache, ids_of(1, 1))
        cache.reset()
    with by_forward():
        expected = decoded(llama, cache_of(llama))
    if layer:
        assert torch.equal(decoded(llama, cache), expected)


def test_weights_are_refused_and_the_token_is_not_lost(llama: Any) -> None:
    eager = build("llama", attention="eager")
    cache = cache_of(eager)
    decoded(eager, cache, tokens=4)
    with pytest.raises(UnsupportedError, match="output_attentions"):
        step(eager, cache, ids_of(1, 1), output_attentions=True)


@pytest.mark.parametrize("layer", [0, 1])
def test_an_interrupted_token_is_noticed(llama: Any, layer: int) -> None:
    def stops(*args: Any, **given: Any) -> Any:
        raise Interrupted

    cache = cache_of(llama)
    decoded(llama, cache, tokens=4)
    with kernel_changed(stops, layer), pytest.raises(Interrupted):
        step(llama, cache, ids_of(1, 1))
    with pytest.raises(UnsupportedError, match="stopped in the middle"):
        step(llama, cache, ids_of(1, 1))
    cache.reset()
    with by_forward():
        expected = decoded(llama, cache_of(llama))
    assert torch.equal(decoded(llama, cache), expected)


def test_a_training_model_is_refused_in_a_run(llama: Any) -> None:
    cache = cache_of(llama)
    decoded(llama, cache, tokens=4)
    llama.train()
    try:
        with pytest.raises(UnsupportedError, match="training"):
            llama(ids_of(1, 1), past_key_values=cache)
    finally:
        llama.eval()


def test_a_training_model_without_gradients_is_refused_in_a_run() -> None:
    model = build("llama").requires_grad_(False)
    cache = cache_of(model)
    decoded(model, cache, tokens=4)
    with pytest.raises(UnsupportedError, match="training"):
        model.train()(ids_of(1, 1), past_key_values=cache)


def test_tokens_that_the_forward_ran_within_a_run(llama: Any) -> None:
    """As a compiled graph does, which calls ``SketchCache.take``: the run ends, and no compression
    is missed."""

    def run() -> torch.Tensor:
        cache = cache_of(llama)
        out = [decoded(llama, cache, tokens=3)]
        before, cache._run = cache._run, lambda keys: None  # type: ignore[method-assign]
        cache._decoding, kept = None, cache._decoding
        out += [step(llama, cache, ids_of(1, 1, i)) for i in range(3)]
        cache._decoding, cache._run = kept, before  # type: ignore[method-assign]
        out += [step(llama, cache, ids_of(1, 1, i)) for i in range(30)]
        return torch.cat(out, 1)

    found = run()
    with by_forward():
        assert torch.equal(found, run())


def test_another_model_is_refused_in_a_run(llama: Any) -> None:
    cache = cache_of(llama)
    decoded(llama, cache, tokens=4)
    with pytest.raises(InputError, match="another model"):
        step(copy.deepcopy(llama), cache, ids_of(1, 1))


def test_gradients_do_not_enter_a_run(llama: Any) -> None:
    def run(cache: SketchCache) -> torch.Tensor:
        decoded(llama, cache, tokens=4)
        with torch.enable_grad():
            llama(ids_of(1, 1), past_key_values=cache)
        assert not any(t.requires_grad for t in contents(cache))
        return step(llama, cache, ids_of(1, 1))

    found = run(cache_of(llama))
    with by_forward():
        assert torch.equal(found, run(cache_of(llama)))


@pytest.mark.parametrize("what", ["fork", "copy", "reorder", "repeat", "reset", "saved", "compact"])
def test_whatever_happens_between_tokens(llama: Any, what: str, tmp_path: Any) -> None:
    """A run ends where another method of the cache was called."""

    def run() -> torch.Tensor:
        cache = cache_of(llama)
        out = [decoded(llama, cache, 2, tokens=4).flatten()]
        if what == "fork":
            twin = cache.fork()
            out += [step(llama, twin, ids_of(2, 1, i)).flatten() for i in range(9)]
        elif what == "copy":
            twin = copy.deepcopy(cache)
            out += [step(llama, twin, ids_of(2, 1, i)).flatten() for i in range(9)]
        elif what == "reorder":
            cache.reorder_cache(torch.tensor([1, 0]))
        elif what == "repeat":
            cache.batch_repeat_interleave(2)
        elif what == "reset":
            cache.reset()
            out.append(decoded(llama, cache, 2, tokens=4).flatten())
        elif what == "saved":
            cache.save(tmp_path / "one.kvs")
            cache = SketchCache.load(tmp_path / "one.kvs", llama)
        elif what == "compact":
            cache.compact(20)
        batch = 4 if what == "repeat" else 2
        out += [step(llama, cache, ids_of(batch, 1, i)).flatten() for i in range(12)]
        return torch.cat(out)

    found = run()
    with by_forward():
        assert torch.equal(found, run())


def test_guesses_that_are_taken_back(llama: Any) -> None:
    """Tokens that ``crop`` may remove are no part of a run."""

    def run() -> torch.Tensor:
        cache = cache_of(llama)
        out = [decoded(llama, cache, tokens=4)]
        for layer in cache.layers:
            layer.activate_past_recording()
        out += [step(llama, cache, ids_of(1, 1, i)) for i in range(3)]
        cache.crop(-2)
        out += [step(llama, cache, ids_of(1, 1, i)) for i in range(9)]
        return torch.cat(out, 1)

    found = run()
    with by_forward():
        assert torch.equal(found, run())


def test_a_cache_with_a_run_can_be_pickled(llama: Any) -> None:
    cache = cache_of(llama)
    decoded(llama, cache, tokens=4)
    assert cache._decoding is not None
    twin = pickle.loads(pickle.dumps(cache))
    assert torch.equal(step(llama, twin, ids_of(1, 1)), step(llama, cache, ids_of(1, 1)))


def test_another_thread_in_the_middle_of_a_run(llama: Any) -> None:
    cache = cache_of(llama)
    decoded(llama, cache, tokens=4)
    errors: list[BaseException] = []

    def intruding(kernel: Any, *args: Any, **given: Any) -> Any:
        out = kernel(*args, **given)

        def intrude() -> None:
            try:
                step(llama, cache, ids_of(1, 1))
            except UnsupportedError as error:
                errors.append(error)

        other = threading.Thread(target=intrude)
        with pytest.MonkeyPatch.context() as patch:
            patch.undo()
            other.start()
            other.join()
        return out

    with kernel_changed(intruding, 0), pytest.raises(UnsupportedError):
        step(llama, cache, ids_of(1, 1))
    assert errors
    cache.reset()
    with by_forward():
        expected = decoded(llama, cache_of(llama))
    assert torch.equal(decoded(llama, cache), expected)
