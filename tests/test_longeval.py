"""LongEval: cases, scoring, the results file, and real runs on a tiny model."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from benchmarks import longeval_markdown as markdown
from benchmarks import longeval_table
from kvsketch import KVSketchError, SketchCache
from kvsketch.errors import InputError
from kvsketch.evaluation import longeval as task
from kvsketch.evaluation.answering import Answerer, Reply
from kvsketch.evaluation.encoding import QUESTION_MARK, Encoder
from kvsketch.evaluation.longeval_cases import ANSWER
from kvsketch.evaluation.report import report
from kvsketch.evaluation.results import Outcome, ResultStore, aggregate, wilson_interval
from kvsketch.evaluation.settings import Settings
from tiny_model import POSITIONS, tiny_case, tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("KVSKETCH_DATA", ROOT.parent / "shared" / "data"))
METHODS = ("streaming_llm", "h2o", "kcenter", "uniform")


def write(path: Path, *records: Any) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def record(**changes: Any) -> dict[str, Any]:
    case = tiny_case(4)
    base = {"prompt": case.prompt, "expected_number": case.expected, "num_lines": 4}
    return {**base, **changes}


# --- cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [200, 300, 400])
def test_official_files_load(lines: int) -> None:
    path = DATA / "longeval" / f"{lines}_lines.jsonl"
    if not path.is_file():
        pytest.skip(f"official LongEval cases are not at {path}")
    cases = task.load_cases(path)
    assert len(cases) == 50
    assert len({case.id for case in cases}) == 50
    for case in cases:
        assert case.lines == lines
        assert case.prompt.count(QUESTION_MARK) == 1
        assert f"REGISTER_CONTENT is <{case.expected}>" in case.prompt


def test_generated_cases_are_official_in_form_and_depend_on_the_seed() -> None:
    pytest.importorskip("wonderwords")
    cases = task.make_cases([5, 8], 3, seed=1)
    assert [case.lines for case in cases] == [5, 5, 5, 8, 8, 8]
    assert cases == task.make_cases([5, 8], 3, seed=1)
    assert {c.id for c in cases}.isdisjoint(c.id for c in task.make_cases([5, 8], 3, seed=2))
    for case in cases:
        body, question = case.prompt.split(QUESTION_MARK)
        key = question.split("in line ")[1].split("?")[0]
        assert f"line {key}: REGISTER_CONTENT is <{case.expected}>\n" in body
        assert body.count("REGISTER_CONTENT is <") == case.lines


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([record(), "{oops"], r"cases\.jsonl:2 is not JSON"),
        ([[1, 2]], r"cases\.jsonl:1 must be a JSON object, got list"),
        ([{"prompt": "x"}], r"cases\.jsonl:1 lacks expected_number, num_lines"),
        ([record(prompt=" ")], "prompt must be text"),
        ([record(expected_number="7")], "expected_number must be an int >= 0, got '7'"),
        ([record(expected_number=True)], "expected_number must be an int >= 0, got True"),
        ([record(num_lines=0)], "num_lines must be an int >= 1, got 0"),
        ([""], "holds no cases"),
        ([record(), record()], r"cases\.jsonl:2 repeats the case at .*cases\.jsonl:1"),
    ],
)
def test_bad_case_files_say_where_and_what(tmp_path: Path, content: Any, message: str) -> None:
    path = write(tmp_path / "cases.jsonl", *content)
    with pytest.raises(InputError, match=message):
        task.load_case_files([path])


def test_unreadable_case_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no\.jsonl cannot be read: No such file"):
        task.load_cases(tmp_path / "no.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        task.load_cases(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        task.load_cases(tmp_path / "binary")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (ANSWER.format(key="torpid-kid", number=2416), 2416),
        ("line 7 holds <42>, no, <43>", 43),  # the last one counts
        ("4,216", 216),  # as the benchmark reads it
        ("007", 7),
        ("-5", 5),
        ("I do not know", -1),
        ("", -1),
    ],
)
def test_answers_are_read_by_the_benchmarks_rule(text: str, answer: int) -> None:
    assert task.read_answer(text) == answer


# --- methods and budgets -------------------------------------------------------------------------


def test_setups_hold_exact_once_and_nothing_twice() -> None:
    setups = task.make_setups(["h2o", "exact", "h2o"], [0.5, 1024, 0.5])
    assert setups == [
        task.Setup("exact", 1.0),
        task.Setup("h2o", 0.5),
        task.Setup("h2o", 1024),
    ]


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"'kcentre'.*'kcenter'"):
        task.make_setups(["kcentre"], [0.5])


@pytest.mark.parametrize(
    ("text", "value"), [("0.25", 0.25), (" 1024 ", 1024), ("1", 1), ("1e-1", 0.1)]
)
def test_budgets(text: str, value: float) -> None:
    budget = task.parse_budget(text)
    assert budget == value
    assert type(budget) is type(value)


@pytest.mark.parametrize("text", ["0", "-3", "0.0", "-0.5", "1.5", "nan", "inf", "half", "", "1_0"])
def test_bad_budgets(text: str) -> None:
    with pytest.raises(InputError, match="budget"):
        task.parse_budget(text)


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


# --- the results file ----------------------------------------------------------------------------


def outcome(case: str = "a", method: str = "h2o", budget: float = 0.5, **changes: Any) -> Outcome:
    base = Outcome(
        case=case,
        lines=4,
        method=method,
        budget=budget,
        expected=7,
        answer=7,
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
    return dataclasses.replace(base, **changes)


def test_rows_hold_means_and_rates() -> None:
    wrong = outcome("b", answer=8, kv_bytes=3000.0, prompt_tokens=300, slots=150)
    (row,) = aggregate([outcome("a"), wrong])
    assert row["accuracy"] == 0.5
    assert row["cases"] == 2
    assert (row["kv_bytes"], row["exact_kv_bytes"], row["slots"]) == (2000, 2000, 100)
    assert row["prefill_tokens_per_s"] == 100  # 400 tokens in 4 s
    assert row["decode_tokens_per_s"] == 8
    (silent,) = aggregate([outcome(decode_tokens=0)])
    assert silent["decode_tokens_per_s"] is None


def test_one_slot_and_everything_are_different_budgets(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with ResultStore(path, {}) as store:
        store.add(outcome(budget=1))
        store.add(outcome(budget=1.0))
    assert len(ResultStore(path, {}).outcomes) == 2


def test_store_comes_back_as_written_and_survives_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    with ResultStore(path, {"sink": 4}) as store:
        store.add(outcome("a"))
        store.add(outcome("b"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with ResultStore(path, {"sink": 4}) as store:
        assert list(store.outcomes.values()) == [outcome("a")]
        store.add(outcome("b"))
    assert path.read_bytes() == whole


def test_store_refuses_other_settings_and_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    ResultStore(path, {"sink": 4, "recent": 32}).close()
    before = path.read_bytes()
    with pytest.raises(InputError, match="recent = 32, but this run has recent = 16"):
        ResultStore(path, {"sink": 4, "recent": 16})
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["not mine", "not mine\n", '{"prompt": "x"}\n', "\n\n"])
def test_store_never_overwrites_another_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(InputError, match=r"notes\.txt exists and is not a results file"):
        ResultStore(path, {})
    assert path.read_text() == content


def test_store_names_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with ResultStore(path, {}) as store:
        store.add(outcome())
    path.write_text(path.read_text() + "garbage\n")
    with pytest.raises(InputError, match=r"run\.jsonl:3 is not a finished case"):
        ResultStore(path, {})


def test_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--out .* cannot be written"):
        ResultStore(tmp_path / "file" / "run.jsonl", {})
    with pytest.raises(InputError, match=r"--out .* cannot be written"):
        ResultStore(tmp_path, {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a full disk")
def test_full_disk_keeps_what_is_finished(tmp_path: Path) -> None:
    with pytest.raises(KVSketchError, match="No space left"):
        ResultStore(Path("/dev/full"), {})
    path = tmp_path / "run.jsonl"
    store = ResultStore(path, {})
    store.add(outcome("a"))
    assert store._file is not None
    os.dup2(os.open("/dev/full", os.O_WRONLY), store._file.fileno())  # the disk fills up
    with pytest.raises(KVSketchError, match=r"No space left.*the 1 finished cases in it are kept"):
        store.add(outcome("b"))
    assert list(ResultStore(path, {}).outcomes) == [outcome("a").key]


# --- real runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return tiny_model(len(tokenizer))


def ask(
    model: Any, tokenizer: Any, method: str, budget: float, *cases: task.Case, **settings: Any
) -> list[Reply]:
    chosen = Settings(**{"max_new_tokens": 6, "recent": 8, **settings})
    encoded = task.encode_cases(Encoder(tokenizer, model.config, chosen), cases)
    answerer = Answerer(model, tokenizer, chosen)
    return answerer.answer([encoded[case.id] for case in cases], method, budget)


def costs(reply: Reply) -> dict[str, Any]:
    """What must repeat exactly: everything but the clock."""
    return {k: v for k, v in reply.__dict__.items() if not k.endswith("_seconds")}


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
    # A question fed after the compression may sit beside the budget until the next one.
    slack = 30 if how.get("question") == "unseen" else 10
    assert 0.5 * first.prompt_tokens - 10 <= first.slots <= 0.5 * first.prompt_tokens + slack
    assert 0.45 < first.kv_bytes / first.exact_kv_bytes < 0.62
    assert first.peak_kv_bytes >= first.kv_bytes


def test_chunks_of_an_exact_prefill_do_not_change_what_is_kept(model: Any, tokenizer: Any) -> None:
    (whole,) = ask(model, tokenizer, "kcenter", 0.5, tiny_case())
    (chunked,) = ask(model, tokenizer, "kcenter", 0.5, tiny_case(), prefill_chunk_size=100)
    assert (whole.text, whole.slots) == (chunked.text, chunked.slots)


def test_batches_answer_as_single_cases_do(model: Any, tokenizer: Any) -> None:
    cases = [tiny_case(30, 3), tiny_case(30, 5), tiny_case(24, 5)]  # two lengths: padding
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
    encoded = Encoder(tokenizer, model.config, Settings(question="unseen")).encode(case.prompt, "x")
    seen = Encoder(tokenizer, model.config, Settings()).encode(case.prompt, "x")
    assert encoded.ids == seen.ids
    assert "Now the record" not in tokenizer.decode(encoded.ids[: encoded.record])
    assert tokenizer.decode(encoded.ids[encoded.record :]).split()[:3] == ["Now", "the", "record"]
    with pytest.raises(InputError, match="x: --question unseen needs a prompt with"):
        Encoder(tokenizer, model.config, Settings(question="unseen")).encode("Hello", "x")


def test_chat_template_is_used_where_there_is_one(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}line {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}the number is{% endif %}"
    )
    for question in ("seen", "unseen"):
        encoder = Encoder(tokenizer, model.config, Settings(question=question))
        ids = encoder.encode(tiny_case().prompt, "x").ids
        assert ids[:2] == [tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids("line")]
        assert ids[-1] == tokenizer.convert_tokens_to_ids("is")


def test_prompt_beyond_the_positions_names_both_numbers(model: Any, tokenizer: Any) -> None:
    case = tiny_case(200)
    tokens = len(tokenizer(case.prompt)["input_ids"])
    assert tokens > POSITIONS
    with pytest.raises(InputError, match=f"prompt of {tokens} tokens .* {POSITIONS} positions"):
        ask(model, tokenizer, "exact", 1.0, case)


def run(model: Any, tokenizer: Any, cases: list[task.Case], setups: Any, path: Path) -> list[Any]:
    settings = Settings(max_new_tokens=4, recent=8)
    encoded = task.encode_cases(Encoder(tokenizer, model.config, settings), cases)
    with ResultStore(path, settings.__dict__) as store:
        task.evaluate(Answerer(model, tokenizer, settings), cases, encoded, setups, store)
        return task.outcomes_of(store, cases, setups)


def test_resuming_answers_only_what_is_missing(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    cases = [tiny_case(30, i) for i in range(3)]
    setups = task.make_setups(["exact", "h2o"], [0.5])
    first = run(model, tokenizer, cases[:2], setups, path)
    assert len(first) == 4
    calls: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        assert run(model, tokenizer, cases[:2], setups, path) == first
        assert calls == []
        everything = run(model, tokenizer, cases, setups, path)
    finally:
        hook.remove()
    assert len(everything) == 6
    assert 0 < len(calls) <= 2 * 4 + 2  # two answers of four tokens, and a warm-up
    assert len(path.read_text().splitlines()) == 1 + 6


def test_accuracy_counts_right_answers(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model(len(tokenizer))
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    with torch.no_grad():
        model.lm_head.weight[digits] *= 50  # so that it answers with numbers
    case = tiny_case()
    (said,) = run(model, tokenizer, [case], [task.Setup("exact", 1.0)], tmp_path / "a")
    assert said.answer >= 0
    right = dataclasses.replace(case, expected=said.answer)
    wrong = dataclasses.replace(case, expected=said.answer + 1)
    outcomes = run(model, tokenizer, [right, wrong], [task.Setup("exact", 1.0)], tmp_path / "b")
    assert aggregate(outcomes)[0]["accuracy"] == 0.5


def test_evaluation_leaves_the_model_as_usable_as_before(model: Any, tokenizer: Any) -> None:
    inputs = tokenizer(tiny_case().prompt, return_tensors="pt")
    before = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    ask(model, tokenizer, "kcenter", 0.25, tiny_case())
    cache = DynamicCache(config=model.config)
    after = model.generate(**inputs, max_new_tokens=4, do_sample=False, past_key_values=cache)
    assert torch.equal(before, after)
    assert isinstance(SketchCache(model.config, "h2o", budget=0.5), SketchCache)


# --- the table in the documentation --------------------------------------------------------------


def table_rows() -> dict[str, Any]:
    rows = [
        {"question": question, **row}
        for question in ("seen", "unseen")
        for row in aggregate(
            [
                outcome(method="exact", budget=1.0, lines=200),
                *(
                    outcome(method=method, budget=budget, lines=200, answer=8)
                    for budget in (0.65, 0.25)
                    for method in METHODS
                ),
            ]
        )
    ]
    settings = {**Settings().__dict__, "model_fingerprint": "abc"}
    return report("table", rows, settings=settings, seed=0)


def test_table_shows_our_numbers_and_the_papers(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"a\n{markdown.BEGIN}\nold\n{markdown.END}\nb\n")
    written = longeval_table.write(table_rows(), tmp_path / "docs", tmp_path / "README.md")
    assert [path.name for path in written] == ["longeval.json", "longeval.md", "README.md"]
    readme = (tmp_path / "README.md").read_text()
    assert "| 200 | 0.65 | 1.00 (0.98) | 0.00 (0.56) | 0.00 (0.66) | 0.00 (0.86) | 0.00 |" in readme
    assert "| 200 | 0.25 | 1.00 | 0.00 | 0.00 | 0.00 | 0.00 |" in readme
    assert "old" not in readme
    assert readme.startswith("a\n")
    assert readme.endswith("b\n")
    page = (tmp_path / "docs" / "longeval.md").read_text()
    assert "2402.06082" in page
    assert "## Question unseen" in page
    shown = json.loads((tmp_path / "docs" / "results" / "longeval.json").read_text())
    assert len(shown["results"]) == 18


def test_table_leaves_a_readme_without_marks_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    longeval_table.write(table_rows(), tmp_path / "docs", tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text() == "mine"


def test_table_is_skipped_without_the_official_cases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longeval_table.main(data=tmp_path, docs=tmp_path / "docs")
    assert "skipped: the official LongEval cases are not here" in capsys.readouterr().out
    assert not (tmp_path / "docs").exists()
