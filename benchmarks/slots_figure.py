"""Draws the slots of a cache after a prompt (docs/how-it-works.md), with ``longeval-one-head``.

python -m benchmarks.slots_figure --plot docs/figures/slots.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import subplots, write

#: The methods that are drawn, each with a line that describes it.
ROWS = (
    ("exact", "exact: every token is a slot of mass 1"),
    ("streaming_llm", "streaming_llm: the first and the last tokens"),
    ("snapkv", "snapkv: tokens that the last queries attend to most; all others are dropped"),
    (
        "heavy_merge",
        "heavy_merge: attended tokens and distinct keys stay; the others become slots for many",
    ),
)
LINES, BUDGET, SINK, RECENT, LAYER, HEAD = 20, 0.25, 4, 16, 2, 0


@dataclass(frozen=True)
class Held:
    """The slots of one KV head: a position and a mass for each, in the order of the positions."""

    positions: Sequence[float]
    mass: Sequence[float]


def measure() -> tuple[int, dict[str, Held]]:
    """The number of tokens of the prompt, and the slots of each method after it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvsketch import SketchCache, packaged_model
    from kvsketch.evaluation.runner.longeval import make_cases

    model = AutoModelForCausalLM.from_pretrained(packaged_model("longeval-one-head"))
    tokenizer = AutoTokenizer.from_pretrained(packaged_model("longeval-one-head"))
    ids = tokenizer(make_cases([LINES], 1, seed=0)[0].prompt, return_tensors="pt").input_ids
    tokens = ids.shape[1]
    found = {"exact": Held(range(tokens), [1.0] * tokens)}
    for method, _ in ROWS[1:]:
        cache = SketchCache(
            model.config,
            method,
            budget=BUDGET,
            sink=SINK,
            recent=RECENT,
            allocation="even",
            bits=16,
            keep=["positions"],
        )
        with torch.no_grad():
            model(ids, past_key_values=cache)
        slots: Any = cache.layers[LAYER].stream.slots
        mass = slots.masses()[0, HEAD]
        order = slots.positions[0, HEAD].argsort(stable=True)
        order = order[mass[order] > 0]
        positions = slots.positions[0, HEAD]
        found[method] = Held(positions[order].tolist(), mass[order].tolist())
    return tokens, found


def draw(tokens: int, found: dict[str, Held], path: Path) -> None:
    """Draw a panel for each method. A bar is a slot, and its height is the slot's mass."""
    fig, axes = subplots(len(ROWS), 9, 5.6, stacked=True)
    from matplotlib.patches import Patch

    highest = max(max(held.mass) for held in found.values())
    for axis, (method, text) in zip(axes, ROWS, strict=True):
        held = found[method]
        kept = len(held.mass)
        merged = [mass > 1 for mass in held.mass]
        window = [p < SINK or p >= tokens - RECENT for p in held.positions]
        colors = [
            "tab:orange" if many else "tab:gray" if edge else "tab:blue"
            for many, edge in zip(merged, window, strict=True)
        ]
        axis.bar(held.positions, held.mass, width=1.0, color=colors)
        axis.set_yscale("log", base=10)
        axis.set_ylim(0.5, 2 * highest)
        axis.set_yticks([1, 10], ["1", "10"])
        axis.minorticks_off()
        share = "all" if kept == tokens else f"{kept}"
        axis.set_title(f"{text} ({share} of {tokens} slots)", fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(
        "position of the token, or of the slot: the mean of the tokens it stands for"
    )
    fig.supylabel("tokens a slot stands for (mass)", fontsize=9)
    names = {
        "tab:gray": "first and last tokens",
        "tab:blue": "a token kept as it is",
        "tab:orange": "many tokens in one slot",
    }
    handles = [Patch(color=color) for color in names]
    fig.legend(
        handles, names.values(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    write(fig, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, required=True)
    tokens, found = measure()
    draw(tokens, found, parser.parse_args().plot)


if __name__ == "__main__":
    main()
