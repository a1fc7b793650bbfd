"""Models and curves of the tests in this folder."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Iterator

import pytest

from benchmarks import vllm_engine as engine
from kvsketch.evaluation.runner.loading import resolve_model


@pytest.fixture(scope="session")
def curves(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Curves of the packaged model, measured on other prompts than the tests'."""
    return engine.curves(tmp_path_factory.mktemp("curves"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random model with sliding windows in four of its six layers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=8192,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=128,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=8192,
        query_pre_attn_scalar=32,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hybrid")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model("longeval-one-head")).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model with the tokens of the packaged one and another shape."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    packaged = resolve_model(engine.MODEL)
    config = LlamaConfig(
        vocab_size=AutoConfig.from_pretrained(packaged).vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("drafts")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(packaged).save_pretrained(folder)
    return str(folder)


#: what Python, vLLM or benchmarks/interpreter read while they are imported
_EARLY = ("PYTHONPATH", "INTERPRETED_PAGES")


@pytest.fixture(scope="session", autouse=True)
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines, and their ranks, are forks of a process that has imported vLLM with the same of the
    variables that matter then: an import takes longer than most tests. All of them log warnings, as
    tests of documents ask for."""
    if importlib.util.find_spec("vllm") is None:
        yield
        return
    said = tmp_path_factory.mktemp("engines") / "said"
    servers: dict[tuple[str | None, ...], subprocess.Popen[str]] = {}

    def process(job: engine.Job, variables: dict[str, str]) -> tuple[int, str]:
        early = {name: variables[name] for name in _EARLY if name in variables}
        kind = tuple(early.get(name) for name in _EARLY)
        server = servers.get(kind)
        if server is None or server.poll() is not None:
            command = [str(engine.PYTHON), "-m", "benchmarks.engine_job", "--forks"]
            given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            environment = {**engine.clean(), "VLLM_LOGGING_LEVEL": "WARNING", **early}
            server = subprocess.Popen(command, cwd=engine.ROOT, env=environment, **given)
            servers[kind] = server
        stdin, stdout = server.stdin, server.stdout
        assert stdin is not None
        assert stdout is not None
        later = {name: value for name, value in variables.items() if name not in _EARLY}
        line = {"job": job, "variables": later, "said": str(said)}
        stdin.write(json.dumps(line) + "\n")
        stdin.flush()
        answer = stdout.readline()
        while answer and not answer.strip().lstrip("-").isdecimal():  # a warning of an import
            answer = stdout.readline()
        return int(answer or 1), said.read_text()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "process", process)
        yield
    for one in servers.values():
        one.communicate()
