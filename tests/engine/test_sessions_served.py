"""Requests whose pages a real vLLM engine saves, and that another one resumes; `make test-vllm`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from benchmarks import vllm_engine as engine
from benchmarks.vllm_documents import CONTEXT
from kvsketch.vllm.checks import BOTH, CONNECTOR
from kvsketch.vllm.settings import PageSettings
from tests.engine.jobs import asked

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own"
)
TOKENS = 130


def serve(folder: Path, requests: list[Any], variables: dict[str, str], **more: Any) -> engine.Job:
    given = {"KVSKETCH_DOCUMENTS": str(folder), "VLLM_LOGGING_LEVEL": "WARNING", **variables}
    more = {"max_num_seqs": 8, "kv_transfer_config": {**CONNECTOR, "kv_role": BOTH}, **more}
    return engine.run(requests, given, **more)


def test_a_session_goes_on(tmp_path):
    whole = [{**one, "ignore_eos": True} for one in asked(4, TOKENS)]
    cuts = [1, 20, 47, 90]
    parts = [{**one, "max_tokens": cut, "transfer": {"kvsketch_save": f"s{cut}"}} for one, cut in zip(whole, cuts)]
    given = {"KVSKETCH_BUDGET": "512"}
    found = serve(tmp_path, whole + parts, given)
    answers = engine.tokens_of(found)
    print(found["said"][-3000:])
    print([one["transfer"] for one in found["answers"]], found["metrics"], list(tmp_path.iterdir()))
    from transformers import AutoTokenizer
    from kvsketch.evaluation.runner.loading import resolve_model
    tok = AutoTokenizer.from_pretrained(resolve_model(engine.MODEL))
    later = [{**one, "prompt": tok(one["prompt"]).input_ids + tokens[:cut], "max_tokens": TOKENS - cut}
        for one, tokens, cut in zip(whole, answers, cuts)]
    resumed = serve(tmp_path, later, given)
    print(resumed["said"][-3000:], resumed["metrics"])
    for full, cut, rest in zip(answers, cuts, engine.tokens_of(resumed)):
        assert full[cut:] == rest
