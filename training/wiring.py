"""A start in which a network copies: it is wired as several induction circuits.

Copying is all that the tasks here have in common. From random weights, with ten thousand words, it
had not begun after a million tokens; wired, the right word is among the first at step 0, and
training goes on from there: nothing is held fixed.

Four KV heads of the first layer and two of the second note the codes of the last four words, each
word twice in the first and once in the second. The other heads of the second layer, and all of the
layers above, find where the present word was last, or the last word was before last (and
the third last fourth last, so that both halves of a key count), and say what stands there. No
circuit rests on one KV head or on one layer. Where nothing matches, attention rests on the token
that every text begins with. Some heads take back what was said a short while ago: lists must not
repeat themselves.

The residual is laid out as: the word's own embedding, which its code is the first part of, the
codes of the last four words, what marks the first token, and a constant.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

CODES = (20, 20, 16, 16)  # coordinates that words are told apart by, from the last on back
WORD = 54  # of a word's own embedding
PLACES = tuple(WORD + sum(CODES[:i]) for i in range(4))
FIRST, CONSTANT = 126, 127
KV_HEADS = 4
LOOKS = (((1, 2), (3, 4), (2, 1), (4, 3)), ((1, 2), (3, 4)))  # words back, by layer and KV head
_SPREAD, _CONSTANT = 0.4, 2.0  # as large as the steps of the optimiser need them to be
_SHARPNESS = 0.3  # of the first odds
_FAST = 6  # frequencies that tell neighbours apart
_WINDOW = (3, 4)  # frequencies that tell some forty tokens from what is further away
_NEAR, _RECENT, _NOTE, _MATCH = 1.25, 1.2, 0.2, 2.0
_COPY, _TAKE_BACK, _REST, _NOISE = 0.11, 0.09, 0.5, 0.02


@torch.no_grad()
def wire(model: LlamaForCausalLM, bos: int) -> None:
    """Overwrites the embeddings, the attention, and everything that is added to the residual.

    For heads of 32, two to a KV head, four KV heads, width 128; ``bos`` is the id of the token that
    begins a text."""
    width = model.config.head_dim
    embeddings = model.model.embed_tokens.weight
    embeddings.zero_()
    embeddings[:, :WORD].normal_(std=_SPREAD)
    embeddings[:, CONSTANT] = _CONSTANT  # the same for all words: no word's odds depend on it
    embeddings[bos] = 0
    embeddings[bos, FIRST] = _CONSTANT
    model.model.norm.weight.fill_(_SHARPNESS)
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.weight.zero_()  # what is not wired says nothing yet
        layer.mlp.down_proj.weight.zero_()
        for name in ("q_proj", "k_proj", "v_proj"):
            # Heads that are wired alike must be able to part.
            getattr(layer.self_attn, name).weight.normal_(std=_NOISE)
        attention = layer.self_attn
        looks = LOOKS[i] if i < len(LOOKS) else ()
        for head, backs in enumerate(looks):
            _look(attention, head * width, backs, model.model.rotary_emb.inv_freq)
        for head in range(len(looks), KV_HEADS):
            _match(attention, head, width)


def _look(
    attention: torch.nn.Module, key: int, backs: tuple[int, int], rates: torch.Tensor
) -> None:
    """The head with keys from row ``key`` on notes the codes of the words so far back."""
    half = len(rates)
    for part, back in enumerate(backs):
        query = 2 * (key + part * half)
        for i in range(_FAST):
            turn = rates[i] * back
            attention.q_proj.weight[query + i, CONSTANT] = _NEAR * turn.cos()
            attention.q_proj.weight[query + half + i, CONSTANT] = -_NEAR * turn.sin()
        for i in range(CODES[back - 1]):
            attention.o_proj.weight[PLACES[back - 1] + i, query + i] = _NOTE
    for i in range(_FAST):
        attention.k_proj.weight[key + i, CONSTANT] = _NEAR
    for i in range(CODES[0]):
        attention.v_proj.weight[key + i, i] = 1


def _match(attention: torch.nn.Module, head: int, width: int) -> None:
    """KV head ``head`` finds the same words. Even ones compare the present word with the last, odd
    ones the last with the last but one."""
    half, key, odd = width // 2, head * width, head % 2
    # Rotations of these change little over hundreds of tokens; those of the slowest nowhere.
    slow = [i + at for at in (0, half) for i in range(half - 1 - CODES[0] // 2, half - 1)]
    first = 0 if head < 2 else WORD - width  # of the coordinates it copies
    for part in range(2):
        query = 2 * key + part * width
        back = part == 1 and head < 2
        for i, place in enumerate(slow):
            attention.q_proj.weight[query + place, (PLACES[0] if odd else 0) + i] += _MATCH
        if odd:
            for i, place in enumerate(reversed(slow[-CODES[2] :])):
                attention.q_proj.weight[query + place, PLACES[2] + i] += _MATCH
        if back:
            for i in _WINDOW:
                attention.q_proj.weight[query + i, CONSTANT] += _RECENT
        attention.q_proj.weight[query + half - 1, CONSTANT] += _REST
        for i in range(width):
            attention.o_proj.weight[first + i, query + i] = -_TAKE_BACK if back else _COPY
    for i, place in enumerate(slow):
        attention.k_proj.weight[key + place, PLACES[odd] + i] += _MATCH
    if odd:
        for i, place in enumerate(reversed(slow[-CODES[3] :])):
            attention.k_proj.weight[key + place, PLACES[3] + i] += _MATCH
    for i in _WINDOW:
        attention.k_proj.weight[key + i, CONSTANT] += _RECENT
    attention.k_proj.weight[key + half - 1, FIRST] += 4 * _REST
    for i in range(width):
        attention.v_proj.weight[key + i, first + i] += 1
