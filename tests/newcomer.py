"""What a newcomer tries in the first hour, with what each attempt must answer.

    make newcomer        # from the wheel, in a fresh environment and an empty folder (CI does this)
    python tests/newcomer.py    # with the kvsketch that is installed, in the present folder

Every item once harmed somebody: a file that was overwritten, an option that was ignored, an answer
that was lost without a word. The script writes its own files and needs no network.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

#: commands in the order of the issue: words, exit code, and what standard output or error contain
COMMANDS: list[tuple[str, int, tuple[str, ...]]] = [
    # 1. after a second reading the budgets are those that are known to be good
    (
        "compress doc.txt -o again.kvs --budget 0.1 --queries sample --allocation measured",
        0,
        ("warning: allocation='measured' with queries='sample'", "'global'"),
    ),
    # 3. no file of another kind is overwritten
    ("compress doc.txt -o doc.txt", 2, ("doc.txt",)),
    ("compress doc.txt -o notes.md", 2, ("notes.md",)),
    ("append doc.kvs more.txt -o notes.md", 2, ("notes.md",)),
    ("calibrate doc.txt --out doc.txt", 2, ("doc.txt",)),
    # 4. a plan that can be followed
    (
        "plan --model model --gpu-memory 24GiB --context 4096 --budget 1024",
        0,
        ("--attention-backend CUSTOM", "--dtype bfloat16", "FP8"),
    ),
    (
        "plan --model model --gpu-memory 24GiB --context 1000 --budget 1024",
        0,
        ("Fewer requests fit with kvsketch",),
    ),
    ("plan --model model --gpu-memory 24GiB --context 900k --budget 1024", 2, ("16384 positions",)),
    ("plan --model model --gpu-memory 80 --context 4096 --budget 1024", 2, ("80GiB",)),
    ("plan --model model --gpu-memory 24GiB --context 4096", 2, ("--concurrency", "--budget")),
    # 5. options that a task does not use, and options that exclude each other
    ("eval longeval --subtasks foo", 2, ("--subtasks", "longeval")),
    ("eval longeval --budgets 0.5 --tolerances 0.1", 2, ("--budgets", "--tolerances")),
    (
        "eval ruler --subtasks niah_single_1 --lengths 600 --limit 2 --methods exact --json",
        0,
        ('"cases": 2',),
    ),
    (
        "eval needle --form line --lengths 600 --depths 0.5 --limit 1 --methods exact --json",
        0,
        ('"cases": 1',),
    ),
    # 6. windows and budgets
    ("compress doc.txt -o wide.kvs --budget 0.25 --recent 2040", 0, ("Budget 0.25",)),
    ("compress doc.txt -o tiny.kvs --budget 20", 2, ("sink=4 + recent=32",)),
    ("compress doc.txt -o tiny.kvs --budget 0.001", 0, ("warning: the measured error",)),
    # 8. room for questions, and whose error is shown
    ("compress long.txt -o long.kvs --max-tokens 16384", 2, ("--max-tokens", "16384")),
    ("merge doc.kvs doc.kvs -o both.kvs", 0, ("not measured",)),
    ("info both.kvs", 0, ("not measured",)),
    # 10. messages
    ("info doc.txt", 2, ("doc.txt", "not")),
    ("compress doc.txt -o d.kvs --method exact", 2, ("exact",)),
    # 14. the list of methods
    ("methods", 0, ("heavy_merge", "default")),
]

#: Python that must end with this text as the last line of an InputError
REFUSED = [
    ("kvsketch.prefill(model, tokenizer('a b', return_tensors='pt'), cache)", "input_ids"),
    ("kvsketch.prefill(model, None, cache)", "input_ids"),
    ("kvsketch.prefill(model, 'text', cache)", "input_ids"),
    ("SketchCache(model.config, seed='x')", "seed"),
    ("SketchCache(model.config, seed=None)", "seed"),
    ("SketchCache(model.config, seed=1.5)", "seed"),
    ("SketchCache(model.config, options=[1])", "options"),
    ("SketchCache(model.config, allocation=3)", "allocation"),
    ("kvsketch.prefill(model, ids, cache, queries=3, tokenizer=tokenizer)", "queries"),
    ("kvsketch.prefill(model, ids, cache, chunk_size='x')", "chunk_size"),
    # another model's configuration; a used cache with a shorter text, and with one as long
    ("model(ids, past_key_values=SketchCache(other))", "configuration of another model"),
    ("model.generate(ids[:, :50], past_key_values=used, max_new_tokens=2)", "not longer"),
    ("model.generate(ids[:, :199].flip(1), past_key_values=used, max_new_tokens=2)", "not longer"),
    ("cache.save('notes.md')", "notes.md"),
]
#: Python that must say True as its last words
RIGHT = [
    # 2. expected questions compress at once, and find their answers
    (
        "asked = SketchCache(model.config, budget=0.1)\n"
        "kvsketch.prefill(model, ids, asked, queries=[question], tokenizer=tokenizer)\n"
        "print(asked.summary()['kv_fraction'] < 0.12)"
    ),
    # 7. what an object says of itself
    "print('199 tokens seen' in repr(used) and 'budget=0.25' in repr(used))",
    "print(0 < used.summary()['kv_fraction'] < 0.5)",
    "print(set(kvsketch.__all__) <= set(dir(kvsketch)))",
]
SETUP = """
import kvsketch
from kvsketch import SketchCache, InputError, packaged_model
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(packaged_model())
tokenizer = AutoTokenizer.from_pretrained(packaged_model())
cache = SketchCache(model.config, budget=0.25)
used = SketchCache(model.config, budget=0.25)
text = open("doc.txt").read()
ids = tokenizer(text, return_tensors="pt")["input_ids"]
question = "\\n" + open("questions.txt").readline().strip()
model.generate(ids[:, :199], past_key_values=used, max_new_tokens=1)
other = AutoModelForCausalLM.from_pretrained(packaged_model("longeval-one-head")).config
"""


def run(words: str) -> subprocess.CompletedProcess[str]:
    """A command of kvsketch."""
    command = [sys.executable, "-m", "kvsketch", *words.split()]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def documents() -> tuple[str, list[tuple[str, str]], str]:
    """A record of 200 lines, its lines with their numbers, and the form of a question."""
    from kvsketch.evaluation.runner.longeval import make_cases

    case = make_cases([200], 1, seed=0)[0]
    text, mark, question = case.prompt.partition("Now the record is over.")
    (named,) = re.findall(r"in line (\S+)\?", question)
    lines = re.findall(r"line (\S+): REGISTER_CONTENT is <(\d+)>", text)
    return text, lines, (mark + question).replace(named, "{}")


def answered(name: str, lines: list[tuple[str, str]], form: str) -> int:
    """How many of 20 questions about random lines a document answers."""
    asked = random.Random(1).sample(lines, 20)
    questions = Path("questions.txt")
    questions.write_text("".join(form.format(line) + "\n" for line, _ in asked), encoding="utf-8")
    found = run(f"ask {name} --questions questions.txt --max-new-tokens 24 --json")
    assert found.returncode == 0, found.stderr
    answers = json.loads(found.stdout.splitlines()[-1])["answers"]
    return sum(number in x["answer"] for (_, number), x in zip(asked, answers, strict=True))


def main() -> int:
    """Run everything; returns the number of attempts that went wrong."""
    wrong = 0

    def check(what: str, right: bool, said: str) -> None:
        nonlocal wrong
        wrong += not right
        print(f"{'ok   ' if right else 'WRONG'} {what}", flush=True)
        if not right:
            print("      " + said.strip().replace("\n", "\n      ")[-1500:], flush=True)

    text, lines, form = documents()
    Path("doc.txt").write_text(text, encoding="utf-8")
    Path("more.txt").write_text(text[:2000], encoding="utf-8")
    Path("long.txt").write_text(text * 12, encoding="utf-8")
    Path("notes.md").write_text("my notes\n", encoding="utf-8")

    from kvsketch import packaged_model

    if not Path("model").exists():
        Path("model").symlink_to(packaged_model())
    for queries in ("prompt", "sample", "reread", "local"):
        made = run(f"compress doc.txt -o doc.kvs --budget 0.1 --queries {queries}")
        right = answered("doc.kvs", lines, form) if made.returncode == 0 else 0
        said = f"{right} of 20 answers\n{made.stderr}"
        check(
            f"compress doc.txt --budget 0.1 --queries {queries}; ask: {right} of 20",
            right >= 18,
            said,
        )
    for words, code, contained in COMMANDS:
        done = run(words)
        said = done.stdout + done.stderr
        raw = "Traceback" in said
        check(
            words, done.returncode == code and not raw and all(x in said for x in contained), said
        )
    unchanged = Path("doc.txt").read_text(encoding="utf-8") == text
    check("doc.txt is as it was", unchanged, "")
    check("notes.md is as it was", Path("notes.md").read_text(encoding="utf-8") == "my notes\n", "")
    checks = "".join(
        f"try:\n    {code}\n    print('accepted')\nexcept InputError as error:\n    print(error)\n"
        for code, _ in REFUSED
    )
    done = subprocess.run(
        [sys.executable, "-c", SETUP + checks], capture_output=True, text=True, check=False
    )
    told = done.stdout.splitlines()
    for number, (code, contained) in enumerate(REFUSED):
        line = told[number] if number < len(told) else done.stderr
        check(code, contained in line and line != "accepted", line)
    done = subprocess.run(
        [sys.executable, "-c", SETUP + "\n".join(RIGHT)],
        capture_output=True,
        text=True,
        check=False,
    )
    told = done.stdout.splitlines()
    for number, code in enumerate(RIGHT):
        right = number < len(told) and told[number] == "True"
        check(code, right, done.stdout + done.stderr)
    print(f"{wrong} attempts went wrong" if wrong else "a newcomer's first hour: fine")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
