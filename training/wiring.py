"""A start in which a network copies: its first two layers are wired as an induction circuit.

Copying is all that the tasks here have in common. From random weights, with ten thousand words, it
took more than a million tokens to begin; wired, it is there at step 0, and training goes on from
it: nothing is held fixed.

The residual is laid out as: the word's own code, those of the last word and of the one before it,
and a constant.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

WORD = 83  # coordinates of a word's own code
CODE = 22  # of them, those that words are told apart by
LAST, BEFORE_LAST, CONSTANT = WORD, WORD + CODE, WORD + 2 * CODE
_SPREAD, _CONSTANT = 0.1, 0.5
_FAST = 6  # frequencies that tell neighbours apart
_NEAR, _WRITE, _MATCH, _COPY = 1.25, 0.1, 1.9, 0.33


@torch.no_grad()
def wire(model: LlamaForCausalLM) -> None:
    """Overwrites the embeddings, and the first head of both groups in the first two layers."""
    config = model.config
    width, half = config.head_dim, config.head_dim // 2
    heads = config.num_attention_heads // config.num_key_value_heads
    rates = model.model.rotary_emb.inv_freq
    embeddings = model.model.embed_tokens.weight
    embeddings.zero_()
    embeddings[:, :WORD].normal_(std=_SPREAD)
    embeddings[:, CONSTANT] = _CONSTANT  # the same for all words: no word's odds depend on it
    for layer in model.model.layers:  # what is not wired says nothing yet
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    # Rotations of these change little over hundreds of tokens.
    slow = [i + part for part in (0, half) for i in range(half - CODE // 2, half)]
    for group in range(2):
        query, key = heads * group * width, group * width  # first rows of the group
        look, match = (model.model.layers[i].self_attn for i in range(2))
        for projection in (look.q_proj, match.q_proj):
            projection.weight[query : query + width] = 0
        for projection in (look.k_proj, match.k_proj, look.v_proj, match.v_proj):
            projection.weight[key : key + width] = 0
        # The first layer looks back by one word, or by two, and notes the word's code.
        for i in range(_FAST):
            turn = rates[i] * (group + 1)
            look.q_proj.weight[query + i, CONSTANT] = _NEAR * turn.cos()
            look.q_proj.weight[query + half + i, CONSTANT] = -_NEAR * turn.sin()
            look.k_proj.weight[key + i, CONSTANT] = _NEAR
        noted = (LAST, BEFORE_LAST)[group]
        for i in range(CODE):
            look.v_proj.weight[key + i, i] = 1
            look.o_proj.weight[noted + i, query + i] = _WRITE
        # The second finds where the same word (or the same last word) was followed by another.
        for i, place in enumerate(slow):
            match.q_proj.weight[query + place, (0, LAST)[group] + i] = _MATCH
            match.k_proj.weight[key + place, noted + i] = _MATCH
        for i in range(width):
            match.v_proj.weight[key + i, group * width + i] = 1
            match.o_proj.weight[group * width + i, query + i] = _COPY
