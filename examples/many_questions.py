"""A record is read and compressed once, before anything is asked; every question then gets a copy
of the cache, so that none sees another."""

import copy
import re

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsketch
from kvsketch.evaluation.runner.longeval import QUESTION_MARK, make_cases, read_answer

name = kvsketch.packaged_model()
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
prompt = make_cases([100], 1, seed=0)[0].prompt
record, question = prompt[: prompt.rfind(QUESTION_MARK)], prompt[prompt.rfind(QUESTION_MARK) :]
lines = re.findall(r"line ([\w-]+): REGISTER_CONTENT is <(\d+)>", record)

# What will be asked is not known: the record's own queries are asked again after it, and what they
# look at is kept.
context = tokenizer(record, return_tensors="pt").input_ids
cache = kvsketch.SketchCache(model.config, budget=0.1)
kvsketch.prefill(model, context, cache)
kept = cache.nbytes() / cache.exact_nbytes()

right = 0
for key, number in lines[::20]:
    asked = re.sub(r"in line [\w-]+", f"in line {key}", question)
    ids = tokenizer(record + asked, return_tensors="pt").input_ids
    answer = model.generate(
        ids, past_key_values=copy.deepcopy(cache), max_new_tokens=12, do_sample=False
    )
    found = read_answer(tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))
    right += found == int(number)
    print(f"{key}: {found}, right is {number}")
print(f"{right} of {len(lines[::20])} right from {kept:.0%} of the bytes")
