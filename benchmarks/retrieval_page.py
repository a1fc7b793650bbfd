"""Writes docs/what-the-numbers-can-tell.md: which heads of the packaged models read the answers.

python -m benchmarks.retrieval_page                          # measures what is missing (an hour)
python -m benchmarks.retrieval_page --only spread --again    # measures one model anew
python -m benchmarks.retrieval_page --no-measure             # writes the page only
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import page_beds
from benchmarks.markdown import folded, made_with, table, written_by
from benchmarks.page import DOCS, loaded, save
from kvsketch.cli.inspect_retrieval import run_retrieval
from kvsketch.models import PACKAGED, PACKAGED_MODELS

RESULTS = DOCS / "results" / "retrieval.json"
PAGE = DOCS / "what-the-numbers-can-tell.md"
#: the tasks of each model, as arguments of ``run_retrieval``
LINES, NEEDLES = {"task": "longeval"}, {"task": "niah_multikey_2", "length": 4000}
TASKS: dict[str, tuple[dict[str, Any], ...]] = {
    "longeval-one-head": (LINES,),
    "ruler-one-layer": (LINES, NEEDLES),
    "spread": ({**LINES, "cases": 60}, NEEDLES),
}
CASES = 20  # unless stated above


def measure(found: list[dict[str, Any]], only: str, again: bool) -> dict[str, Any]:
    """What is there, and what is missing of the models of this version, saved one by one."""
    for model in [only] if only else [name for name in TASKS if name in PACKAGED_MODELS]:
        for task in TASKS[model]:
            there = [r for r in found if (r["model"], r["task"]) == (model, task["task"])]
            if there and not again:
                continue
            with tempfile.TemporaryDirectory() as folder:
                result = run_retrieval(model, out=Path(folder), **{"cases": CASES, **task})
                picture = DOCS / "figures" / f"retrieval_{model}_{task['task']}.svg"
                picture.write_bytes((Path(folder) / "retrieval.svg").read_bytes())
            found = [r for r in found if r not in there] + [result]
            save({"command": "retrieval", "results": found, "seed": 0}, RESULTS)
    order = list(TASKS)
    found = sorted(found, key=lambda result: order.index(result["model"]))
    return {"command": "retrieval", "results": found, "seed": 0}


def page(result: dict[str, Any]) -> str:
    """The text of the page."""
    sections = "\n".join(_section(found) for found in result["results"])
    default = [r for r in result["results"] if PACKAGED_MODELS[r["model"]] == "spread"]
    opening = "".join(f"{_picture(found)}\n\n" for found in default[:1])
    return (
        f"# What these numbers can tell\n\n{written_by('retrieval_page')}\n\n{opening}"
        "Every accuracy in these pages comes from small models that were trained here, since they "
        "run on two CPU cores and their answers cannot be guessed. Whether a comparison carries "
        "over to a large model depends on how its heads retrieve. In published models a few per "
        "cent of all heads retrieve, which is dozens, in many layers ([Wu et al. "
        "2024](https://arxiv.org/abs/2404.15574)), and a quarter (multi-head attention) to a half "
        "(grouped queries) of the KV heads must see all tokens ([DuoAttention]"
        "(https://arxiv.org/abs/2410.10819)). The models here were measured for the same:\n\n"
        f"{_summary(result['results'])}\n\n"
        "The columns are: the accuracy with the exact cache, and with the output of one KV head "
        "removed, whichever costs most; the layers in which a head puts at least 0.3 of a token's "
        "attention on the line or sentence with the answer; the share of the cases in which a "
        "token of the question does so; and the smallest share of KV heads found that keeps 90% of "
        "the accuracy when the others see only the first 16 and the last 64 tokens.\n\n"
        f"{_follows(result['results'])}\n{page_beds.section(loaded)}\n"
        "## What was not checked\n\n"
        "No model of more than a few million parameters was measured here: none can be downloaded "
        "where these tables are made. The packaged models know nothing but their tasks, their "
        "texts have no language to speak of, and their longest texts have about 6,000 tokens. "
        "Nothing here says how a method acts on reasoning, on summaries or on 100,000 tokens.\n\n"
        "## On your own model\n\n"
        "```bash\n"
        "kvsketch inspect YOUR_MODEL --retrieval --task niah_multikey_2 --length 8000 --out told\n"
        "kvsketch eval longeval ruler --model YOUR_MODEL --lines 200,400 --lengths 8000 \\\n"
        "    --methods exact,heavy_merge,snapkv --budgets 0.25,0.1 --question unseen\n"
        "```\n\n"
        "The first command says how far your model is like those above, the second repeats the "
        "tables on it. `python -m benchmarks.longeval --help` and `python -m benchmarks.ruler "
        "--help` are the scripts behind the tables of these pages.\n\n"
        f"{folded(sections)}"
    )


def _named(found: dict[str, Any]) -> str:
    default = PACKAGED_MODELS[found["model"]] == PACKAGED_MODELS[PACKAGED]
    return f"`{found['model']}`" + (" (the default)" if default else "")


def _asked(found: dict[str, Any]) -> str:
    size = f"{found['lines']} lines" if "lines" in found else f"{found['length']:,} tokens"
    return f"{found['task']}, {size}"


def _summary(results: list[dict[str, Any]]) -> str:
    rows = []
    for found in results:
        worst = min(row["removed"] for row in found["heads"])
        layers = len({row["layer"] for row in found["heads"]})
        rows.append(
            [
                _named(found),
                _asked(found),
                f"{found['accuracy']:.2f}",
                f"{worst:.2f}",
                f"{len(found['layers_that_read'])} of {layers}",
                f"{found['question_reads']:.2f}",
                f"{found['whole']['heads']} of {len(found['heads'])} "
                f"({found['whole']['share']:.2f})",
            ]
        )
    return table(
        ["model", "task", "exact", "without a head", "layers that read", "question reads", "whole"],
        rows,
    )


def _follows(results: list[dict[str, Any]]) -> str:
    """What follows for the tables, by what was measured."""
    said = []
    for found in results:
        few = found["whole"]["heads"] == 1
        blind = found["question_reads"] < 0.1
        if few:
            said.append(
                f"In `{found['model']}` ({_asked(found)}) a single KV head of "
                f"{len(found['heads'])} has to see all tokens. An allocation that finds it, such "
                "as `@measured` or `@calibrated`, has won; on a model that needs a third of its "
                "heads it saves less."
            )
        if blind:
            said.append(
                f"In `{found['model']}` ({_asked(found)}) the question's tokens do not look at the "
                "answer. Methods that keep what the question attends to (SnapKV, AdaKV, H2O, TOVA) "
                "cannot work there by construction, and their rows say nothing about them."
            )
    if any(found["model"] == "spread" for found in results):
        said.append(
            "`spread` needs many heads because it was trained to: in some of its sequences most "
            "heads saw only first and recent tokens, and no answer was to be given then. It shows "
            "how methods act on a model that is so, and not that models are."
        )
    return "".join(f"- {line}\n" for line in said)


def _picture(found: dict[str, Any]) -> str:
    return (
        f"![The largest share of attention on the evidence, and the accuracy without it, of each "
        f"KV head of {found['model']}.](figures/retrieval_{found['model']}_{found['task']}.svg)"
    )


def _section(found: dict[str, Any]) -> str:
    curve = ", ".join(f"{count}: {score:.2f}" for count, score in found["whole"]["curve"])
    rows = [
        [
            str(row["layer"]), str(row["head"]), f"{row['question']:.2f}", f"{row['answer']:.2f}",
            f"{row['removed']:.2f}", f"{row['restricted']:+.3f}",
        ]
        for row in found["heads"]
    ]  # fmt: skip
    header = ["layer", "KV head", "question", "answer", "accuracy without it", "nats more"]
    return (
        f"## {found['model']}: {_asked(found)}\n\n{_picture(found)}\n\n"
        f"{table(header, rows)}\n\n"
        f'"question" and "answer": the largest share of its attention that a token of the '
        f"question, or of the answer, puts on the evidence in this head, the mean over "
        f'{found["cases"]} cases. "nats more": how much less likely a token of the answer gets '
        f"when this head alone sees only first and last tokens. Accuracy with so many heads whole: "
        f"{curve}.\n\n{made_with(found)}\n"
    )


def main(
    only: Annotated[str, typer.Option(help="Measure this model only.")] = "",
    again: Annotated[bool, typer.Option("--again", help="Also what is there.")] = False,
    write: Annotated[bool, typer.Option("--measure/--no-measure")] = True,
) -> None:
    """Example: python -m benchmarks.retrieval_page --only spread --again"""
    if only and only not in TASKS:
        raise typer.BadParameter(f"--only {only!r} must be one of {', '.join(TASKS)}")
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["results"] if RESULTS.is_file() else []
    result = measure(found, only, again) if write else {"results": found}
    if write:
        save(result, RESULTS)
    PAGE.write_text(page(result), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
