"""Compressed documents that a real vLLM engine loads; `make test-vllm` runs it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import asked, seams

from benchmarks import vllm_engine as engine
from benchmarks.vllm_documents import CONTEXT, MARK, Documents, load
from kvsketch import SketchCache
from kvsketch.documents.answering import Sampling, next_tokens
from kvsketch.files.format import read, write
from kvsketch.files.tokens import told
from kvsketch.hf.saving import KIND
from kvsketch.slots import Slots
from kvsketch.vllm.checks import BOTH, CONNECTOR
from kvsketch.vllm.offline import engine_of
from kvsketch.vllm.settings import PageSettings

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own"
)
COUNT = 4


FEW = {"KVSKETCH_BUDGET": "512"}


class Shelf(Documents):
    """Documents in a folder, and requests about them."""

    def in_transformers(self, tokens: int = 12) -> list[list[int]]:
        """The tokens with which transformers answers from the files."""
        found = []
        for number, (ids, one) in enumerate(zip(self.ids, self.requests, strict=True)):
            cache = SketchCache.load(self.folder / f"{number}.kvs", self.model)
            rest = torch.tensor([one["prompt"][len(ids) :]])
            answer = next_tokens(self.model, cache, rest, Sampling())
            found.append([int(token) for token in itertools.islice(answer, tokens)])
        return found


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("documents"), FEW, 100, COUNT)


def long_answers(shelf: Shelf, tokens: int = 110) -> list[Any]:
    """Requests whose pages are compressed while they answer, if there are enough tokens."""
    return [{**one, "max_tokens": tokens, "ignore_eos": True} for one in shelf.requests]


KINDS = {
    "16": ({"KVSKETCH_BITS": "16"}, 200),
    "8": ({"KVSKETCH_BITS": "8"}, 200),
    "4": ({"KVSKETCH_BITS": "4"}, 200),
    "exact": ({"KVSKETCH_METHOD": "exact"}, 200),
    "short": ({"KVSKETCH_BITS": "16"}, 30),
}


@pytest.mark.parametrize("kind", seams(KINDS, "8"))
def test_answers_are_those_of_transformers_from_the_same_files(kind, tmp_path):
    given, lines = KINDS[kind]
    shelf = Shelf(tmp_path, given if kind == "exact" else {**FEW, **given}, lines, 2)
    found = shelf.load(long_answers(shelf, 12))
    assert engine.tokens_of(found) == shelf.in_transformers()
    assert found["metrics"]["documents"] == 2
    assert found["metrics"]["unread"] == sum(map(len, shelf.ids))
    requests = zip(shelf.requests, shelf.ids, strict=True)
    rest = sum(len(one["prompt"]) - len(ids) for one, ids in requests)
    assert found["metrics"]["tokens"] == rest + 2 * 11
    assert "does not fit" not in found["said"]
    assert found["free_before"] == found["free_after"]


def test_a_batch_is_its_requests_alone_with_small_chunks_and_preemptions(shelf):
    requests = long_answers(shelf)
    alone = shelf.load(requests, together=False, enable_prefix_caching=False)
    together = shelf.load(requests, max_num_batched_tokens=16)
    crowd = shelf.load(requests, preempt=7, num_gpu_blocks_override=6)
    assert engine.same(alone, together) == COUNT
    assert engine.same(alone, crowd) == COUNT
    assert crowd["preemptions"] > 0
    assert crowd["metrics"]["documents"] > COUNT
    # A page is compressed for the first time a whole interval after it was loaded.
    every = PageSettings(budget=512).rhythm(CONTEXT).every
    both = zip(requests, shelf.ids, strict=True)
    rest = [len(one["prompt"]) - len(ids) + 109 for one, ids in both]
    assert min(rest) > 2 * every
    layers = shelf.model.config.num_hidden_layers
    assert alone["metrics"]["compressions"] == layers * sum(count // every for count in rest)
    for found in (alone, together, crowd):
        assert found["free_before"] == found["free_after"]


@pytest.mark.parametrize("bits", ["16", "8", "4"])
def test_a_document_is_still_there_after_compressions(bits, tmp_path):
    """The last quarter of a record is read behind the others, whose file is loaded: the page is
    compressed several times, and answers are right."""
    given = {"KVSKETCH_BUDGET": "1024", "KVSKETCH_BITS": bits}
    shelf = Shelf(tmp_path, given, 200, 2, share=0.75)
    found = shelf.load()
    layers = shelf.model.config.num_hidden_layers
    assert found["metrics"]["compressions"] >= 3 * layers * 2
    assert engine.right(shelf.rows, [one["text"] for one in found["answers"]]) == 2


def test_further_turns_start_from_the_page_of_the_turn_before(shelf):
    """And the tokens of a document alone, which no file may answer, are read: no copy that was
    never written is taken for their page."""
    requests = long_answers(shelf, 60)
    first = shelf.load(requests, together=False, enable_prefix_caching=False)
    turns = [
        {**one, "prompt": one["prompt"] + answer + [7, 8, 9], "max_tokens": 12}
        for one, answer in zip(requests, engine.tokens_of(first), strict=True)
    ]
    alone = [{**one, "prompt": ids} for one, ids in zip(requests, shelf.ids, strict=True)]
    every = requests + turns + turns + requests + alone
    expected = shelf.load(every, together=False, enable_prefix_caching=False)
    found = shelf.load(every, together=False, block_size=32)
    assert engine.same(expected, found) == 5 * COUNT
    assert expected["metrics"]["documents"] == 4 * COUNT
    assert COUNT <= found["metrics"]["documents"] <= 3 * COUNT


def test_a_file_that_cannot_be_used_is_named_and_the_prompt_is_read(shelf, tmp_path):
    """One with a flipped bit, whose header is right; one cut in half; a link; one of more tokens
    than it says."""
    paths = [shelf.folder / f"{number}.kvs" for number in range(COUNT)]
    raw = bytearray(paths[0].read_bytes())
    raw[-1] ^= 1
    (tmp_path / "0.kvs").write_bytes(raw)
    raw = paths[1].read_bytes()
    (tmp_path / "1.kvs").write_bytes(raw[: len(raw) // 2])
    (tmp_path / "2.kvs").symlink_to(paths[2])
    cache = SketchCache.load(paths[3], shelf.model)
    cache.save(tmp_path / "3.kvs", about={"ids": told(shelf.ids[3][:-1])})
    without = engine.run(shelf.requests, shelf.variables, max_num_seqs=8)
    twice = [*shelf.requests, *shelf.requests]
    found = load(tmp_path, shelf.variables, twice, together=False, enable_prefix_caching=False)
    assert engine.tokens_of(found) == 2 * engine.tokens_of(without)
    assert found["metrics"]["documents"] == found["metrics"]["unread"] == 0
    assert found["metrics"]["unusable"] == COUNT
    reasons = "is damaged", "a damaged one", "not a regular file", "holds .* tokens, and says"
    for number, why in enumerate(reasons):
        said = re.findall(rf"{number}\.kvs is not used: .*{why}", found["said"])
        assert len(said) == 1, why
    assert found["free_before"] == found["free_after"]


def test_a_file_that_does_not_fit_is_squeezed_or_refused(shelf):
    given = {**shelf.variables, "KVSKETCH_BUDGET": "400"}
    found = load(shelf.folder, given, shelf.requests)
    assert found["metrics"]["documents"] == found["metrics"]["squeezed"] == COUNT
    assert found["said"].count("does not fit the pages") == COUNT
    assert "kvsketch compress --for-vllm" in found["said"]
    refused = load(shelf.folder, {**given, "KVSKETCH_SQUEEZE": "0"}, shelf.requests)
    without = engine.run(shelf.requests, given, max_num_seqs=8)
    assert engine.same(refused, without) == COUNT
    assert refused["metrics"]["documents"] == refused["metrics"]["squeezed"] == 0
    assert refused["metrics"]["unusable"] == COUNT


def test_aborted_and_repeated_requests(shelf):
    requests = long_answers(shelf, 30)
    expected = shelf.load(requests)
    gone = [{**one, "abort": step} for one, step in zip(requests, (1, 2, 3, 5), strict=True)]
    several = [{**requests[0], "n": 2, "max_tokens": 4}]
    found = shelf.load([*gone, *requests, *several])
    assert engine.tokens_of(found)[:COUNT] == [None] * COUNT
    assert engine.tokens_of(found)[COUNT : 2 * COUNT] == engine.tokens_of(expected)
    assert len(found["answers"][-1]["all"]) == 2
    assert found["free_before"] == found["free_after"]


def test_a_server_reads_in_pieces_and_the_command_asks_it_about_a_file(shelf, tmp_path):
    """With its scheduler in a process of its own, and scheduling ahead."""
    requests = asked(3)
    (tmp_path / "text.txt").write_text(shelf.rows[0]["prompt"].partition(MARK)[0])
    question = shelf.rows[0]["prompt"].partition("\n" + MARK.strip())[2]
    variables = {**FEW, "KVSKETCH_DOCUMENTS": str(shelf.folder)}
    flags = ["--kv-transfer-config", json.dumps(CONNECTOR), "--max-num-seqs", "8"]
    flags += ["--scheduler-cls", engine.PIECES["scheduler_cls"]]
    with engine.served(variables, tmp_path / "log", *flags) as address:
        texts = engine.told(address, [one["prompt"] for one in requests])
        done = subprocess.run(
            [
                *(sys.executable, "-m", "kvsketch", "ask", shelf.folder / "0.kvs"),
                *(MARK.strip() + question, "--server", address, "--text", tmp_path / "text.txt"),
                *("--max-new-tokens", "12", "--json"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        numbers = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
        shown = engine_of(address)
    assert done.returncode == 0, done.stderr
    (said,) = json.loads(done.stdout.splitlines()[-1])["answers"]
    offline = shelf.load([*requests, *shelf.requests[:1]], **engine.PIECES)
    *expected, answer = [one["text"] for one in offline["answers"]]
    assert texts == expected
    assert said["answer"] == answer.strip()
    log = (tmp_path / "log").read_text()
    assert "Prompts are compressed faster" not in log  # what is said to those without it
    assert "kvsketch:documents_total 1.0" in numbers
    assert f"kvsketch:unread_total {float(len(shelf.ids[0]))}" in numbers
    assert shown == (PageSettings(budget=512), CONTEXT)


def test_the_rest_of_a_prompt_is_read_in_pieces(shelf):
    """With ``PageScheduler``, where a document ends within a piece."""
    more = engine.drawn([500] * 2, 8)
    requests = [
        {**one, "prompt": ids + one["prompt"]} for one, ids in zip(more, shelf.ids, strict=False)
    ]
    pieces = {**shelf.variables, "KVSKETCH_PIECE": "128"}
    given = {**engine.PIECES, "max_num_batched_tokens": 300}
    alone = load(shelf.folder, pieces, requests, together=False, **given)
    together = load(shelf.folder, pieces, requests, **given)
    assert engine.same(alone, together) == 2
    for found in (alone, together):
        assert found["metrics"]["documents"] == 2
        assert found["metrics"]["compressions"] > 0


def test_a_page_that_is_loaded_again_starts_anew(shelf):
    """With memory for one page. The first step of both requests has the same inputs."""
    (long, *_), short = long_answers(shelf), {**shelf.requests[0], "max_tokens": 1}
    given = {"together": False, "enable_prefix_caching": False}
    expected = shelf.load([long], **given)
    found = shelf.load([short, long, short, long], num_gpu_blocks_override=2, **given)
    assert engine.tokens_of(found)[1::2] == 2 * engine.tokens_of(expected)
    assert found["metrics"]["compressions"] == 2 * expected["metrics"]["compressions"]


@pytest.mark.parametrize("stages", [1, 2])
def test_the_second_runner_loads_the_same(shelf, stages):
    requests = long_answers(shelf, 60)[:2]
    first = shelf.load(requests)
    given = {**shelf.variables, **engine.as_on_cuda(), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    second = load(shelf.folder, given, requests, pipeline_parallel_size=stages)
    assert engine.same(first, second) == 2
    assert second["metrics"]["documents"] == 2
    assert first["metrics"]["compressions"] == second["metrics"]["compressions"] > 0


def test_two_ranks_load_their_heads(shelf):
    both = {**shelf.variables, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    requests = long_answers(shelf, 60)[:2]
    one = shelf.load(requests)
    two = load(shelf.folder, both, requests, tensor_parallel_size=2)
    assert engine.same(one, two) == 2
    assert one["metrics"]["compressions"] > 0
    assert two["metrics"]["unread"] == one["metrics"]["unread"] > 0


def test_converted_documents_are_kept_up_to_so_many_bytes(monkeypatch):
    """The least recently used goes first. A file that fails is read once for all requests that wait
    for it, and every load is over once."""
    from kvsketch.vllm import loading
    from kvsketch.vllm.conversion import Converted
    from kvsketch.vllm.shelf import Found

    loader = loading.Loader(
        SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={})), []
    )
    read, written, counts = [], [], Counter()

    def reading(found: Found, layers: object) -> Converted:
        read.append(found.name)
        if found.name == "bad":
            raise ValueError("no")
        window = Slots(*torch.zeros(2, 1, 1, 2, 1))
        return Converted(9, 0, {0: torch.zeros(24, dtype=torch.uint8)}, {1: window}, "")

    monkeypatch.setattr(loading, "_KEPT", 100)
    monkeypatch.setattr(loader, "_read", reading)
    monkeypatch.setattr(loader, "_write", lambda block, *_: written.append(block))
    monkeypatch.setattr(loader, "_count", lambda **numbers: counts.update(numbers))

    def load(*names: str) -> dict[str, bool]:
        loads = [
            loading.Load(f"{name}{i}", Found(name, (0, 0), (9, "")), ([i],), 9)
            for i, name in enumerate(names)
        ]
        over = list(loader.step(loads, 5.0))
        while loader._waiting:
            over += loader.step([], 5.0)
        assert len(over) == len(names)
        return dict(over)

    assert load("a", "a", "bad", "bad") == {"a0": True, "a1": True, "bad2": False, "bad3": False}
    assert (read, written) == (["a", "bad"], [([0],), ([1],)])
    assert +counts == {"documents": 2, "unread": 2 * 9, "unusable": 1}
    load("b")
    load("a")
    load("c")  # b is gone, and not a
    load("a")
    assert read == ["a", "bad", "b", "c"]
    load("b")
    assert read == ["a", "bad", "b", "c", "b"]
    loader.close()


REFUSED = {
    "connector": ({}, 'only with --kv-transfer-config \'{"kv_connector": "DocumentConnector"'),
    "policy": (
        {"kv_transfer_config": {**CONNECTOR, "kv_load_failure_policy": "fail"}},
        '"kv_load_failure_policy": "recompute"',
    ),
    "role": (
        {"kv_transfer_config": {**CONNECTOR, "kv_role": "kv_producer"}},
        "or with the role 'kv_both'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_loaded_is_refused_at_start_up(name, tmp_path):
    arguments, said = REFUSED[name]
    given = {**FEW, "KVSKETCH_DOCUMENTS": str(tmp_path)}
    with pytest.raises(RuntimeError, match=re.escape(said)):
        engine.run([], given, **arguments)


@pytest.mark.parametrize(
    "connector", [CONNECTOR, {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]
)
def test_a_connector_without_documents_is_refused(connector):
    with pytest.raises(RuntimeError, match="unset --kv-transfer-config, or set KVSKETCH_DOCUMENTS"):
        engine.run([], FEW, kv_transfer_config=connector)


WINDOWS = {"enable_prefix_caching": False, "max_model_len": CONTEXT}


@pytest.fixture(scope="module")
def windowed(hybrid, tmp_path_factory) -> Shelf:
    """Documents of a model with sliding windows, the last of them shorter than a window."""
    folder = tmp_path_factory.mktemp("windowed")
    shelf = Shelf(folder, {"KVSKETCH_BUDGET": "256"}, 90, COUNT, model=hybrid)
    ids = shelf.ids[-1][:100]
    shelf.put(COUNT - 1, ids)
    shelf.ids[-1], shelf.requests[-1] = ids, {"prompt": [*ids, 7, 8, 9], "max_tokens": 12}
    return shelf


@pytest.mark.seams
def test_a_document_brings_the_tokens_of_sliding_windows(windowed, hybrid):
    """The windows begin within a block, and answers depend on them. Pages of several blocks."""
    assert all((len(ids) - 127) % 32 for ids in windowed.ids)
    given = {**WINDOWS, "model": hybrid}
    found = windowed.load(long_answers(windowed, 12), **given)
    assert engine.tokens_of(found) == windowed.in_transformers()
    assert found["metrics"]["documents"] == COUNT
    requests = zip(windowed.requests, windowed.ids, strict=True)
    rest = sum(len(one["prompt"]) - len(ids) for one, ids in requests)
    assert found["metrics"]["tokens"] == rest + COUNT * 11
    assert found["free_before"] == found["free_after"]
    requests = long_answers(windowed)
    alone = windowed.load(requests, together=False, **given)
    crowd = windowed.load(requests, max_num_batched_tokens=64, preempt=7, **given)
    assert engine.same(alone, crowd) == COUNT
    assert crowd["preemptions"] > 0
    assert crowd["free_before"] == crowd["free_after"]


def test_a_file_without_its_windows_is_named_and_the_prompt_is_read(windowed, hybrid, tmp_path):
    for number in range(COUNT):
        path = windowed.folder / f"{number}.kvs"
        header, state = read(path, KIND)
        for layer in (0, 1, 3, 4):  # all tokens but the last
            for name in ("keys", "values"):
                place = f"layers.{layer}.{name}"
                state.tensors[place] = state.tensors[place][:, :, 1:]
        write(tmp_path / path.name, KIND, header, state)
    given = {**WINDOWS, "model": hybrid}
    read_alone = engine.run(windowed.requests, windowed.variables, max_num_seqs=8, **given)
    found = load(tmp_path, windowed.variables, windowed.requests, **given)
    assert engine.same(read_alone, found) == COUNT
    assert found["metrics"]["documents"] == 0
    assert found["said"].count("has a sliding window of the shape") == COUNT


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "pass --no-enable-prefix-caching, or unset KVSKETCH_DOCUMENTS"),
        (
            {"enable_prefix_caching": False, "kv_transfer_config": {**CONNECTOR, "kv_role": BOTH}},
            "does not save pages of models with sliding windows",
        ),
    ],
)
def test_what_documents_of_sliding_windows_do_not_allow(more, said, hybrid, tmp_path):
    given = {"kv_transfer_config": CONNECTOR, "model": hybrid, "max_model_len": 2048, **more}
    with pytest.raises(RuntimeError, match=said):
        engine.run([], {**FEW, "KVSKETCH_DOCUMENTS": str(tmp_path)}, **given)


def test_a_file_that_was_written_anew_is_kept_once(monkeypatch):
    """Of a document that is replaced, the former version is forgotten when the new one was read,
    but not before the requests that wait for it have got it."""
    from kvsketch.vllm import loading
    from kvsketch.vllm.shelf import Found

    monkeypatch.setattr(loading, "page_layers", lambda config: {})
    loader, written = loading.Loader(None, []), []
    made = SimpleNamespace(bytes=1, squeezed="")
    monkeypatch.setattr(loader, "_count", lambda **numbers: None)
    monkeypatch.setattr(loader, "_read", lambda found, layers: made)
    monkeypatch.setattr(loader, "_write", lambda blocks, *_: written.append(blocks))
    old, new, other = (Found(n, (s, 1), (9, "")) for n, s in (("a", 1), ("a", 2), ("b", 1)))
    for at, found in enumerate((old, new, other)):
        loads = [loading.Load(str(at), found, ([at],), 9)]
        while not (done := list(loader.step(loads, 1.0))):
            loads = []
        assert done == [(str(at), True)]
    assert list(loader._kept) == [new, other]
    assert written == [([0],), ([1],), ([2],)]
    loader.close()
