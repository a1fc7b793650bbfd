"""A start in which a network copies: its first two layers are wired as an induction circuit.

Copying is all that the tasks here have in common. From random weights, with ten thousand words, it
had not begun after a million tokens; wired, the right word is among the first at step 0, and
training goes on from there: nothing is held fixed.

The first layer notes the codes of the last four words. The second finds where the present word was
last, or the last word was before last (and the third last fourth last, so that both halves of a key
count), and says what stands there. Two further heads of it take back what was said so a short while
ago: lists must not repeat themselves.

The residual is laid out as: the word's own embedding, which its code is the first part of, the
codes of the last four words, and a constant.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

CODES = (22, 22, 16, 16)  # coordinates that words are told apart by, from the last on back
WORD = 51  # of a word's own embedding
PLACES = tuple(WORD + sum(CODES[:i]) for i in range(4))
CONSTANT = 127
_SPREAD, _CONSTANT = 0.1, 0.5
_FAST = 6  # frequencies that tell neighbours apart
_WINDOW = (3, 4)  # frequencies that tell some forty tokens from what is further away
_NEAR, _RECENT, _NOTE, _MATCH, _COPY, _TAKE_BACK = 1.25, 1.2, 0.1, 2.0, 0.5, 0.4


@torch.no_grad()
def wire(model: LlamaForCausalLM) -> None:
    """Overwrites the embeddings, the attention of the first two layers, and everything that is
    added to the residual. For heads of 32, two to a group, two groups, width 128."""
    config = model.config
    width, half = config.head_dim, config.head_dim // 2
    rates = model.model.rotary_emb.inv_freq
    embeddings = model.model.embed_tokens.weight
    embeddings.zero_()
    embeddings[:, :WORD].normal_(std=_SPREAD)
    embeddings[:, CONSTANT] = _CONSTANT  # the same for all words: no word's odds depend on it
    for layer in model.model.layers:  # what is not wired says nothing yet
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    look, match = (model.model.layers[i].self_attn for i in range(2))
    for layer in (look, match):
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
            projection.weight.zero_()
    # Rotations of these change little over hundreds of tokens.
    slow = [i + part for part in (0, half) for i in range(half - CODES[0] // 2, half)]
    for group in range(2):
        key = group * width  # first row of the group's keys and values
        for part in range(2):
            query, back = (2 * group + part) * width, 2 * part + group
            for i in range(_FAST):
                turn = rates[i] * (back + 1)
                look.q_proj.weight[query + i, CONSTANT] = _NEAR * turn.cos()
                look.q_proj.weight[query + half + i, CONSTANT] = -_NEAR * turn.sin()
            for i in range(CODES[back]):
                look.o_proj.weight[PLACES[back] + i, query + i] = _NOTE
            # The present word stood last, or the last one before last.
            sought, gain = (0, PLACES[0])[group], (_COPY, -_TAKE_BACK)[part]
            for i, place in enumerate(slow):
                match.q_proj.weight[query + place, sought + i] = _MATCH
            if group:
                for i, place in enumerate(reversed(slow[-CODES[2] :])):
                    match.q_proj.weight[query + place, PLACES[2] + i] += _MATCH
            if part:
                for i in _WINDOW:
                    match.q_proj.weight[query + i, CONSTANT] = _RECENT
            first = group * width
            for i in range(min(width, WORD - first)):
                match.o_proj.weight[first + i, query + i] = gain
        for i in range(_FAST):
            look.k_proj.weight[key + i, CONSTANT] = _NEAR
        for i in range(CODES[0]):
            look.v_proj.weight[key + i, i] = 1
        for i, place in enumerate(slow):
            match.k_proj.weight[key + place, PLACES[group] + i] = _MATCH
        if group:
            for i, place in enumerate(reversed(slow[-CODES[3] :])):
                match.k_proj.weight[key + place, PLACES[3] + i] += _MATCH
        for i in _WINDOW:
            match.k_proj.weight[key + i, CONSTANT] = _RECENT
        for i in range(min(width, WORD - group * width)):
            match.v_proj.weight[key + i, group * width + i] = 1
