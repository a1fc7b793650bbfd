"""Tasks on the continuation of texts: the measures, checked by hand, and the data they need."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from families import CONFIGS, VOCABULARY, build
from kvsketch import InputError, SketchCache, UnsupportedError
from kvsketch.cli.app import app
from kvsketch.evaluation.runner.encoding import EncodedCase, Encoder
from kvsketch.evaluation.runner.following import ATTENTION, Follower
from kvsketch.evaluation.runner.scales import scale_of
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import EXACT, Setup
from kvsketch.evaluation.tasks import TASKS, Options, make_tasks
from kvsketch.evaluation.tasks.text_data import load_texts
from kvsketch.evaluation.tasks.texts import GAP, MEASURES, Texts, pieces
from kvsketch.hf.activations import capture
from tiny_model import save_tiny_model, tiny_case, tiny_model, tiny_tokenizer

NEW = 20


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(len(tiny_tokenizer()))


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    found: torch.Tensor = tiny_tokenizer()(tiny_case(30).prompt, return_tensors="pt").input_ids
    return found


def case_of(ids: torch.Tensor, measure: str = "kl", gap: int = 0, new: int = NEW) -> EncodedCase:
    return EncodedCase(ids[0].tolist(), ids.shape[1] - 1 - new - gap, new, measure)


# --- what is measured ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gap", "prefill", "chunk"),  # all pairs
    [(0, "exact", None), (0, "streaming", 64), (30, "exact", 64), (30, "streaming", None)],
)
def test_everything_kept_is_the_exact_cache(
    model: Any, ids: torch.Tensor, gap: int, prefill: str, chunk: int | None
) -> None:
    settings = Settings(prefill=prefill, prefill_chunk_size=chunk, recent=8)
    follower = Follower(model, settings)
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
    nats = -float(logits[-NEW - 1 : -1].gather(-1, ids[0, -NEW:, None]).mean())
    for setup in (Setup(EXACT), Setup("snapkv", 1.0), Setup("heavy_merge", 1.0)):
        found = follower.reply(case_of(ids, gap=gap), setup).measured
        assert found["kl"] == pytest.approx(0, abs=1e-9)
        assert found["top1"] == 1.0
        assert found["nats"] == pytest.approx(nats, abs=1e-4)
        assert found["exact_nats"] == pytest.approx(nats, abs=1e-4)
        errors = follower.reply(case_of(ids, ATTENTION, gap), setup).measured
        assert errors["worst_layer"] < 1e-5


def test_predictions_are_those_of_decoding_the_text(model: Any, ids: torch.Tensor) -> None:
    """The measures are those of decoding the text token by token with a SketchCache."""
    case = case_of(ids)
    reply = Follower(model, Settings(recent=8)).reply(case, Setup("streaming_llm", 40))
    cache = SketchCache(model.config, "streaming_llm", budget=40, recent=8)
    kl = nats = agreed = 0.0
    with torch.inference_mode():
        truth = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
        model(ids[:, : case.record], past_key_values=cache)
        for i in range(case.record, ids.shape[1] - 1):
            out = model(ids[:, i : i + 1], past_key_values=cache).logits[0, -1].double()
            ours = out.log_softmax(-1)
            kl += float((truth[i].exp() * (truth[i] - ours)).sum())
            nats -= float(ours[ids[0, i + 1]])
            agreed += float(truth[i].argmax() == ours.argmax())
    assert reply.measured["kl"] == pytest.approx(kl / NEW, rel=1e-4)
    assert reply.measured["kl"] > 1e-6
    assert reply.measured["nats"] == pytest.approx(nats / NEW, abs=1e-6)
    assert reply.measured["top1"] == agreed / NEW
    assert (reply.prompt_tokens, reply.new_tokens, reply.decode_tokens) == (case.record, NEW, NEW)
    assert 40 <= reply.slots <= 42
    assert reply.kv_bytes < reply.exact_kv_bytes / 3


@pytest.mark.parametrize("gap", [0, 30])
def test_attention_errors_are_those_of_single_layers(
    model: Any, ids: torch.Tensor, gap: int
) -> None:
    """Errors of sinks and recent tokens equal those computed by hand, where every layer gets the
    exact run's queries, keys and values, whatever earlier layers lost."""
    sink, recent = 4, 8
    case = case_of(ids, ATTENTION, gap)
    settings = Settings(recent=recent, one_shot=True)
    found = Follower(model, settings).reply(case, Setup("streaming_llm", sink + recent)).measured
    asked, n = ids.shape[1] - 1 - NEW, ids.shape[1] - 1
    # a gap is a second prompt: after it, the recent window is at its end
    last = asked if gap else case.record
    errors = []
    for layer in capture(model, ids[:, :n]):
        keys, values = (
            t.repeat_interleave(2, dim=1)[0].double() for t in (layer.keys, layer.values)
        )
        queries = layer.queries[0].double()
        kept = [*range(sink), *range(last - recent, n)]
        wrong = right = 0.0
        for t in range(asked, n):
            scores = layer.scaling * (queries[:, t, None] * keys[:, : t + 1]).sum(-1)
            exact = (scores.softmax(-1)[..., None] * values[:, : t + 1]).sum(1)
            mine = [i for i in kept if i <= t]
            ours = (scores[:, mine].softmax(-1)[..., None] * values[:, mine]).sum(1)
            wrong += float((ours - exact).square().sum())
            right += float(exact.square().sum())
        errors.append((wrong / right) ** 0.5)
    assert found["error"] == pytest.approx(sum(errors) / len(errors), rel=1e-3)
    assert found["worst_layer"] == pytest.approx(max(errors), rel=1e-3)
    assert found["worst_layer"] > 0.01


def test_the_exact_run_is_remembered_for_one_case(model: Any, ids: torch.Tensor) -> None:
    follower = Follower(model, Settings(recent=8))
    first = follower.reply(case_of(ids), Setup("uniform", 40, seed=1))
    read: list[int] = []
    hook = model.register_forward_pre_hook(lambda m, args: read.append(args[0].shape[1]))
    try:
        again = follower.reply(case_of(ids), Setup("uniform", 40, seed=1))
        assert max(read) == first.prompt_tokens
        assert read.count(first.prompt_tokens) == 1
        follower.reply(case_of(ids[:, 1:]), Setup("uniform", 40, seed=1))
        assert read.count(first.prompt_tokens - 1) == 2
    finally:
        hook.remove()
    assert again.measured == first.measured


@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "mpt"])
def test_every_family_can_be_followed(family: str) -> None:
    model = build(family)
    ids = torch.randint(3, VOCABULARY, (1, 90), generator=torch.Generator().manual_seed(0))
    follower = Follower(model, Settings(sink=2, recent=4))
    before = model.config._attn_implementation
    for measure in ("kl", ATTENTION):
        exact = follower.reply(case_of(ids, measure), Setup(EXACT)).measured
        ours = follower.reply(case_of(ids, measure), Setup("streaming_llm", 12)).measured
        name = "kl" if measure == "kl" else "error"
        assert abs(exact[name]) < 1e-5
        assert ours[name] > 10 * abs(exact[name])
    assert model.config._attn_implementation == before


def test_mpt_has_predictions_and_no_attention_to_compare() -> None:
    model = build("mpt")
    ids = torch.randint(3, VOCABULARY, (1, 90), generator=torch.Generator().manual_seed(0))
    follower = Follower(model, Settings(sink=2, recent=4))
    assert follower.reply(case_of(ids), Setup("streaming_llm", 12)).measured["kl"] > 0
    with pytest.raises(UnsupportedError, match="attention interface"):
        follower.reply(case_of(ids, ATTENTION), Setup("streaming_llm", 12))


# --- texts ---------------------------------------------------------------------------------------


def test_pieces_follow_each_other_and_say_where_they_begin() -> None:
    found = list(pieces(iter([("a", "12345"), ("b", "6789"), ("c", "xy")]), 4))
    assert found == [("a", "1234"), ("a", "5\n\n6"), ("b", "789\n")]
    assert list(pieces(iter([]), 4)) == []


def test_texts_come_from_files_folders_and_data_sets(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("bee", encoding="utf-8")
    lines = "".join(json.dumps({"text": t}) + "\n" for t in ("one", "two"))
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "c.md").write_text("not this", encoding="utf-8")
    texts = [text for _, text in load_texts(str(tmp_path))]
    assert texts == ["one", "two", "bee"]
    assert next(load_texts(str(tmp_path / "a.jsonl")))[0].endswith("a.jsonl:1")
    pytest.importorskip("datasets")
    data_set = tmp_path / "set"
    data_set.mkdir()
    (data_set / "test.jsonl").write_text(lines, encoding="utf-8")
    assert [text for _, text in load_texts(f"hub:{data_set}")] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none", None, "is not there; allowed"),
        ("a.jsonl", "{", r"a.jsonl:1 is not JSON"),
        ("a.jsonl", '{"text": 3}', r"a.jsonl:1 has no 'text' that is a string"),
        ("a.jsonl", "[]", r"a.jsonl:1 has no 'text'"),
        ("a.txt", b"\xff\xfe\xff", "is not UTF-8"),
    ],
)
def test_bad_texts_are_named(
    tmp_path: Path, name: str, content: str | bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        list(load_texts(str(path)))


def test_a_folder_without_texts_and_a_data_set_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"holds no \.txt or \.jsonl files"):
        load_texts(str(tmp_path))
    datasets = pytest.importorskip("datasets")

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(InputError, match=r"hub:some/text could not be read: no network$"):
        list(load_texts("hub:some/text"))


def test_cases_are_the_same_for_every_task_and_fit_their_length(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(tiny_case(60).prompt * 10, encoding="utf-8")
    encoder = Encoder(tiny_tokenizer(), tiny_model(100).config, Settings(question="unseen"))
    seen = Encoder(tiny_tokenizer(), tiny_model(100).config, Settings())
    first = None
    for name in MEASURES:
        task = Texts(name, lengths=[200, 150], num_cases=2, data=str(text))
        cases = task.cases()
        assert [case.group["length"] for case in cases] == [200, 200, 150, 150]
        assert len({case.id for case in cases}) == 4
        first = first or [case.context for case in cases]
        assert [case.context for case in cases] == first
        whole = task.encoded(cases[0], encoder, 500, 30)
        assert (len(whole.ids), whole.new_tokens, whole.measure) == (200, 30, name)
        assert whole.record == 200 - 1 - 30 - GAP
        assert task.encoded(cases[0], seen, 500, 30).record == 200 - 1 - 30
        with pytest.raises(InputError, match="169 tokens before those that are measured"):
            task.encoded(cases[0], seen, 150, 30)
        with pytest.raises(InputError, match="too few to measure 150"):
            task.encoded(cases[2], seen, 500, 150)
        with pytest.raises(InputError, match="64 tokens after the rest was compressed"):
            task.encoded(cases[2], encoder, 500, 100)
        with pytest.raises(TypeError):
            task.score(cases[0], "words")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [10_000]}, "--num-cases 4: the text makes 0 parts of 80000 characters"),
        ({"num_cases": 1000}, "--num-cases 1000: the text makes"),
        ({"lengths": [0]}, "length"),
        ({"num_cases": 0}, "num_cases"),
        ({"form": "sandwich"}, "form"),
    ],
)
def test_impossible_texts_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("word " * 2000, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        Texts("kl", **{"lengths": [100], "data": str(text), **changes}).cases()
    with pytest.raises(InputError, match="task"):
        Texts("klx")


def test_a_text_of_too_few_tokens_is_named(tmp_path: Path) -> None:
    """A text of words so long that it has too few tokens is refused with its number of
    characters."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefghijklmnopqrstuvwxyz" * 100, encoding="utf-8")
    task = Texts("kl", lengths=[100], data=str(text))
    encoder = Encoder(tiny_tokenizer(), tiny_model(100).config, Settings())
    with pytest.raises(InputError, match="800 characters make"):
        task.encoded(task.cases()[0], encoder, 500, 10)


def test_records_are_measured_on_their_answer() -> None:
    pytest.importorskip("wonderwords")
    task = Texts("kl", form="line", lines=[5], num_cases=1)
    (case,) = task.cases()
    tokenizer = tiny_tokenizer()
    seen = task.encoded(case, Encoder(tokenizer, tiny_model(100).config, Settings()), 500, 128)
    unseen_settings = Settings(question="unseen")
    unseen = task.encoded(
        case, Encoder(tokenizer, tiny_model(100).config, unseen_settings), 500, 128
    )
    assert seen.ids == unseen.ids
    answer = tokenizer(case.answers[0], add_special_tokens=False)["input_ids"]
    assert seen.ids[seen.record :] == answer
    assert seen.new_tokens == len(answer) - 1
    assert unseen.record == len(tokenizer(case.context)["input_ids"])
    (again,) = Texts("kl", form="line", lines=[5], num_cases=1, seed=1).cases()
    assert again.context != case.context


# --- the command ---------------------------------------------------------------------------------


def test_scales_say_which_way_is_better() -> None:
    assert set(MEASURES) < set(TASKS)
    assert all(scale_of(name).is_error for name in MEASURES)
    assert not scale_of("longbench/multi_news").is_error
    mean, low, high = scale_of("perplexity").summary([1.0, 2.0])
    assert mean == pytest.approx(math.exp(1.5))
    assert low < mean < high
    assert scale_of("kl").summary([0.0, 0.0]) == (0.0, 0.0, 0.0)
    assert scale_of("kl").summary([0.1, 5.0])[2] > 1
    assert scale_of("kl").best_first(0.1) < scale_of("kl").best_first(0.2)
    assert scale_of("needle").best_first(0.2) < scale_of("needle").best_first(0.1)
    shown = [scale_of("kl").shown(x) for x in (0.0, 1e-6, 2.5e-5, 0.01882, 1.5, 271.4, 12_345.6)]
    assert shown == ["0", "0", "2.50e-05", "0.0188", "1.50", "271", "12,346"]
    assert scale_of("longbench/x").shown(0.123) == "12.3"


def test_eval_measures_texts_and_resumes(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(tiny_case(60).prompt * 10, encoding="utf-8")
    words = ["eval", *MEASURES, "--model", str(folder), "--data", str(text)]
    words += ["--lengths", "200", "--num-cases", "2", "--max-new-tokens", "20", "--recent", "8"]
    words += ["--methods", "exact,snapkv,heavy_merge+int4", "--budgets", "0.25", "--json"]
    words += ["--out", str(tmp_path / "run.jsonl")]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    rows = json.loads(first.stdout.splitlines()[-1])["results"]
    assert [row["task"] for row in rows] == [name for name in MEASURES for _ in range(3)]
    by = {(row["task"], row["method"]): row for row in rows}
    for task in MEASURES:
        exact, ours = by[task, "exact"], by[task, "snapkv"]
        assert exact["score"] == pytest.approx(
            math.exp(exact["measured"]["exact_nats"]) if task == "perplexity" else 0,
            rel=1e-4,
            abs=1e-3,
        )
        assert ours["cases"] == 2
        assert ours["kv_bytes"] < exact["kv_bytes"] / 3
        assert ours["ci95"][0] <= ours["score"] <= ours["ci95"][1]
        assert "accuracy" not in ours
    assert by["kl", "snapkv"]["measured"]["kl"] == by["kl", "snapkv"]["score"]
    again = CliRunner().invoke(app, words)
    assert json.loads(again.stdout.splitlines()[-1])["results"] == rows
    assert "less is better" in first.stderr


def test_options_reach_the_texts(tmp_path: Path) -> None:
    (task,) = make_tasks(["kl"], Options(form="line", lines=[7], num_cases=3, limit=2, seed=5))
    assert isinstance(task, Texts)
    assert (task.form, task.lines, task.num_cases, task.seed) == ("line", [7], 2, 5)
    (needle,) = make_tasks(["needle"], Options())
    assert needle.form == "sandwich"  # type: ignore[attr-defined]
