"""Tasks of lm-evaluation-harness on a tiny model: local task files, and the real harness."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoConfig

from kvsketch.errors import InputError, UnsupportedError
from tiny_model import save_tiny_model, tiny_case, tiny_tokenizer

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (kvsketch[lm-eval])")
pytest.importorskip("accelerate", reason="the harness's Hugging Face models need accelerate")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from kvsketch.evaluation.runner.harness import SketchLM

GENERATE = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
CHOOSE = """
task: tiny_choose
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: ["1", "8", "15 brave", "22 line calm"]
doc_to_target: 2
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
WHOLE = """
task: tiny_whole
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{prompt}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
LINES = (30, 22, 26)  # prompts of three lengths, so that batches are padded


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.json"
    rows = [{"prompt": tiny_case(lines).prompt, "answer": "22"} for lines in LINES]
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for name, text in (("generate", GENERATE), ("choose", CHOOSE), ("whole", WHOLE)):
        (folder / f"{name}.yaml").write_text(text.format(data=data), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _own_datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)


def evaluated(tasks, name, model="kvsketch", **model_args):
    return lm_eval.simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=[name],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=3,
        device="cpu",
        bootstrap_iters=0,
        random_seed=None,
        numpy_random_seed=None,
        torch_random_seed=None,
    )


def answers(results, name):
    return [sample["resps"] for sample in results["samples"][name]]


def scored(model, requests, cls=SketchLM, **arguments):
    lm = cls(model, device="cpu", batch_size=2, **arguments)
    made = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(requests)]
    return lm, lm.loglikelihood(made, disable_tqdm=True)


# --- the whole harness ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny_generate", "tiny_choose", "tiny_whole"])
def test_the_exact_method_is_the_harness_own_model(model, tasks, name):
    ours = evaluated(tasks, name, pretrained=model, method="exact")
    theirs = evaluated(tasks, name, "hf", pretrained=model)
    assert answers(ours, name) == answers(theirs, name)
    assert ours["results"] == theirs["results"]
    assert "kvsketch" not in ours["config"]


def test_generated_answers(model, tasks):
    theirs = answers(evaluated(tasks, "tiny_generate", "hf", pretrained=model), "tiny_generate")
    whole = evaluated(tasks, "tiny_generate", pretrained=model, method="h2o", budget=1.0)
    assert answers(whole, "tiny_generate") == theirs
    assert whole["config"]["kvsketch"]["kv_bytes"] >= whole["config"]["kvsketch"]["exact_kv_bytes"]
    less = evaluated(tasks, "tiny_generate", pretrained=model, budget=0.3)
    assert answers(less, "tiny_generate") != theirs
    kept = less["config"]["kvsketch"]
    assert kept["method"] == "heavy_merge"
    assert kept["budget"] == 0.3
    assert 0.2 < kept["kv_bytes"] / kept["exact_kv_bytes"] < 0.4


def test_scored_choices(model, tasks):
    def scores(results):
        found = answers(results, "tiny_choose")
        return torch.tensor([[float(choice[0][0]) for choice in doc] for doc in found])

    theirs = scores(evaluated(tasks, "tiny_choose", "hf", pretrained=model))
    whole = evaluated(tasks, "tiny_choose", pretrained=model, method="snapkv", budget=1.0)
    torch.testing.assert_close(scores(whole), theirs, atol=1e-4, rtol=1e-4)
    less = evaluated(tasks, "tiny_choose", pretrained=model, method="snapkv", budget=0.3)
    assert (scores(less) - theirs).abs().amin() > 1e-3  # also for choices of one token
    kept = less["config"]["kvsketch"]
    assert 0.25 < kept["kv_bytes"] / kept["exact_kv_bytes"] < 0.35


def test_a_whole_text_has_no_context_to_compress(model, tasks):
    with pytest.raises(UnsupportedError, match="loglikelihood_rolling"):
        evaluated(tasks, "tiny_whole", pretrained=model, budget=0.3)


@pytest.mark.slow
def test_the_command(model, tasks, tmp_path):
    def run(*arguments):
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "kvsketch.evaluation.runner.harness",
                "--model",
                "kvsketch",
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=300,
        )

    common = ["--tasks", "tiny_choose,tiny_generate", "--include_path", str(tasks)]
    common += ["--device", "cpu", "--batch_size", "2", "--output_path", str(tmp_path)]
    done = run("--model_args", f"pretrained={model},method=snapkv,budget=0.25,sink=2", *common)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.rglob("results_*.json")
    config = json.loads(written.read_text(encoding="utf-8"))["config"]
    assert config["kvsketch"]["budget"] == 0.25
    assert config["kvsketch"]["sink"] == 2
    assert config["kvsketch"]["kv_bytes"] < 0.4 * config["kvsketch"]["exact_kv_bytes"]
    wrong = run("--model_args", f"pretrained={model},bugdet=0.25", *common)
    assert wrong.returncode == 1
    assert wrong.stderr.strip().splitlines()[-1].startswith("error: model_args='bugdet'")


# --- scores --------------------------------------------------------------------------------------


def test_a_score_is_that_of_the_same_tokens_through_the_same_cache(model):
    """A score is the log-probability of the choice's tokens, computed here token by token with the
    same cache."""
    context, choices = tiny_case(30).prompt, [" 22", " 22 brave calm", " dark 5"]
    lm, found = scored(model, [(context, c) for c in choices], method="snapkv", budget=0.3)
    for choice, (nats, _) in zip(choices, found, strict=True):
        before, after = lm._encode_pair(context, choice)
        cache = lm._new_cache(lm.model.config)
        with torch.no_grad():
            lm.model(torch.tensor([before[:-1]]), past_key_values=cache)
            slots = cache.summary()["slots"]
            assert slots < 0.35 * len(before)
            asked = torch.tensor([[before[-1], *after[:-1]]])
            logits = lm.model(asked, past_key_values=cache).logits[0].log_softmax(-1)
            total = sum(float(logits[i, token]) for i, token in enumerate(after))
        assert nats == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("prefill", ["exact", "streaming"])
@pytest.mark.parametrize("method", ["heavy_merge", "streaming_llm", "subgen"])
def test_order_and_batches_change_nothing(model, method, prefill):
    contexts = [tiny_case(lines).prompt for lines in (60, 40)]
    pairs = [(c, choice) for choice in (" 1", " 22 brave", " calm 5") for c in contexts]
    arguments = {"method": method, "budget": 0.3, "prefill": prefill}
    if prefill == "streaming":
        arguments["allocation"] = "even"
    _, forth = scored(model, pairs, **arguments)
    _, back = scored(model, pairs[::-1], **arguments)
    for (one, same), (other, as_) in zip(forth, back[::-1], strict=True):
        assert one == pytest.approx(other, abs=1e-3)
        assert same == as_


def test_contexts_too_short_and_too_long(model):
    prompt = tiny_case(100).prompt  # longer than the model's 1,024 positions
    pairs = [("", "brave calm"), (prompt, " 22")]
    _, ours = scored(model, pairs, method="streaming_llm", budget=1.0)
    _, theirs = scored(model, pairs, cls=HFLM)
    for (one, same), (other, as_) in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=1e-3)
        assert same == as_
    with pytest.raises(InputError, match="leaves no context in max_length=1024"):
        scored(model, [("brave", prompt)], method="streaming_llm")


# --- wrong input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "snapvk"}, "did you mean 'snapkv'"),
        ({"bugdet": 0.3}, "model_args='bugdet' is unknown; did you mean 'budget'"),
        ({"budget": 1.5}, "budget=1.5"),
        ({"budget": "a quarter"}, "budget='a quarter' is not a number"),
        ({"tolerance": 2.0}, "tolerance=2.0"),
        ({"max_budget": 0.5}, "model_args='max_budget' is unknown"),
        ({"allocation": "fair"}, "allocation='fair' must be one of even, measured"),
        ({"bits": 3}, "bits=3"),
        ({"sink": -1}, "sink=-1 must be an int >= 0"),
        ({"recent": "many"}, "recent='many' must be an int >= 0"),
        ({"seed": 0.5}, "seed=0.5 must be an int >= 0"),
        ({"prefill": "chunked"}, "prefill='chunked' must be one of exact, streaming"),
        ({"one_shot": "maybe"}, "one_shot='maybe' must be True or False"),
        ({"method": "exact", "budget": 0.3}, "budget=0.3 has no effect with method='exact'"),
        ({"method": "exact", "bits": 4}, "bits=4 has no effect with method='exact'"),
    ],
)
def test_bad_arguments_are_named_before_weights_are_loaded(model, monkeypatch, arguments, message):
    def never(*args, **kwargs):
        raise AssertionError("the weights were asked for")

    monkeypatch.setattr(HFLM, "_create_model", never)
    with pytest.raises(InputError) as error:
        SketchLM(model, device="cpu", **arguments)
    assert message in str(error.value)


def test_a_model_that_cannot_be_compressed_is_refused_at_once(tmp_path):
    tokenizer = tiny_tokenizer()
    config = GPTNeoConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        attention_types=[[["global"], 1]],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="GPTNeoForCausalLM does not use"):
        SketchLM(str(tmp_path), device="cpu")
