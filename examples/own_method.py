"""A method of one's own: which tokens stay, in one function. Everything else (sinks, recent tokens,
budgets, batches, chats) comes with it."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvsketch import SketchCache, packaged_model
from kvsketch.evaluation.runner.longeval import make_cases
from kvsketch.methods.base import Compressor, keep_top


class LargeValues(Compressor):
    """Keep the tokens whose values are largest."""

    name = "large_values"
    paper = "an example"
    ragged = True  # a budget may be one for each head: keep_top takes both

    def reduce(self, slots, budget, asked_again):
        return keep_top(slots, slots.values.float().norm(dim=-1), budget)


name = packaged_model()
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
prompt = make_cases([100], 1, seed=0)[0].prompt
ids = tokenizer(prompt, return_tensors="pt").input_ids

for method in (LargeValues, "knorm", "snapkv", "heavy_merge"):
    cache = SketchCache(model.config, method, budget=0.25, allocation="even", bits=16)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    heads = [error for layer in cache.error() for error in layer["prompt"]]
    print(f"{cache.method:14} relative error of attention {sum(heads) / len(heads):.3f}")
