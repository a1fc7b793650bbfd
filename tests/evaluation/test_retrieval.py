"""`kvsketch inspect --retrieval`: what heads may see and what is left out against plain references,
the packaged model's one head, and the refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM
from typer.testing import CliRunner

from families import VOCABULARY, build
from kvsketch import InputError, UnsupportedError
from kvsketch.cli.app import app
from kvsketch.evaluation.inspection import retrieval
from kvsketch.evaluation.inspection.evidence import evidence_in
from kvsketch.evaluation.inspection.retrieval import (
    _Heads,
    _least_whole,
    _shares,
    measure_retrieval,
    steps,
)
from kvsketch.evaluation.runner.loading import load_model, load_tokenizer
from kvsketch.evaluation.tasks import Options, make_tasks
from kvsketch.evaluation.tasks.base import Case, Task
from kvsketch.hf.interface import watched
from kvsketch.models import packaged_model

TOKENS, SINK, RECENT = 40, 3, 8


@pytest.fixture(scope="module")
def llama():
    return build("llama").eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def layers_of(model) -> dict[int, int]:
    config = model.config
    return dict.fromkeys(range(config.num_hidden_layers), config.num_key_value_heads)


def logits(model, ids, heads=None, **arguments):
    with torch.no_grad(), watched(model, heads or _Heads({}, 0, 0)):
        return model(ids, use_cache=False, **arguments).logits


def test_a_removed_head_is_one_whose_output_is_projected_by_nothing(llama, ids):
    heads = _Heads(layers_of(llama), SINK, RECENT)
    with heads.removing((1, 1)):
        removed = logits(llama, ids, heads)
    weight = llama.model.layers[1].self_attn.o_proj.weight
    saved, width = weight.data.clone(), weight.shape[1] // llama.config.num_key_value_heads
    try:
        weight.data[:, width : 2 * width] = 0
        expected = logits(llama, ids)
    finally:
        weight.data = saved
    assert torch.allclose(removed, expected, atol=1e-5)
    assert not torch.allclose(removed, logits(llama, ids), atol=1e-3)
    assert torch.equal(logits(llama, ids, heads), logits(llama, ids))  # nothing is removed any more


@pytest.mark.parametrize("chunk", [7, 512])
def test_restricted_heads_see_the_first_and_the_recent_tokens(llama, ids, chunk, monkeypatch):
    monkeypatch.setattr(retrieval, "_CHUNK", chunk)
    layers = layers_of(llama)
    heads = _Heads(layers, SINK, RECENT)
    place = torch.arange(TOKENS)
    own = place[:, None]
    seen = (place <= own) & ((place < SINK) | (place > own - RECENT))
    mask = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = logits(llama, ids, attention_mask=mask)
    with heads.restricting([(layer, head) for layer, n in layers.items() for head in range(n)]):
        assert torch.allclose(logits(llama, ids, heads), expected, atol=1e-5)
    with heads.restricting([(0, 1)]):
        one = logits(llama, ids, heads)
    assert not torch.allclose(one, expected, atol=1e-3)
    assert not torch.allclose(one, logits(llama, ids), atol=1e-3)


def test_one_restricted_head_leaves_the_others_as_they_are(llama, ids):
    heads = _Heads(layers_of(llama), SINK, RECENT)
    outs = {}

    def around(kernel, module, *args, **kwargs):
        out, weights = heads(kernel, module, *args, **kwargs)
        outs.setdefault(module.layer_idx, out)
        return out, weights

    logits(llama, ids, around)
    whole = outs.pop(0)
    outs.clear()
    with heads.restricting([(0, 1)]):
        logits(llama, ids, around)
    group = whole.shape[2] // llama.config.num_key_value_heads
    assert torch.allclose(outs[0][:, :, :group], whole[:, :, :group], atol=1e-6)
    changed = (outs[0] - whole)[:, :, group : 2 * group].abs().amax((0, 2, 3))
    assert (changed[:RECENT] < 1e-6).all()
    assert (changed[SINK + RECENT :] > 1e-6).all()


def test_shares_are_the_models_own_attention(ids):
    model = build("llama", "eager").eval()
    evidence, found = torch.tensor([4, 5, 11]), {}
    heads = _Heads(layers_of(model), SINK, RECENT)
    heads.look = lambda layer, query, key, kwargs: found.__setitem__(
        layer, _shares(query[:, :, -6:], key, evidence, kwargs)
    )
    with torch.no_grad(), watched(model, heads):
        weights = model(ids, use_cache=False, output_attentions=True).attentions
    for layer, share in found.items():
        expected = weights[layer][:, :, -6:, evidence].sum(-1)
        assert torch.allclose(share.flatten(1, 2), expected, atol=1e-5)
    assert len(found) == model.config.num_hidden_layers


def test_evidence_is_the_line_or_the_sentence_with_the_answer():
    text = "line a: <12>\nline b: <1>\nline c: <123>\n"
    assert [text[a:b] for a, b in evidence_in(text, ["12"])] == ["line a: <12>"]
    text = "One is: 1. Some two is: 22. Is it 3? It is 22."
    assert [text[a:b] for a, b in evidence_in(text, ["22"])] == ["Some two is: 22", "It is 22."]
    assert evidence_in(text, ["4"]) == []


def test_the_least_number_of_whole_heads_is_searched_in_both_orders():
    """Heads 2 and 5 are needed; the first order finds both early, the second does not."""
    heads = [(0, i) for i in range(8)]
    rows = [
        {"question": 0.0, "answer": float(i in (2, 5)), "restricted": -abs(i - 7.0)}
        for i in range(8)
    ]
    now: list = []

    class Restricting:
        def restricting(self, some):
            now[:] = some
            return watched(torch.nn.Module(), lambda *a: None)

    trial = SimpleNamespace(
        heads=Restricting(), accuracy=lambda: float(not {(0, 2), (0, 5)} & set(now))
    )
    assert _least_whole(trial, heads, rows, 1.0)["heads"] == 2
    for row in rows:
        row["answer"] = -row["restricted"]  # useless: the last heads come last
    found = _least_whole(trial, heads, rows, 1.0)
    assert found["heads"] == 6
    assert found["share"] == 0.75
    assert [8, 1.0] in found["curve"]


def packaged(lines: int, cases: int, **arguments):
    folder = str(packaged_model("longeval-one-head"))
    (task,) = make_tasks(["longeval"], Options(lines=[lines], num_cases=cases))
    model, tokenizer = load_model(folder, "cpu", "float32"), load_tokenizer(folder)
    return measure_retrieval(model, tokenizer, task, **arguments)


@pytest.mark.slow
def test_the_first_packaged_model_reads_with_one_head():
    told: list[int] = []
    found = packaged(30, 2, advance=lambda: told.append(1))
    rows = {(row["layer"], row["head"]): row for row in found["heads"]}
    assert found["accuracy"] == 1
    assert found["layers_that_read"] == [2]
    assert found["whole"]["heads"] == 1
    assert rows[2, 0]["answer"] > 0.9
    assert rows[2, 0]["removed"] == 0
    assert rows[2, 0]["restricted"] > 1
    assert rows[2, 1]["removed"] == 1
    assert max(row["answer"] for place, row in rows.items() if place != (2, 0)) < 0.5
    assert len(told) <= steps(2, 8)


class Fixed(Task):
    name = "fixed"

    def __init__(self, context: str) -> None:
        self.context = context

    def cases(self) -> list[Case]:
        return [Case("fixed", self.context, "\nWhat? ", ("17",), 4)]

    def score(self, case: Case, text: str) -> float:
        return float("17" in text)


def test_what_cannot_be_measured_is_refused_by_name():
    folder = str(packaged_model("longeval-one-head"))
    tokenizer, model = load_tokenizer(folder), load_model(folder, "cpu", "float32")
    with pytest.raises(InputError, match=r"0% of 1 cases of fixed right .* at least 50%"):
        measure_retrieval(model, tokenizer, Fixed("A line.\nIt is 17."))
    with pytest.raises(InputError, match=r"no answer stands in the context.*longeval, needle"):
        measure_retrieval(model, tokenizer, Fixed("A line.\nIt is 18."))
    slow_tokenizer = type("Slow", (), {"is_fast": False, "__call__": tokenizer.__call__})
    with pytest.raises(UnsupportedError, match="fast tokenizer"):
        measure_retrieval(model, slow_tokenizer(), Fixed("It is 17."))
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedError, match="'flex_attention': load the model with"):
        measure_retrieval(model, tokenizer, Fixed("It is 17."))
    single = build("llama")
    single.config.num_hidden_layers = single.config.num_key_value_heads = 1
    single.config.layer_types = None
    with pytest.raises(InputError, match="a single KV head"):
        measure_retrieval(single, tokenizer, Fixed("It is 17."))
    with pytest.raises(UnsupportedError, match="attention interface"):
        measure_retrieval(
            BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2)),
            tokenizer,
            Fixed("It is 17."),
        )


def test_the_command_writes_numbers_and_a_picture(tmp_path: Path):
    words = ["inspect", "longeval-one-head", "--retrieval", "--lines", "20", "--cases", "1"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "retrieval.json").read_text())
    assert found["whole"]["share"] == 0.125
    assert "1 of 8 KV heads (12%)" in " ".join(result.stderr.split())
    assert {file.name for file in tmp_path.iterdir()} == {
        "retrieval.json", "retrieval.png", "retrieval.svg",
    }  # fmt: skip
    (tmp_path / "retrieval.json").write_text("mine")
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert (tmp_path / "retrieval.json").read_text() == "mine"


def test_the_page_is_what_the_results_say():
    from benchmarks.retrieval_page import PAGE, RESULTS, page

    assert PAGE.read_text(encoding="utf-8") == page(json.loads(RESULTS.read_text(encoding="utf-8")))
