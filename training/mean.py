"""The weighted mean of models of one recipe: `python -m training.mean OUT 0.35:DIR 0.65:DIR ...`.

Models that were trained on from the same weights can be averaged (Wortsman et al. 2022, Model
soups, arXiv:2203.05482): what each has learned since is largely in the mean. OUT has the tokenizer
and the log of the last one, and what it is the mean of.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def mean(out: Path, parts: list[tuple[float, Path]]) -> None:
    """Write the mean of exported models to the folder ``out``.

    Raises:
        SystemExit: weights that do not add up to 1, or models of other shapes or recipes.
    """
    total = sum(weight for weight, _ in parts)
    if abs(total - 1) > 1e-6:
        raise SystemExit(f"the weights must add up to 1, got {total:g}")
    logs = [json.loads((folder / "training_log.json").read_text()) for _, folder in parts]
    recipes = {log["recipe"] for log in logs if "recipe" in log}
    if len(recipes) > 1:
        raise SystemExit(f"the models are of several recipes: {', '.join(sorted(recipes))}")
    summed: dict[str, torch.Tensor] = {}
    for weight, folder in parts:
        tensors = load_file(folder / "model.safetensors")
        if summed and any(summed[name].shape != t.shape for name, t in tensors.items()):
            raise SystemExit(f"{folder} has weights of other shapes than {parts[0][1]}")
        for name, tensor in tensors.items():
            part = tensor.float() * weight
            summed[name] = summed[name] + part if name in summed else part
    last = parts[-1][1]
    out.mkdir(parents=True, exist_ok=True)
    for file in last.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, out / file.name)
    weights = [weight for weight, _ in parts]
    named = [{"weight": w, "tokens": log["tokens"]} for w, log in zip(weights, logs, strict=True)]
    about = {**logs[-1], "mean_of": named}
    about.pop("held_out_accuracy", None)  # which is that of the last one
    (out / "training_log.json").write_text(json.dumps(about, indent=2) + "\n")
    save_file(summed, out / "model.safetensors", metadata={"format": "pt"})


def _part(text: str) -> tuple[float, Path]:
    weight, _, folder = text.partition(":")
    return float(weight), Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", type=_part, nargs="+", metavar="WEIGHT:DIR")
    arguments = parser.parse_args()
    mean(arguments.out, arguments.parts)


if __name__ == "__main__":
    main()
