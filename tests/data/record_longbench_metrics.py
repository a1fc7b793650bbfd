"""Writes ``longbench_metrics.json``: the official LongBench code's scores of pairs made here.

The code is run from a checkout of THUDM/LongBench and is not in this repository, nor is its data.
Only numbers and hashes are written. The pairs are drawn again, from the same seeds, by
``tests/evaluation/test_longbench.py``; a hash says that they are the same.

    python record_longbench_metrics.py metrics LongBench/LongBench ../shared/data/longbench
    python record_longbench_metrics.py prompts LongBench/LongBench ../shared/data/longbench

The first needs rouge, jieba, fuzzywuzzy, python-Levenshtein and numpy, the second kvsketch.

Recorded with commit 2e00731, rouge 1.0.1, jieba 0.42.1, fuzzywuzzy 0.18.0 and python-Levenshtein
0.27.5, ``code_sim_difflib`` as without the latter.
"""

# ruff: noqa: RUF001 (Chinese punctuation)

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "longbench_metrics.json"
PAIRS = 240  # per metric
PROMPTS = 40  # records per data set
MAX_LENGTHS = (1500, 9001, 10**6)  # tokens
REAL = {
    "qa_f1": "multi_news",
    "rouge": "multi_news",
    "qa_f1_zh": "multifieldqa_zh",
    "rouge_zh": "multifieldqa_zh",
    "retrieval_zh": "passage_retrieval_zh",
}
NAMES = ("multi_news", "multifieldqa_zh", "passage_retrieval_zh")

ENGLISH = (
    "The a An old harbour keeper said that lamp was lit, and boats came in. No-one saw it! Its "
    "cost: 1,200 pounds in 1874; the town's council (all nine) paid half. Why? It isn't known. "
    "A ferry ran daily... Mr. Hale wrote “slow but dry” in the log. Rain fell over Tarn Bay."
)
CHINESE = (
    "老 灯塔 管理员 说 ， 灯 已经 点亮 ， 船只 陆续 进港 。 没有人 看见 ！ 费用 ： 1200 英镑 ， "
    "1874 年 ； 镇 议会 （ 共 九 人 ） 承担 一半 。 为什么 ？ 不 知道 。 Hale 先生 在 日志 里 写道 "
    "“ 慢 而 干燥 ” 。 渡轮 每天 往返 塔恩湾 . 大雨 A B"
)
CLASSES = (
    ("Date", "Distance", "Description", "Description of a person", "Person", "Other", "Othe", "O"),
    ("体育", "体育赛事", "赛事", "财经", "财经新闻", "新闻", "农业、农村", "农业"),
)
CODE = (
    "for (int i = 0; i < size; i++) {",
    "return self.lamp(height, turns=3)  # slow",
    "    keeper.log.append((day, 'dry'))",
    'public static final String TOWN = "Tarn";',
    "// the ferry runs daily",
    "if boats is None: boats = []",
    "```python",
    "var total = prices.Where(p => p > 0).Sum();",
    "",
)

Pair = tuple[str, str, tuple[str, ...]]


def corrupted(words: Sequence[str], joint: str, rng: random.Random) -> str:
    """Words, some of which are lost, repeated, moved or in upper case; sometimes almost nothing."""
    kind = rng.randrange(15)
    if kind == 0:
        return rng.choice(("", " ", "\n", ".", "...", "。", "，", "the", "0"))
    keep = rng.choice((1.0, 0.95, 0.9, 0.7, 0.4))
    out = [word for word in words if rng.random() < keep]
    for _ in range(rng.randrange(4) if out else 0):
        at, to = rng.randrange(len(out)), rng.randrange(len(out))
        change = rng.randrange(5)
        if change == 0:
            out.insert(to, out[at])
        elif change == 1:
            out[at], out[to] = out[to], out[at]
        elif change == 2:
            out[at] = out[at].upper()
        elif change == 3:
            out[at] += rng.choice((".", ",", "!", "。", "、", "\n", "  ", "-", "7"))
        else:
            del out[to:]
            break
    text = joint.join(out)
    if kind == 1:
        text = rng.choice(("Answer: ", "答案是：", "\n\n", "It is ", "1. ")) + text
    return text + text if kind == 2 else text


def english(rng: random.Random) -> list[str]:
    words = ENGLISH.split()
    return [rng.choice(words) for _ in range(rng.randrange(1, rng.choice((6, 25, 80))))]


def chinese(rng: random.Random) -> list[str]:
    words = CHINESE.split()
    return [rng.choice(words) for _ in range(rng.randrange(1, rng.choice((6, 25, 80))))]


def numbers(right: str, template: str, rng: random.Random) -> str:
    """A few numbers, some of them right, with or without the words around them."""
    found = [
        rng.choice((right, right, str(rng.randrange(40)), right + "0", f"0{right}", "３", "x"))
        for _ in range(rng.randrange(5))
    ]
    joint = rng.choice((" ", ", ", "\n", " and ", "、"))
    return joint.join(rng.choice((template, "{}", "{}.")).format(n) for n in found)


def labels(rng: random.Random) -> Pair:
    classes = list(rng.choice(CLASSES))
    rng.shuffle(classes)
    answer = rng.choice(classes)
    named = [rng.choice((answer, rng.choice(classes))) for _ in range(rng.randrange(4))]
    return rng.choice((" ", "\n", "Type: ", "")).join(named), answer, tuple(classes)


def code(rng: random.Random) -> Pair:
    answer = rng.choice(CODE)
    lines = [rng.choice(CODE) for _ in range(rng.randrange(3))]
    cut = list(answer)
    for _ in range(rng.randrange(12) if cut else 0):
        at = rng.randrange(len(cut))
        cut[at] = rng.choice(("", " ", "x", cut[at] * 2, "_"))
    lines.insert(rng.randrange(len(lines) + 1), "".join(cut))
    return rng.choice(("", "\n", "\n\n")) + "\n".join(lines), answer, ()


def words_pair(words: list[str], joint: str, rng: random.Random) -> Pair:
    return corrupted(words, joint, rng), joint.join(words), ()


def numbers_pair(template: str, answer: str, rng: random.Random) -> Pair:
    right = str(rng.randrange(1, 31))
    return numbers(right, template, rng), answer.format(right), ()


SYNTHETIC: dict[str, Callable[[random.Random], Pair]] = {
    "qa_f1": lambda rng: words_pair(english(rng), " ", rng),
    "qa_f1_zh": lambda rng: words_pair(chinese(rng), "", rng),
    "rouge": lambda rng: words_pair(english(rng), " ", rng),
    "rouge_zh": lambda rng: words_pair(chinese(rng), "", rng),
    "classification": labels,
    "retrieval": lambda rng: numbers_pair("Paragraph {}", "Paragraph {}", rng),
    "retrieval_zh": lambda rng: numbers_pair("段落{}", "段落{}", rng),
    "count": lambda rng: numbers_pair("There are {}", "{}", rng),
    "code_sim": code,
}


def synthetic(metric: str) -> list[Pair]:
    rng = random.Random(f"longbench/{metric}")
    return [SYNTHETIC[metric](rng) for _ in range(PAIRS)]


def records(data: Path, name: str) -> list[dict[str, Any]]:
    with (data / f"{name}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def real(metric: str, data: Path) -> list[Pair]:
    """One pair of each record: its answer (a piece of the context for the ROUGE of multifieldqa_zh,
    whose answers are short) or the start of it, and a corruption."""
    rng = random.Random(f"longbench/real/{metric}")
    pairs = []
    for record in records(data, REAL[metric]):
        answer = record["answers"][0]
        if metric == "retrieval_zh":
            pairs.append((numbers(answer[2:], "段落{}", rng), answer, ()))
        elif metric in ("rouge", "qa_f1"):
            words = answer.split(" ")[: 120 if metric == "rouge" else 25]
            pairs.append(words_pair(words, " ", rng))
        else:
            at = rng.randrange(len(record["context"]) - 150)
            text = answer if metric == "qa_f1_zh" else record["context"][at : at + 150]
            pairs.append(words_pair(list(text), "", rng))
    return pairs


def digest(items: Any) -> str:
    return hashlib.sha256(json.dumps(items).encode()).hexdigest()


def predictions(name: str, metric: str) -> Iterator[tuple[str, list[str], int, list[str]]]:
    """For one data set, predictions with up to three answers, a length in words and the classes."""
    rng = random.Random(f"longbench/eval/{name}")
    classes = list(CLASSES[name == "lsht"])
    for _ in range(24):
        text, answer, _ = SYNTHETIC[metric](rng)
        more = [SYNTHETIC[metric](rng)[1] for _ in range(rng.randrange(3))]
        if metric == "classification":
            answer, *more = (rng.choice(classes) for _ in range(1 + len(more)))
            text = rng.choice(("", "\n", "\n\n")) + rng.choice((answer, text))
        yield text, [*more, answer], rng.choice((0, 3999, 4000, 7999, 8000, 20000)), classes


# --- the official code ----------------------------------------------------------------------------


def lists_of(source: Path) -> list[list[str]]:
    """The lists in ``dataset in [...]`` and ``datasets = [...]`` of a source file, in order."""
    found = []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        value = None
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "dataset":
            value = node.comparators[0]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "datasets":
            value = node.value
        if isinstance(value, ast.List):
            found.append((node.lineno, ast.literal_eval(value)))
    return [names for _, names in sorted(found)]


def facts(checkout: Path) -> dict[str, list[Any]]:
    """For each data set the hash of its prompt, the longest answer, the metric, and whether it is
    in LongBench-E, is put to chat models in their template, and is scored by its first line."""
    prompts, lengths = (
        json.loads((checkout / "config" / f"dataset2{kind}.json").read_text(encoding="utf-8"))
        for kind in ("prompt", "maxlen")
    )
    plain, _, extended, *_ = lists_of(checkout / "pred.py")
    first_line = lists_of(checkout / "eval.py")[0]
    source = (checkout / "eval.py").read_text(encoding="utf-8")
    table = next(
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    )
    metrics = {
        ast.literal_eval(key): ast.unparse(value).removesuffix("_score")
        for key, value in zip(table.keys, table.values, strict=True)
        if key is not None
    }
    return {
        name: [
            digest(prompt),
            lengths[name],
            metrics[name],
            name in extended,
            name not in plain,
            name in first_line,
        ]
        for name, prompt in prompts.items()
    }


def official_prompts(
    checkout: Path, name: str, data: Path, tokenizer: Any, max_length: int
) -> list[str]:
    """Prompts of the first records, by the statements of the official ``get_pred`` before the one
    that decides on the chat template."""
    tree = ast.parse((checkout / "pred.py").read_text(encoding="utf-8"))
    loop = next(
        node
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and function.name == "get_pred"
        for node in function.body
        if isinstance(node, ast.For)
    )
    at = next(i for i, node in enumerate(loop.body) if "dataset not in" in ast.unparse(node))
    build = compile(ast.Module(loop.body[:at], []), "pred.py", "exec")
    templates = json.loads((checkout / "config" / "dataset2prompt.json").read_text("utf-8"))
    names = {"prompt_format": templates[name], "tokenizer": tokenizer, "max_length": max_length}
    prompts = []
    for record in islice(records(data, name), PROMPTS):
        space: dict[str, Any] = {**names, "json_obj": record, "model_name": ""}
        exec(build, space)
        prompts.append(space["prompt"])
    return prompts


def record_metrics(checkout: Path, data: Path) -> dict[str, Any]:
    sys.path.insert(0, str(checkout))
    import eval as official  # the official eval.py, which imports the functions of metrics.py
    from fuzzywuzzy import fuzz

    if fuzz.SequenceMatcher is difflib.SequenceMatcher:
        raise SystemExit("install python-Levenshtein: both kinds of fuzzywuzzy are recorded")

    def scores(metric: str, pairs: list[Pair]) -> dict[str, Any]:
        function = getattr(official, f"{metric}_score")
        found = [float(function(p, a, all_classes=list(c))) for p, a, c in pairs]
        return {"pairs": digest(pairs), "scores": found}

    made = {metric: scores(metric, synthetic(metric)) for metric in SYNTHETIC}
    fast, fuzz.SequenceMatcher = fuzz.SequenceMatcher, difflib.SequenceMatcher
    made["code_sim_difflib"] = scores("code_sim", synthetic("code_sim"))
    fuzz.SequenceMatcher = fast

    known, tables = facts(checkout), {}
    for name, (_, _, metric, extended, _, _) in known.items():
        texts, answers, lengths, (classes, *_) = zip(*predictions(name, metric), strict=True)
        tables[name] = official.scorer(name, texts, answers, classes)
        if extended:
            tables[f"{name}_e"] = official.scorer_e(name, texts, answers, lengths, classes)
    return {
        "datasets": known,
        "synthetic": made,
        "real": {metric: scores(metric, real(metric, data)) for metric in REAL},
        "eval": tables,
    }


def record_prompts(checkout: Path, data: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    model = HERE.parent.parent / "src" / "kvsketch" / "models" / "longeval"
    tokenizer = AutoTokenizer.from_pretrained(model)
    return {
        "prompts": {
            name: {
                str(length): digest(official_prompts(checkout, name, data, tokenizer, length))
                for length in MAX_LENGTHS
            }
            for name in NAMES
        }
    }


def main(what: str, checkout: str, data: str) -> None:
    run = {"metrics": record_metrics, "prompts": record_prompts}[what]
    known = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.is_file() else {}
    known |= run(Path(checkout).resolve(), Path(data).resolve())
    RECORDED.write_text(json.dumps(known) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
