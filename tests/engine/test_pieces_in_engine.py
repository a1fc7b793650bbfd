"""Prompts in pieces (``PageScheduler``) in a real vLLM engine on a CPU."""

from __future__ import annotations

import importlib.util

import pytest
from jobs import asked, right

from benchmarks import vllm_engine as engine
from benchmarks.vllm_engine import PIECES, drawn
from kvsketch.evaluation.runner.loading import resolve_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own"
)
SMALL = {**engine.OURS, "KVSKETCH_BUDGET": "256", "KVSKETCH_PIECE": "256"}


@pytest.mark.parametrize("bits", ["16", "4"])
def test_answers_depend_on_nothing_but_the_request(bits):
    """Neither on the size of chunks, nor on other requests, nor on preemptions."""
    variables = {**SMALL, "KVSKETCH_BITS": bits}
    requests = asked(1) + drawn((20, 255, 256, 257, 513, 900), 40)
    alone = engine.run(requests, variables, together=False, max_num_seqs=8, **PIECES)
    crowd = {"preempt": 7, "num_gpu_blocks_override": 7, "max_num_batched_tokens": 300}
    together = engine.run(requests, variables, max_num_seqs=8, **crowd, **PIECES)
    assert engine.same(alone, together) == len(requests)
    assert together["preemptions"] > 0
    assert together["free_before"] == together["free_after"]
    # 1,632 tokens take seven pieces, 900 four, ...; the last pieces may fit.
    assert 6 * 6 < alone["metrics"]["compressions"] < 6 * 8 + 6 * 6 * 8


def test_what_no_last_query_asked_for_is_answered():
    """512 of 1,600 tokens: all queries of a piece say what is kept, not only the last ones."""
    variables = {**engine.OURS, "KVSKETCH_BUDGET": "512"}
    found = engine.run(asked(8), variables, max_num_seqs=8, **PIECES)
    assert right(found, 8) >= 7


@pytest.mark.parametrize("kind", ["plain", "sliding windows"])
def test_requests_start_from_the_page_of_a_document_that_was_read(kind, hybrid):
    """With sliding windows, vLLM has to keep the tokens of the windows after every piece, too."""
    given = {}
    if kind != "plain":
        given = {"model": hybrid, "max_model_len": 4096, "prefix_cache_retention_interval": 256}
    requests, reused = [], 0
    for number, document in enumerate(drawn((900, 1200), 1)):
        requests.append(document)
        reused += 3 * (len(document["prompt"]) // 256 * 256)
        for question in drawn((40, 60, 300), 8, 1 + number):
            requests.append({**question, "prompt": document["prompt"] + question["prompt"]})
    off = engine.run(
        requests, SMALL, together=False, enable_prefix_caching=False, **given, **PIECES
    )
    on = engine.run(requests, SMALL, together=False, **given, **PIECES)
    assert engine.same(off, on) == len(requests)
    assert on["reused_tokens"] == reused
    crowd = {"max_num_seqs": 4, "preempt": 5}
    crowd["num_gpu_blocks_override"] = 8 if kind == "plain" else 120
    both = engine.run(requests + requests[::-1], SMALL, **crowd, **given, **PIECES)
    twice = {"answers": off["answers"] + off["answers"][::-1]}
    assert engine.same(twice, both) == 2 * len(requests)
    assert both["preemptions"] > 0 < both["reused_tokens"]
    assert both["free_before"] == both["free_after"]


def test_the_second_runner_reads_what_it_decoded_one_by_one():
    """To the model runner V2, the tokens that a preempted request has decoded are part of its
    prompt. Later requests begin with a prompt and its answer, as the turns of a chat do."""
    variables = {**engine.OURS, "KVSKETCH_BUDGET": "128", "KVSKETCH_PIECE": "64"}
    given = {"max_model_len": 1024, "block_size": 32, "max_num_batched_tokens": 96}
    given |= {"max_num_seqs": 2, **PIECES}
    prompts = drawn((200, 300), 72)
    first = engine.run(prompts, variables, enable_prefix_caching=False, **given)
    turns = [
        {**one, "prompt": one["prompt"] + answer[:count] + [7], "max_tokens": 8}
        for count in (66, 30)
        for one, answer in zip(prompts, engine.tokens_of(first), strict=True)
    ]
    off = engine.run(turns, variables, enable_prefix_caching=False, **given)
    second = {**variables, **engine.as_on_cuda()}
    on = engine.run(prompts + turns, second, preempt=33, **given)
    expected = {"answers": first["answers"] + off["answers"]}
    assert engine.same(expected, on) == len(prompts + turns)
    assert on["preemptions"] > 1
    assert on["reused_tokens"] > 0


def test_two_ranks_with_budgets_by_curves_answer_as_one(curves):
    variables = {**SMALL, "KVSKETCH_ALLOCATION": curves, "KVSKETCH_BUDGET": "512"}
    one = engine.run(asked(2), variables, max_num_seqs=8, **PIECES)
    both = {**variables, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    two = engine.run(asked(2), both, max_num_seqs=8, tensor_parallel_size=2, **PIECES)
    assert engine.same(one, two) == 2


REFUSED = {
    "step": ({}, {"max_num_batched_tokens": 260}, "piece=256 is more than the 252 tokens"),
    "blocks": ({"KVSKETCH_PIECE": "200"}, {}, "piece=200 must be a multiple of vLLM's block size"),
    "threshold": ({}, {"long_prefill_token_threshold": 100}, "--long-prefill-token-threshold=100"),
    "scheduler": (
        {},
        {"scheduler_cls": "benchmarks.engine_job.Engine"},
        "does not know the scheduler benchmarks.engine_job.Engine",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_in_pieces_is_refused(name):
    variables, more, message = REFUSED[name]
    with pytest.raises(RuntimeError, match=message):
        engine.run([], {**SMALL, **variables}, **{"max_num_seqs": 8, **PIECES, **more})


@pytest.mark.seams
def test_answers_with_guesses_are_those_without():
    """By n-grams. Pages are compressed behind no guess, however many are right."""
    requests = [{**one, "max_tokens": 60, "ignore_eos": True} for one in asked(4)]
    requests.append({**drawn((5,), 200)[0], "prompt": "line one: REGISTER is <43514>\n" * 20})
    given = {"max_num_seqs": 8, **PIECES}
    plain = engine.run(requests, SMALL, **given)
    guessed = engine.run(requests, SMALL, **given, **engine.GUESSES)
    assert engine.same(plain, guessed) == len(requests)
    assert plain["metrics"]["compressions"] == guessed["metrics"]["compressions"]
    assert len(guessed["steps"]) < 0.6 * len(plain["steps"])
    assert guessed["free_before"] == guessed["free_after"]


@pytest.mark.seams
def test_answers_with_guesses_of_another_model_are_those_without(drafts):
    """Which has pages of its own. Requests are guessed beside each other and read again after they
    were preempted, and some start from the page of a document that was read."""
    requests = [{**one, "max_tokens": 40, "ignore_eos": True} for one in asked(3)]
    requests += drawn((20, 255, 257, 513, 900), 50)
    alone = engine.run(requests, SMALL, together=False, max_num_seqs=8, **PIECES)
    crowd = {"max_num_seqs": 8, "max_num_batched_tokens": 300, **PIECES}
    crowd |= engine.guessed_by(resolve_model("lists"))
    first = engine.run(requests, SMALL, preempt=11, num_gpu_blocks_override=7, **crowd)
    assert engine.same(alone, first) == len(requests)
    assert first["preemptions"] > 0
    assert len(first["steps"]) < 0.3 * len(alone["steps"])
    assert first["free_before"] == first["free_after"]
    again = engine.run(requests + requests[::-1], SMALL, together=False, **crowd)
    twice = {"answers": alone["answers"] + alone["answers"][::-1]}
    assert engine.same(twice, again) == 2 * len(requests)
    assert again["reused_tokens"] > 4000
    # Of another shape, in 4 bits, and never right.
    few = {**SMALL, "KVSKETCH_BITS": "4"}
    alone = engine.run(requests, few, together=False, max_num_seqs=8, **PIECES)
    other = engine.run(requests, few, **{**crowd, **engine.guessed_by(drafts)})
    assert engine.same(alone, other) == len(requests)
    assert other["metrics"]["compressions"] > alone["metrics"]["compressions"]
