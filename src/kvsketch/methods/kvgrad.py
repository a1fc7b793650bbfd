"""KVgrad: attention of a second reading, weighted by how much the model's result depends on it."""

from __future__ import annotations

from dataclasses import replace

from kvsketch.methods.kvzip_plus import KVzipPlus


class KVgrad(KVzipPlus):
    """Keep the tokens whose contribution to a second reading the model's last hidden states depend
    on most.

    As KVzip+, but the attention that a query gives a token is multiplied by the norm of the
    gradient of the sum of squares of the last layer's hidden states by the attention's output at
    that query, instead of being divided by the norm of the hidden state there; and 512 tokens are
    read again at a time (kvpress's KVgradPress: the same tokens are kept). The gradient is of the
    second reading's own tokens; of a padded batch each row has its own.

    It needs gradients: a forward of every part whose activations are kept, and a backward. The
    model does not change; its parameters are frozen meanwhile. docs/errors.md has the cost, next to
    KVzip's. Memory: the activations of about 540 tokens of all layers.
    """

    name = "kvgrad"
    paper = "KVgrad (openreview.net/forum?id=cg1wTCJjjk)"
    requires = replace(KVzipPlus.requires, weights="gradient", part=512)
