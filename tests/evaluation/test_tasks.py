"""Tasks that are generated from a seed: needle in a haystack, RULER, LongEval."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from kvsketch.errors import InputError
from kvsketch.evaluation.runner import longeval as official
from kvsketch.evaluation.runner.loading import load_tokenizer, resolve_model
from kvsketch.evaluation.tasks import TASKS, USED, Options, make_tasks
from kvsketch.evaluation.tasks.base import Case
from kvsketch.evaluation.tasks.fitting import Lengths, largest
from kvsketch.evaluation.tasks.haystack import (
    NOISE,
    Haystack,
    filler,
    inserted,
    load_haystack,
    noise_lines,
)
from kvsketch.evaluation.tasks.longeval import LongEval
from kvsketch.evaluation.tasks.needle import FORMS, SANDWICH, Needle
from kvsketch.evaluation.tasks.ruler import SUBTASKS, Ruler
from kvsketch.evaluation.tasks.ruler_needles import NEEDLES
from tiny_model import tiny_case, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("KVSKETCH_DATA", ROOT.parent / "shared" / "data"))
FAR = 10**9  # as without a limit
TOKENIZERS = ("longeval-one-head", "tiny", "tiny chat")


@lru_cache
def tokenizer(name: str) -> Any:
    if name == "longeval-one-head":
        return load_tokenizer(resolve_model("longeval-one-head"))
    found = tiny_tokenizer()
    if name == "tiny chat":
        found.chat_template = (
            "{% for m in messages %}user says: {{ m['content'] | trim }}\n{% endfor %}and you: "
        )
    return found


def encoded(name: str, case: Case) -> int:
    """The number of tokens of a prompt as the model gets it."""
    if name.endswith("chat"):
        return len(
            tokenizer(name).apply_chat_template(
                [{"role": "user", "content": case.prompt}],
                add_generation_prompt=True,
                return_dict=True,
            )["input_ids"]
        )
    return len(tokenizer(name)(case.prompt)["input_ids"])


def fitted(task: Needle | Ruler, name: str = "longeval-one-head") -> list[Case]:
    return [task.fitted(case, tokenizer(name), FAR) for case in task.cases()]


@pytest.fixture(autouse=True)
def _no_essays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without essays the haystack is the same on every machine."""
    monkeypatch.setenv("KVSKETCH_DATA", str(tmp_path / "nothing"))


# --- haystacks -----------------------------------------------------------------------------------


def test_sentences_are_the_words_in_order_round_and_round() -> None:
    words = ("One", "two.", '"Three', 'four!"', "Five", "(six?)", "seven")
    text = Haystack("text", words)
    assert text.starts == (0, 2, 4, 6)
    assert text.sentences(2, 5) == ['"Three four!"', "Five (six?)", "seven"]
    assert text.sentences(6, 4) == ["seven One two.", '"Three']
    assert text.sentences(0, 0) == []


@given(start=st.integers(0, 10**6), count=st.integers(0, 300))
def test_sentences_hold_as_many_words_as_asked(start: int, count: int) -> None:
    text = _filler()
    words = " ".join(text.sentences(start, count)).split()
    assert words == [text.words[(start + i) % len(text.words)] for i in range(count)]


@lru_cache
def _filler() -> Haystack:
    return filler()


def test_filler_is_used_without_a_folder_and_always_the_same() -> None:
    assert load_haystack() == filler() == filler()
    assert load_haystack().name == "filler"
    assert not any(character.isdigit() for character in "".join(filler().words))


def test_a_folder_is_read_by_file_name_with_single_spaces(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("And\r\n\r\nmore.", encoding="utf-8-sig")
    (tmp_path / "a.txt").write_text("Some  text.\n", encoding="utf-8")
    (tmp_path / "c.md").write_text("not this")
    assert load_haystack(tmp_path).words == ("Some", "text.", "And", "more.")


def test_essays_beside_a_checkout_are_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "essays").mkdir()
    (tmp_path / "essays" / "one.txt").write_text("One essay.")
    monkeypatch.setenv("KVSKETCH_DATA", str(tmp_path))
    assert load_haystack() == Haystack("essays", ("One", "essay."))


def test_bad_folders_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere is not a folder"):
        load_haystack(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"holds no text; allowed: a folder of \.txt files"):
        load_haystack(tmp_path)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin\.txt is not UTF-8"):
        load_haystack(tmp_path)
    with pytest.raises(InputError, match=r"latin\.txt is not UTF-8"):
        Needle([500], [0.5], haystack=tmp_path).cases()


def test_noise_comes_five_sentences_a_line() -> None:
    assert noise_lines(0) == []
    assert noise_lines(7) == [" ".join(NOISE), "The grass is green. The sky is blue."]


@given(
    count=st.integers(0, 40),
    shares=st.lists(st.floats(0, 1, exclude_max=True), max_size=6),
)
def test_inserted_lines_stand_at_their_shares(count: int, shares: list[float]) -> None:
    lines = [f"line {i}" for i in range(count)]
    items = [f"item {i}" for i in range(len(shares))]
    found = inserted(lines, items, shares)
    assert [x for x in found if x.startswith("line")] == lines
    assert [x for x in found if x.startswith("item")] == items
    for item, share in zip(items, sorted(shares), strict=True):
        before = sum(x.startswith("line") for x in found[: found.index(item)])
        assert before <= share * (count + 1) < before + 1


# --- lengths -------------------------------------------------------------------------------------


@given(
    steps=st.lists(st.integers(0, 50), max_size=60),
    limit=st.integers(0, 1500),
    bounded=st.booleans(),
)
def test_largest_is_the_largest(steps: list[int], limit: int, bounded: bool) -> None:
    sizes = [3]
    for step in steps:
        sizes.append(sizes[-1] + step)

    def size(n: int) -> int:  # without an upper limit
        return sizes[n] if n < len(sizes) else sizes[-1] + 7 * (n - len(sizes) + 1)

    most = len(steps) if bounded else None
    right = [n for n in range(most + 1 if bounded else 600) if size(n) <= limit]
    assert largest(size, limit, most) == (right[-1] if right else None)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=50), st.integers(0, 120))
def test_largest_keeps_within_the_limit_where_sizes_fall(sizes: list[int], limit: int) -> None:
    found = largest(sizes.__getitem__, limit, len(sizes) - 1)
    if sizes[0] > limit:
        assert found is None
    else:
        assert found is not None
        assert sizes[found] <= limit


def test_largest_takes_few_calls() -> None:
    calls = []

    def size(n: int) -> int:
        calls.append(n)
        return 500 + int(4.7 * n) + n % 13

    found = largest(size, 131_072)
    assert found is not None
    assert size(found) <= 131_072 < size(found + 1)
    assert len(calls) < 20


def one_unit(case: Case, name: str) -> int:
    """The tokens of one more unit of a RULER haystack of needles."""
    needles = re.findall(r"One of the special magic .*", case.context)
    return max((Lengths(tokenizer(name)).text(needle + "\n") for needle in needles), default=0)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("length", [3000, 9000])
def test_ruler_prompts_are_as_long_as_asked_and_never_longer(name: str, length: int) -> None:
    for case in fitted(Ruler(SUBTASKS, [length], num_cases=1), name):
        total = encoded(name, case) + case.max_new_tokens
        # Only a haystack of needles has units that large.
        slack = one_unit(case, name) if case.group["subtask"] in NEEDLES else 0
        assert length - max(0.02 * length, slack) <= total <= length, (case.where, total)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("form", FORMS)
def test_needle_prompts_are_as_long_as_asked_and_never_longer(name: str, form: str) -> None:
    for case in fitted(Needle([1500, 4000], [0, 0.37, 1], form=form), name):
        length = case.group["length"]
        total = encoded(name, case) + case.max_new_tokens
        slack = Lengths(tokenizer(name)).text(case.details["needle"]) if form == "line" else 0
        assert length - max(0.02 * length, slack) <= total <= length, (case.where, total)


@pytest.mark.parametrize("task", [Needle([64], [0.5]), Ruler(["vt", "cwe", "fwe"], [64], 1)])
def test_lengths_too_short_are_refused_with_what_they_need(task: Needle | Ruler) -> None:
    for case in task.cases():  # cases are made without the tokenizer
        with pytest.raises(InputError, match=r"length=64 is too short: this takes at least \d+"):
            task.fitted(case, tokenizer("longeval-one-head"), FAR)


def test_lengths_beyond_the_model_or_the_word_list_are_refused() -> None:
    task = Needle([1000], [0.5])
    with pytest.raises(InputError, match=r"length=1000 needs up to 970 tokens.* room for 969"):
        task.fitted(task.cases()[0], tokenizer("tiny"), 969)
    words = Ruler(["cwe"], [10**6], 1)
    with pytest.raises(InputError, match=r"ruler/cwe .*is too long: the available filling text"):
        words.fitted(words.cases()[0], tokenizer("tiny"), FAR)


# --- needle in a haystack ------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(500, 3000),
    depth=st.floats(0, 1),
    seed=st.integers(0, 10**6),
    form=st.sampled_from(sorted(FORMS)),
    name=st.sampled_from(TOKENIZERS),
)
def test_the_needle_is_at_its_depth(
    length: int, depth: float, seed: int, form: str, name: str
) -> None:
    case = fitted(Needle([length], [depth], form=form, seed=seed), name)[0]
    assert case.context.startswith(FORMS[form].before)
    body = case.context[len(FORMS[form].before) :]
    assert body.count(case.details["needle"]) == 1
    before, after = body.split(case.details["needle"])
    count = Lengths(tokenizer(name)).text
    if depth == 1:
        assert not after
        return
    # In the text itself: the needle ends a sentence (or line), and the next one would be too deep.
    whole = before + ("" if form == "line" or not before or not after else " ") + after
    ends = [m.end() for m in re.finditer(r"\n" if form == "line" else r"[.!?](?= |$)", whole)]
    places = [0, *[end for end in ends if end < len(whole)]]
    assert len(before) in places
    share = depth * count(whole)
    assert count(before) <= share
    later = [place for place in places if place > len(before)]
    if later:
        assert count(whole[: later[0]]) + 1 > share  # 1: with or without a space


@pytest.mark.parametrize("form", FORMS)
def test_what_is_asked_is_in_the_context_once(form: str) -> None:
    for case in fitted(Needle([1200], [0, 0.5, 1], num_cases=3, form=form)):
        assert case.context.count(case.answers[0]) == 1
        key = case.details["key"]
        assert case.context.count(f" {key}") >= 1
        assert key in case.question
        if form != "sandwich":
            line = next(line for line in case.context.split("\n") if f" {key}" in line)
            assert case.answers[0] in line


def test_sandwich_is_what_balancekv_asks() -> None:
    case = Needle([600], [1.0]).cases()[0]
    assert case.prompt.startswith("This is a very long story book: <book> ")
    assert case.prompt.endswith(
        "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a "
        "sunny day.\n </book>.\n Based on the content of the book, Question: The best thing to do "
        "in San Francisco is: \nAnswer:"
    )
    assert case.max_new_tokens == 30


def test_line_is_a_longeval_prompt_with_the_line_at_its_depth() -> None:
    case = fitted(Needle([2000], [0.25], form="line"))[0]
    found = official.LinesCase(case.prompt + " ", int(case.answers[0]), 1, "")
    split = LongEval([found]).cases()[0]
    assert split.context == case.context
    assert split.question.strip() == case.question.strip()
    lines = case.context.split("\n\n", 1)[1].splitlines()
    assert all(re.fullmatch(r"line \S.*: REGISTER_CONTENT is <\d+>", line) for line in lines)
    assert len({line.split(":")[0] for line in lines}) == len(lines)
    place = next(i for i, line in enumerate(lines) if f"<{case.answers[0]}>" in line)
    assert place / len(lines) == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (SANDWICH, 1.0),
        (SANDWICH.upper(), 1.0),
        (f" {SANDWICH}\nQuestion: what", 1.0),
        # "a" is there twice: 11 distinct words; "day" is not "day."
        ("You should eat a sandwich on a sunny day", 5 / 11),
        ("Walk the bridge", 0.0),
        (f"\n{SANDWICH}", 0.0),
        ("", 0.0),
    ],
)
def test_sandwich_score_is_recall_of_words(text: str, score: float) -> None:
    task = Needle([600], [0.5])
    assert task.score(task.cases()[0], text) == pytest.approx(score)


@pytest.mark.parametrize("form", ["number", "line"])
def test_number_score_wants_the_number(form: str) -> None:
    task = Needle([600], [0.5], form=form)
    case = task.cases()[0]
    number = case.answers[0]
    assert task.score(case, f" The number is {number}.") == 1
    assert task.score(case, f"\n{number}\nThe 7 others") == 1
    assert task.score(case, f"{number}0") == 0
    assert task.score(case, "") == 0
    assert task.score(case, f"none\n{number}") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [0]}, "length=0 must be an int >= 1"),
        ({"depths": [0.5, 1.01]}, r"depth=1.01 must be a number in \[0, 1\]"),
        ({"depths": [-0.1]}, r"depth=-0.1 must be"),
        ({"depths": [math.nan]}, r"depth=nan must be"),
        ({"depths": ["half"]}, r"depth='half' must be"),
        ({"num_cases": 0}, "num_cases=0 must be an int >= 1"),
        ({"form": "sandwhich"}, "form='sandwhich' is unknown; did you mean 'sandwich'"),
    ],
)
def test_bad_needles_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Needle(**{"lengths": [500], "depths": [0.5], **arguments})


def test_real_essays_hold_no_needle_of_their_own() -> None:
    essays = DATA / "essays"
    if not essays.is_dir():
        pytest.skip(f"essays are not at {essays}")
    for form in ("sandwich", "number"):
        for case in fitted(Needle([6000], [0, 0.5, 1], form=form, haystack=essays)):
            assert case.details["haystack"] == "essays"
            assert case.context.count(case.answers[0]) == 1
            assert 0.98 * 6000 <= encoded("longeval-one-head", case) + case.max_new_tokens <= 6000


# --- the same cases everywhere -------------------------------------------------------------------


def task_of(kind: str, seed: int) -> Needle | Ruler:
    if kind in FORMS:
        return Needle([700, 1500], [0, 0.5, 1], num_cases=2, form=kind, seed=seed)
    return Ruler([kind], [2500, 9000], num_cases=2, seed=seed)


@pytest.mark.parametrize("kind", [*FORMS, *SUBTASKS])
def test_cases_depend_on_the_seed_and_nothing_else(kind: str) -> None:
    cases = task_of(kind, 1).cases()
    assert cases == task_of(kind, 1).cases()
    assert len({case.id for case in cases}) == len(cases)
    assert {case.id for case in cases}.isdisjoint(case.id for case in task_of(kind, 2).cases())
    # One more case or length does not change the others.
    one = task_of(kind, 1)
    one.lengths = one.lengths[:1]
    assert one.cases() == cases[: len(cases) // 2]


@pytest.mark.parametrize("kind", [*FORMS, *SUBTASKS])
def test_fitting_changes_the_context_only_and_the_same_way(kind: str) -> None:
    task = task_of(kind, 1)
    case = task.cases()[-1]
    found = task.fitted(case, tokenizer("longeval-one-head"), FAR)
    assert found == task_of(kind, 1).fitted(case, tokenizer("longeval-one-head"), FAR)
    assert found.context != case.context
    for same in ("task", "question", "answers", "max_new_tokens", "group", "details", "where"):
        assert getattr(found, same) == getattr(case, same)
    assert case.task == ("needle/" if kind in FORMS else "ruler/") + kind


# --- RULER ---------------------------------------------------------------------------------------


def test_ruler_templates_are_the_official_ones() -> None:
    """Prompts are those of scripts/data/synthetic/constants.py with values filled in."""
    single, many = (Ruler([kind], [700], 1).cases()[0] for kind in list(NEEDLES)[0::6])
    key = re.findall(r"number for (\S+) mentioned", single.question)[0]
    assert single.context.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. I "
        "will quiz you about the number afterwards.\nThe grass is green. The sky is blue. The sun "
        "is yellow. Here we go. There and back again.\n"
    )
    assert f"\nOne of the special magic numbers for {key} is: {single.answers[0]}.\n" in (
        single.context
    )
    assert single.question == (
        f"\nWhat is the special magic number for {key} mentioned in the provided text? The special "
        f"magic number for {key} mentioned in the provided text is"
    )
    key = re.findall(r"numbers for (\S+) mentioned", many.question)[0]
    assert many.context.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize "
        "it. I will quiz you about the numbers afterwards.\n"
    )
    assert many.question == (
        f"\nWhat are all the special magic numbers for {key} mentioned in the provided text? The "
        f"special magic numbers for {key} mentioned in the provided text are"
    )
    tokens = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50}
    for case in Ruler(SUBTASKS, [5000], 1).cases():
        assert case.max_new_tokens == tokens[case.group["subtask"].split("_")[0]]


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(list(NEEDLES)),
    seed=st.integers(0, 10**6),
    length=st.integers(1200, 3000),
)
def test_needles_are_there_as_often_as_they_should(kind: str, seed: int, length: int) -> None:
    row = NEEDLES[kind]
    case = fitted(Ruler([kind], [length], 1, seed=seed))[0]
    pairs = re.findall(
        r"One of the special magic (?:numbers|uuids) for (.+?) is: ([0-9a-f-]+)\.", case.context
    )
    asked = re.split(r", and |, ", case.question.split(" for ")[1].split(" mentioned")[0])
    assert len(asked) == row.num_queries
    assert case.answers == tuple(
        value for key in asked for value in _in_order(pairs, key, case.answers)
    )
    assert len(case.answers) == row.num_queries * row.num_values
    assert all(case.context.count(answer) == 1 for answer in case.answers)
    hidden = row.num_keys * row.num_values
    assert len(pairs) == hidden if row.haystack != "needle" else len(pairs) > hidden
    assert len({key for key, _ in pairs}) == len(pairs) // row.num_values
    assert len({value for _, value in pairs}) == len(pairs)
    digits = "uuids" if row.values == "uuids" else "numbers"
    form = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    assert all(re.fullmatch(form if digits == "uuids" else r"\d{7}", a) for a in case.answers)


def _in_order(pairs: list[tuple[str, str]], key: str, answers: tuple[str, ...]) -> list[str]:
    return sorted((v for k, v in pairs if k == key), key=answers.index)


def test_needles_stand_between_sentences() -> None:
    for case in fitted(Ruler(["niah_multivalue"], [3000], 5)):
        body = case.context.split("\n", 1)[1]
        for before in re.split(r"One of the special magic [^.]*\. ?", body)[:-1]:
            assert not before or before.rstrip()[-1] in ".!?"


def test_every_needle_is_asked_for_equally_often() -> None:
    cases = Ruler(["niah_multikey_1"], [800], 400).cases()
    places = Counter()
    for case in cases:
        found = re.findall(r"is: (\d{7})\.", case.context)
        places[found.index(case.answers[0])] += 1
    assert chisquare([places[i] for i in range(4)]).pvalue > 1e-4


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1200, 5000))
def test_chains_lead_to_their_value(seed: int, length: int) -> None:
    case = fitted(Ruler(["vt"], [length], 1, seed=seed))[0]
    asked, many = re.findall(r"assigned the value (\d{5}) in|(\d) variables", case.question)
    assert int(many[1]) == len(case.answers) == 5
    # Solved by executing the assignments in the order of the text.
    values: dict[str, str] = {}
    for name, value in re.findall(r"^VAR ([A-Z]+) = (.+)$", case.context, re.M):
        values[name] = values[value[4:]] if value.startswith("VAR ") else value
    assert [name for name, value in values.items() if value == asked[0]] == list(case.answers)
    assert len(values) == 10  # five are of the example
    assert len(set(values.values())) == 2
    example = case.context.split("they are:")[1].split("\n")[0].split()
    assert [name for name in values if name not in case.answers] == example
    assert case.prompt.count("Memorize and track the chain(s)") == 2


@pytest.mark.parametrize(("length", "repeats"), [(4095, (6, 1)), (4096, (30, 3))])
def test_common_words_are_the_common_ones(length: int, repeats: tuple[int, int]) -> None:
    for case in fitted(Ruler(["cwe"], [length], 2), "tiny"):
        words, example = _word_counts(case.context)
        assert set(case.answers) == {word for word, _ in words.most_common(10)}
        assert len(case.answers) == 10
        assert all(words[word] == repeats[0] for word in case.answers)
        others = [count for word, count in words.items() if word not in case.answers]
        assert set(others) == {repeats[1]}
        solved = case.context.split("in the list are: ")[1].split("\n")[0]
        assert set(re.findall(r"\d+\. (.+?)(?= \d+\. |$)", solved)) == {
            word for word, _ in example.most_common(10)
        }


def _word_counts(context: str) -> tuple[Counter[str], Counter[str]]:
    lists = [part.split("\nQuestion")[0] for part in context.split("most often.\n")[1:]]
    example, words = (Counter(re.findall(r"\d+\. (.+?)(?= \d+\. |$)", part)) for part in lists)
    return words, example


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(900, 5000))
def test_frequent_words_are_the_frequent_ones(seed: int, length: int) -> None:
    case = fitted(Ruler(["fwe"], [length], 1, seed=seed))[0]
    counts = Counter(case.context.split("coded words. ")[1].split())
    ranked = counts.most_common()
    assert ranked[0][0] == "..."
    assert {word for word, _ in ranked[1:4]} == set(case.answers)
    assert len(ranked) < 5 or ranked[3][1] > ranked[4][1]
    total = counts["..."] * math.pi**2 / 6
    for rank, word in enumerate(case.answers, start=2):
        assert abs(counts[word] - total / rank**2 / (math.pi**2 / 6)) <= 1


@pytest.mark.parametrize("kind", SUBTASKS)
def test_ruler_scores_the_share_of_answers(kind: str) -> None:
    task = Ruler([kind], [5000], 1)
    case = task.cases()[0]
    assert task.score(case, ", ".join(case.answers)) == 1
    assert task.score(case, "\t".join(case.answers).upper()) == 1
    assert task.score(case, case.answers[0]) == pytest.approx(1 / len(case.answers))
    assert task.score(case, "something else") == 0
    assert task.score(case, "") == 0


def test_bad_ruler_arguments_are_refused() -> None:
    with pytest.raises(InputError, match=r"subtask='niah_singel_1'.*did you mean 'niah_single_1'"):
        Ruler(["niah_singel_1"], [4096])
    with pytest.raises(InputError, match="length=-1 must be an int >= 1"):
        Ruler(["vt"], [-1])
    with pytest.raises(InputError, match="num_cases=0 must be"):
        Ruler(["vt"], [4096], num_cases=0)


# --- LongEval ------------------------------------------------------------------------------------


def test_longeval_is_split_at_the_official_question() -> None:
    case = tiny_case(12, which=5)
    task = LongEval([case])
    found = task.cases()[0]
    assert found.prompt == case.prompt
    assert found.question.startswith(official.QUESTION_MARK)
    assert found.context.endswith(">\n")
    assert found.answers == (str(case.expected),)
    assert found.group == {"lines": 12}
    assert task.fitted(found, tokenizer("tiny"), FAR) is found


@given(st.text("0123456789 <>.ab\n"), st.integers(0, 50_000))
def test_longeval_scores_by_its_own_rule(text: str, expected: int) -> None:
    task = LongEval([tiny_case(4, expected=expected)])
    right = official.read_answer(text) == expected
    assert task.score(task.cases()[0], text) == right
    assert task.score(task.cases()[0], f"{text} <{expected}>.") == 1


def test_longeval_without_the_question_is_refused() -> None:
    with pytest.raises(InputError, match=r"here:3: the prompt has no 'Now the record is over\.'"):
        LongEval([official.LinesCase("Some lines", 1, 1, "here:3")]).cases()


def test_official_longeval_files_make_tasks() -> None:
    file = DATA / "longeval" / "200_lines.jsonl"
    if not file.is_file():
        pytest.skip(f"official LongEval cases are not at {file}")
    task = LongEval(official.load_case_files([file], 5))
    for case in task.cases():
        assert f"<{case.answers[0]}>\n" in case.context
        assert case.group == {"lines": 200}


def test_a_limit_is_of_each_length_and_subtask() -> None:
    """--limit shortens every task that has cases of several lengths."""
    options = Options(lengths=[300, 500], depths=[0.0, 0.5, 1.0], form="line", limit=2)
    (needle,) = make_tasks(["needle"], options)
    assert [(c.group["length"], c.group["depth"]) for c in needle.cases()] == [
        *((300, 0.0), (300, 0.5), (500, 0.0), (500, 0.5)),
    ]
    (ruler,) = make_tasks(["ruler"], replace(options, subtasks=["vt", "fwe"]))
    cases = ruler.cases()
    assert [(c.group["subtask"], c.group["length"], c.details["index"]) for c in cases] == [
        (subtask, length, index)
        for subtask in ("vt", "fwe")
        for length in (300, 500)
        for index in range(2)
    ]
    (few,) = make_tasks(["ruler"], replace(options, subtasks=["vt"], num_cases=1))
    assert len(few.cases()) == 2


def test_every_option_is_used_by_a_task() -> None:
    assert set(USED) == set(TASKS)
    assert set().union(*USED.values()) == {field.name for field in fields(Options)}
    assert make_tasks(["longeval", "ruler"], Options(subtasks=["vt"]), ["subtasks", "model"])
    with pytest.raises(InputError, match="--subtasks has no effect on longeval"):
        make_tasks(["longeval"], Options(subtasks=["vt"]), ["subtasks"])
