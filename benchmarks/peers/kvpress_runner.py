"""Runs kvpress's own presses on given tensors, in the peers' interpreter.

    python kvpress_runner.py request.json in.safetensors out.safetensors

The request is a list of jobs ``{"press": class name, "arguments": those of its constructor,
"inner": class name of the wrapped press or null, "inner_arguments": those of its constructor,
"ratio": compression_ratio, "layer": index, "layers": number of layers, "repeats": number of
calls}``. Job i reads ``queries.i``, ``[batch, heads, n, dim]``, ``keys.i`` and ``values.i``,
``[batch, kv_heads, n, dim]``, and optionally the weight of the output projection, ``output.i``,
``[heads, dim, heads * dim]``. It writes ``kept.i``, int64 ``[batch, kv_heads, kept]``, the
ascending indices of the tokens that the press's own ``compress`` kept, and ``seconds.i``, float64,
the time of its fastest call.

Presses compute queries from hidden states, with the layer's projection and rotary embedding. Here
the layer is a real LlamaAttention whose projection is the identity and whose rotation is by zero
degrees, and a hidden state is the concatenation of the queries and keys, so that the queries and
keys that the layer computes are the given ones. The random seed is 0.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import kvpress
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama


def layer(heads: int, kv_heads: int, dim: int, index: int, layers: int) -> Any:
    config = LlamaConfig(
        hidden_size=(heads + kv_heads) * dim,
        head_dim=dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=layers,
        attn_implementation="eager",
    )
    module = modeling_llama.LlamaAttention(config, index)
    with torch.no_grad():
        both = torch.eye((heads + kv_heads) * dim)
        module.q_proj.weight.copy_(both[: heads * dim])
        module.k_proj.weight.copy_(both[heads * dim :])
    # ExpectedAttentionPress takes the rotations of future positions from the layer.
    module.rotary_emb = lambda x, ids: unrotated(ids.shape[-1], x)
    return module.eval()


def unrotated(n: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosine and sine of zero degrees, ``[1, n, dim]``."""
    one = torch.ones(1, n, like.shape[-1], dtype=like.dtype)
    return one, torch.zeros_like(one)


def attention_weights(module: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The weights that a model with eager attention passes to presses, by transformers' code."""
    n = queries.shape[2]
    mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
    _, weights = modeling_llama.eager_attention_forward(
        module, queries, keys, keys, mask, scaling=module.scaling
    )
    return weights


def row_bytes(rows: torch.Tensor) -> list[bytes]:
    return [row.tobytes() for row in rows.contiguous().view(torch.uint8).numpy()]


def indices(whole: list[torch.Tensor], kept: list[torch.Tensor]) -> torch.Tensor:
    """The ascending indices of the kept keys and values."""
    before, after = torch.cat(whole, dim=-1), torch.cat(kept, dim=-1)
    batch, heads, count, _ = after.shape
    found = torch.empty(batch, heads, count, dtype=torch.int64)
    for b in range(batch):
        for h in range(heads):
            place = {row: i for i, row in enumerate(row_bytes(before[b, h]))}
            found[b, h] = torch.tensor([place[row] for row in row_bytes(after[b, h])])
    return found.sort(dim=-1).values


def press_of(job: dict[str, Any]) -> Any:
    cls, arguments = getattr(kvpress, job["press"]), job["arguments"]
    if job["inner"] is None:
        return cls(compression_ratio=job["ratio"], **arguments)
    inner = getattr(kvpress, job["inner"])(compression_ratio=job["ratio"], **job["inner_arguments"])
    return cls(inner, **arguments)


@torch.no_grad()
def run(
    job: dict[str, Any], queries: Any, keys: Any, values: Any, output: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, n, dim = queries.shape
    module = layer(heads, keys.shape[1], dim, job["layer"], job["layers"]).to(queries.dtype)
    if output is not None:
        module.o_proj.weight.zero_()
        module.o_proj.weight[: output.shape[2]] = output.flatten(0, 1).T
    press = press_of(job)
    hidden = torch.cat([queries, keys], dim=1).transpose(1, 2).reshape(batch, n, -1)
    weights = None
    if job["press"] == "ObservedAttentionPress":  # No other press needs the weights.
        weights = attention_weights(module, queries, keys)
    extra = {"position_embeddings": unrotated(n, queries)}
    seconds = []
    for _ in range(job["repeats"]):
        torch.manual_seed(0)
        start = time.perf_counter()
        kept = press.compress(module, hidden, keys, values, weights, extra)
        seconds.append(time.perf_counter() - start)
    return indices([keys, values], list(kept)), torch.tensor(min(seconds), dtype=torch.float64)


def main() -> None:
    request, source, target = sys.argv[1:]
    with open(request, encoding="utf-8") as file:
        jobs = json.load(file)
    tensors = load_file(source)
    found = {}
    for i, job in enumerate(jobs):
        given = (tensors.get(f"{x}.{i}") for x in ("queries", "keys", "values", "output"))
        found[f"kept.{i}"], found[f"seconds.{i}"] = run(job, *given)
    save_file(found, target)


if __name__ == "__main__":
    main()
