"""The packaged models load as any other, read any text, and answer LongEval and RULER."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM

import kvsketch
from kvsketch.evaluation.runner.answering import Answerer
from kvsketch.evaluation.runner.encoding import Encoder
from kvsketch.evaluation.runner.loading import resolve_model
from kvsketch.evaluation.runner.longeval import load_case_files, read_answer
from kvsketch.evaluation.runner.longeval_cases import generate_cases
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import Setup
from kvsketch.evaluation.tasks.ruler import Ruler
from kvsketch.evaluation.tasks.sessions import FORMS, Sessions
from kvsketch.models import PACKAGED_MODELS, packaged_model

ROOT = Path(__file__).resolve().parents[2]
OFFICIAL = Path(os.environ.get("KVSKETCH_DATA", ROOT.parent / "shared" / "data")) / "longeval"


LINES = ("longeval-one-head", "spread", "lists")
RULERS = ("ruler-one-layer", "spread", "lists")


@functools.cache
def of(name):
    """A packaged model and its tokenizer."""
    folder = packaged_model(name)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def accuracy(model, tokenizer, prompts, expected):
    right = 0
    with torch.inference_mode():
        for prompt, number in zip(prompts, expected, strict=True):
            inputs = tokenizer(prompt, return_tensors="pt")
            cache = DynamicCache(config=model.config)
            ids = model.generate(
                **inputs, past_key_values=cache, max_new_tokens=32, do_sample=False
            )
            answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])
            right += read_answer(answer) == number
    return right / len(prompts)


@pytest.mark.parametrize("name", PACKAGED_MODELS)
def test_is_small_and_loads_as_any_other(name):
    model, _ = of(name)
    folder = Path(resolve_model(name))
    assert folder == packaged_model(name)
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings >= 16_384
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12e6
    assert not [f for f in folder.iterdir() if f.suffix in {".bin", ".pt", ".pkl"}]


@pytest.mark.parametrize("name", PACKAGED_MODELS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_tokenizer_is_lossless_on_any_text(name, text):
    tokenizer = of(name)[1]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_tokens_of_a_record():
    """A line has about ten tokens, a digit is one token, and no digit ends the sequence."""
    tokenizer = of("longeval-one-head")[1]
    prompt = generate_cases(200, 1, seed=5)[0]["prompt"]
    assert 9 <= len(tokenizer(prompt).input_ids) / 200 <= 12
    digits = [tokenizer(d, add_special_tokens=False).input_ids for d in "0123456789"]
    assert all(len(d) == 1 for d in digits)
    assert tokenizer.eos_token_id not in {d[0] for d in digits}
    assert len({d[0] for d in digits}) == 10


@pytest.mark.parametrize("name", LINES)
def test_answers_generated_cases(name):
    cases = generate_cases(200, 3, seed=123)
    prompts = [case["prompt"] for case in cases]
    assert accuracy(*of(name), prompts, [c["expected_number"] for c in cases]) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_answers_the_official_cases(name):
    path = OFFICIAL / "400_lines.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    cases = load_case_files([path], None)
    assert len(cases) == 50
    some = cases[:20]
    prompts = [case.prompt for case in some]
    assert accuracy(*of(name), prompts, [c.expected for c in some]) >= 0.95


@pytest.mark.slow
def test_answers_680_lines():
    cases = generate_cases(680, 20, seed=7)
    prompts = [case["prompt"] for case in cases]
    right = accuracy(*of("longeval-one-head"), prompts, [c["expected_number"] for c in cases])
    assert right >= 0.9


def test_the_ruler_model_answers_lines():
    cases = generate_cases(100, 4, seed=123)
    prompts = [case["prompt"] for case in cases]
    right = accuracy(*of("ruler-one-layer"), prompts, [c["expected_number"] for c in cases])
    assert right >= 0.75


@pytest.mark.parametrize("name", RULERS)
@pytest.mark.parametrize("subtask", ["niah_single_1", "niah_multikey_2", "niah_multiquery"])
def test_answers_ruler(name, subtask):
    model, tokenizer = of(name)
    task = Ruler([subtask], [1000], 2, seed=5)
    scores = []
    for case in (task.fitted(case, tokenizer, 4000) for case in task.cases()):
        inputs = tokenizer(case.prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=case.max_new_tokens, do_sample=False)
        scores.append(task.score(case, tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])))
    assert sum(scores) / len(scores) >= 0.75


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "count", "least"),
    [(form, 6, 0.88) if form == "list" else (form, 2, 0.9) for form in FORMS],
)
def test_the_lists_model_holds_sessions(form, count, least):
    """With the exact cache, the text read before its question is known. A list that goes wrong
    loses all that follows, so that more of them are needed for a mean."""
    folder, settings_ = packaged_model("lists"), Settings(question="unseen")
    model, tokenizer = of("lists")
    answerer = Answerer(model, tokenizer, settings_)
    assert str(folder) == resolve_model("lists")
    task, scores = Sessions(form, [330], count), []
    encoder = Encoder(tokenizer, model.config, settings_)
    for case in task.cases():
        encoded = task.encoded(case, encoder, 16_384, case.max_new_tokens)
        (reply,) = answerer.answer([encoded], Setup("exact", 1.0))
        scores.append(task.graded(case, reply))
    assert sum(scores) / len(scores) >= least


@pytest.mark.slow
def test_a_long_question_is_kept_while_it_is_answered():
    """The list of what is asked for, as long as the answer, is needed to the end of it."""
    model, tokenizer = of("lists")
    settings_ = Settings(question="unseen")
    answerer, encoder = (
        Answerer(model, tokenizer, settings_),
        Encoder(tokenizer, model.config, settings_),
    )
    task, right = Sessions("list", [330], 3), []
    for case in task.cases():
        encoded = task.encoded(case, encoder, 16_384, case.max_new_tokens)
        (reply,) = answerer.answer([encoded], Setup("heavy_merge", 0.125))  # of 32 bits a number
        right.append(task.graded(case, reply))
    assert sum(right) / len(right) >= 0.8  # one wrong line may lead to others


def test_the_default_is_the_spread_model_and_another_name_is_refused():
    assert kvsketch.packaged_model() == packaged_model("packaged") == packaged_model("spread")
    with pytest.raises(kvsketch.InputError, match="'packagd' is unknown; did you mean 'packaged'"):
        kvsketch.packaged_model("packagd")
