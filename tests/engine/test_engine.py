"""Our pages in a real vLLM engine on a CPU; `make test-vllm` runs it in its own environment."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from jobs import about_documents, adapter, asked, right, seams

from benchmarks import vllm_engine as engine
from benchmarks.longeval import cases
from benchmarks.vllm_engine import drawn
from kvsketch import SketchCache, measure_curves
from kvsketch.evaluation.runner.loading import load_model, resolve_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own"
)
HEAVY = engine.OURS


@pytest.mark.seams
def test_answers_with_the_exact_page_are_vllms_own():
    requests = asked(6)
    stock = engine.run(requests, {}, max_num_seqs=16)
    exact = engine.run(requests, {"KVSKETCH_METHOD": "exact"}, max_num_seqs=16)
    assert engine.same(stock, exact) == 6
    assert right(stock, 6) == 6


def test_answers_are_those_of_transformers():
    requests = asked(6)
    variables = {**HEAVY, "KVSKETCH_BUDGET": "768"}
    ours = engine.run(requests, variables, max_num_seqs=16, **engine.PIECES)
    theirs = engine.transformers_answers([one["prompt"] for one in requests], 768)
    texts = [one["text"].strip() for one in ours["answers"]]
    assert sum(a == b.strip() for a, (b, _) in zip(texts, theirs, strict=True)) >= 5
    # With this budget about four of five answers are right (docs/vllm.md).
    assert right(ours, 6) >= 3


@pytest.mark.parametrize("method", ["streaming_llm", "cluster_merge", "h2o", "keydiff"])
def test_a_batch_is_its_requests_alone(method):
    variables = {"KVSKETCH_METHOD": method, "KVSKETCH_BUDGET": "512"}
    requests = asked(3, lines=100)
    together = engine.run(requests, variables, max_num_seqs=8)
    alone = engine.run(requests, variables, together=False, max_num_seqs=8)
    assert engine.same(together, alone) == 3
    assert together["metrics"]["compressions"] > 0
    assert together["metrics"]["error"] > 0


def test_chunks_change_nothing():
    found = engine.chunks(2)
    assert found["equal"] == 2


@pytest.mark.seams
def test_mixed_requests_with_aborts_and_preemptions():
    found = engine.mixed(8, seed=1, longest=3000, pages=7)
    assert found["aborted"] > 0 < found["preemptions"]
    assert found["most_running"] < 8  # The others wait for a page.
    assert found["equal"] == found["finished"] == 8 - found["aborted"]
    before, after = found["free_pages"]
    assert before == after


@pytest.mark.seams
def test_two_ranks_answer_as_one(monkeypatch):
    """Here in new processes, as vLLM starts them: each has to find our plugin. The ranks of other
    tests are forks."""
    monkeypatch.setattr(engine, "process", engine.new_process)
    found = engine.parallel(2)
    assert found["equal"] == 2


@pytest.mark.parametrize("bits", ["8", "4"])
def test_slots_in_few_bits(bits):
    variables = {**HEAVY, "KVSKETCH_BITS": bits}
    together = engine.run(asked(6), variables, max_num_seqs=8)
    alone = engine.run(asked(2), variables, together=False, max_num_seqs=8)
    assert engine.same({"answers": together["answers"][:2]}, alone) == 2
    assert right(together, 6) >= 5
    sixteen = engine.run([], HEAVY)  # 32 bits here, this model's dtype
    assert together["page_bytes"] < sixteen["page_bytes"] * (0.5 if bits == "8" else 0.4)
    assert together["metrics"]["error"] > 0


def test_budgets_by_curves_and_two_ranks_of_them(curves):
    """Budgets by curves answer more of eight questions than even ones of the same bytes; two ranks
    answer as one."""
    variables = {**HEAVY, "KVSKETCH_BUDGET": "256"}
    even = engine.run(asked(8), variables, max_num_seqs=16)
    variables["KVSKETCH_ALLOCATION"] = curves
    one = engine.run(asked(8), variables, max_num_seqs=16)
    alone = engine.run(asked(2), variables, together=False, max_num_seqs=8)
    assert engine.same({"answers": one["answers"][:2]}, alone) == 2
    assert right(one, 8) > right(even, 8)
    assert one["page_bytes"] < 1.02 * even["page_bytes"]
    both = {**variables, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    two = engine.run(asked(1), both, max_num_seqs=8, tensor_parallel_size=2)
    assert engine.same({"answers": alone["answers"][:1]}, two) == 1


@pytest.mark.seams
def test_layers_with_a_sliding_window_keep_their_own_small_blocks(hybrid):
    requests, given = drawn((50, 500, 900, 200), 16), {"model": hybrid, "max_model_len": 4096}
    stock = engine.run(requests, {}, **given)
    exact = engine.run(requests, {"KVSKETCH_METHOD": "exact"}, **given)
    assert engine.same(stock, exact) == 4
    assert exact["concurrency"] > 0.9 * stock["concurrency"]
    few = {"KVSKETCH_METHOD": "heavy_merge", "KVSKETCH_BUDGET": "256"}
    # Of a random model tokens are nearly equally likely, and on some machines products of other
    # sizes round differently, which in 4 bits becomes another code.
    for variables, least in ((few, 4), ({**few, "KVSKETCH_BITS": "4"}, 3)):
        together = engine.run(requests, variables, preempt=7, **given)
        alone = engine.run(requests, variables, together=False, **given)
        assert together["preemptions"] > 0
        assert engine.same(together, alone) >= least
        assert together["free_before"] == together["free_after"]
        assert together["concurrency"] > stock["concurrency"]


@pytest.mark.parametrize("bits", ["16", "4"])
def test_requests_start_from_the_page_of_a_document_that_was_read(bits):
    variables, requests = {**HEAVY, "KVSKETCH_BITS": bits}, about_documents(2)
    off = engine.run(requests, variables, together=False, enable_prefix_caching=False)
    on = engine.run(requests, variables, together=False)
    assert off["reused_tokens"] == 0
    assert engine.same(off, on) == len(requests)
    document = len(requests[0]["prompt"])
    assert on["reused_tokens"] > 6 * 0.9 * document
    assert on["metrics"]["tokens"] == off["metrics"]["tokens"] - on["reused_tokens"]
    crowd = {"max_num_seqs": 4, "num_gpu_blocks_override": 8, "preempt": 5}
    both = engine.run(requests + requests[::-1], variables, **crowd)
    twice = {"answers": off["answers"] + off["answers"][::-1]}
    assert engine.same(twice, both) == 2 * len(requests)
    assert both["preemptions"] > 0 < both["reused_tokens"]
    assert both["free_before"] == both["free_after"]


@pytest.mark.parametrize("bits", seams(["16", "4"], "4"))
def test_a_page_of_several_blocks_is_found_again(bits, hybrid):
    """With sliding windows, too, requests start from the copy of a page, with vLLM's own cache of
    the tokens in the window. Blocks of pages in few bits are reused for tokens."""
    documents = drawn((900, 1100), 1)
    questions = [one["prompt"] for one in drawn((40,) * 4, 1)]
    requests = []
    for number, document in enumerate(documents):
        requests.append(document)
        for question in questions[2 * number : 2 * number + 2]:
            prompt = document["prompt"] + question
            requests.append({"prompt": prompt, "max_tokens": 8, "ignore_eos": True})
    variables = {**HEAVY, "KVSKETCH_BUDGET": "256", "KVSKETCH_BITS": bits}
    given = {"model": hybrid, "max_model_len": 4096}
    off = engine.run(requests, variables, together=False, enable_prefix_caching=False, **given)
    on = engine.run(requests, variables, together=False, **given)
    assert off["reused_tokens"] == 0
    assert engine.same(off, on) == len(requests)
    assert on["reused_tokens"] > 2 * 0.9 * 2000
    crowd = {"max_num_seqs": 4, "num_gpu_blocks_override": 120, "preempt": 5, **given}
    both = engine.run(requests + requests[::-1], variables, **crowd)
    twice = {"answers": off["answers"] + off["answers"][::-1]}
    assert engine.same(twice, both) == 2 * len(requests)
    assert both["preemptions"] > 0 < both["reused_tokens"]
    assert both["free_before"] == both["free_after"]


def test_adapters(tmp_path):
    prompt = asked(1, lines=30)[0] | {"max_tokens": 24, "ignore_eos": True}
    each = [prompt, *(prompt | {"adapter": adapter(tmp_path, seed)} for seed in (1, 2))]
    given = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "dtype": "float32"}
    # One at a time: in a batch on a CPU, vLLM 0.32 gives a request without an adapter another's.
    stock = engine.run(each, {}, together=False, **given)
    # The second time, every request starts from the copy of its own adapter's page.
    ours = engine.run(each * 2, {"KVSKETCH_METHOD": "exact"}, together=False, **given)
    assert ours["reused_tokens"] > 0
    wanted, found = ([one["tokens"] for one in run["answers"]] for run in (stock, ours))
    assert found == wanted * 2
    assert len({tuple(tokens) for tokens in wanted}) == 3


def test_several_answers_of_a_request():
    requests = asked(3)
    one = engine.run(requests, HEAVY, max_num_seqs=16)
    three = engine.run([{**r, "n": 3} for r in requests], HEAVY, max_num_seqs=16)
    for alone, several in zip(one["answers"], three["answers"], strict=True):
        assert several["all"] == [alone["text"]] * 3


def test_curves_of_another_model_are_refused(curves, hybrid):
    variables = {**HEAVY, "KVSKETCH_ALLOCATION": curves}
    with pytest.raises(RuntimeError, match=r"curves are of 6 layers x 4 KV heads"):
        engine.run([], variables, model=hybrid, max_model_len=4096)


def test_curves_of_a_model_with_sliding_windows(hybrid, tmp_path):
    """They are of the layers that have pages; heads that need more get more slots."""
    model, path = load_model(hybrid, "cpu", "float32"), tmp_path / "curves.json"
    ids = torch.tensor([request["prompt"] for request in drawn((1200,), 1, seed=5)])
    measure_curves(model, [ids], "heavy_merge").save(path)
    requests, given = drawn((700, 1500), 12), {"model": hybrid, "max_model_len": 4096}
    variables = {"KVSKETCH_BUDGET": "256", "KVSKETCH_ALLOCATION": str(path)}
    alone = engine.run(requests, variables, together=False, **given)
    together = engine.run(requests, variables, max_num_batched_tokens=64, **given)
    assert engine.same(alone, together) == len(requests)
    assert alone["metrics"]["compressions"] > 0


def test_a_page_is_as_large_for_a_long_context_as_for_a_short_one():
    pages = [
        engine.run([], engine.SMALL, max_model_len=context)["page_bytes"]
        for context in (2048, 16_000)
    ]
    assert pages[0] == pages[1]


@pytest.mark.seams
def test_unset_vllm_is_untouched():
    found = engine.run(asked(1), {})
    assert found["spec"] == "FullAttentionSpec"
    assert "metrics" not in found
    assert engine.run([], HEAVY)["spec"] == "PageSpec"


def test_settings_of_the_engines_own_configuration_win():
    extra = {"kvsketch": {"budget": 256}}
    few = engine.run([], {**HEAVY}, additional_config=extra)
    many = engine.run([], {**HEAVY})
    assert few["page_bytes"] < many["page_bytes"] / 3


REFUSED = {
    "budget": ({"KVSKETCH_METHOD": "heavy_merge", "KVSKETCH_BUDGET": "20"}, {}, "at least 40"),
    "method": ({"KVSKETCH_METHOD": "heavymerge"}, {}, "did you mean 'heavy_merge'"),
    "variable": ({"KVSKETCH_METHOD": "exact", "KVSKETCH_BUGDET": "3"}, {}, "KVSKETCH_BUGDET"),
    "bits": ({**HEAVY, "KVSKETCH_BITS": "5"}, {}, "bits=5 must be one of 16"),
    "curves": ({**HEAVY, "KVSKETCH_ALLOCATION": "/no/such"}, {}, "'/no/such' cannot be read"),
    "exact": ({"KVSKETCH_METHOD": "exact", "KVSKETCH_BITS": "8"}, {}, "leave bits out"),
    "number": ({"KVSKETCH_BUDGET": "many"}, {}, "KVSKETCH_BUDGET='many' is not a number"),
    "setting": (
        HEAVY,
        {"additional_config": {"kvsketch": {"bugdet": 3}}},
        "kvsketch setting='bugdet' is unknown",
    ),
    "pipeline": (
        {**HEAVY, "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        {"pipeline_parallel_size": 2},
        "pipeline parallelism",
    ),
    "dtype": (HEAVY, {"kv_cache_dtype": "fp8"}, "KV cache in fp8"),
    "speculation": (
        HEAVY,
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        "serves speculative decoding only with --scheduler-cls",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_at_start_up(name):
    variables, arguments, said = REFUSED[name]
    with pytest.raises(RuntimeError, match=re.escape(said)):
        engine.run(asked(1), variables, **arguments)


@pytest.mark.seams
def test_a_server(tmp_path):
    """The openai client gets the offline answers, metrics show what pages hold, and a stream that
    is dropped frees its page."""
    import openai

    prompts = [row["prompt"] for row in cases(200, 4, 0)[1]]
    log = tmp_path / "log"
    with engine.served(HEAVY, log) as address:
        found = engine.told(address, prompts)
        numbers = metrics(address, "kvsketch")
        assert numbers["tokens_total"] > 4 * 1500
        assert numbers["compressions_total"] >= 4 * 4
        assert numbers["error_total"] > 0
        assert 0 < numbers["slots"] < 1792
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        stream = client.completions.create(
            model=engine.MODEL, prompt=prompts[0], max_tokens=3000, stream=True
        )
        next(iter(stream))
        stream.close()
        for _ in range(60):
            held = metrics(address, "vllm")
            if held["num_requests_running"] == held["kv_cache_usage_perc"] == 0:
                break
            time.sleep(0.5)
        else:
            pytest.fail("the page is still held")
    assert "Maximum concurrency" in log.read_text()
    offline = engine.run(asked(4), HEAVY, max_num_seqs=16)
    assert found == [answer["text"] for answer in offline["answers"]]


def metrics(address, begin):
    """The numbers of a server whose names begin so, without their labels."""
    text = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
    pattern = rf"^{begin}:(\w+)(?:{{.*}})? ([\d.e+-]+)$"
    return {name: float(number) for name, number in re.findall(pattern, text, re.MULTILINE)}


def test_the_stub_says_what_is_wrong():
    done = subprocess.run(
        [sys.executable, "-m", "kvsketch.vllm.stub"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "is installed already" in done.stderr


def test_the_plugin_is_found():
    from importlib.metadata import entry_points

    (found,) = entry_points(group="vllm.general_plugins", name="kvsketch")
    assert found.value == "kvsketch.vllm:register"


def test_attention_sinks(tmp_path):
    """gpt-oss, which also has sliding windows: the exact page gives vLLM's own answers, and a
    compressed one those of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig

    config = GptOssConfig(
        vocab_size=8192,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=8192,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.normal_(2.0)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(resolve_model("longeval-one-head")).save_pretrained(tmp_path)
    requests, given = drawn((50, 700), 12), {"model": str(tmp_path), "max_model_len": 4096}
    stock = engine.run(requests, {}, **given)
    exact = engine.run(requests, {"KVSKETCH_METHOD": "exact"}, **given)
    assert engine.same(stock, exact) == 2
    kept = engine.run(requests, {"KVSKETCH_BUDGET": "256"}, **given, **engine.PIECES)
    assert kept["metrics"]["compressions"] > 0
    found = []
    for request in requests:
        ids = torch.tensor([request["prompt"]])
        cache = SketchCache(config, budget=256, bits=16, allocation="even", prefill="streaming")
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        found.append(out[0, ids.shape[1] :].tolist())
    assert engine.tokens_of(kept) == found
