"""What a cache does with settings that are known to be good or bad: after a second reading, with
expected questions, with a recent window above the budget, and with a large measured error."""

from __future__ import annotations

import random
import re
import warnings

import pytest
import torch
from test_reading import Letters, ids_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsketch
from kvsketch import AccuracyWarning, SketchCache, UnsupportedError, packaged_model
from kvsketch.evaluation.runner.longeval import make_cases
from kvsketch.hf import forward, reading
from kvsketch.hf.passing import passed
from kvsketch.kernels import native
from tiny_model import small_llama
from tiny_models import build


@pytest.fixture(scope="module")
def llama():
    return small_llama().eval()


def held(cache):
    return [layer.stream.held.tolist() for layer in cache.layers]


@pytest.mark.parametrize("queries", ["reread", "local", "sample"])
def test_the_default_after_a_second_reading_is_global(llama, queries):
    """Without an allocation, heavy_merge compares scores over all heads after a second reading, and
    after one reading if the prompt's own queries can be asked again."""
    ids = ids_of(1, 200)
    default, told = (
        SketchCache(llama.config, budget=0.3, allocation=how) for how in (None, "global")
    )
    for cache in (default, told):
        kvsketch.prefill(llama, ids, cache, queries=queries, tokenizer=Letters())
    assert default.summary()["allocation"] == told.summary()["allocation"] == "global"
    assert held(default) == held(told)
    default.reset()
    fresh = SketchCache(llama.config, budget=0.3)
    assert default.summary()["allocation"] == fresh.summary()["allocation"]
    with torch.no_grad():
        llama(ids, past_key_values=default)
    assert default.summary()["allocation"] == "global"
    assert held(default) != held(told)


def test_other_defaults_are_as_after_one_reading(llama):
    """A schedule, a tolerance and other methods keep their allocation after a second reading."""
    for settings in (
        {"tolerance": 0.2},
        {"budget": 0.3, "allocation": [1.0] * len(llama.model.layers)},
    ):
        cache = SketchCache(llama.config, **settings)
        before = cache.summary()["allocation"]
        kvsketch.prefill(llama, ids_of(1, 200), cache, queries="reread", tokenizer=Letters())
        assert cache.summary()["allocation"] == before
    cache = SketchCache(llama.config, "snapkv", budget=0.3)
    kvsketch.prefill(llama, ids_of(1, 200), cache, queries="reread", tokenizer=Letters())
    assert cache.summary()["allocation"] == "even"


def test_measured_budgets_after_a_second_reading_warn(llama):
    """The combination that loses most answers warns, and no other one does."""
    ids = ids_of(1, 200)
    for allocation, queries in (("measured", "prompt"), (None, "reread"), ("global", "reread")):
        cache = SketchCache(llama.config, budget=0.3, allocation=allocation)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "allocation=")
            kvsketch.prefill(llama, ids, cache, queries=queries, tokenizer=Letters())
    cache = SketchCache(llama.config, budget=0.3, allocation="measured")
    with pytest.warns(AccuracyWarning, match="allocation='measured' with queries='sample'"):
        kvsketch.prefill(llama, ids, cache, queries="sample", tokenizer=Letters())


@pytest.mark.parametrize(
    "settings", [{"budget": 0.25}, {"tolerance": 0.3}, {"budget": 80}], ids=str
)
@pytest.mark.parametrize("chunk_size", [None, 70])
def test_expected_questions_compress_at_once(llama, settings, chunk_size, monkeypatch):
    """A context is compressed as soon as its expected questions were read, however short they and
    their answers are, and neither is kept."""
    monkeypatch.setattr(reading, "ANSWER", 3)
    cache = SketchCache(llama.config, **settings)
    seen = []
    kvsketch.prefill(
        llama,
        ids_of(2, 240),
        cache,
        queries=["a", "bc"],
        tokenizer=Letters(),
        chunk_size=chunk_size,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert cache.get_seq_length() == 240
    assert cache.summary()["kv_bytes"] < 0.6 * cache.exact_nbytes()
    assert all(layer.stream.compressed for layer in cache.layers)
    assert all(row["prompt"] is not None for row in cache.error())
    assert seen[-1][0] == seen[-1][1]
    assert sorted(seen) == seen


def test_the_answers_to_expected_questions_are_found():
    """From questions alone, the packaged model, which looks at a line only while it writes the
    answer, keeps the lines of these questions, in a tenth of the bytes."""
    name = packaged_model("longeval-one-head")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(name),
        AutoTokenizer.from_pretrained(name),
    )
    case = make_cases([200], 1, seed=0)[0]
    document, mark, question = case.prompt.partition("Now the record is over.")
    lines = re.findall(r"line (\S+): REGISTER_CONTENT is <(\d+)>", document)
    (named,) = re.findall(r"in line (\S+)\?", question)
    picked = random.Random(0).sample(lines, 3)
    questions = [(mark + question).replace(named, line) for line, _ in picked]
    ids = tokenizer(document, return_tensors="pt").input_ids
    cache = SketchCache(model.config, budget=0.1, bits=16)
    kvsketch.prefill(model, ids, cache, queries=questions, tokenizer=tokenizer)
    for asked, (_, number) in zip(questions, picked, strict=True):
        more = tokenizer(asked, add_special_tokens=False, return_tensors="pt").input_ids
        whole = torch.cat([ids, more], dim=1)
        out = model.generate(whole, past_key_values=cache.fork(), max_new_tokens=24)
        assert number in tokenizer.decode(out[0, whole.shape[1] :])


@pytest.mark.parametrize("method", ["heavy_merge", "snapkv"])
@pytest.mark.parametrize("allocation", [None, "global"])
def test_a_recent_window_above_the_budget_shrinks(llama, method, allocation):
    """A fraction that sinks and recent window would exceed is kept all the same."""
    cache = SketchCache(llama.config, method, budget=0.25, recent=390, allocation=allocation)
    with torch.no_grad():
        llama(ids_of(1, 400), past_key_values=cache)
    assert cache.summary()["slots"] == 100
    short = SketchCache(llama.config, method, budget=0.25, allocation="measured")
    with torch.no_grad():
        llama(ids_of(1, 60), past_key_values=short)
    assert short.summary()["slots"] == 60, "too short to measure: kept until there are more tokens"


def test_a_large_measured_error_warns(llama, monkeypatch):
    """An average error above 35% warns once the prompt is compressed, with ``generate`` and with
    ``prefill``; a smaller one does not."""
    assert forward.LARGE_ERROR == 0.35
    ids = ids_of(1, 200)

    def read(again):
        cache = SketchCache(llama.config, "cluster_merge", budget=0.5)
        if again:
            kvsketch.prefill(llama, ids, cache)
        else:
            with torch.no_grad():
                llama(ids, **passed(llama, cache))
        errors = [error for row in cache.error() for error in row["prompt"]]
        return sum(errors) / len(errors)

    for again in (False, True):
        monkeypatch.setattr(forward, "LARGE_ERROR", 1e9)
        mean = read(again)
        assert mean > 0
        monkeypatch.setattr(forward, "LARGE_ERROR", 0.99 * mean)
        with pytest.warns(AccuracyWarning, match=f"is {mean:.0%} of"):
            read(again)
        monkeypatch.setattr(forward, "LARGE_ERROR", 1.01 * mean)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read(again)


@pytest.mark.parametrize("queries", ["local", "sample"])
def test_gradients_of_a_part_of_a_second_reading_are_refused(llama, queries):
    cache = SketchCache(llama.config, "kvgrad", budget=0.3)
    with pytest.raises(UnsupportedError, match=r"kvgrad.*use queries='reread'"):
        kvsketch.prefill(llama, ids_of(1, 60), cache, queries=queries, tokenizer=Letters())
    assert not cache.get_seq_length()


@pytest.mark.parametrize("bits", [None, 8, 4, 16])
@pytest.mark.parametrize("compiled", [True, False])
def test_neither_sinks_nor_recent_tokens(llama, bits, compiled):
    """The error of a compression is measured though no token is exact."""
    with native.switched(compiled):
        cache = SketchCache(llama.config, budget=0.25, bits=bits, sink=0, recent=0)
        with torch.no_grad():
            for ids in (ids_of(1, 200), ids_of(1, 1), ids_of(1, 7)):
                found = llama(ids, past_key_values=cache).logits
        assert found.isfinite().all()
    assert cache.summary()["slots"] < 208


def test_kvzip_keeps_a_whole_prompt_of_a_model_with_slopes():
    """A second reading is left out where nothing is compressed, and nothing asks for its scores."""
    model = build("mpt")
    cache = SketchCache(model.config, "kvzip", budget=1.0)
    kvsketch.prefill(model, ids_of(1, 200), cache, queries="reread", tokenizer=Letters())
    with torch.no_grad():
        for ids in [ids_of(1, 60), *[ids_of(1, 1)] * 8]:  # enough queries to measure on
            model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 268


def test_an_answer_ends_at_given_strings():
    """transformers passes the tokenizer, which it needs for them, on to attention."""
    path = packaged_model()
    model, tokenizer = (x.from_pretrained(path) for x in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("line a: REGISTER_CONTENT is <123>\n" * 20, return_tensors="pt")
    found = model.generate(
        **ids,
        past_key_values=SketchCache(model.config, budget=0.5),
        min_new_tokens=4,
        max_new_tokens=4,
        stop_strings=["no such text"],
        tokenizer=tokenizer,
    )
    assert found.shape[1] == ids.input_ids.shape[1] + 4
