"""Requests whose pages a real vLLM engine saves, and that another one resumes; `make test-vllm`."""

from __future__ import annotations

import importlib.util
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import seams

from benchmarks import vllm_engine as engine
from benchmarks.vllm_documents import load
from kvsketch import SketchCache
from kvsketch.documents.answering import Sampling, next_tokens
from kvsketch.errors import InputError
from kvsketch.evaluation.runner.loading import load_model, load_tokenizer, resolve_model
from kvsketch.files.tokens import mark_of, told
from kvsketch.vllm.checks import BOTH, CONNECTOR
from kvsketch.vllm.shelf import header_of
from tests.engine.jobs import asked

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own"
)
FEW = {"KVSKETCH_BUDGET": "512"}
SAVING: engine.Job = {"kv_transfer_config": {**CONNECTOR, "kv_role": BOTH}}
#: After how many tokens of an answer a session is saved; the last one ends by itself. A page is
#: compressed every 48 or 24 tokens.
CUTS, TOKENS = (1, 30, 60), 100


def requests_of(lines: int = 120) -> list[engine.Job]:
    """Requests in tokens, for answers of so many tokens."""
    tokenizer = load_tokenizer(resolve_model(engine.MODEL))
    return [
        {**one, "prompt": tokenizer(one["prompt"]).input_ids, "ignore_eos": True}
        for one in asked(4, TOKENS, lines)
    ]


def saving(request: engine.Job, name: object, **more: Any) -> engine.Job:
    return {**request, "transfer": {"kvsketch_save": name}, **more}


KINDS = {
    "16 bits": ({}, {}),
    "4 bits by curves, in pieces": ({"KVSKETCH_BITS": "4"}, engine.PIECES),
}


@pytest.mark.parametrize("kind", seams(KINDS, "16 bits"))
def test_a_session_saved_by_one_server_and_resumed_by_another(kind, tmp_path, curves):
    """The same tokens as one that never stopped, and only those that are new are read. One after
    the other: rounding depends on the batch, and decides behind the end of an answer."""
    few, pieces = KINDS[kind]
    variables = {**FEW, **few, **({"KVSKETCH_ALLOCATION": curves} if few else {})}
    given = {**SAVING, **pieces, "together": False}
    whole = requests_of()
    parts = [saving(one, f"{n}", max_tokens=n) for n, one in zip(CUTS, whole, strict=False)]
    parts.append(saving(whole[-1], "end.kvs", ignore_eos=False))
    found = load(tmp_path, variables, whole + parts, **given)
    answers = engine.tokens_of(found)
    stopped = answers[len(whole) :]
    answers = answers[: len(whole)]
    assert [len(tokens) for tokens in stopped[:-1]] == list(CUTS)
    assert len(stopped[-1]) < TOKENS
    names = [*(f"{cut}.kvs" for cut in CUTS), "end.kvs"]
    said = [one["transfer"] for one in found["answers"]]
    assert said == [None] * len(whole) + [{"kvsketch_save": name} for name in names]
    assert (found["metrics"]["saved"], found["metrics"]["unsaved"]) == (len(names), 0)
    assert found["free_before"] == found["free_after"]

    later = [
        {**one, "prompt": one["prompt"] + tokens, "max_tokens": TOKENS - len(tokens)}
        for one, tokens in zip(whole, stopped, strict=True)
    ]
    for name, one in zip(names, later, strict=True):
        ids = told(one["prompt"][:-1])
        assert mark_of(header_of(tmp_path / name)) == (ids["count"], ids["sha256"])
    resumed = load(tmp_path, variables, later, **given)
    rest = [tokens[len(part) :] for tokens, part in zip(answers, stopped, strict=True)]
    assert engine.tokens_of(resumed) == rest
    assert resumed["metrics"]["documents"] == len(whole)
    assert resumed["metrics"]["tokens"] == sum(map(len, rest))
    assert "fit the pages" not in resumed["said"]

    model = load_model(resolve_model(engine.MODEL), "cpu", "float32")
    for name, one, expected in zip(names, later, rest, strict=True):
        cache = SketchCache.load(tmp_path / name, model)
        answer = next_tokens(model, cache, torch.tensor([one["prompt"][-1:]]), Sampling())
        assert [int(token) for token in itertools.islice(answer, 8)] == expected[:8]


def test_what_is_not_saved_is_named_and_harms_no_other_request(tmp_path):
    """Paths, a file that is there, a name twice, a stop string, an aborted request, and a disk that
    has no room."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "there.kvs").write_bytes(b"old")
    (folder / "link.kvs").symlink_to(tmp_path / "elsewhere")
    short, long = requests_of(20)[0] | {"max_tokens": 8}, requests_of()[0]
    wrong = ["../up", "/tmp/x", "a/b", ".hidden", "", "a" * 200, 7, None, "zwölf", "a\0b"]
    refused = [saving(short, name) for name in wrong]
    there = [saving(short, name) for name in ("there", "there.kvs", "link")]
    twice = [saving(short, "twice"), saving(short, "twice")]
    plain = engine.run([long, short], FEW, max_num_seqs=8)
    stop = plain["answers"][1]["text"].strip()[:3]
    lost = [saving(long, "gone", abort=3), saving(short, "stop", stop=[stop]), saving(long, "full")]
    requests = [long, short, *refused, *there, *twice, *lost]
    found = load(folder, FEW, requests, largest_file=2 << 20, max_num_seqs=32, **SAVING)
    expected, answers = engine.tokens_of(plain), engine.tokens_of(found)
    assert answers[0] == answers[-1] == expected[0]
    assert answers[1 : 2 + len(wrong) + 5] == [expected[1]] * (len(wrong) + 6)
    said = [None if one is None else one["transfer"] for one in found["answers"]]
    errors = [one["kvsketch_error"] for one in said[2 : 2 + len(wrong) + 3]]
    for name, error in zip(wrong, errors, strict=False):
        assert f"kvsketch_save={name!r:.120} must be the name of a new file" in error
    assert ["exists, and is not replaced" in error for error in errors] == [False] * len(wrong) + [
        True
    ] * 3
    first, second = said[2 + len(there) + len(wrong) :][:2]
    assert first == {"kvsketch_save": "twice.kvs"}
    assert "twice.kvs exists" in second["kvsketch_error"]
    assert said[:2] + said[-3:] == [None] * 4 + [{"kvsketch_save": "full.kvs"}]
    for name in ("gone", "stop"):
        assert f"kvsketch_save='{name}' is not saved: the request was aborted" in found["said"]
    assert "full.kvs is not saved" in found["said"]
    assert "File too large" in found["said"]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["link.kvs", "there.kvs", "twice.kvs"]
    assert (folder / "there.kvs").read_bytes() == b"old"
    assert not (tmp_path / "elsewhere").exists()
    assert mark_of(header_of(folder / "twice.kvs"))[0] == len(short["prompt"]) + 7
    assert found["metrics"]["saved"] == 1
    assert found["metrics"]["unsaved"] == len(wrong) + 3 + 1 + 3
    assert found["free_before"] == found["free_after"]


@pytest.mark.parametrize(
    ("tokens", "last", "kept"),
    [(9, 0, 9), (9, 9, 9), (10, 0, 9), (10, 9, 9), (10, 10, 10), (8, 0, 0), (11, 0, 0)],
)
def test_the_last_token_is_left_out_if_a_step_was_ahead(tokens, last, kept):
    """Unless it is in slots already. vLLM's steps on a CPU never are."""
    from kvsketch.vllm.saving import _of

    known = [(9, "all but the last"), (10, "all")]
    if kept:
        assert _of(known, tokens, last)[0] == kept
    else:
        with pytest.raises(InputError, match=f"its page holds {tokens} tokens of 10"):
            _of(known, tokens, last)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kv_role": "kv_consumer"}, '--kv-transfer-config needs "kv_role": "kv_both"'),
        ({"world_size": 2}, "unset --tensor-parallel-size and --pipeline-parallel-size"),
        ({"alone": False}, "token ids alone do not say the prompt"),
        ({"blocks": []}, "was preempted when it ended"),
    ],
)
def test_pages_that_cannot_be_saved_are_refused_by_name(changed, said, tmp_path):
    from vllm.v1.request import RequestStatus

    from kvsketch.vllm.sessions import PageSaves

    given = {"kv_role": BOTH, "world_size": 1, "alone": True, "blocks": [3], **changed}
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=given["kv_role"]),
        parallel_config=SimpleNamespace(world_size=given["world_size"]),
    )
    request = SimpleNamespace(
        request_id="a",
        kv_transfer_params={"kvsketch_save": "a"},
        status=RequestStatus.FINISHED_STOPPED,
        all_token_ids=[1, 2, 3],
    )
    saves = PageSaves(config, str(tmp_path))
    answer = saves.finished(request, given["alone"], given["blocks"])
    assert said in answer["kvsketch_error"]
    assert saves.take() == []
