"""How well a model answers official-format cases.

`forced` scores a whole answer with one forward pass: greedy decoding produces exactly the
expected answer if and only if every one of its tokens is the most likely next token.
`python -m training.evaluate FOLDER FILE...` really generates, on case files or `generated:LINES`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from kvsketch.evaluation.runner.longeval import read_answer
from kvsketch.evaluation.runner.longeval_cases import ANSWER, generate_cases

GENERATED_SEED = 987_654_321


@torch.no_grad()
def forced(model, tokenizer: PreTrainedTokenizerBase, cases: list[dict]) -> float:
    right = 0
    for case in cases:
        answer = ANSWER.format(key=case["random_idx"][0], number=case["expected_number"])
        prompt = tokenizer(case["prompt"])["input_ids"]
        expected = tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id]
        ids = torch.tensor([prompt + expected])
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False)[0]
        logits = model.lm_head(hidden[0, len(prompt) - 1 :])
        right += bool((logits.argmax(-1) == torch.tensor(expected)).all())
    return right / len(cases)


@torch.no_grad()
def greedy(model, tokenizer: PreTrainedTokenizerBase, cases: list[dict]) -> float:
    right = 0
    for case in cases:
        inputs = tokenizer(case["prompt"], return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
        text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += read_answer(text) == case["expected_number"]
    return right / len(cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="+", help="a .jsonl file or generated:LINES")
    parser.add_argument("--count", type=int, default=50, help="cases to run of each")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    for name in arguments.cases:
        if name.startswith("generated:"):
            cases = generate_cases(int(name.split(":")[1]), arguments.count, GENERATED_SEED)
        else:
            cases = [json.loads(line) for line in Path(name).read_text().splitlines()]
        cases = cases[: arguments.count]
        score = greedy(model, tokenizer, cases)
        print(json.dumps({"cases": name, "count": len(cases), "accuracy": score}), flush=True)


if __name__ == "__main__":
    main()
