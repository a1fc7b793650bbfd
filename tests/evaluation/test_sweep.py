"""Sweeps: setups, settings, intervals, the store, and real runs on a tiny model."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

import tiny_models
from kvsketch import KVSketchError, SketchCache
from kvsketch.errors import InputError
from kvsketch.evaluation.runner import longeval
from kvsketch.evaluation.runner.aggregates import aggregate
from kvsketch.evaluation.runner.answering import Answerer
from kvsketch.evaluation.runner.encoding import EncodedCase, Encoder
from kvsketch.evaluation.runner.intervals import mean_interval, wilson_interval
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import Setup, make_setups, parse_budget, parse_method
from kvsketch.evaluation.runner.store import Record, Store, key_of
from kvsketch.evaluation.runner.sweep import Sweep
from kvsketch.evaluation.tasks.base import Reply
from kvsketch.evaluation.tasks.longeval import LongEval
from tiny_model import POSITIONS, save_tiny_model, tiny_case, tiny_model, tiny_tokenizer

METHODS = ("streaming_llm", "h2o", "kcenter", "uniform")


def record_of(
    setup: Setup | None = None,
    score: float = 1.0,
    settings: Settings | None = None,
    case: str = "a",
    group: dict[str, Any] | None = None,
    **changes: Any,
) -> Record:
    setup, settings = setup or Setup("h2o", 0.5), settings or Settings()
    identity = {"model": "m", "task": "longeval", "case": case}
    identity |= {**settings.identity(), **setup.identity()}
    reply = Reply(
        text="is <7>",
        prompt_tokens=100,
        new_tokens=5,
        slots=50,
        kv_bytes=1000.0,
        exact_kv_bytes=2000.0,
        final_kv_bytes=1040.0,
        final_exact_kv_bytes=2080.0,
        peak_kv_bytes=1500.0,
        prefill_seconds=2.0,
        decode_tokens=4,
        decode_seconds=0.5,
    )
    result = {"score": score, "group": group or {"lines": 4}, "label": setup.label}
    result |= {"kept": setup.kept, "answers": ["7"], **reply.__dict__, **changes}
    return Record(identity, result)


# --- methods and budgets -------------------------------------------------------------------------


def test_setups_hold_exact_once_and_nothing_twice() -> None:
    setups = make_setups(["h2o", "exact", "h2o"], [0.5, 1024, 0.5])
    assert setups == [
        Setup("exact"),
        Setup("h2o", 0.5),
        Setup("h2o", 1024),
    ]


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'kcentre'.*'kcenter'"):
        make_setups(["kcentre"], [0.5])


@pytest.mark.parametrize(
    ("text", "value"), [("0.25", 0.25), (" 1024 ", 1024), ("1", 1), ("1e-1", 0.1)]
)
def test_budgets(text: str, value: float) -> None:
    budget = parse_budget(text)
    assert budget == value
    assert type(budget) is type(value)


@pytest.mark.parametrize("text", ["0", "-3", "0.0", "-0.5", "1.5", "nan", "inf", "half", "", "1_0"])
def test_bad_budgets(text: str) -> None:
    with pytest.raises(InputError, match="budget"):
        parse_budget(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sink": -1}, "--sink -1"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"prefill_chunk_size": 0}, "--prefill-chunk-size 0"),
        ({"prefill": "lazy"}, "--prefill 'lazy'.*exact, streaming"),
        ({"question": "asked"}, "--question 'asked'.*seen, unseen"),
        ({"dtype": "int8"}, "--dtype 'int8'"),
        ({"question": "unseen", "batch_size": 2}, "one case at a time"),
    ],
)
def test_bad_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings(**change)


@pytest.mark.parametrize(
    ("text", "setup"),
    [
        ("exact", Setup("exact")),
        ("snapkv", Setup("snapkv")),
        ("snapkv@measured", Setup("snapkv", allocation="measured")),
        ("heavy_merge@even+int4", Setup("heavy_merge", allocation="even", bits=4)),
        ("uniform+int8", Setup("uniform", bits=8)),
    ],
)
def test_methods_are_read_and_written_alike(text: str, setup: Setup) -> None:
    assert parse_method(text) == setup
    assert setup.label == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapkv+int3", "int3"),
        ("snapkv@evenly", "allocation 'evenly' must be one of even, measured"),
        ("exact+int4", "the exact cache has no"),
        ("", "unknown"),
    ],
)
def test_bad_methods(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_method(text)


def test_setups_of_budgets_tolerances_and_seeds() -> None:
    setups = make_setups(["exact", "h2o"], [0.5], [0.05], [0, 1], "measured")
    assert setups == [
        Setup("exact"),
        Setup("h2o", 0.5, allocation="measured", seed=0),
        Setup("h2o", 0.5, allocation="measured", seed=1),
        Setup("h2o", None, 0.05, "measured", seed=0),
        Setup("h2o", None, 0.05, "measured", seed=1),
    ]
    assert [s.kept for s in setups[1::2]] == ["0.5", "tol 0.05"]
    for arguments, word in (
        ((["h2o"], []), "--budgets is empty"),
        (([], [0.5]), "--methods is empty"),
        ((["h2o"], [], [1.5]), "tolerance=1.5"),
        ((["h2o"], [0.5], [], []), "--seeds is empty"),
    ):
        with pytest.raises(InputError, match=word):
            make_setups(*arguments)


# --- statistics ----------------------------------------------------------------------------------


def test_wilson_interval_of_published_examples() -> None:
    # Newcombe (1998), Table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for correct, cases, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson_interval(correct, cases) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_share_and_mirrors(pair: tuple[int, int]) -> None:
    correct, cases = pair
    low, high = wilson_interval(correct, cases)
    assert 0 <= low <= correct / cases <= high <= 1
    assert low < high
    mirrored = wilson_interval(cases - correct, cases)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high))


@pytest.mark.parametrize(("correct", "cases"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_interval_refuses_nonsense(correct: int, cases: int) -> None:
    with pytest.raises(InputError):
        wilson_interval(correct, cases)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_intervals_of_means_hold_the_mean(scores: list[float]) -> None:
    low, high = mean_interval(scores)
    mean = sum(scores) / len(scores)
    assert 0 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= 1
    if set(scores) <= {0.0, 1.0}:
        assert (low, high) == wilson_interval(round(sum(scores)), len(scores))


def test_interval_of_no_scores() -> None:
    with pytest.raises(InputError, match="at least one score"):
        mean_interval([])


# --- the store -----------------------------------------------------------------------------------


def test_rows_hold_means_and_rates() -> None:
    wrong = record_of(score=0.0, case="b", kv_bytes=3000.0, prompt_tokens=300, slots=150)
    (row,) = aggregate([record_of(), wrong])
    assert row["accuracy"] == row["score"] == 0.5
    assert row["cases"] == 2
    assert (row["kv_bytes"], row["exact_kv_bytes"], row["slots"]) == (2000, 2000, 100)
    assert row["prefill_tokens_per_s"] == 100  # 400 tokens in 4 s
    assert row["decode_tokens_per_s"] == 8
    (silent,) = aggregate([record_of(decode_tokens=0, score=0.25)])
    assert silent["decode_tokens_per_s"] is None
    assert "accuracy" not in silent


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.booleans() | st.none()))
def test_keys_do_not_depend_on_order_and_tell_ints_from_floats(identity: dict[str, Any]) -> None:
    backwards = dict(reversed(list(identity.items())))
    assert key_of(identity) == key_of(backwards)
    assert key_of({**identity, "budget": 1}) != key_of({**identity, "budget": 1.0})


def test_store_comes_back_as_written_and_survives_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    with Store(path) as store:
        store.add(record_of(case="a"))
        store.add(record_of(case="b"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with Store(path) as store:
        assert list(store) == [record_of(case="a")]
        store.add(record_of(case="b"))
    assert path.read_bytes() == whole


def test_stores_can_be_concatenated(tmp_path: Path) -> None:
    for name in "ab":
        with Store(tmp_path / name) as store:
            store.add(record_of(case=name))
    both = tmp_path / "both"
    both.write_bytes((tmp_path / "a").read_bytes() + (tmp_path / "b").read_bytes())
    assert [r.identity["case"] for r in Store(both, write=False)] == ["a", "b"]


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Store(path) as store:
        store.add(record_of())
        with pytest.raises(InputError, match="being written by another process"):
            Store(path)
        assert len(Store(path, write=False)) == 1  # reading is always allowed
    Store(path).close()


@pytest.mark.parametrize("content", ["not mine", "not mine\n", '{"prompt": "x"}\n', "\n\n"])
def test_store_never_overwrites_another_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(InputError, match=r"notes\.txt:1 is not a line of a results store"):
        Store(path)
    assert path.read_text() == content


def test_store_names_damaged_lines_and_other_versions(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Store(path) as store:
        store.add(record_of())
    good = path.read_text()
    for bad, message in (
        ("garbage\n", r"run\.jsonl:2 is not a line"),
        (good.replace('"format": 1', '"format": 7'), r"run\.jsonl:2 is of format 7"),
    ):
        path.write_text(good + bad)
        with pytest.raises(InputError, match=message):
            Store(path)
        assert path.read_text() == good + bad


def test_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--out .* cannot be written"):
        Store(tmp_path / "file" / "run.jsonl")
    with pytest.raises(InputError, match=r"--out .* cannot be written"):
        Store(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a full disk")
def test_full_disk_keeps_what_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    store = Store(path)
    store.add(record_of(case="a"))
    assert store._descriptor is not None
    os.dup2(os.open("/dev/full", os.O_WRONLY), store._descriptor)  # as on a full disk
    with pytest.raises(KVSketchError, match=r"No space left.*the 1 finished cases in it are kept"):
        store.add(record_of(case="b"))
    assert [r.identity["case"] for r in Store(path)] == ["a"]


# --- real runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return tiny_model(len(tokenizer))


def encoded(
    model: Any, tokenizer: Any, case: longeval.LinesCase, settings: Settings
) -> EncodedCase:
    (whole,) = LongEval([case]).cases()
    encoder = Encoder(tokenizer, model.config, settings)
    new = settings.new_tokens(whole.max_new_tokens)
    return encoder.encode(whole.context, whole.question, whole.where, new)


def ask(
    model: Any,
    tokenizer: Any,
    method: str,
    budget: float,
    *cases: longeval.LinesCase,
    **settings: Any,
) -> list[Reply]:
    chosen = Settings(**{"max_new_tokens": 6, "recent": 8, **settings})
    answerer = Answerer(model, tokenizer, chosen)
    mine = [encoded(model, tokenizer, case, chosen) for case in cases]
    return answerer.answer(mine, Setup(method, budget))


def costs(reply: Reply) -> dict[str, Any]:
    """The fields of a reply that must repeat exactly: all but the times."""
    return {k: v for k, v in reply.__dict__.items() if not k.endswith("_seconds")}


@pytest.mark.parametrize("family", ["lfm2", "gemma3_text", "gemma4_text"])
def test_models_with_other_layers_are_measured(family: str, tokenizer: Any) -> None:
    """Layers with states, windows and shared keys: the exact cache's bytes are those that a
    compressed one is compared with."""
    model, case = tiny_models.build(family), tiny_case(8)
    assert max(tokenizer(case.prompt)["input_ids"]) < model.config.vocab_size
    (exact,) = ask(model, tokenizer, "exact", 1.0, case)
    (kept,) = ask(model, tokenizer, "snapkv", 0.5, case, question="unseen")
    assert exact.kv_bytes == exact.exact_kv_bytes == kept.exact_kv_bytes
    assert kept.kv_bytes < exact.kv_bytes


def test_exact_answers_are_those_of_plain_generate(model: Any, tokenizer: Any) -> None:
    case = tiny_case()
    (reply,) = ask(model, tokenizer, "exact", 1.0, case)
    inputs = tokenizer(case.prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0]
    new = output[inputs.input_ids.shape[1] :]
    assert reply.text == tokenizer.decode(new, skip_special_tokens=True)
    assert reply.prompt_tokens == reply.slots == inputs.input_ids.shape[1]
    # 2 layers x (key + value) x 2 KV heads x head_dim 8 x float32
    assert reply.kv_bytes == reply.exact_kv_bytes == reply.prompt_tokens * 2 * 2 * 2 * 8 * 4
    assert reply.final_kv_bytes - reply.kv_bytes == (reply.new_tokens - 1) * 256
    assert reply.prefill_seconds > 0
    assert reply.decode_tokens == reply.new_tokens - 1


@pytest.mark.parametrize("method", METHODS)
def test_methods_at_full_budget_answer_as_exact_does(
    model: Any, tokenizer: Any, method: str
) -> None:
    case = tiny_case()
    (exact,) = ask(model, tokenizer, "exact", 1.0, case)
    (full,) = ask(model, tokenizer, method, 1.0, case)
    assert full.text == exact.text
    assert full.exact_kv_bytes == exact.exact_kv_bytes
    assert full.final_exact_kv_bytes == exact.final_exact_kv_bytes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"prefill_chunk_size": 100},
        {"prefill": "streaming", "prefill_chunk_size": 64},
        {"question": "unseen"},
        {"question": "unseen", "prefill_chunk_size": 100},
        {"one_shot": True},
    ],
)
def test_every_method_and_mode_keeps_its_budget_and_repeats(
    model: Any, tokenizer: Any, method: str, how: dict[str, Any]
) -> None:
    (first,) = ask(model, tokenizer, method, 0.5, tiny_case(), **how)
    (again,) = ask(model, tokenizer, method, 0.5, tiny_case(), **how)
    assert costs(first) == costs(again)
    # A question read after the compression may exceed the budget until the next compression.
    slack = 30 if how.get("question") == "unseen" else 10
    assert 0.5 * first.prompt_tokens - 10 <= first.slots <= 0.5 * first.prompt_tokens + slack
    assert 0.45 < first.kv_bytes / first.exact_kv_bytes < 0.62
    assert first.peak_kv_bytes >= first.kv_bytes


def test_chunks_of_an_exact_prefill_do_not_change_what_is_kept(model: Any, tokenizer: Any) -> None:
    (whole,) = ask(model, tokenizer, "kcenter", 0.5, tiny_case())
    (chunked,) = ask(model, tokenizer, "kcenter", 0.5, tiny_case(), prefill_chunk_size=100)
    assert (whole.text, whole.slots) == (chunked.text, chunked.slots)


def test_batches_answer_as_single_cases_do(model: Any, tokenizer: Any) -> None:
    cases = [tiny_case(30, 3), tiny_case(30, 5), tiny_case(24, 5)]  # two lengths cause padding
    alone = [ask(model, tokenizer, "h2o", 1.0, case)[0] for case in cases]
    batch = ask(model, tokenizer, "h2o", 1.0, *cases, batch_size=3)
    assert [reply.text for reply in batch] == [reply.text for reply in alone]
    assert [reply.prompt_tokens for reply in batch] == [reply.prompt_tokens for reply in alone]


def test_answers_stop_at_the_end_of_sequence(tokenizer: Any) -> None:
    model = tiny_model(len(tokenizer))
    inputs = tokenizer(tiny_case().prompt, return_tensors="pt")
    first = model.generate(**inputs, max_new_tokens=1, do_sample=False)[0, -1].item()
    model.generation_config.eos_token_id = [2, first]
    (after,) = ask(model, tokenizer, "exact", 1.0, tiny_case())
    assert after.new_tokens == 1
    assert (after.decode_tokens, after.final_kv_bytes) == (0, after.kv_bytes)


def test_unseen_question_is_cut_at_the_official_place(model: Any, tokenizer: Any) -> None:
    case = tiny_case()
    unseen = encoded(model, tokenizer, case, Settings(question="unseen"))
    seen = encoded(model, tokenizer, case, Settings())
    assert unseen.ids == seen.ids
    assert "Now the record" not in tokenizer.decode(unseen.ids[: unseen.record])
    assert tokenizer.decode(unseen.ids[unseen.record :]).split()[:3] == ["Now", "the", "record"]
    with pytest.raises(InputError, match="x: --question unseen needs a prompt whose question"):
        Encoder(tokenizer, model.config, Settings(question="unseen")).encode("Hello", "", "x", 4)


def test_chat_template_is_used_where_there_is_one(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}line {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}the number is{% endif %}"
    )
    for question in ("seen", "unseen"):
        ids = encoded(model, tokenizer, tiny_case(), Settings(question=question)).ids
        assert ids[:2] == [tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids("line")]
        assert ids[-1] == tokenizer.convert_tokens_to_ids("is")


def test_prompt_beyond_the_positions_names_both_numbers(model: Any, tokenizer: Any) -> None:
    case = tiny_case(200)
    tokens = len(tokenizer(case.prompt)["input_ids"])
    assert tokens > POSITIONS
    with pytest.raises(InputError, match=f"prompt of {tokens} tokens .* {POSITIONS} positions"):
        ask(model, tokenizer, "exact", 1.0, case)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def sweep_of(
    folder: str, cases: list[longeval.LinesCase], setups: Any, path: Path | None, **settings: Any
) -> Sweep:
    chosen = Settings(**{"max_new_tokens": 4, "recent": 8, **settings})
    return Sweep.open(folder, [LongEval(cases)], setups, chosen, path)


def run(sweep: Sweep) -> dict[str, Any]:
    """The results of a sweep by key, without times."""
    with sweep.store:
        sweep.run(sweep.jobs())
    return timeless(sweep.store)


def timeless(store: Store) -> dict[str, Any]:
    return {
        record.key: {
            k: v for k, v in record.result.items() if not k.endswith("_seconds") and k != "made"
        }
        for record in store
    }


def test_resuming_answers_only_what_is_missing(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    cases = [tiny_case(30, i) for i in range(3)]
    setups = make_setups(["exact", "h2o"], [0.5])
    first = run(sweep_of(folder, cases[:2], setups, path))
    assert len(first) == 4
    answered: list[Setup] = []
    answer = Answerer.answer

    def count(self: Answerer, batch: Any, setup: Setup) -> list[Reply]:
        answered.append(setup)
        return answer(self, batch, setup)

    monkeypatch.setattr(Answerer, "answer", count)
    assert run(sweep_of(folder, cases[:2], setups, path)) == first
    assert answered == []
    everything = run(sweep_of(folder, cases, setups, path))
    assert len(everything) == 6
    assert answered == setups
    assert everything.items() >= first.items()
    # answers under other settings are added to the same file
    run(sweep_of(folder, cases, setups, path, question="unseen"))
    assert len(Store(path, write=False)) == 12


def test_seeds_are_answers_of_their_own_and_one_row(folder: str) -> None:
    setups = make_setups(["exact", "uniform"], [0.5], seeds=[0, 1, 2])
    sweep = sweep_of(folder, [tiny_case(30, i) for i in range(2)], setups, None)
    assert len(run(sweep)) == 2 + 6
    exact, uniform = sweep.rows()
    assert (exact["cases"], exact["answers"]) == (2, 2)
    assert (uniform["cases"], uniform["answers"]) == (2, 6)


def test_setups_may_depend_on_the_case(folder: str) -> None:
    shares = {30: 0.5, 20: 0.25}
    cases = [tiny_case(30), tiny_case(20)]
    sweep = sweep_of(folder, cases, lambda c: [Setup("h2o", shares[c.group["lines"]])], None)
    run(sweep)
    assert [(row["lines"], row["budget"]) for row in sweep.rows()] == [(30, 0.5), (20, 0.25)]


def test_batches_hold_one_length_and_one_setup(folder: str) -> None:
    cases = [tiny_case(30, 0), tiny_case(30, 1), tiny_case(30, 2), tiny_case(20, 0)]
    setups = make_setups(["exact", "h2o"], [0.5])
    sweep = sweep_of(folder, cases, setups, None, batch_size=2)
    jobs = sweep.jobs()
    assert [len(job.cases) for job in jobs] == [2, 2, 1, 1, 1, 1]
    assert len({key for job in jobs for key in job.keys}) == 8
    assert len(run(sweep)) == 8


def test_accuracy_counts_right_answers(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model(len(tokenizer))
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    with torch.no_grad():
        model.lm_head.weight[digits] *= 50  # so that its answers are numbers
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    case = tiny_case()
    (said,) = run(sweep_of(str(tmp_path), [case], [Setup("exact")], None)).values()
    number = longeval.read_answer(said["text"])
    assert number >= 0
    cases = [dataclasses.replace(case, expected=number + i) for i in range(2)]
    sweep = sweep_of(str(tmp_path), cases, [Setup("exact")], None)
    run(sweep)
    assert sweep.rows()[0]["accuracy"] == 0.5


def test_evaluation_leaves_the_model_as_usable_as_before(model: Any, tokenizer: Any) -> None:
    inputs = tokenizer(tiny_case().prompt, return_tensors="pt")
    before = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    ask(model, tokenizer, "kcenter", 0.25, tiny_case())
    cache = DynamicCache(config=model.config)
    after = model.generate(**inputs, max_new_tokens=4, do_sample=False, past_key_values=cache)
    assert torch.equal(before, after)
    assert isinstance(SketchCache(model.config, "h2o", budget=0.5), SketchCache)


# --- killed and run again ------------------------------------------------------------------------


def command(folder: str, cases: Path, out: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "kvsketch", "eval", "longeval", "--model", folder),
        *("--cases", str(cases), "--out", str(out), "--recent", "8", "--max-new-tokens", "4"),
        *("--methods", "h2o,uniform,snapkv,streaming_llm", "--budgets", "0.2,0.3,0.4,0.5", *more),
    ]


@pytest.fixture(scope="module")
def case_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cases") / "cases.jsonl"
    cases = [tiny_case(10 + i // 5, i % 5) for i in range(10)]
    rows = [
        {"prompt": c.prompt, "expected_number": c.expected, "num_lines": c.lines} for c in cases
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def killed_at(words: list[str], out: Path, lines: int) -> None:
    """Run a command, and kill it by SIGKILL as soon as the store has so many lines."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if out.is_file() and out.read_bytes().count(b"\n") >= lines:
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.01)
    process.wait()


@pytest.mark.slow
def test_a_sweep_killed_three_times_ends_as_an_uninterrupted_one(
    folder: str, case_file: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    subprocess.run(command(folder, case_file, whole), check=True, capture_output=True)
    wanted = timeless(Store(whole, write=False))
    assert len(wanted) == 10 * 16
    for lines in sorted(random.Random(0).sample(range(1, 150), 3)):
        killed_at(command(folder, case_file, broken), broken, lines)
        assert lines <= len(Store(broken, write=False)) < len(wanted)
    subprocess.run(command(folder, case_file, broken), check=True, capture_output=True)
    assert timeless(Store(broken, write=False)) == wanted
    assert broken.read_bytes().count(b"\n") == len(wanted)  # no case is stored twice
