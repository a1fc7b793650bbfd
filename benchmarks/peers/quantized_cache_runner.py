"""Runs layers of transformers' QuantizedCache, in the peers' interpreter.

    python quantized_cache_runner.py request.json in.safetensors out.safetensors

The request is ``{"bits": 4 or 2, "axis_key": 0 or -1, "layers": number of layers}``. The script
reads ``keys.i`` and ``values.i``, ``[batch, kv_heads, n, dim]``, as a prompt. It writes them as the
next token's attention reads them, and ``bytes.i``, the bytes of the packed tensors with scales and
zero points.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import QuantoQuantizedLayer


def storages(thing: Any, seen: dict[int, int]) -> None:
    """Collect the storages of a plain tensor, or of the plain tensors in a packed one."""
    if type(thing) is torch.Tensor:
        storage = thing.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    elif isinstance(thing, torch.Tensor):
        for part in vars(thing).values():
            storages(part, seen)


@torch.no_grad()
def run(asked: dict[str, int], keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
    layer = QuantoQuantizedLayer(
        nbits=asked["bits"], axis_key=asked["axis_key"], axis_value=0, residual_length=1 << 30
    )
    layer.update(keys, values)
    held: dict[int, int] = {}
    storages(layer._quantized_keys, held)
    storages(layer._quantized_values, held)
    seen = layer.update(keys[:, :, -1:], values[:, :, -1:])
    size = torch.tensor(sum(held.values()))
    return [*(tensor[:, :, : keys.shape[2]].contiguous() for tensor in seen), size]


def main() -> None:
    request, source, target = sys.argv[1:]
    with open(request, encoding="utf-8") as file:
        asked = json.load(file)
    tensors = load_file(source)
    out = {}
    for i in range(asked["layers"]):
        found = run(asked, tensors[f"keys.{i}"], tensors[f"values.{i}"])
        for name, tensor in zip(("keys", "values", "bytes"), found, strict=True):
            out[f"{name}.{i}"] = tensor
    save_file(out, target)


if __name__ == "__main__":
    main()
