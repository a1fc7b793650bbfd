"""What fits into the memory of a GPU, with vLLM's own cache and with pages."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from typer.testing import CliRunner

from kvsketch import InputError, UnsupportedError, packaged_model
from kvsketch.cli.app import app
from kvsketch.page.layout import Layout
from kvsketch.vllm.checks import check_layer
from kvsketch.vllm.plan import plan, size_of, tokens_of
from kvsketch.vllm.settings import SCHEDULER, PageSettings


def llama(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    sizes["max_position_embeddings"] = 8192
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100}
    return LlamaConfig(**{**sizes, **heads, **changes})


def test_a_plan_fits_and_nothing_larger_does():
    config = llama()
    found = plan(config, 2**30, 8192, concurrency=20)
    assert found.request_bytes == 8192 * 3 * 2 * 2 * 32 * 2
    assert found.before == pytest.approx(found.kv_bytes / found.request_bytes)
    assert found.before_fp8 == 2 * found.before
    assert found.sliding == 0
    assert found.after >= 20
    assert 21 * found.page_bytes <= found.kv_bytes
    larger = PageSettings(budget=found.budget + 1).layout(8192, 2, 4, 32, torch.bfloat16)
    assert 21 * larger.bytes * 3 > found.kv_bytes or found.budget == 8192
    layout = PageSettings(budget=found.budget).layout(8192, 2, 4, 32, torch.bfloat16)
    assert isinstance(layout, Layout)
    assert found.page_bytes == 3 * layout.bytes
    assert found.slots == layout.slots


def test_a_plan_with_a_budget():
    found = plan(llama(), 2**30, 8192, settings=PageSettings(budget=512))
    assert found.budget == 512
    assert found.after == found.kv_bytes // found.page_bytes - 1


def test_a_plan_that_cannot_be():
    with pytest.raises(InputError, match="weights take"):
        plan(llama(hidden_size=2048, vocab_size=50_000), 2**27, 8192, concurrency=2)
    with pytest.raises(InputError, match="not even budget=40"):
        plan(llama(), 2**24, 8192, concurrency=10_000)
    with pytest.raises(InputError, match="concurrency=0"):
        plan(llama(), 2**30, 8192, concurrency=0)
    with pytest.raises(InputError, match="context=8193 is longer than the model's 8192 positions"):
        plan(llama(), 2**30, 8193, concurrency=2)


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("deepseek_v3", "multi-head latent attention"),
        ("gemma3n_text", "layers that share keys and values"),
        ("gemma4_text", "heads of different sizes"),
        ("llama4_text", "chunked attention"),
        ("qwen3_next", "layers without keys and values"),
        ("bloom", "ALiBi"),
        ("mistral", "no full-attention layer"),
    ],
)
def test_models_that_the_plugin_does_not_serve_are_not_planned_for(family, says):
    with pytest.raises(UnsupportedError, match=says):
        plan(AutoConfig.for_model(family), 2**40, 1024, concurrency=2)


def test_attention_sinks_are_planned_for_and_other_arguments_refused():
    """gpt-oss has sliding windows and attention sinks."""
    found = plan(AutoConfig.for_model("gpt_oss"), 2**40, 8192, concurrency=2)
    assert found.sliding > 0
    with pytest.raises(UnsupportedError, match="attention with unheard_of="):
        check_layer(None, "decoder", None, {"unheard_of": 1})


def test_layers_with_a_sliding_window_keep_vllms_own_cache_of_it():
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=6, sliding_window=512)
    found = plan(config, 2**34, 8192, settings=PageSettings(budget=1024))
    token = 4 * 2 * 256 * 2  # a layer's bytes of a token
    assert found.sliding == 5
    assert found.request_bytes == (8192 + 5 * 512) * token
    layout = PageSettings(budget=1024).layout(8192, 4, 2, 256, torch.bfloat16)
    page = found.page_bytes - 5 * 512 * token
    assert layout.bytes <= page < layout.bytes + 16 * token
    assert page % (16 * token) == 0  # in vLLM's blocks


def test_positions_that_yarn_adds_can_be_planned_for():
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    config = llama(rope_parameters={**scaled, "rope_theta": 10_000.0})
    assert plan(config, 2**32, 32_768, concurrency=2).after >= 2
    with pytest.raises(InputError, match="the model's 32768 positions"):
        plan(config, 2**32, 32_769, concurrency=2)


def test_a_plan_says_where_kvsketch_is_worse():
    worse = plan(llama(), 2**30, 1000, settings=PageSettings(budget=1024))
    assert worse.after < int(worse.before)
    assert worse.warning is not None
    assert f"than with vLLM's own cache: {worse.after:,} against" in worse.warning
    between = plan(llama(), 2**30, 2048, settings=PageSettings(budget=1024))
    assert int(between.before) <= between.after < int(between.before_fp8)
    assert between.warning is not None
    assert "--kv-cache-dtype fp8" in between.warning
    assert plan(llama(), 2**30, 8192, settings=PageSettings(budget=512)).warning is None


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("24GB", 24 * 10**9), ("1.5 gib", 3 * 2**29)]
)
def test_sizes(text, size):
    assert size_of(text, "memory") == size


def test_contexts():
    assert tokens_of("128k", "context") == 131_072
    assert tokens_of("4096", "context") == 4096
    for wrong in ("", "lots", "0", "12GiB"):
        with pytest.raises(InputError, match="context="):
            tokens_of(wrong, "context")
    with pytest.raises(InputError, match="memory='lots'"):
        size_of("lots", "memory")
    with pytest.raises(InputError, match="memory='80' has no unit; write 80GiB or 80GB"):
        size_of("80", "memory")


def test_the_command(tmp_path):
    llama().save_pretrained(tmp_path)
    arguments = ["plan", "--model", str(tmp_path), "--gpu-memory", "1GiB", "--context", "8k"]
    done = CliRunner().invoke(app, [*arguments, "--concurrency", "20", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["after"] >= 20
    assert found["context"] == 8192
    shown = CliRunner().invoke(app, [*arguments, "--concurrency", "20"])
    (line,) = [line for line in shown.stdout.splitlines() if "vllm serve" in line]
    assert line == found["command_line"]
    assert line.startswith(f"KVSKETCH_METHOD=heavy_merge KVSKETCH_BUDGET={found['budget']} ")
    assert line.endswith(
        f" vllm serve {tmp_path} --max-model-len 8192 --dtype bfloat16 --attention-backend CUSTOM"
        f" --scheduler-cls {SCHEDULER}"
    )
    assert "vLLM, FP8" in shown.stdout
    assert found["warning"] in " ".join(shown.stdout.split())
    nothing = CliRunner().invoke(app, arguments).stderr
    assert "give --concurrency N" in nothing
    exact = CliRunner().invoke(app, [*arguments, "--concurrency", "2", "--method", "exact"]).stderr
    assert "--method exact keeps every token" in exact
    assert "not both" not in nothing
    both = CliRunner().invoke(app, [*arguments, "--concurrency", "2", "--budget", "99"]).stderr
    assert "--concurrency 2 and --budget 99 exclude each other" in both
    for wrong in (
        [],
        ["--concurrency", "2", "--budget", "9"],
        ["--budget", "64", "--dtype", "x"],
        ["--budget", "0"],
    ):
        assert CliRunner().invoke(app, [*arguments, *wrong]).exit_code == 2


def test_the_command_is_one_that_vllm_can_run(tmp_path):
    """A packaged model by its folder; layers with a sliding window keep their own backend."""
    words = ["--gpu-memory", "1GiB", "--context", "4k", "--budget", "256"]
    shown = CliRunner().invoke(app, ["plan", "--model", "longeval-one-head", *words])
    assert f"vllm serve {packaged_model('longeval-one-head')} --max-model-len 4096" in shown.stdout
    folder = tmp_path / "a model"
    AutoConfig.for_model("gemma3_text", num_hidden_layers=6).save_pretrained(folder)
    words[1] = "16GiB"
    shown = CliRunner().invoke(app, ["plan", "--model", str(folder), *words])
    (line,) = [line for line in shown.stdout.splitlines() if "vllm serve" in line]
    assert f"vllm serve '{folder}' " in line
    assert line.endswith(
        """--attention-config '{"backend_per_kind": {"full_attention": "CUSTOM"}}'"""
        f" --scheduler-cls {SCHEDULER}"
    )
    assert "--attention-backend" not in line
    assert "5 layers have a sliding window" in shown.stdout
