"""SketchCache under tensor parallelism: a transformers Llama, sharded over two gloo ranks on the
CPU, against the same model in one process. Each rank has half of the KV heads."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing
from transformers import AutoModelForCausalLM

from kvsketch import InputError, SketchCache
from kvsketch.cache.curves import Curves
from kvsketch.cache.held_out import LEVELS
from tiny_model import small_llama

pytest.importorskip("accelerate", reason="transformers shards a model only with accelerate")
pytestmark = pytest.mark.slow  # starts two processes that import torch and transformers

RANKS, TOKENS, NEW = 2, 300, 12
SETUPS: dict[str, dict[str, Any]] = {
    "streaming_llm": {"method": "streaming_llm", "budget": 0.3},
    "streaming prefill": {"method": "streaming_llm", "budget": 90, "prefill": "streaming"},
    "snapkv": {"method": "snapkv", "budget": 0.3},
    "pyramidkv": {"method": "pyramidkv", "budget": 0.3},
    "int8": {"method": "snapkv", "budget": 0.3, "bits": 8},
    "even": {"method": "heavy_merge", "budget": 0.3, "allocation": "even"},
    "tolerance": {"method": "heavy_merge", "tolerance": 0.2},
    "measured": {"method": "heavy_merge", "budget": 0.15, "allocation": "measured"},
    "measured slots": {"method": "snapkv", "budget": 90, "allocation": "measured"},
    "bounded": {"method": "heavy_merge", "tolerance": 0.2, "budget": 0.5},
    "curves": {"method": "snapkv", "budget": 0.3},  # its allocation is a file, see ``run``
}
SCHEDULE = [[0.5, 0.5, 1.5, 1.5], [1.5, 1.5, 0.5, 0.5]]


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, the second of which is padded."""
    ids = torch.randint(3, 90, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    return ids, mask


def table_bytes(stream: Any) -> int:
    """The bytes of the tables that say to which head every block of slots belongs. They depend on
    the sizes of all heads of a process together: a rank whose heads are all of one size has none,
    nor has one with blocks of a few slots."""
    tables = [part.blocks.tensors() for part in stream.open() if part.blocks is not None]
    return sum(tensor.nbytes for table in tables for tensor in table)


def run(folder: Path, **parallel: Any) -> dict[str, Any]:
    """For every setup the answer, the summary and errors of its cache, the slots of every row, and
    the bytes of every layer's slots."""
    torch.set_num_threads(1)
    # float64, so that the order of sums over ranks cannot lead to different tokens
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **parallel).eval()
    ids, mask = prompts()
    found: dict[str, Any] = {}
    for name, setup in SETUPS.items():
        if name == "curves":
            setup = setup | {"allocation": folder / "curves.json"}
        cache = SketchCache(model.config, **setup)
        out = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            prefill_chunk_size=64 if "prefill" in setup else None,
        )
        held = [layer.stream.held.sum(1).tolist() for layer in cache.layers]  # [layer][row]
        summary = cache.summary()
        stored = [
            layer["kv_bytes"] - table_bytes(cache.layers[layer["layer"]].stream)
            for layer in summary["layers"]
        ]
        found[name] = (out[:, TOKENS:].tolist(), summary, cache.error(), held, stored)
    try:
        model(ids, past_key_values=SketchCache(model.config, "snapkv", allocation=SCHEDULE))
        found["schedule"] = "worked"
    except InputError as error:
        found["schedule"] = str(error)
    return found


def rank(number: int, folder: Path, port: int) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from transformers.distributed import DistributedConfig

    distributed.init_process_group("gloo")
    try:
        config = DistributedConfig(tp_size=RANKS, tp_plan="auto")
        found = run(folder, distributed_config=config)
        torch.save(found, folder / f"{number}.pt")
    finally:
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of one process, and those of each rank."""
    folder = tmp_path_factory.mktemp("model")
    model = small_llama()
    for layer in model.model.layers:  # the second rank's heads matter more
        layer.self_attn.v_proj.weight.data[16:] *= 4
    model.save_pretrained(folder)
    g = torch.Generator().manual_seed(0)
    errors = torch.rand(2, 4, len(LEVELS), generator=g, dtype=torch.float64)
    errors = errors.sort(descending=True).values
    errors[:, 2:] *= 4
    Curves(errors, torch.tensor(LEVELS)).save(folder / "curves.json")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(rank, (folder, port), nprocs=RANKS)
    ranks = [torch.load(folder / f"{n}.pt", weights_only=False) for n in range(RANKS)]
    return run(folder), ranks


@pytest.mark.parametrize("name", SETUPS)
def test_ranks_answer_as_one_process(results, name):
    one, ranks = results[0][name], [found[name] for found in results[1]]
    assert all(answer == one[0] for answer, *_ in ranks)
    summaries = [summary for _, summary, *_ in ranks]
    for layer, whole in enumerate(one[1]["layers"]):
        slots = [summary["layers"][layer]["slots"] for summary in summaries]
        assert sum(slots) / RANKS == pytest.approx(whole["slots"], rel=1e-6)
    # All rows of a layer are stored as long as the one with most slots, on every rank by itself;
    # recent tokens, in all bits, are as many in every row. 2% is for blocks of slots; 3% also for
    # the masses of recent tokens, which a rank leaves out if all are 1.
    for layer, whole in enumerate(one[4]):
        longer = sum(max(held[layer]) for *_, held, _ in ranks) / max(one[3][layer])
        kept = sum(stored[layer] for *_, stored in ranks)
        assert 0.97 * whole <= kept <= 1.02 * longer * whole
    halves = [summary["exact_kv_bytes"] for summary in summaries]
    assert halves == [one[1]["exact_kv_bytes"] // RANKS] * RANKS  # each rank has its own heads only
    assert one[1]["kv_bytes"] < 0.95 * one[1]["exact_kv_bytes"]
    for layer, whole in enumerate(one[2]):
        joined = [error for _, _, errors, *_ in ranks for error in errors[layer]["prompt"]]
        assert joined == pytest.approx(whole["prompt"], abs=1e-6)


@pytest.mark.parametrize("name", ["measured", "measured slots", "curves"])
def test_ranks_share_one_budget(results, name):
    slots = [found[name][1]["slots"] for found in results[1]]
    assert slots[1] > 1.2 * slots[0]
    assert sum(slots) / RANKS == pytest.approx(results[0][name][1]["slots"])


def test_a_schedule_per_head_is_refused(results):
    one, ranks = results
    assert one["schedule"] == "worked"
    for found in ranks:
        assert "of 4 KV heads, and these keys have 2" in found["schedule"]
