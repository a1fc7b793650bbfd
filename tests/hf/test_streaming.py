"""A streaming prefill is compressed in pieces, which end at fixed tokens or with a chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsketch import SketchCache
from kvsketch.cache.stream import Stream
from kvsketch.page.quantized import FULL
from tiny_models import build, with_buffer

spend = Stream.spend
TOKENS, PIECE, WINDOW = 70, 20, {"sink": 2, "recent": 6}


@pytest.fixture(scope="module")
def model():
    return build("llama")


def ids_of(rows: int, tokens: int = TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(3, 60, (rows, tokens), generator=generator)


def read(model, cache: SketchCache, ids: torch.Tensor, sizes: list[int], mask=None) -> torch.Tensor:
    """The logits of all tokens of a text that is read in chunks of these sizes."""
    found, at = [], 0
    with torch.no_grad():
        for size in sizes:
            given = {} if mask is None else {"attention_mask": mask[:, : at + size]}
            out = model(ids[:, at : at + size], past_key_values=cache, use_cache=True, **given)
            found.append(out.logits)
            at += size
    return torch.cat(found, dim=1)


def cache_of(model, method: str, bits: int = 16, buffer: int | None = 2) -> SketchCache:
    settings = {"budget": 24, "bits": bits, "prefill": "streaming", "allocation": "even"}
    cache = SketchCache(model.config, method, **settings, **WINDOW)
    return in_pieces(cache if buffer is None else with_buffer(cache, buffer))


def in_pieces(cache: SketchCache) -> SketchCache:
    for layer in cache.layers:
        if hasattr(layer, "stream"):
            layer.stream.pace.piece = PIECE
    return cache


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llama", m) for m in ("heavy_merge", "snapkv", "h2o", "uniform", "balancekv")),
        ("bloom", "snapkv"),
        ("deepseek_v3", "heavy_merge"),
        ("gpt_oss", "heavy_merge"),
    ],
)
def test_chunks_of_whole_pieces_are_the_same(family, method, bits):
    model = build(family)
    ids = ids_of(2)
    caches = [cache_of(model, method, bits) for _ in range(3)]
    sizes = ([TOKENS], [20, 20, 20, 10], [40, 30])
    one, *others = (read(model, c, ids, s) for c, s in zip(caches, sizes, strict=True))
    stream = caches[0].layers[-1].stream
    assert stream.pace.rhythm is not None
    assert stream.compressed
    for found, cache in zip(others, caches[1:], strict=True):
        torch.testing.assert_close(found, one, rtol=2e-3, atol=2e-3)
        for ours, first in zip(cache.layers, caches[0].layers, strict=True):
            if not hasattr(ours, "stream"):  # a layer with a sliding window
                continue
            a, b = (layer.stream.slots for layer in (ours, first))
            step = 2e-3 if bits == 16 else 0.04  # of a code
            torch.testing.assert_close(a.keys, b.keys, rtol=2e-3, atol=step)
            torch.testing.assert_close(a.values, b.values, rtol=2e-3, atol=step)


def test_padding_takes_no_part(model):
    """A row that is padded on the left answers as it does when its padding is read in the same
    chunks, token by token."""
    ids, mask = ids_of(2), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :9] = 0
    one = read(model, cache_of(model, "heavy_merge"), ids, [TOKENS], mask)
    other = read(model, cache_of(model, "heavy_merge"), ids, [20, 40, 10], mask)
    torch.testing.assert_close(one[:, 9:], other[:, 9:], rtol=2e-3, atol=2e-3)
    alone = read(model, cache_of(model, "heavy_merge"), ids[1:], [TOKENS])
    torch.testing.assert_close(one[1:], alone, rtol=2e-3, atol=2e-3)


def test_a_piece_that_fits_is_not_compressed(model):
    """Decoded tokens then fill the buffer."""
    cache = cache_of(model, "snapkv")
    rhythm = cache.layers[0].stream.pace.rhythm
    assert (rhythm.first, rhythm.slots) == (24 - 3 * 2, 24 + 2)
    read(model, cache, ids_of(1), [rhythm.first])
    assert not cache.layers[0].stream.compressed
    read(model, cache, ids_of(1), [1] * (rhythm.every - 1))
    assert not cache.layers[0].stream.compressed
    assert cache.summary()["slots"] == rhythm.slots - 1
    read(model, cache, ids_of(1), [1])
    assert cache.summary()["slots"] == rhythm.kept
    cache.reset()
    read(model, cache, ids_of(1), [rhythm.first + 1])
    assert cache.summary()["slots"] == rhythm.kept


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": 0.4, "bits": 16},
        {"budget": 22, "allocation": "measured", "bits": 4},
        {"budget": 14, "allocation": "measured", "bits": 4},  # the first piece does not fit
        {"budget": 14, "allocation": "measured", "bits": 16},
    ],
)
def test_budgets_that_grow_or_differ_stream_in_pieces_too(model, settings):
    cache = in_pieces(SketchCache(model.config, prefill="streaming", **settings, **WINDOW))
    most = 0
    for start in range(0, TOKENS, 35):
        read(model, cache, ids_of(1)[:, start:], [35])
        most = max(most, max(int(layer.stream.held.max()) for layer in cache.layers))
        assert all(layer.stream.compressed for layer in cache.layers)
    assert cache.layers[0].stream.pace.rhythm is None
    assert most < TOKENS


def test_bits_are_chosen_on_the_first_piece_of_any_forward(model, monkeypatch):
    chosen = []

    def spent(self: Stream, *given: Any) -> None:
        chosen.append((self.seen, self.scores.asked_again))
        spend(self, *given)

    monkeypatch.setattr(Stream, "spend", spent)
    ids = ids_of(1, 400)
    for sizes in ([400], [200, 200], [150, 250]):
        cache = SketchCache(model.config, budget=0.3, prefill="streaming")
        for layer in cache.layers:
            layer.stream.pace.piece = 200
        read(model, cache, ids, sizes)
        assert chosen == [(sizes[0] if sizes[0] < 200 else 200, True)] * len(cache.layers)
        assert cache.layers[0].stream.pace.bits != FULL
        chosen.clear()


def test_answers_of_a_prompt_that_fits_are_listened_to(model):
    """While there is no budget yet: bits are chosen by the queries of the answer, if it is long
    enough to measure on."""
    cache = SketchCache(model.config, budget=120, prefill="streaming")
    read(model, cache, ids_of(1, 50), [50])
    streams = [layer.stream for layer in cache.layers]
    assert all(stream.waits and not stream.scores.queries.count for stream in streams)
    read(model, cache, ids_of(1, 50), [1] * 50)
    assert [stream.scores.queries.count for stream in streams] == [50] * len(streams)
    read(model, cache, ids_of(1, 30), [1] * 30)
    assert all(stream.compressed and stream.pace.bits != FULL for stream in streams)


def test_a_failed_chunk_of_a_compressed_stream_asks_for_a_reset(model):
    cache = cache_of(model, "snapkv")
    read(model, cache, ids_of(1), [TOKENS])
    layer = model.model.layers[1].self_attn
    kept, layer.forward = layer.forward, lambda *a, **k: 1 / 0
    try:
        with pytest.raises(ZeroDivisionError):
            read(model, cache, ids_of(1), [TOKENS])
    finally:
        layer.forward = kept
    with pytest.raises(Exception, match=r"reset\(\)"):
        read(model, cache, ids_of(1), [1])
    cache.reset()
    assert read(model, cache, ids_of(1), [TOKENS]).isfinite().all()


def test_a_saved_stream_goes_on_at_the_same_tokens(model, tmp_path):
    expected = read(model, cache_of(model, "heavy_merge", buffer=None), ids_of(1), [TOKENS])
    cache = cache_of(model, "heavy_merge", buffer=None)
    read(model, cache, ids_of(1), [40])
    cache.save(tmp_path / "a.kvs")
    again = in_pieces(SketchCache.load(tmp_path / "a.kvs", model))
    assert again.layers[0].stream.pace.rhythm is not None
    found = read(model, again, ids_of(1)[:, 40:], [30])
    torch.testing.assert_close(found, expected[:, 40:], rtol=2e-3, atol=2e-3)


def test_tokens_that_may_be_removed_are_not_compressed(model):
    """Assisted decoding: a chunk of guesses goes beyond a compression, and some are taken back."""
    cache = cache_of(model, "heavy_merge")
    slots = cache.layers[0].stream.pace.rhythm.slots
    for layer in cache.layers:
        layer.stream.pace.piece = slots + 2
    read(model, cache, ids_of(1), [1] * (slots - 3))
    for layer in cache.layers:
        layer.activate_past_recording()
    read(model, cache, ids_of(1)[:, slots - 3 :], [9])
    assert not cache.layers[0].stream.compressed
    cache.crop(-7)
    assert cache.get_seq_length() == slots - 1
    assert not cache.layers[0].stream.compressed
    read(model, cache, ids_of(1)[:, slots - 1 :], [9])
    cache.crop(-4)
    assert cache.layers[0].stream.compressed
    assert cache.get_seq_length() == slots + 4
