"""Runs kvpress's CAMPress on given tensors, in the peers' interpreter.

    python kvpress_cam_runner.py request.json in.safetensors out.safetensors

The request is a list of jobs ``{"kept": tokens kept, "merge_budget": that of the press}``. Job i
reads ``keys.i`` and ``values.i``, ``[batch, kv_heads, n, dim]``, ``attention.i``,
``[batch, kv_heads, n]``, the accumulated attention, which is also the score of the wrapped press,
and ``uniform.i``, ``[batch, kv_heads, evicted]``, the random numbers of the evicted tokens in their
order. It writes ``keys.i`` and ``values.i``, which the press's own ``compress`` keeps after as many
new tokens as are evicted.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from kvpress import CAMPress, ScorerPress
from safetensors.torch import load_file, save_file


@dataclass
class Given(ScorerPress):
    """A press with given scores."""

    scores: Any = None

    def score(self, *_: Any) -> torch.Tensor:
        return self.scores


def main() -> None:
    request, source, target = sys.argv[1:]
    with open(request, encoding="utf-8") as file:
        jobs = json.load(file)
    tensors = load_file(source)
    found = {}
    for i, job in enumerate(jobs):
        keys, values = tensors[f"keys.{i}"], tensors[f"values.{i}"]
        attention, uniform = tensors[f"attention.{i}"], tensors[f"uniform.{i}"]
        press = CAMPress(
            Given(scores=attention), target_size=job["kept"], merge_budget=job["merge_budget"]
        )
        press.layer_step_counts[0] = uniform.shape[-1]
        press._running_attn_sum[0] = attention
        torch.bernoulli = lambda p, u=uniform: (u < p).to(p.dtype)
        module = SimpleNamespace(layer_idx=0)
        kept = press.compress(module, None, keys, values, attention, {})
        found[f"keys.{i}"], found[f"values.{i}"] = kept
    save_file(found, target)


if __name__ == "__main__":
    main()
