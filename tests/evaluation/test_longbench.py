"""LongBench: scores, prompts and truncation equal the official code's; the loader and its
errors."""

# ruff: noqa: RUF001 (Chinese punctuation)

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from data import record_longbench_metrics as recorder
from kvsketch.errors import InputError, UnsupportedError
from kvsketch.evaluation.runner.encoding import Encoder
from kvsketch.evaluation.runner.loading import load_tokenizer, resolve_model
from kvsketch.evaluation.runner.settings import Settings
from kvsketch.evaluation.tasks import longbench, longbench_metrics
from kvsketch.evaluation.tasks.base import Case, mean
from kvsketch.evaluation.tasks.longbench import LongBench
from kvsketch.evaluation.tasks.longbench_metrics import METRICS
from kvsketch.evaluation.tasks.longbench_prompts import DATASETS

for package in ("rouge", "rapidfuzz", "jieba"):
    pytest.importorskip(package, reason="LongBench's metrics need the extra `evaluation`")

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("KVSKETCH_DATA", ROOT.parent / "shared" / "data")) / "longbench"
RECORDED = json.loads(recorder.RECORDED.read_text(encoding="utf-8"))
CHECKOUT = os.environ.get("KVSKETCH_LONGBENCH", "")  # LongBench/ of THUDM/LongBench

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"LongBench's records are not at {DATA}")
needs_checkout = pytest.mark.skipif(
    not CHECKOUT, reason="KVSKETCH_LONGBENCH does not name the official code's folder LongBench"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_model("longeval-one-head"))


def row(**changes: Any) -> dict[str, Any]:
    base = {
        "input": "Which {colour}?",
        "context": "Sea {and} sky.\u2028Blue.",
        "answers": ["Blue", "the sea"],
        "length": 5,
        "all_classes": None,
    }
    return {**base, **changes}


def folder(path: Path, file: str, *rows: Any) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows]
    (path / file).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return path


def one(path: Path, name: str, extended: bool = False, **changes: Any) -> Case:
    file = f"{name}_e.jsonl" if extended else f"{name}.jsonl"
    (case,) = LongBench([name], folder(path, file, row(**changes)), extended).cases()
    return case


# --- equal to the official code ------------------------------------------------------------------


def largest_difference(metric: str, pairs: list[recorder.Pair], recorded: dict[str, Any]) -> float:
    assert recorder.digest(pairs) == recorded["pairs"], "not the recorded pairs: record them again"
    assert len(pairs) == len(recorded["scores"]) >= 200
    function = METRICS[metric]
    return max(
        abs(function(*pair) - score) for pair, score in zip(pairs, recorded["scores"], strict=True)
    )


@pytest.mark.parametrize("metric", METRICS)
def test_scores_of_synthetic_pairs_are_the_official_ones(metric: str) -> None:
    recorded = RECORDED["synthetic"][metric]
    assert 0 < sum(score > 0 for score in recorded["scores"]) < len(recorded["scores"])
    assert largest_difference(metric, recorder.synthetic(metric), recorded) <= 1e-9


@needs_data
@pytest.mark.parametrize("metric", recorder.REAL)
def test_scores_of_corrupted_real_answers_are_the_official_ones(metric: str) -> None:
    pairs = recorder.real(metric, DATA)
    assert largest_difference(metric, pairs, RECORDED["real"][metric]) <= 1e-9


def test_code_sim_is_the_one_with_levenshtein_and_never_below_difflibs() -> None:
    fast, slow = (RECORDED["synthetic"][name] for name in ("code_sim", "code_sim_difflib"))
    assert fast["pairs"] == slow["pairs"]
    pairs = list(zip(fast["scores"], slow["scores"], strict=True))
    assert all(a >= b for a, b in pairs)
    assert any(a > b for a, b in pairs)  # the official result depends on the installed packages


@given(st.text("abc(", max_size=12), st.text("abc(", max_size=12))
def test_code_sim_is_twice_the_common_subsequence_over_both_lengths(a: str, b: str) -> None:
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = (
                table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
            )
    exact = 2 * table[-1][-1] / (len(a) + len(b)) if a or b else 1.0
    assert METRICS["code_sim"](a, b, ()) == pytest.approx(exact, abs=0.005 + 1e-9)


def test_every_data_set_is_the_official_one() -> None:
    ours = {
        name: [
            recorder.digest(d.prompt),
            d.max_new_tokens,
            d.metric,
            d.extended,
            d.chat,
            d.few_shot,
        ]
        for name, d in DATASETS.items()
    }
    assert ours == RECORDED["datasets"]
    for dataset in DATASETS.values():
        assert dataset.prompt.count("{context}") == 1
        assert "{input}" not in dataset.prompt.split("{context}")[0]


def official(scored: Iterable[tuple[Case, float]]) -> dict[str, float | dict[str, float]]:
    """Scores as the official ``eval.py`` writes them: 100 times the mean to two digits by data
    set, for LongBench-E by data set and length (a length without cases is left out)."""
    groups: dict[str, dict[str, list[float]]] = {}
    for case, score in scored:
        lengths = groups.setdefault(case.group["dataset"], {})
        lengths.setdefault(case.group.get("length", ""), []).append(score)
    table: dict[str, float | dict[str, float]] = {}
    for name, lengths in groups.items():
        means = {length: round(100 * mean(scores), 2) for length, scores in lengths.items()}
        table[name] = (
            means[""] if "" in means else {b: means[b] for b in longbench.BUCKETS if b in means}
        )
    return table


@pytest.mark.parametrize("name", RECORDED["eval"])
def test_tables_are_those_of_the_official_eval(name: str, tmp_path: Path) -> None:
    extended = name.endswith("_e")
    base = name.removesuffix("_e")
    made = list(recorder.predictions(base, DATASETS[base].metric))
    rows = [
        row(answers=answers, length=length, all_classes=classes)
        for _, answers, length, classes in made
    ]
    task = LongBench([base], folder(tmp_path, f"{name}.jsonl", *rows), extended)
    cases = task.cases()
    table = official(
        (case, task.score(case, text)) for case, (text, *_) in zip(cases, made, strict=True)
    )
    assert table == {base: pytest.approx(RECORDED["eval"][name], abs=1e-9)}


def our_prompts(name: str, tokenizer: Any, max_length: int) -> list[str]:
    task = LongBench([name], DATA, limit=recorder.PROMPTS)
    prompts = []
    for case in task.cases():
        fitted = task.fitted(case, tokenizer, max_length)
        # A byte may be a token: a Chinese question may be longer than the half that is kept.
        short = len(tokenizer(case.question)["input_ids"]) <= max_length // 2
        assert fitted.question == (case.question if short else "")
        prompts.append(fitted.prompt)
    return prompts


@needs_data
@pytest.mark.parametrize("max_length", recorder.MAX_LENGTHS)
@pytest.mark.parametrize("name", recorder.NAMES)
def test_prompts_and_truncation_are_the_official_ones(
    name: str, max_length: int, tokenizer: Any
) -> None:
    prompts = our_prompts(name, tokenizer, max_length)
    assert len(prompts) == recorder.PROMPTS
    assert recorder.digest(prompts) == RECORDED["prompts"][name][str(max_length)]


@needs_data
@needs_checkout
@pytest.mark.parametrize("max_length", [1500, 1501])
@pytest.mark.parametrize("name", recorder.NAMES)
def test_prompts_and_truncation_are_those_the_official_code_makes_now(
    name: str, max_length: int, tokenizer: Any
) -> None:
    theirs = recorder.official_prompts(Path(CHECKOUT), name, DATA, tokenizer, max_length)
    assert our_prompts(name, tokenizer, max_length) == theirs


@needs_checkout
def test_recorded_facts_are_those_of_the_checkout() -> None:
    assert recorder.facts(Path(CHECKOUT)) == RECORDED["datasets"]


# --- metrics -------------------------------------------------------------------------------------

words = st.text("ab一二的.。,!#3 \n", max_size=30)


@pytest.mark.parametrize("metric", ["qa_f1", "qa_f1_zh", "rouge", "rouge_zh", "count", "code_sim"])
@given(prediction=words, answer=words)
def test_scores_are_shares(metric: str, prediction: str, answer: str) -> None:
    assert 0 <= METRICS[metric](prediction, answer, ()) <= 1


@given(st.lists(st.sampled_from(["A", "AB", "ABC", "B"])), words, st.sampled_from(["A", "AB"]))
def test_classification_is_a_share(classes: list[str], prediction: str, answer: str) -> None:
    assert 0 <= METRICS["classification"](prediction + "AB", answer, classes) <= 1


@pytest.mark.parametrize(
    ("metric", "answer"),
    [
        ("qa_f1", "Tarn Bay, in 1874."),
        ("qa_f1_zh", "塔恩湾，1874年。"),
        ("rouge", "A lamp was lit. Boats came in."),
        ("rouge_zh", "灯已经点亮，船只陆续进港。"),
        ("classification", "体育赛事"),
        ("retrieval", "Paragraph 12"),
        ("retrieval_zh", "段落12"),
        ("count", "12"),
        ("code_sim", "return lamp"),
    ],
)
def test_the_answer_itself_is_right_and_nothing_is_wrong(metric: str, answer: str) -> None:
    classes = ("体育", "体育赛事", "财经")
    # ROUGE adds 1e-8 to a denominator.
    assert METRICS[metric](answer, answer, classes) == pytest.approx(1, abs=1e-8)
    assert METRICS[metric]("", answer, classes) == 0


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "expected"),
    [
        ("qa_f1", "The lamp!", "a lamp", 1),
        ("qa_f1", "lamp lamp boat", "lamp boat", 0.8),
        ("count", "3, not 4", "3", 0.5),
        ("count", "03", "3", 0),
        ("retrieval", "Paragraph 12 (of 30)", "Paragraph 12", 0.5),
        ("code_sim", "\n# lamp\n`x`\n// y\nreturn 1\nreturn 2", "return 1", 1),
        ("code_sim", "# only a comment", "return 1", 0),
        ("code_sim", "", "", 1),
        ("rouge", "...", "...", 0),  # no sentence
        # "AB" and "B" are parts of "ABC", but deleting "AB" hides "B".
        ("classification", "ABC", "ABC", 0.5),
    ],
)
def test_rules(metric: str, prediction: str, answer: str, expected: float) -> None:
    assert METRICS[metric](prediction, answer, ("AB", "B", "ABC")) == pytest.approx(expected)


def test_rouge_of_an_endless_sentence_is_0_as_officially() -> None:
    prediction, answer = (" ".join(["z", *(f"{c}{i}" for i in range(700))]) for c in "ab")
    assert METRICS["rouge"](prediction, answer, ()) == 0


def test_retrieval_answers_must_name_a_paragraph() -> None:
    with pytest.raises(InputError, match=r"answer='nine' must match 'Paragraph"):
        METRICS["retrieval"]("9", "nine", ())


def test_a_missing_package_is_named_before_a_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(longbench_metrics.importlib, "import_module", missing)
    LongBench(["qasper"], None)  # it needs no package
    with pytest.raises(UnsupportedError, match=r"package rapidfuzz: pip install 'kvsketch\[eval"):
        LongBench(["lcc"], None)


# --- cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DATASETS)
def test_a_case_is_the_formatted_prompt_cut_after_its_context(name: str, tmp_path: Path) -> None:
    dataset = DATASETS[name]
    answers = {"retrieval": ["Paragraph 3"], "retrieval_zh": ["段落3"]}.get(dataset.metric, ["A"])
    case = one(tmp_path, name, answers=answers, all_classes=["A", "B"])
    assert case.prompt == dataset.prompt.format(**row())
    assert case.context.endswith(row()["context"])
    assert case.question
    assert case.task == f"longbench/{name}"
    assert case.answers == tuple(answers)
    assert case.max_new_tokens == dataset.max_new_tokens
    assert case.group == {"dataset": name}
    classified = name in ("trec", "lsht")
    assert case.details["all_classes"] == (["A", "B"] if classified else None)
    assert case.details["stop"] == (["\n"] if name == "samsum" else [])
    assert case.where.endswith(f"{name}.jsonl:1")


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, "0-4k"), (3999, "0-4k"), (4000, "4-8k"), (7999, "4-8k"), (8000, "8k+"), (90000, "8k+")],
)
def test_longbench_e_groups_by_length(length: int, expected: str, tmp_path: Path) -> None:
    case = one(tmp_path, "qasper", extended=True, length=length)
    assert case.task == "longbench_e/qasper"
    assert case.group == {"dataset": "qasper", "length": expected}


def test_a_score_is_the_best_over_the_answers(tmp_path: Path) -> None:
    case = one(tmp_path, "qasper")
    task = LongBench(["qasper"], tmp_path)
    assert task.score(case, "blue.") == 1
    assert task.score(case, "sea\n\nQuestion: blue?") == pytest.approx(0.5)
    assert task.score(case, "") == 0


def test_only_the_first_line_counts_after_examples(tmp_path: Path) -> None:
    case = one(tmp_path, "triviaqa")
    assert LongBench(["triviaqa"], tmp_path).score(case, "\n\nblue\nPassage: more") == 1


@needs_data
def test_real_records_load() -> None:
    cases = LongBench(recorder.NAMES, DATA).cases()
    assert [sum(c.group["dataset"] == n for c in cases) for n in recorder.NAMES] == [200] * 3
    assert all(len(case.answers) == 1 for case in cases)
    few = LongBench(recorder.NAMES, DATA, limit=2).cases()
    assert few == [cases[i + j] for i in (0, 200, 400) for j in (0, 1)]


# --- truncation ----------------------------------------------------------------------------------


@given(text=st.text("ab 一\n", max_size=200), limit=st.integers(2, 300))
def test_truncation_keeps_both_ends(text: str, limit: int, tokenizer: Any) -> None:
    task = LongBench(["qasper"], None)
    case = Case("longbench/qasper", "Story: " + text, "\n\nQ: which?", ("a",), 8)
    fitted = task.fitted(case, tokenizer, limit)
    ids = tokenizer(case.prompt)["input_ids"]
    if len(ids) <= limit:
        assert fitted == case
        return
    half = limit // 2
    ends = [tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:])]
    assert fitted.prompt == "".join(ends)
    kept = ends[1].endswith(case.question)  # whole, after the cut
    assert fitted.question == (case.question if kept else "")
    assert (fitted.answers, fitted.task) == (case.answers, case.task)


def test_a_cut_question_is_context(tokenizer: Any) -> None:
    case = Case("longbench/qasper", "Story. " * 50, "Which? " * 50, ("a",), 8)
    fitted = LongBench(["qasper"], None).fitted(case, tokenizer, 20)
    assert fitted.question == ""
    assert fitted.context


def test_a_question_its_tokenizer_rewrites_stays_apart(tokenizer: Any) -> None:
    case = Case("longbench/qasper", "Story. " * 50, "What is </s> for?", ("a",), 8)
    fitted = LongBench(["qasper"], None).fitted(case, tokenizer, 60)
    assert fitted.question == "What is  for?"
    assert fitted.context.endswith("Story. ")


def test_nothing_can_be_cut_to_one_token(tokenizer: Any) -> None:
    case = Case("longbench/qasper", "Story.", "?", ("a",), 8)
    with pytest.raises(InputError, match="limit=1 must be an int >= 2"):
        LongBench(["qasper"], None).fitted(case, tokenizer, 1)


def test_a_prompt_cut_to_the_models_limit_fits_it(tokenizer: Any) -> None:
    """A prompt that is cut to the model's limit may have more tokens when it is encoded again,
    where the cut is within a character or merges pieces; it is then cut further. With an explicit
    limit it is cut as the official code does, and refused if it is too long."""
    config = LlamaConfig(max_position_embeddings=120)
    text = "".join(chr(0x4E00 + 7 * i) for i in range(400))  # every character is several tokens
    details = {"all_classes": None, "chat": True, "stop": []}
    case = Case("longbench/qasper", text, "\n\nQ: which?", ("a",), 8, details=details, where="x")
    task, lengths = LongBench(["qasper"], None), set()
    for new in range(8, 24):
        encoder = Encoder(tokenizer, config, Settings())
        prompt = task.fitted(case, tokenizer, 120 - new).prompt
        lengths.add(len(tokenizer(prompt)["input_ids"]) > 120 - new)
        whole = task.encoded(case, encoder, 120 - new, new)
        assert 100 - new < len(whole.ids) <= 120 - new
        if len(tokenizer(prompt)["input_ids"]) > 120 - new:
            explicit = Encoder(tokenizer, config, Settings(max_prompt_tokens=120 - new))
            with pytest.raises(InputError, match="beyond the model's 120 positions"):
                task.encoded(case, explicit, 120 - new, new)
    assert True in lengths


# --- wrong data ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qasper", {"context": 3}, r"qasper\.jsonl:2: context=3 must be a string"),
        ("qasper", {"input": None}, r"jsonl:2: input=None must be a string"),
        ("qasper", {"answers": []}, r"jsonl:2: answers=\[\] must be a list of strings, at least"),
        ("qasper", {"answers": "blue"}, r"jsonl:2: answers='blue' must be a list of strings"),
        ("qasper", {"answers": ["x" * 99, 3]}, r"answers=\['x+\.\.\. must be a list of strings"),
        ("trec", {}, r"jsonl:2: all_classes=None must be a list of strings"),
        ("passage_retrieval_en", {}, r"jsonl:2: answers: 'Blue' must match 'Paragraph"),
    ],
)
def test_wrong_fields_are_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    good = row(answers=["Paragraph 3"], all_classes=["A"])
    folder(tmp_path, f"{name}.jsonl", good, row(**changes))
    with pytest.raises(InputError, match=message):
        LongBench([name], tmp_path).cases()


@pytest.mark.parametrize("field", ["context", "input", "answers", "length"])
def test_missing_fields_are_named(field: str, tmp_path: Path) -> None:
    folder(tmp_path, "qasper_e.jsonl", {k: v for k, v in row().items() if k != field})
    with pytest.raises(InputError, match=rf"qasper_e\.jsonl:1: {field} is missing"):
        LongBench(["qasper"], tmp_path, extended=True).cases()


@pytest.mark.parametrize(
    ("line", "message"),
    [("{oops", r"jsonl:1 is not JSON"), ("[1]", r"jsonl:1 must be a JSON object, not list")],
)
def test_lines_that_are_no_records(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        LongBench(["qasper"], folder(tmp_path, "qasper.jsonl", line)).cases()


def test_other_damage(tmp_path: Path) -> None:
    task = LongBench(["qasper"], tmp_path)
    with pytest.raises(InputError, match=r"cannot read qasper\.jsonl: No such file"):
        task.cases()
    folder(tmp_path, "qasper.jsonl", "", " ")
    with pytest.raises(InputError, match=r"qasper\.jsonl is empty"):
        task.cases()
    (tmp_path / "qasper.jsonl").write_bytes(b'{"input": "\xff"}\n')
    with pytest.raises(InputError, match=r"qasper\.jsonl:1 is not JSON: 'utf-8'"):
        task.cases()
    folder(tmp_path, "qasper_e.jsonl", row(length=True))
    with pytest.raises(InputError, match="length=True must be an int >= 0"):
        LongBench(["qasper"], tmp_path, extended=True).cases()


@pytest.mark.parametrize(
    ("datasets", "options", "message"),
    [
        (["multinews"], {}, "'multinews' is unknown; did you mean 'multi_news'"),
        (
            ["narrativeqa"],
            {"extended": True},
            "'narrativeqa' is not in LongBench-E. Allowed: 2wiki",
        ),
        ([], {}, r"datasets=\[\] must be names"),
        ("qasper", {}, "datasets='qasper' must be names"),
        (["qasper", "qasper"], {}, "each once"),
        (["qasper"], {"limit": 0}, "limit=0 must be an int >= 1"),
    ],
)
def test_wrong_arguments(datasets: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LongBench(datasets, None, **options)


# --- the hub -------------------------------------------------------------------------------------


def hub(monkeypatch: pytest.MonkeyPatch, found: Path | Exception) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []

    def download(repo_id: str, filename: str, *, repo_type: str) -> str:
        asked.append((repo_id, filename, repo_type))
        if isinstance(found, Exception):
            raise found
        return str(found)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return asked


def test_without_a_folder_the_published_archive_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for name in ("qasper", "qasper_e"):
            archive.writestr(f"data/{name}.jsonl", json.dumps(row(input=name)) + "\n")
    asked = hub(monkeypatch, tmp_path / "data.zip")
    for extended, expected in ((False, "qasper"), (True, "qasper_e")):
        (case,) = LongBench(["qasper"], None, extended).cases()
        assert f"Question: {expected}\n" in case.question
        assert case.where == f"zai-org/LongBench/data.zip/data/{expected}.jsonl:1"
    assert asked == [("zai-org/LongBench", "data.zip", "dataset")] * 2
    with pytest.raises(InputError, match=r"damaged: .*data/multi_news\.jsonl"):
        LongBench(["multi_news"], None).cases()


def test_an_archive_that_cannot_be_had_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(monkeypatch, OSError("offline\nand more"))
    with pytest.raises(
        InputError, match="could not be fetched from the Hugging Face Hub: offline;"
    ):
        LongBench(["qasper"], None).cases()
    (tmp_path / "data.zip").write_text("no archive")
    hub(monkeypatch, tmp_path / "data.zip")
    with pytest.raises(InputError, match="zai-org/LongBench is damaged: File is not a zip file"):
        LongBench(["qasper"], None).cases()


def test_a_folder_that_is_not_there_is_named_before_a_package_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(metric: str) -> None:
        raise UnsupportedError(f"{metric} needs jieba")

    monkeypatch.setattr(longbench, "require", missing)
    with pytest.raises(InputError, match=r"data='.*none' is not a folder of data sets"):
        LongBench(list(DATASETS), tmp_path / "none")
    with pytest.raises(UnsupportedError):
        LongBench(list(DATASETS), tmp_path)
