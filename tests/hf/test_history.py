"""A cache continues the text that it has read, and ``generate`` passes on what is beyond that: a
text that begins otherwise would be answered wrongly, without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import kvsketch
from kvsketch import InputError, SketchCache
from tiny_models import build

READ, ANSWER, MORE = 200, 6, 20
OTHER = "not the one that this cache has read"


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def ids_of(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (rows, tokens), generator=generator)


def answered(model: Any, ids: torch.Tensor, cache: Any, **settings: Any) -> torch.Tensor:
    settings = {"do_sample": False, "max_new_tokens": ANSWER, **settings}
    out: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **settings
    )
    return out


def one_turn(model: Any, rows: int = 2, **settings: Any) -> tuple[SketchCache, torch.Tensor]:
    """A cache of one turn, and the text of a second one."""
    cache = SketchCache(model.config, budget=0.5, prefill=READ)
    said = answered(model, ids_of(rows, READ), cache, **settings)
    return cache, torch.cat([said, ids_of(len(said), MORE, seed=1)], 1)


def changed(text: torch.Tensor, place: int) -> torch.Tensor:
    """The text with another token in its last row."""
    other = text.clone()
    other[-1, place] = 3 + (other[-1, place] - 2) % 57
    assert int((other != text).sum()) == 1
    return other


@pytest.mark.parametrize("place", [0, READ - 1, READ + ANSWER - 2])
def test_another_text_is_refused_and_the_right_one_goes_on(llama: Any, place: int) -> None:
    cache, text = one_turn(llama)
    before = cache.get_seq_length(), cache.nbytes()
    was = int(text[-1, place])
    with pytest.raises(InputError, match=rf"{OTHER}: token {place} of 205 is \d+ and was {was} \("):
        answered(llama, changed(text, place), cache)
    assert (cache.get_seq_length(), cache.nbytes()) == before
    twin, _ = one_turn(llama)
    assert torch.equal(answered(llama, text, cache), answered(llama, text, twin))


@pytest.mark.parametrize("place", [READ + ANSWER - 1, READ + ANSWER, -1])
def test_tokens_that_were_not_read_may_be_others(llama: Any, place: int) -> None:
    """The last token of an answer is one of them."""
    cache, text = one_turn(llama)
    answered(llama, changed(text, place), cache)
    assert cache.get_seq_length() == text.shape[1] + ANSWER - 1


CHUNKS, LOOKUP = {"prefill_chunk_size": 64}, {"prompt_lookup_num_tokens": 3}
ONCE = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="older versions read a text in chunks from its beginning, whatever a cache has read",
)


@pytest.mark.parametrize("first", [{}, CHUNKS, LOOKUP])
@pytest.mark.parametrize("second", [{}, pytest.param(CHUNKS, marks=ONCE), LOOKUP])
def test_in_chunks_and_with_assisted_decoding(
    llama: Any, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """transformers passes all of the text to a cache when assisted decoding begins, also what the
    cache has read."""
    expected = answered(llama, one_turn(llama, 1)[1], one_turn(llama, 1)[0])
    cache, text = one_turn(llama, 1, **first)
    assert torch.equal(answered(llama, text, cache, **second), expected)
    assert cache.get_seq_length() == text.shape[1] + ANSWER - 1
    cache, text = one_turn(llama, 1, **first)
    with pytest.raises(InputError, match=OTHER):
        answered(llama, changed(text, 5), cache, **second)


@pytest.mark.parametrize("settings", [{}, LOOKUP])
def test_a_text_with_nothing_new_is_refused(llama: Any, settings: dict[str, Any]) -> None:
    cache, text = one_turn(llama, 1)
    for tokens in (READ + ANSWER - 1, READ, 50):
        with pytest.raises(InputError, match="not longer than the 205 tokens"):
            answered(llama, text[:, :tokens], cache, **settings)
    assert cache.get_seq_length() == READ + ANSWER - 1
    answered(llama, text, cache, **settings)


def test_assisted_decoding_after_a_context(llama: Any) -> None:
    text = torch.cat([ids_of(1, READ), ids_of(1, MORE, seed=1)], 1)
    told = []
    for settings in ({}, {"prompt_lookup_num_tokens": 3}):
        cache = SketchCache(llama.config, budget=0.5)
        kvsketch.prefill(llama, ids_of(1, READ), cache)
        told.append(answered(llama, text, cache, **settings))
        assert cache.get_seq_length() == text.shape[1] + ANSWER - 1
    assert torch.equal(*told)


def test_rows_keep_their_texts(llama: Any) -> None:
    """Beams: those of the cache are not the answers that are returned."""
    cache, text = one_turn(llama)
    cache.batch_select_indices(torch.tensor([1]))
    with pytest.raises(InputError, match=OTHER):
        answered(llama, text[:1], cache)
    answered(llama, text[1:], cache)
    cache, text = one_turn(llama)
    fork = cache.fork(2)
    with pytest.raises(InputError, match=r"\(row 3\)"):
        answered(llama, changed(text.repeat_interleave(2, 0), 7), fork)
    answered(llama, text.repeat_interleave(2, 0), fork)
    cache, text = one_turn(llama, num_beams=3, num_return_sequences=3, max_new_tokens=12)
    with pytest.raises(InputError, match="after a beam search"):
        answered(llama, text, cache)


def test_a_prefilled_context_and_a_question(llama: Any) -> None:
    """The tokens of both together may be others than those of the context alone."""
    cache = SketchCache(llama.config, budget=0.5)
    context = ids_of(1, READ)
    kvsketch.prefill(llama, context, cache)
    text = torch.cat([context, ids_of(1, MORE, seed=1)], 1)
    with pytest.raises(InputError, match=rf"{OTHER}: token {READ - 1} of"):
        answered(llama, changed(text, READ - 1), cache)
    answered(llama, text, cache)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_file_says_which_texts_were_read(llama: Any, tmp_path: Path, rows: int) -> None:
    cache, text = one_turn(llama, rows)
    cache.save(tmp_path / "one.kvs")
    loaded = SketchCache.load(tmp_path / "one.kvs", llama)
    loaded.save(tmp_path / "two.kvs")
    assert (tmp_path / "two.kvs").read_bytes() == (tmp_path / "one.kvs").read_bytes()
    for place in (0, READ + ANSWER - 2):
        with pytest.raises(InputError, match=rf"with the 205 tokens .* \(row {rows - 1}\)"):
            answered(llama, changed(text, place), loaded)
    expected = answered(llama, text, cache)
    assert torch.equal(answered(llama, text, loaded), expected)
    with pytest.raises(InputError, match=OTHER):
        answered(llama, changed(torch.cat([expected, text[:, :3]], 1), 0), loaded)


def test_a_loaded_cache_whose_rows_change_is_not_compared(llama: Any, tmp_path: Path) -> None:
    cache, text = one_turn(llama)
    cache.save(tmp_path / "one.kvs")
    loaded = SketchCache.load(tmp_path / "one.kvs", llama)
    loaded.reorder_cache(torch.tensor([1, 0]))
    answered(llama, text.flip(0), loaded)
    whole = SketchCache(llama.config, budget=1.0)
    text = answered(llama, ids_of(2, READ), whole)
    whole.save(tmp_path / "whole.kvs")
    loaded = SketchCache.load(tmp_path / "whole.kvs", llama)
    loaded.crop(-3)
    answered(llama, changed(text, READ + ANSWER - 2), loaded)


def forwarded(model: Any, cache: SketchCache, text: torch.Tensor) -> torch.Tensor:
    """Another text, of which this cache has read a part without ``generate``."""
    cache.crop(-(cache.get_seq_length() - READ))
    other = torch.cat([text[:, :READ], ids_of(len(text), 9, seed=2)], 1)
    with torch.no_grad():
        model(other[:, READ:], past_key_values=cache)
    return torch.cat([other, text[:, -1:]], 1)


def started_anew(model: Any, cache: SketchCache, text: torch.Tensor) -> torch.Tensor:
    cache.reset()
    return changed(text, 0)


@pytest.mark.parametrize("between", [forwarded, started_anew])
def test_what_is_not_known_is_not_compared(
    llama: Any, between: Callable[[Any, SketchCache, torch.Tensor], torch.Tensor]
) -> None:
    cache = SketchCache(llama.config, budget=1.0)
    text = answered(llama, ids_of(2, READ), cache)
    answered(llama, between(llama, cache, text), cache)


def test_a_text_that_was_refused_was_not_read(llama: Any) -> None:
    cache, text = one_turn(llama)
    too_long = torch.cat([text, ids_of(2, llama.config.max_position_embeddings, seed=3)], 1)
    with pytest.raises(InputError, match="beyond the model's"):
        answered(llama, too_long, cache)
    answered(llama, changed(text, READ + ANSWER + 2), cache)


def test_the_callers_ids_may_change_afterwards(llama: Any) -> None:
    cache = SketchCache(llama.config, budget=0.5)
    ids = ids_of(1, READ)
    said = answered(llama, ids, cache, max_new_tokens=1)
    ids.zero_()
    answered(llama, torch.cat([said, ids_of(1, MORE, seed=1)], 1), cache)


def test_embeddings_have_no_ids(llama: Any) -> None:
    cache = SketchCache(llama.config, budget=0.5)
    embedded = llama.get_input_embeddings()(ids_of(1, READ))
    settings = {"do_sample": False, "max_new_tokens": ANSWER}
    said = llama.generate(inputs_embeds=embedded, past_key_values=cache, **settings)
    answered(llama, torch.cat([ids_of(1, READ, seed=9), said, ids_of(1, 9)], 1), cache)
