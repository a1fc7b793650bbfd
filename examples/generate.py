"""One prompt with a quarter of the cache, beside the exact cache."""

from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvsketch import SketchCache, packaged_model
from kvsketch.evaluation.runner.longeval import make_cases

name = packaged_model()  # or any supported model: a folder or a Hugging Face id
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
case = make_cases([200], 1, seed=0)[0]  # a record of 200 lines, and a question about one of them
inputs = tokenizer(case.prompt, return_tensors="pt")

for cache in (DynamicCache(config=model.config), SketchCache(model.config, budget=0.25)):
    ids = model.generate(**inputs, past_key_values=cache, max_new_tokens=12)
    answer = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    print(f"{type(cache).__name__}: {answer.strip()!r}; right is {case.expected}")

summary = cache.summary()
print(f"{summary['kv_bytes']:,} of {summary['exact_kv_bytes']:,} bytes are kept")
for layer in cache.error():  # measured on the prompt's last queries
    print(f"layer {layer['layer']}: relative error by KV head", layer["prompt"])
