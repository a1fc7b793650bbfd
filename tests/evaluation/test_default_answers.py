"""The default answers on a model whose answer needs nearly every token of one KV head, while the
others see the text as a whole: there, heads that keep tokens alone lose the answer."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsketch
from kvsketch import SketchCache
from kvsketch.evaluation.runner.loading import resolve_model
from kvsketch.evaluation.runner.longeval import make_cases, read_answer


def test_with_a_tenth_of_the_bytes() -> None:
    path = resolve_model("longeval-one-head")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    right = []
    for case in make_cases([200], 3, seed=1):
        ids = tokenizer(case.prompt, return_tensors="pt").input_ids
        context = tokenizer(case.prompt[: case.prompt.index("\n\nNow the record") + 1]).input_ids
        cache = SketchCache(model.config, budget=0.1)
        kvsketch.prefill(model, torch.tensor([context]), cache)
        out = model.generate(ids, past_key_values=cache, max_new_tokens=16, do_sample=False)
        said = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        right.append(read_answer(said) == case.expected)
    assert all(right), right
