"""Our pages in a real vLLM engine on a CPU: `make test-vllm`, in an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from benchmarks import vllm_engine as engine
from benchmarks.longeval_unseen import cases
from kvsketch.evaluation.runner.loading import PACKAGED, resolve_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own"
)
HEAVY = engine.OURS


def asked(count: int, tokens: int = 12) -> list[dict]:
    _, rows = cases(200, count, 0)
    return [{"prompt": row["prompt"], "max_tokens": tokens} for row in rows]


def test_answers_with_the_exact_page_are_vllms_own():
    found = engine.answers(6)
    assert found["exact_equal_to_stock"] == 6
    assert found["right"]["stock"] == 6
    assert found["equal_to_transformers"] >= 5
    assert found["right"]["heavy_merge"] >= 5


@pytest.mark.parametrize("method", ["streaming_llm", "cluster_merge", "h2o", "keydiff"])
def test_a_batch_is_its_requests_alone(method):
    variables = {"KVSKETCH_METHOD": method, "KVSKETCH_BUDGET": "512"}
    together = engine.run(asked(4), variables, max_num_seqs=8)
    alone = engine.run(asked(4), variables, together=False, max_num_seqs=8)
    assert engine.same(together, alone) == 4
    assert together["metrics"]["compressions"] > 0
    assert together["metrics"]["error"] > 0


def test_chunks_change_nothing():
    found = engine.chunks(4)
    assert found["equal"] == 4


def test_mixed_requests_with_aborts_and_preemptions():
    found = engine.mixed(16, seed=1)
    assert found["aborted"] > 0 < found["preemptions"]
    assert found["equal"] == found["finished"] == 16 - found["aborted"]
    before, after = found["free_pages"]
    assert before == after


def test_two_ranks_answer_as_one():
    found = engine.parallel(4)
    assert found["equal"] == 4


def test_a_page_is_as_large_for_a_long_context_as_for_a_short_one():
    pages = [
        engine.run([], engine.SMALL, max_model_len=context)["page_bytes"]
        for context in (2048, 16_000)
    ]
    assert pages[0] == pages[1]


def test_unset_vllm_is_untouched():
    found = engine.run(asked(1), {})
    assert "metrics" not in found
    assert found["page_bytes"] % 32 == 0


def test_settings_of_the_engines_own_configuration_win():
    extra = {"kvsketch": {"budget": 256}}
    few = engine.run([], {**HEAVY}, additional_config=extra)
    many = engine.run([], {**HEAVY})
    assert few["page_bytes"] < many["page_bytes"] / 3


REFUSED = {
    "budget": ({"KVSKETCH_METHOD": "heavy_merge", "KVSKETCH_BUDGET": "20"}, {}, "at least 37"),
    "method": ({"KVSKETCH_METHOD": "heavymerge"}, {}, "did you mean 'heavy_merge'"),
    "variable": ({"KVSKETCH_METHOD": "exact", "KVSKETCH_BUGDET": "3"}, {}, "KVSKETCH_BUGDET"),
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
        "speculative decoding",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_at_start_up(name):
    variables, arguments, said = REFUSED[name]
    with pytest.raises(RuntimeError, match=re.escape(said)):
        engine.run(asked(1), {**variables, "VLLM_LOGGING_LEVEL": "ERROR"}, **arguments)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """`vllm serve` with heavy_merge; its address and log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(resolve_model(PACKAGED))]
    command += ["--served-model-name", "packaged", "--dtype", "float32", "--max-model-len", "8192"]
    command += ["--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", **HEAVY}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **variables}, cwd=log.parent
        )
        address = f"http://127.0.0.1:{port}"
        for _ in range(180):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None, log.read_text()
                time.sleep(1)
        yield address, log
        process.terminate()
        process.wait(60)


def test_the_openai_client_gets_the_offline_answers(server):
    import openai

    address, log = server
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    _, rows = cases(200, 4, 0)
    found = [
        client.completions.create(
            model="packaged", prompt=row["prompt"], max_tokens=12, temperature=0
        )
        for row in rows
    ]
    offline = engine.run(asked(4), HEAVY, max_num_seqs=16)
    expected = [answer["text"] for answer in offline["answers"]]
    assert [one.choices[0].text for one in found] == expected
    assert "Maximum concurrency" in log.read_text()


def test_the_server_shows_what_pages_hold(server):
    address, _ = server
    text = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
    numbers = dict(re.findall(r"^kvsketch:(\w+) ([\d.e+-]+)$", text, re.MULTILINE))
    assert float(numbers["tokens_total"]) > 4 * 2000
    assert float(numbers["compressions_total"]) >= 4 * 4
    assert float(numbers["error_total"]) > 0
    assert 0 < float(numbers["slots"]) < 1792


def test_a_stream_that_is_dropped_frees_its_page(server):
    import openai

    address, _ = server
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    _, rows = cases(200, 1, 0)
    stream = client.completions.create(
        model="packaged", prompt=rows[0]["prompt"], max_tokens=3000, stream=True
    )
    next(iter(stream))
    stream.close()
    for _ in range(60):
        text = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
        running = re.search(r"^vllm:num_requests_running\{.*\} ([\d.]+)$", text, re.MULTILINE)
        used = re.search(r"^vllm:kv_cache_usage_perc\{.*\} ([\d.]+)$", text, re.MULTILINE)
        assert running
        assert used
        if float(running[1]) == 0 and float(used[1]) == 0:
            return
        time.sleep(0.5)
    pytest.fail("the page is still held")


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
