"""A loss on the tokens after the next one: a question's last token predicts its whole answer.

Where only the next token is predicted, the question's tokens look at the first token of an answer,
and nothing looks at the others before they are written. Methods that keep what was attended to
(H2O) then lose half of a number. Large models plan ahead (Wu et al. 2024, arXiv:2404.00859), and
some are trained to (Gloeckle et al. 2024, arXiv:2404.19737), by a loss as this one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM

from training.data import Batch


class Ahead(nn.Module):
    """What the model's last hidden state says of tokens further ahead. It is not exported.

    Args:
        width: of the hidden state.
        tokens: how many tokens after the next one are predicted.
    """

    def __init__(self, width: int, tokens: int = 2) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(tokens))
        for one in self.maps:
            nn.init.eye_(one.weight)

    def loss(
        self, model: LlamaForCausalLM, hidden: torch.Tensor, batch: Batch, alone: bool = False
    ) -> torch.Tensor:
        """Mean loss of the later tokens of answers, where the tokens between belong to the same
        answer. Rows in which several tokens are right are left out.

        Args:
            hidden: ``[rows, tokens, width]``.
            alone: only the maps learn from it, not the model: maps that know nothing yet would
                spoil a model that was trained before.
        """
        words = model.lm_head.weight
        if alone:
            hidden, words = hidden.detach(), words.detach()
        answer = torch.from_numpy(batch.answer).clone()
        answer[sorted({row for row, _ in batch.either})] = -1
        wanted = torch.from_numpy(batch.wanted)
        losses = [hidden.new_zeros(0)]
        for further, one in enumerate(self.maps, 1):
            next_one, later = answer[:, 1:-further], answer[:, 1 + further :]
            chosen = (later >= 0) & (later == next_one)
            logits = F.linear(one(hidden[:, : chosen.shape[1]][chosen]), words)
            targets = wanted[:, 1 + further :][chosen]
            losses.append(F.cross_entropy(logits.float(), targets, reduction="none"))
        every = torch.cat(losses)
        return every.sum() / max(len(every), 1)
