"""The weighted mean of models of one recipe: `python -m training.mean OUT 0.35:DIR 0.65:DIR ...`.

Models that were trained on from the same weights can be averaged (Wortsman et al. 2022, Model
soups, arXiv:2203.05482): what each has learned since is largely in the mean. OUT has the tokenizer
and the log of the last one, and what it is the mean of.

With ``--attention 0.82``, what the attention layers that read (all but the first two) add is
multiplied by so much: an answer then needs the votes of more heads.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

#: attention's output projection in the layers that read
_READS = re.compile(r"model\.layers\.([2-9]|\d\d)\.self_attn\.o_proj\.weight")


def mean(out: Path, parts: list[tuple[float, Path]], attention: float = 1.0) -> None:
    """Write the mean of exported models to the folder ``out``.

    Args:
        attention: what the layers that read add is multiplied by it, > 0.

    Raises:
        SystemExit: weights that do not add up to 1, models of other shapes or recipes, or a factor
            out of range.
    """
    if not attention > 0:
        raise SystemExit(f"--attention {attention:g} must be > 0")
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
    for name in filter(_READS.fullmatch, summed):
        summed[name] = summed[name] * attention
    last = parts[-1][1]
    out.mkdir(parents=True, exist_ok=True)
    for file in last.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, out / file.name)
    weights = [weight for weight, _ in parts]
    named = [{"weight": w, "tokens": log["tokens"]} for w, log in zip(weights, logs, strict=True)]
    factor = {} if attention == 1 else {"attention": attention}
    about = {**logs[-1], "mean_of": named, **factor}
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
    parser.add_argument("--attention", type=float, default=1.0, metavar="FACTOR")
    arguments = parser.parse_args()
    mean(arguments.out, arguments.parts, arguments.attention)


if __name__ == "__main__":
    main()
