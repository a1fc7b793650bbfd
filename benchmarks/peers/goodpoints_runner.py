"""Runs goodpoints' kernel thinning on given keys and values, in the peers' interpreter.

    python goodpoints_runner.py request.json in.safetensors out.safetensors

The request is ``{"rounds": m, "seed": seed}``. The script reads ``keys`` and ``values``,
``[batch, kv_heads, n, dim]``, and writes ``kept``, the indices of the kept tokens, int64
``[batch, kv_heads, n // 2^m]``, ascending.

The kernel is attention's: exp(<k, k'> / sqrt(dim)) (<v, v'> + c), where c is the largest squared
entry of a value, so that numerator and denominator of attention are both in its space. It is
divided by its largest exponential, which changes nothing for thinning and prevents an overflow.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from goodpoints import kt
from safetensors.torch import load_file, save_file


def thin(keys: np.ndarray, values: np.ndarray, rounds: int, seed: int) -> np.ndarray:
    dim = keys.shape[1]
    keys = keys / dim**0.25
    largest = np.square(keys).sum(1).max()
    floor = max(np.square(values).max(), np.finfo(float).tiny)

    def kernel(y: np.ndarray, x: np.ndarray) -> np.ndarray:
        score = (x[:, :dim] * y[..., :dim]).sum(-1) - largest
        return np.exp(score) * ((x[:, dim:] * y[..., dim:]).sum(-1) + floor)

    points = np.concatenate([keys, values], axis=1)
    return np.sort(kt.thin(points, rounds, kernel, kernel, seed=seed, store_K=True, unique=True))


def main() -> None:
    request, source, target = sys.argv[1:]
    with open(request, encoding="utf-8") as file:
        asked = json.load(file)
    tensors = load_file(source)
    keys, values = (tensors[name].double().numpy() for name in ("keys", "values"))
    batch, heads, n, _ = keys.shape
    kept = np.empty((batch, heads, n >> asked["rounds"]), dtype=np.int64)
    for b in range(batch):
        for h in range(heads):
            seed = asked["seed"] + b * heads + h
            kept[b, h] = thin(keys[b, h], values[b, h], asked["rounds"], seed)
    save_file({"kept": torch.from_numpy(kept)}, target)


if __name__ == "__main__":
    main()
