"""Writes docs/inspect.md: the results of `kvsketch inspect` for the models used here.

python -m benchmarks.inspect_page              # measures, draws the figures, writes the page
python -m benchmarks.inspect_page --no-measure # writes the page from docs/results/inspect.json
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.markdown import table, written_by
from benchmarks.page import DOCS, save
from benchmarks.prompts import default_models
from kvsketch.cli.inspect_command import run

RESULTS = DOCS / "results" / "inspect.json"
SHOWN = ("norms", "clusterability", "tsne", "entropy")
TITLES = {
    "norms": "Norms",
    "clusterability": "Covering keys and values by few balls",
    "tsne": "Keys and values in the plane",
    "entropy": "Where attention goes",
}


def measure(models: list[str], seed: int) -> dict[str, Any]:
    """Inspect the models and write their figures. The points of a t-SNE are in the figures only."""
    found = []
    for model in models:
        name = Path(model).name
        with tempfile.TemporaryDirectory() as folder:
            result = run(model, seed=seed, out=Path(folder))
            for figure in SHOWN:
                drawn = Path(folder) / result["figures"][figure]["svg"]
                target = DOCS / "figures" / f"inspect_{name}_{figure}.svg"
                target.write_bytes(drawn.read_bytes())
                result["figures"][figure] |= {"svg": target.name}
            result["figures"] = {
                figure: {k: v for k, v in result["figures"][figure].items() if k != "png"}
                for figure in SHOWN
            }
        for view in result["tsne"]:
            del view["points"], view["positions"]
        found.append({**result, "model": name})
    return {"command": "inspect", "results": found, "seed": seed}


def page(result: dict[str, Any]) -> str:
    """The text of docs/inspect.md."""
    parts = [
        f"# Activations of two models\n\n{written_by('inspect_page')}\n\n"
        f"{_opening(result['results'])}\n\n"
        "For your own model and prompts:\n\n"
        "```bash\nkvsketch inspect YOUR_MODEL prompt1.txt prompt2.txt --out inspected\n```\n\n"
        "ClusterGen's Figure 1 and its appendix C, for your model and prompts: every KV head of "
        "the given layers gets its t-SNE with 16 greedy k-center points (Figure 1, C.2); query "
        "norms are under Norms (C.1). OPT, MPT, Llama and Gemma 2, the paper's four families, can "
        "all be read (`tests/evaluation/test_inspection.py`, on random weights):\n\n"
        "```bash\nkvsketch inspect facebook/opt-6.7b triviaqa.txt --limit 2048 \\\n"
        "    --layers 3,17 --out fig1\n```\n",
        *(_section(found) for found in result["results"]),
    ]
    return "\n".join(parts)


def _opening(results: list[dict[str, Any]]) -> str:
    """The norms of the first model, what was found in each, and what follows."""
    rows = []
    for found in results:
        best = min(found["errors"], key=lambda name: found["errors"][name])
        rows.append(
            [
                f"{found['model']}, {len(found['layers'])} layers",
                f"{max(found['tokens']):,}",
                f"`{best}` {found['errors'][best]:.3f}",
                found["readings"]["entropy"].rpartition("and ")[2].removesuffix("."),
            ]
        )
    header = ["model", "tokens", "lowest error at a quarter", "where 90% of attention is"]
    first = results[0]
    caption = first["figures"]["norms"]["caption"].removesuffix(first["readings"]["norms"]).strip()
    return (
        f"![{caption}](figures/{first['figures']['norms']['svg']})\n\n{table(header, rows)}\n\n"
        "What follows: attention to few tokens is what makes compression possible, and how few "
        "differs by model and layer; norms of this size make the papers' bounds useless "
        "([guarantees](guarantees.md))."
    )


def _section(found: dict[str, Any]) -> str:
    tokens = " and ".join(f"{n:,}" for n in found["tokens"])
    text = f"## {found['model']}\n\nPrompts: {found['source']}, {tokens} tokens.\n"
    for figure in SHOWN:
        drawn = found["figures"][figure]
        caption = drawn["caption"].removesuffix(found["readings"][figure]).strip()
        text += (
            f"\n### {TITLES[figure]}\n\n{found['readings'][figure]}\n\n"
            f"![{caption}](figures/{drawn['svg']})\n"
        )
    readings = found["readings"]
    ranked = sorted(found["errors"].items(), key=lambda item: item[1])
    text += (
        f"\n### Errors by method\n\n{readings['errors']} {readings['tolerance']}\n\n"
        f"{table(['method', 'error'], [[name, f'{error:.3f}'] for name, error in ranked])}\n"
        "\nRelative error of attention on real activations, mean over layers, heads and prompts; "
        "the larger of the errors on held-out and on repeated queries.\n"
        f"\n### Sizes that the theorems require\n\n{readings['theory']}\n"
    )
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    hardware = ", ".join(f"{name} {value}" for name, value in found["hardware"].items())
    return text + f"\nSeed {found['seed']}; {versions}; {hardware}.\n"


def main(
    models: Annotated[
        str, typer.Option(help="Comma-separated: model folders, hub ids, packaged.")
    ] = "",
    seed: int = 0,
    measured: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure, or use the stored results.")
    ] = True,
) -> None:
    """Example: python -m benchmarks.inspect_page"""
    if measured:
        save(measure(models.split(",") if models else default_models(), seed), RESULTS)
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    (DOCS / "inspect.md").write_text(page(result), encoding="utf-8")
    print(f"wrote {DOCS / 'inspect.md'}")


if __name__ == "__main__":
    typer.run(main)
