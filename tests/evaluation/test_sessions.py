"""Sessions of many turns in one cache, and what is asked in them."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvsketch.cli.app import app
from kvsketch.errors import InputError
from kvsketch.evaluation.runner import answering
from kvsketch.evaluation.runner.encoding import Encoder
from kvsketch.evaluation.runner.loading import load_model, load_tokenizer, resolve_model
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.runner.setups import Setup
from kvsketch.evaluation.tasks import Options, make_tasks
from kvsketch.evaluation.tasks.sessions import AGES, DOCUMENTS, FORMS, LAST, QUESTIONS, Sessions
from tiny_model import tiny_tokenizer

LINES = 66


@pytest.fixture(scope="module")
def spread() -> Any:
    path = resolve_model("spread")
    return load_model(path, "cpu", "float32"), load_tokenizer(path)


def replied(task: Sessions, case: Any, turns: list[str]) -> Any:
    return SimpleNamespace(turns=tuple(turns))


@pytest.mark.parametrize("form", FORMS)
def test_right_answers_score_and_wrong_ones_do_not(form: str) -> None:
    task = Sessions(form, [LINES], 2, seed=3)
    first, second = task.cases()
    assert first.id != second.id
    assert first.id == Sessions(form, [LINES], 2, seed=3).cases()[0].id
    assert first.id != Sessions(form, [LINES], 1, seed=4).cases()[0].id
    right = replied(task, first, list(first.answers))
    assert task.graded(first, right) == 1
    assert set(task.measured(first, right).values()) == {1.0}
    wrong = replied(task, first, ["no idea"] * len(first.answers))
    assert task.graded(first, wrong) == 0
    with pytest.raises(TypeError):
        task.score(first, "1")


@pytest.mark.parametrize("form", ["turns", "documents", "system"])
def test_what_is_asked_was_read_before_and_once(form: str) -> None:
    task = Sessions(form, [LINES], 1)
    (case,) = task.cases()
    read, asked = "", []
    for turn in task._turns[case.id]:
        read += turn.text
        key = re.search(r"(?:line|code for) (\S+?)\?", turn.question)[1]  # type: ignore[index]
        assert f"{key}: REGISTER_CONTENT is <{turn.answer}>" in read or (
            f"The code for {key} is {turn.answer}." in read
        )
        asked.append(key)
    assert len(set(asked)) == len(asked)
    wanted = QUESTIONS if form == "turns" else DOCUMENTS + len(AGES) + LAST + (form == "system")
    assert len(asked) == wanted


def test_documents_are_asked_about_as_many_documents_later_as_said() -> None:
    task = Sessions("documents", [LINES], 1)
    (case,) = task.cases()
    read: list[str] = []
    for turn in task._turns[case.id]:
        if turn.text:
            read.append(turn.text)
        where = next(i for i, text in enumerate(read) if f"<{turn.answer}>" in text)
        assert turn.about == f"documents ago {len(read) - 1 - where:02}"
    answers = list(case.answers)
    answers[-1] = answers[0]
    curve = task.measured(case, replied(task, case, answers))
    assert curve.pop("documents ago 10") == 1 - 1 / LAST
    assert set(curve.values()) == {1.0}


def test_a_system_message_is_scored_alone() -> None:
    task = Sessions("system", [LINES], 1)
    (case,) = task.cases()
    only = ["no idea"] * (len(case.answers) - 1) + [case.answers[-1]]
    assert task.graded(case, replied(task, case, only)) == 1
    most = [*case.answers[:-1], "no idea"]
    assert task.graded(case, replied(task, case, most)) == 0


def test_what_is_left_out_of_a_list_costs_only_itself() -> None:
    task = Sessions("list", [40], 1)
    (case,) = task.cases()
    (turn,) = task._turns[case.id]
    told = case.answers[0].split(",")
    assert len(told) == 8
    for one in told:
        assert f"One of the special magic numbers for{one}." in turn.text
        assert one.partition(" is: ")[0].strip() in turn.question
    key = told[2].partition(" is: ")[0]
    said = ",".join([*told[:2], f"{key} is: 1234567", *told[3:7]]) + "."
    assert task.graded(case, replied(task, case, [said])) == 6 / 8
    curve = task.measured(case, replied(task, case, [said]))
    assert curve == {"quarter 1": 1, "quarter 2": 0.5, "quarter 3": 1, "quarter 4": 0.5}
    least = encoded_length(case.answers[0])
    assert least < case.max_new_tokens < 3 * least


def encoded_length(text: str) -> int:
    return len(load_tokenizer(resolve_model("spread")).encode(text))


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="form"):
        Sessions("chat")
    with pytest.raises(InputError, match="lines"):
        Sessions("turns", [QUESTIONS - 1])
    with pytest.raises(InputError, match="num_cases"):
        Sessions(num_cases=0)
    with pytest.raises(InputError, match=r"--depths has no effect on sessions"):
        make_tasks(["sessions"], Options(), ["depths"])
    task = Sessions("documents", [LINES], 1)
    encoder = Encoder(tiny_tokenizer(), SimpleNamespace(get_text_config=dict), Settings())
    with pytest.raises(InputError, match="fewer --lines"):
        task.encoded(task.cases()[0], encoder, 100, 32)


@pytest.mark.parametrize("question", ["seen", "unseen"])
def test_a_chat_template_surrounds_every_turn(question: str) -> None:
    tokenizer = load_tokenizer(resolve_model("spread"))
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>"
        "{% endfor %}<assistant>"
    )
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    encoder = Encoder(tokenizer, config, Settings(question=question))
    task = Sessions("documents", [LINES], 1)
    (case,) = task.cases()
    turns = task.encoded(case, encoder, 10**6, 32).turns
    texts = [
        "".join(tokenizer.decode(part) for part in (turn.text, turn.question)) for turn in turns
    ]
    apart = [bool(turn.text) and question == "unseen" for turn in task._turns[case.id]]
    assert [bool(turn.text) for turn in turns] == apart
    for turn, text in zip(task._turns[case.id], texts, strict=True):
        said = turn.text + turn.question
        assert text.endswith(f"<user>{said}</user><assistant>")
    assert texts[0].startswith("<user>")
    assert texts[1].startswith("</assistant>")


@pytest.mark.slow
def test_the_exact_cache_answers(spread: Any) -> None:
    """A real session through ``generate``: what is read first is read alone, unseen, and the
    answers are in the cache when the next turn comes."""
    model, tokenizer = spread
    settings = Settings(question="unseen")
    encoder = Encoder(tokenizer, model.config, settings)
    answerer = answering.Answerer(model, tokenizer, settings)
    task = Sessions("documents", [220], 1, seed=5)
    (case,) = task.cases()
    encoded = task.encoded(case, encoder, 10_000, 32)
    setups = {Setup("exact"): 0.9, Setup("heavy_merge", 400): 0.9, Setup("heavy_merge", 0.25): 0.75}
    for setup, least in setups.items():
        (reply,) = answerer.answer([encoded], setup)
        assert task.graded(case, reply) >= least
        assert len(reply.turns) == len(case.answers)
        assert reply.final_exact_kv_bytes > 0
        if setup.method != "exact":
            assert reply.final_kv_bytes <= 1.06 * (
                400 * 6144 if setup.budget == 400 else 0.25 * reply.final_exact_kv_bytes
            )
            assert reply.prompt_tokens + reply.new_tokens == pytest.approx(
                reply.final_exact_kv_bytes / 6144, abs=1
            )


def test_the_command_prints_a_curve_and_resumes(tmp_path: Any) -> None:
    torch.set_num_threads(1)
    out = tmp_path / "run.jsonl"
    command = (
        "eval sessions --form turns --lines 50 --num-cases 1 --methods exact,streaming_llm "
        f"--budgets 0.25 --json --out {out}"
    ).split()
    runs = [CliRunner().invoke(app, command) for _ in range(2)]
    for run in runs:
        assert run.exit_code == 0, run.output
    rows = json.loads(runs[0].stdout.splitlines()[-1])["results"]
    assert [row["method"] for row in rows] == ["exact", "streaming_llm"]
    assert next(iter(rows[0]["measured"])) == "turns 01-10"
    assert rows[0]["measured"]["turns 01-10"] > rows[1]["measured"]["turns 41-50"]
    assert json.loads(runs[1].stdout.splitlines()[-1])["results"] == rows
    assert len(out.read_text().splitlines()) == 2
    page = tmp_path / "page.html"
    shown = CliRunner().invoke(app, ["report", str(out), "--out", str(page), "--json"])
    assert shown.exit_code == 0, shown.output
    figures = json.loads(shown.stdout.splitlines()[-1])["figures"]
    (curve,) = [one["title"] for one in figures if "in its course" in one["title"]]
    assert "turns" in curve
    text = page.read_text()
    for row in rows:
        for point, score in row["measured"].items():
            assert f"{row['method']}, {point}: {score:.2f}" in text
