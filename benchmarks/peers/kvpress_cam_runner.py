"""Runs kvpress's CAMPress on given tensors. Executed by the peers' interpreter:

    python kvpress_cam_runner.py request.json in.safetensors out.safetensors

The request is a list of jobs ``{"kept": tokens kept, "merge_budget": of the press}``; job i reads
``keys.i`` and ``values.i`` ``[batch, kv_heads, n, dim]``, ``attention.i`` ``[batch, kv_heads, n]``
(accumulated, by which the press inside scores, too) and ``uniform.i``, ``[batch, kv_heads,
evicted]``, the random numbers of the tokens that go, in their order; it writes ``keys.i`` and
``values.i`` of what the press's own ``compress`` keeps, where as many tokens came as go.
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
    """A press that has its scores already."""

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
