"""Our pages with what vLLM uses on CUDA: its model runner V2, and Triton kernels, here in Triton's
interpreter (``benchmarks/interpreter``)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from types import SimpleNamespace

import pytest
import torch
from jobs import about_documents, asked

from benchmarks import vllm_engine as engine
from benchmarks import vllm_gpu
from benchmarks.vllm_engine import drawn
from kvsketch.errors import UnsupportedError
from kvsketch.vllm import VERSIONS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own"
)
RUNNER = engine.as_on_cuda()
KERNELS = engine.as_on_cuda(pages=True)
TWO = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
FEW = {**engine.OURS, "KVSKETCH_BUDGET": "128"}


def test_both_runners_give_the_same_answers_to_a_crowd_with_preemptions():
    """The second one with the model compiled and scheduled ahead, as vLLM does by default."""
    given = {"enforce_eager": False, "async_scheduling": True}
    crowd = {"preempt": 5, "num_gpu_blocks_override": 6, "max_num_seqs": 8}
    first = engine.run(asked(6), engine.SMALL, max_num_seqs=8)
    second = engine.run(asked(6), {**engine.SMALL, **RUNNER}, **given, **crowd)
    assert engine.same(first, second) == 6
    assert second["preemptions"] > 0
    assert second["free_before"] == second["free_after"]
    assert second["spec"] == "PageSpec"


@pytest.mark.seams
def test_the_second_runner_starts_from_the_page_of_a_document():
    requests = about_documents(2)
    off = engine.run(requests, engine.OURS, together=False, enable_prefix_caching=False)
    on = engine.run(requests, {**engine.OURS, **RUNNER}, together=False)
    assert engine.same(off, on) == len(requests)
    assert on["reused_tokens"] > 6 * 0.9 * len(requests[0]["prompt"])


def test_copies_stay_as_they_are_when_a_preempted_request_is_read_again():
    """To the second runner, the tokens that a preempted request has decoded are part of its prompt.
    Later requests begin with a prompt and its answer, as the turns of a chat do."""
    prompts, variables = drawn((300, 300), 220), {**engine.OURS, "KVSKETCH_BUDGET": "128"}
    given = {"max_model_len": 1024, "block_size": 32, "max_num_batched_tokens": 64}
    given |= {"max_num_seqs": 2}
    first = engine.run(prompts, variables, enable_prefix_caching=False, **given)
    turns = [
        {**one, "prompt": one["prompt"] + answer[:count] + [7], "max_tokens": 8}
        for count in (210, 150, 60)
        for one, answer in zip(prompts, engine.tokens_of(first), strict=True)
    ]
    off = engine.run(turns, variables, enable_prefix_caching=False, **given)
    on = engine.run(prompts + turns, {**variables, **RUNNER}, preempt=90, **given)
    expected = {"answers": first["answers"] + off["answers"]}
    assert engine.same(expected, on) == len(prompts + turns)
    assert on["preemptions"] > 1
    assert on["reused_tokens"] > 6 * 288


def test_two_ranks_of_the_second_runner_answer_as_one():
    one = engine.run(asked(2), engine.OURS, max_num_seqs=8)
    two = engine.run(
        asked(2), {**engine.OURS, **RUNNER, **TWO}, max_num_seqs=8, tensor_parallel_size=2
    )
    assert engine.same(one, two) == 2


@pytest.mark.parametrize("kind", ["curves", "balancekv"])
def test_two_stages_answer_as_one(kind, curves):
    """A stage knows the numbers of its layers: budgets by curves and the seeds of methods that draw
    random numbers are those of one stage."""
    variables = {
        "curves": {**engine.SMALL, "KVSKETCH_ALLOCATION": curves, "KVSKETCH_BITS": "8"},
        "balancekv": {"KVSKETCH_METHOD": "balancekv", "KVSKETCH_BUDGET": "1024"},
    }[kind]
    one = engine.run(asked(2), variables, max_num_seqs=8)
    two = engine.run(
        asked(2), {**variables, **RUNNER, **TWO}, max_num_seqs=8, pipeline_parallel_size=2
    )
    assert engine.same(one, two) == 2
    for name in ("tokens", "compressions"):
        assert one["metrics"][name] == two["metrics"][name]
    assert one["metrics"]["error"] == pytest.approx(two["metrics"]["error"], rel=1e-2)


def test_two_stages_of_a_model_with_sliding_windows_are_refused(hybrid):
    """A stage cannot know whether there are such layers in the others."""
    given = {"model": hybrid, "max_model_len": 1024, "pipeline_parallel_size": 2}
    with pytest.raises(RuntimeError, match="models with sliding windows with pipeline parallelism"):
        engine.run([], {**FEW, **RUNNER, **TWO}, **given)


@pytest.mark.parametrize(("bits", "lines"), [("16", [16]), ("4", [7, 8])])
def test_triton_kernels_read_the_pages(bits, lines):
    """Questions that are answered, since the tokens that follow random ones are nearly equally
    likely: a sum in another order may then change the answer."""
    requests = [one for n in lines for one in asked(2 // len(lines), 3, lines=n)]
    variables = {**FEW, "KVSKETCH_BITS": bits}
    given = {"max_num_seqs": 8, "max_model_len": 1024}
    plain = engine.run(requests, variables, **given)
    cuda = {"attention_config": engine.FULL_ATTENTION, **given}
    kernels = engine.run(requests, {**variables, **KERNELS}, **cuda)
    assert plain["metrics"]["compressions"] > 0
    assert engine.same(plain, kernels) == 2


def test_layers_with_a_sliding_window_have_vllms_triton_backend(hybrid):
    """With ``backend_per_kind``, only layers of full attention have pages. The answers are those
    with vLLM's CPU backend for the other layers."""
    given = {"model": hybrid, "max_model_len": 1024}
    requests, few = drawn((40, 140), 3), {**FEW, "KVSKETCH_BITS": "4"}
    cuda = {"attention_config": engine.FULL_ATTENTION, "num_gpu_blocks_override": 40, **given}
    for variables, of_cpu in ((few, few), ({"KVSKETCH_METHOD": "exact"}, {})):
        expected = engine.run(requests, of_cpu, **given)
        found = engine.run(requests, {**variables, **KERNELS}, preempt=2, **cuda)
        assert engine.same(expected, found) == 2
        assert found["spec"] == "PageSpec"
        assert found["preemptions"] > 0
        assert found["clears_blocks"]  # of pages, before tokens are written to them
        assert (found["metrics"]["compressions"] > 0) == (variables is few)


def test_a_gpu_without_the_option_is_warned_of():
    """If vLLM's configuration selects another backend, nothing of kvsketch is called again."""
    code = """if True:
        import kvsketch.vllm
        from vllm.platforms import current_platform
        type(current_platform).is_cpu = lambda self: False
        kvsketch.vllm.register()
        kvsketch.vllm.register()
    """
    variables = {**os.environ, **engine.OURS}
    command = [str(engine.PYTHON), "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert (done.stdout + done.stderr).count("kvsketch is used only with --attention-config") == 1


@pytest.mark.parametrize("cache", ["turboquant_4bit_nc", "heavy_merge+int8"])
def test_the_benchmark_for_a_gpu(cache, tmp_path):
    # vLLM loads one of its three libraries, by the processor, and for TurboQuant a certain one
    if cache.startswith("turboquant") and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM's TurboQuant ends the process on processors without AVX-512 BF16")
    shape = {"vocab_size": 2100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = {"model": vllm_gpu.shaped(tmp_path, **shape, **heads), "load_format": "dummy"}
    row = vllm_gpu.measured(
        cache, 50, 2, 4, 40, 0, KERNELS, **model, skip_tokenizer_init=True, enforce_eager=True
    )
    assert row.pop("vllm").startswith(VERSIONS)
    assert len(row) == 3
    assert all(number > 0 for number in row.values())


def test_the_refusal_of_a_sliding_window_names_the_option(monkeypatch):
    from kvsketch.vllm import attention

    monkeypatch.setattr(attention, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    with pytest.raises(UnsupportedError, match=r'\{"full_attention": "CUSTOM"\}'):
        attention.PageImpl(4, 32, 1.0, sliding_window=128)
