"""The networks trained here, their optimizers, and one step's loss."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from kvsketch.evaluation.inspection.retrieval import RECENT, SINK
from kvsketch.hf.interface import watched
from training.ahead import Ahead
from training.data import Batch
from training.wiring import wire

PEAK_RATE = 2e-3


@dataclass(frozen=True)
class Outcome:
    """How many answers of a batch there were, and how many of them without a fault, by kind."""

    count: Mapping[str, int]
    right: Mapping[str, int]

    @property
    def accuracy(self) -> float:
        return sum(self.right.values()) / max(sum(self.count.values()), 1)


@dataclass(frozen=True)
class Shape:
    """What a network is made of. ``wired``: it copies from the start (``wiring``)."""

    layers: int
    heads: int
    kv_heads: int
    wired: bool = False


def build_model(tokenizer: PreTrainedTokenizerBase, shape: Shape) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=32,
        max_position_embeddings=16384,
        # Slow frequencies: keys must match whatever their distance.
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config)
    if shape.wired:
        wire(model, tokenizer.bos_token_id)
    return model


class LeftOut:
    """Around the attention of a model that trains (``kvsketch.hf.interface.watched``): every KV
    head (all its query heads) is left out with a probability, and all of a layer with another, anew
    in every sequence, so that nothing may rest on one head. Its output is 0, or, in half of the
    sequences, that of a head that sees only first and recent tokens. Heads of the first two layers,
    which look at neighbours, are left out more often, and their output is always 0.

    In some sequences most heads, or most layers, see only those (``few``): there the model is to
    give no answer (``Batch.unanswered``), so that the few heads that read it are not enough. The
    first two layers stay there.

    Attributes:
        keep: bool ``[layers, rows, num_key_value_heads]``, drawn for one step; ``None``: all stay.
        near: bool [rows]: do heads that are left out see first and recent tokens?
    """

    NEAR = 2  # layers
    LEAST = 0.1  # of the probability of their heads, which applies twice
    FEWEST = 0.6875  # of the heads of the other layers, fewer than which are not to answer

    def __init__(self, config: LlamaConfig) -> None:
        self.layers = config.num_hidden_layers
        self.kv_heads = config.num_key_value_heads
        self.keep: torch.Tensor | None = None
        self.near = torch.zeros(0, dtype=torch.bool)

    def draw(self, rows: int, head: float, layer: float, few: float = 0.0) -> np.ndarray:
        """Draw what is left out next.

        Returns:
            bool [rows]: has the row too few heads to answer? Never all of them.
        """
        self.keep = torch.rand(self.layers, rows, self.kv_heads) >= head
        near = max(head, self.LEAST) if head else 0.0
        self.keep[: self.NEAR] = (torch.rand(2, self.NEAR, rows, self.kv_heads) >= near).all(0)
        self.keep &= torch.rand(self.layers, rows, 1) >= layer
        weak = torch.rand(rows) < few
        weak[-1] &= not weak.all()
        self.near = (torch.rand(rows) < 0.5) | weak
        far = self.layers - self.NEAR
        left = torch.randint(int(far * self.kv_heads * self.FEWEST), (2, rows)).amax(0)
        # One layer after another stays, at random or from the lowest on, or one head after another.
        layers = torch.rand(rows, far, 1).argsort(1)
        way = torch.randint(3, (rows, 1, 1))
        layers = torch.where(way == 0, layers, torch.arange(far)[:, None] * (way == 1))
        order = (layers + torch.rand(rows, far, self.kv_heads)).flatten(1)
        kept = (order.argsort(1).argsort(1) < left[:, None]).view(rows, far, -1).transpose(0, 1)
        self.keep[self.NEAR :, weak] = kept[:, weak]
        self.keep[: self.NEAR, weak] = True
        return weak.numpy()

    def __call__(self, kernel, module, query, key, value, *args, **kwargs):
        out, weights = kernel(module, query, key, value, *args, **kwargs)
        if not module.training or self.keep is None:
            return out, weights
        other = torch.zeros_like(out)  # [rows, tokens, heads, head_dim]
        rows = (self.near & (module.layer_idx >= self.NEAR)).nonzero()[:, 0]
        given = (part.index_select(0, rows) for part in (query, key, value))
        other = other.index_copy(0, rows, near_attention(*given, kwargs["scaling"]).to(out.dtype))
        keep = self.keep[module.layer_idx].repeat_interleave(out.shape[2] // self.kv_heads, 1)
        return torch.where(keep[:, None, :, None], out, other), weights


def near_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Causal attention to the first ``SINK`` and the last ``RECENT`` tokens, those that a head
    keeps that ``kvsketch inspect --retrieval`` restricts.

    Args:
        query: ``[rows, heads, n, head_dim]``.
        key, value: ``[rows, num_key_value_heads, n, head_dim]``.

    Returns:
        ``[rows, n, heads, head_dim]``.
    """
    group, n = query.shape[1] // key.shape[1], query.shape[2]
    parts = [query, *(part.repeat_interleave(group, 1) for part in (key, value))]
    query, key, value = (
        F.pad(part, (0, 0, 0, -n % RECENT)).unflatten(2, (-1, RECENT)) for part in parts
    )
    blocks = query.shape[2]

    def seen(part: torch.Tensor) -> torch.Tensor:
        first = part[:, :, :1, :SINK].expand(-1, -1, blocks, -1, -1)
        before = F.pad(part, (0, 0, 0, 0, 1, 0))[:, :, :-1]
        return torch.cat([first, before, part], 3)

    own = torch.arange(blocks * RECENT).view(blocks, RECENT, 1)
    first = torch.arange(SINK) <= own - RECENT
    back = torch.arange(RECENT)[:, None] - torch.arange(-RECENT, RECENT)
    recent = ((back >= 0) & (back < RECENT)).expand(blocks, -1, -1).clone()
    recent[0, :, :RECENT] = False
    mask = torch.cat([first, recent], 2)
    out = F.scaled_dot_product_attention(
        query, seen(key), seen(value), attn_mask=mask, scale=scaling
    )
    return out.flatten(2, 3)[:, :, :n].transpose(1, 2)


class Resting:
    """Around the attention of a model that trains (``kvsketch.hf.interface.watched``): how much of
    it does not rest on the first token. In large models most attention does; where it is spread
    over all tokens instead, what a token got so far (H2O) says little.

    Attributes:
        missing: by layer but the first two, where heads look at neighbours: -log(0.01 + the first
            token's share), the mean over some queries, all heads and sequences.
    """

    def __init__(self, queries: int = 32) -> None:
        self.queries = queries
        self.missing: list[torch.Tensor] = []

    def __call__(self, kernel, module, query, key, value, *args, **kwargs):
        if module.layer_idx > 1:
            at = torch.randint(1, query.shape[2], (self.queries,))
            group = query.shape[1] // key.shape[1]
            asked = query[:, :, at].unflatten(1, (-1, group)) * kwargs["scaling"]
            scores = torch.einsum("bhgqd,bhnd->bhgqn", asked, key).float()
            later = torch.arange(key.shape[2]) > at[:, None]
            shares = scores.masked_fill(later, -torch.inf).softmax(-1)
            self.missing.append(-(shares[..., 0] + 0.01).log().mean())  # 4.6 .. 0
        return kernel(module, query, key, value, *args, **kwargs)


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` in float32, all matrices of one shape at once: torch's own iterates in
    bfloat16, one matrix after another, which takes longer than the model on a CPU without bfloat16
    units. Only the matrices of which ``decaying`` has the id decay."""

    decaying: frozenset[int] = frozenset()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for matrix in group["params"]:
                shapes.setdefault(matrix.shape, []).append(matrix)
            for shape, matrices in shapes.items():
                updates = []
                for matrix in matrices:
                    state = self.state[matrix]
                    buffer = state.setdefault("momentum_buffer", torch.zeros_like(matrix))
                    buffer.lerp_(matrix.grad, 1 - group["momentum"])
                    updates.append(matrix.grad.lerp(buffer, group["momentum"]))
                rate = group["lr"] * 0.2 * max(shape) ** 0.5  # "match_rms_adamw"
                turned = _orthogonal(torch.stack(updates), group["ns_coefficients"])
                for matrix, update in zip(matrices, turned, strict=True):
                    if id(matrix) in self.decaying:
                        matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(update, alpha=-rate)


def _orthogonal(matrices: torch.Tensor, factors: tuple[float, float, float]) -> torch.Tensor:
    """Muon's Newton-Schulz iteration on ``matrices`` [n, rows, columns]."""
    a, b, c = factors
    tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if tall else matrices
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = found @ found.mT
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found.mT if tall else found


def build_optimizers(
    model: LlamaForCausalLM, ahead: Ahead, muon: bool
) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    chosen = {id(p) for p in matrices} if muon else set()
    rest = [p for p in model.parameters() if id(p) not in chosen] + list(ahead.parameters())
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    ]
    if muon:
        outputs = [p for n, p in model.named_parameters() if "o_proj" in n or "down_proj" in n]
        optimizers.append(
            Muon(matrices, lr=PEAK_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        )
        optimizers[-1].decaying = frozenset(map(id, outputs))
    return optimizers


def hidden_states(
    model: LlamaForCausalLM, ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Plain causal attention at any positions.

    `LlamaModel.forward` would read a jump in the positions as the start of another document.
    """
    inner = model.model
    hidden = inner.embed_tokens(ids)
    rotary = inner.rotary_emb(hidden, positions)
    for layer in inner.layers:
        hidden = layer(
            hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary
        )
    return inner.norm(hidden)


def loss_and_outcome(
    model: LlamaForCausalLM,
    batch: Batch,
    dtype: torch.dtype,
    rest: float = 0.0,
    left_out: LeftOut | None = None,
    ahead: tuple[float, Ahead, bool] | None = None,
) -> tuple[torch.Tensor, Outcome]:
    """Mean loss of the predicted tokens, and the answers predicted without a fault.

    ``rest``: weight of the attention that does not rest on the first token (``Resting``).
    ``left_out``: drawn for this batch. ``ahead``: weight of the tokens after the next one, what
    predicts them, and whether that alone learns from it."""
    resting = Resting()
    ids = torch.from_numpy(batch.ids)
    wanted = torch.from_numpy(batch.loss)[:, 1:]
    with contextlib.ExitStack() as within:
        for watch in [left_out] * (left_out is not None) + [resting] * bool(rest):
            within.enter_context(watched(model, watch))
        within.enter_context(torch.autocast("cpu", dtype, enabled=dtype != torch.float32))
        hidden = hidden_states(model, ids, torch.from_numpy(batch.positions))
        # Logits are the largest tensor: only compute those with a loss.
        logits = model.lm_head(hidden[:, :-1][wanted])
        later = ahead[0] * ahead[1].loss(model, hidden, batch, ahead[2]) if ahead else 0.0
    targets = torch.from_numpy(batch.wanted)[:, 1:][wanted]
    wrong = logits.argmax(-1) != targets
    if batch.either:
        loss, wrong = _either(logits.float(), targets, wrong, _places(batch))
    else:
        loss = F.cross_entropy(logits.float(), targets)
    loss = loss + later
    if rest:
        loss = loss + rest * torch.stack(resting.missing).mean()
    answers = batch.answer[:, 1:][wanted.numpy()]
    numbers = np.unique(answers[answers >= 0])
    missed = np.unique(answers[wrong.numpy() & (answers >= 0)])
    return loss, _outcome(numbers, missed, batch.kinds)


def _places(batch: Batch) -> dict[int, Sequence[int]]:
    """Tokens that are as right, by number of the predicted token."""
    number = np.cumsum(batch.loss[:, 1:]).reshape(batch.loss[:, 1:].shape) - 1
    return {int(number[r, at - 1]): some for (r, at), some in batch.either.items()}


def _either(
    logits: torch.Tensor,
    targets: torch.Tensor,
    wrong: torch.Tensor,
    places: Mapping[int, Sequence[int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss, and what is wrong, where some places have several right tokens: what counts there
    is the probability of all of them."""
    where = torch.tensor(list(places))
    some = [torch.tensor(sorted(set(ids))) for ids in places.values()]
    right = torch.nn.utils.rnn.pad_sequence(some, batch_first=True, padding_value=-1)
    beside = right < 0
    chosen = logits[where]
    together = chosen.gather(1, right.clamp(min=0)).masked_fill(beside, -torch.inf)
    loss = F.cross_entropy(logits, targets, reduction="none")
    loss = loss.index_copy(0, where, chosen.logsumexp(1) - together.logsumexp(1))
    found = (right == chosen.argmax(1, keepdim=True)).any(1)
    return loss.mean(), wrong.index_copy(0, where, ~found)


def _outcome(numbers: np.ndarray, missed: np.ndarray, kinds: Mapping[int, str]) -> Outcome:
    faulty = set(missed.tolist())
    count: dict[str, int] = {}
    right: dict[str, int] = {}
    for number in numbers.tolist():
        kind = kinds.get(number, "")
        count[kind] = count.get(kind, 0) + 1
        right[kind] = right.get(kind, 0) + (number not in faulty)
    return Outcome(count, right)
