"""Keeps a run for another machine: `python -m training.keep DIR FILE.safetensors`.

Writes the weights of DIR/checkpoint.pt in bfloat16 and their place in the curriculum, without the
optimizers' state. `python -m training.train --start FILE.safetensors` goes on from there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def keep(folder: Path, file: Path) -> None:
    """Write ``file`` from the checkpoint of a run's ``folder``."""
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    weights = {name: value.bfloat16().contiguous() for name, value in saved["model"].items()}
    weights.pop("lm_head.weight")  # the embeddings'
    about = {"recipe": saved["recipe"], "state": json.dumps(saved["state"])}
    save_file(weights, file, metadata=about)


def kept(file: Path) -> dict[str, object]:
    """What ``keep`` wrote, as a checkpoint: "recipe", "model" (float32) and "state". Or what
    ``export`` wrote, if ``file`` is a folder: at the end of its stage, as one that is not named.

    Raises:
        SystemExit: ``file`` is none that ``keep`` wrote.
    """
    if file.is_dir():
        summary = json.loads((file / "training_log.json").read_text())
        weights = load_file(file / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        state = {key: summary[key] for key in ("step", "tokens", "curriculum")}
        state["seconds"] = 60 * summary["minutes"]
        named = {key: summary[key] for key in ("recipe",) if key in summary}
        return {**named, "model": weights, "state": state}
    with safe_open(file, "pt") as opened:
        about = opened.metadata() or {}
        if "recipe" not in about:
            raise SystemExit(f"--start: {file} was not written by training.keep")
        weights = {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return {"recipe": about["recipe"], "model": weights, "state": json.loads(about["state"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    keep(arguments.folder, arguments.file)


if __name__ == "__main__":
    main()
