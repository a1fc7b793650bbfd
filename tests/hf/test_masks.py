"""What is read from attention masks: padding, hidden tokens, and queries that are not causal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch import UnsupportedError
from kvsketch.hf.masks import PLAIN, Masks, View, over_slots


def causal(live: torch.Tensor, q: int) -> torch.Tensor:
    """transformers' bool mask of the last ``q`` tokens, given which tokens are padding."""
    n = live.shape[1]
    return torch.ones(q, n, dtype=torch.bool).tril(n - q)[None, None] & live[:, None, None, :]


def forms(mask: torch.Tensor) -> list[torch.Tensor]:
    lowest = torch.finfo(torch.float32).min
    return [mask, torch.zeros(mask.shape).masked_fill(~mask, lowest)]


def test_no_mask_says_nothing() -> None:
    assert Masks().read(None, 2, 5, 5) is PLAIN


@settings(max_examples=40)
@given(
    pads=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    old=st.integers(0, 6),
    q=st.integers(5, 8),
    settled=st.booleans(),
)
def test_padding(pads: list[int], old: int, q: int, settled: bool) -> None:
    """Padding at the start of the new tokens is recognised in every form of mask, also where the
    mask lets a padded query see nothing; no other token counts as hidden."""
    live = torch.ones(len(pads), old + q, dtype=torch.bool)
    for row, count in enumerate(pads):
        live[row, old : old + count] = False
    new = live[:, old:]
    mask = causal(live, q)
    blind = mask & new[:, None, :, None]
    for given_mask in (*forms(mask), *forms(blind), live):
        masks = Masks()
        masks.settled = settled
        view = masks.read(given_mask, len(pads), q, old + q)
        assert view.hidden is None
        assert view.chunk is None
        assert view.shown == 0
        if not any(pads):
            assert view.live is None
            assert view.newest is None
            assert view.causal is None
        else:
            assert view.live is not None
            assert view.newest is not None
            assert view.causal is not None
            assert torch.equal(view.live, live)
            assert torch.equal(view.newest, new)
            assert torch.equal(view.causal, new)


def test_queries_that_see_something_else_are_not_causal() -> None:
    """A query that sees a later token, or misses an earlier one, is not marked as causal, and its
    mask is kept."""
    mask = causal(torch.ones(1, 8, dtype=torch.bool), 4)
    mask[0, 0, 1, 7] = True
    mask[0, 0, 2, 0] = False
    masks = Masks()
    masks.settled = True
    view = masks.read(mask, 1, 4, 8)
    assert view.causal is not None
    assert view.causal.tolist() == [[True, False, False, True]]
    assert view.chunk is not None
    assert torch.equal(view.chunk, mask[..., 4:])
    assert view.hidden is not None
    assert view.hidden.nonzero().tolist() == [[0, 0, 2, 0]]


def test_a_token_that_one_branch_sees_is_no_padding() -> None:
    tree = torch.eye(3, dtype=torch.bool)[None, None]
    mask = torch.cat([torch.ones(1, 1, 3, 5, dtype=torch.bool), tree], dim=-1)
    view = Masks().read(mask, 1, 3, 8)
    assert view.live is None
    assert view.chunk is not None


def test_the_newest_mask_decides_until_something_is_compressed() -> None:
    masks = Masks()
    live = torch.ones(1, 6, dtype=torch.bool)
    live[0, :2] = False
    masks.read(causal(live, 6), 1, 6, 6)
    shown = torch.ones(1, 7, dtype=torch.bool)
    assert masks.read(causal(shown, 1), 1, 1, 7).live is None
    masks = Masks()
    masks.read(causal(live, 6), 1, 6, 6)
    masks.settled = True
    view = masks.read(causal(shown, 1), 1, 1, 7)
    assert view.shown == 2
    assert view.live is not None
    assert view.live.tolist() == [[False] * 2 + [True] * 5]
    assert masks.read(None, 1, 1, 8).shown == 2


def test_one_mask_is_read_once_a_forward_and_again_in_the_next() -> None:
    masks = Masks()
    mask = torch.ones(1, 4, dtype=torch.bool)
    mask[0, 0] = False
    first = masks.read(mask, 1, 4, 4)
    assert masks.read(mask, 1, 4, 4) is first
    longer = torch.cat([mask, mask[:, -1:]], dim=1)
    later = masks.read(longer, 1, 1, 5)
    assert later.newest is None
    masks.forget()
    assert masks.read(longer, 1, 1, 5) is not later


@pytest.mark.parametrize("heads", [1, 4])
def test_hidden_tokens_become_hidden_slots(heads: int) -> None:
    """Slots are hidden by their positions, for one mask of all heads and for a mask per head."""
    hidden = torch.zeros(1, heads, 2, 6, dtype=torch.bool)
    hidden[0, -1, 1, 3] = True
    positions = torch.tensor([[[0.0, 3.0, 5.0], [3.0, 4.0, 5.0]]])  # two KV heads
    mask = over_slots(View(hidden=hidden), 4, positions, None)
    assert mask is not None
    assert mask.shape == (1, 4, 2, 3)
    wanted = torch.ones(4, 2, 3, dtype=torch.bool)
    for head in range(4) if heads == 1 else [3]:
        wanted[head, 1, 1 if head < 2 else 0] = False
    assert torch.equal(mask[0], wanted)


def test_masses_that_stand_for_several_tokens_are_not_hidden() -> None:
    hidden = torch.ones(1, 1, 1, 6, dtype=torch.bool)
    positions = torch.zeros(1, 2, 3)
    over_slots(View(hidden=hidden), 4, positions, torch.tensor([[[1.0, 0.0, 1.0]] * 2]))
    with pytest.raises(UnsupportedError, match="represent several tokens"):
        over_slots(View(hidden=hidden), 4, positions, torch.tensor([[[1.0, 0.5, 1.0]] * 2]))


@pytest.mark.parametrize(
    "mask", [torch.ones(1, 1, 4, 3).bool(), torch.ones(4).bool(), "all", torch.ones(1, 3).bool()]
)
def test_what_is_no_mask_over_all_tokens_is_named(mask: object) -> None:
    with pytest.raises(UnsupportedError, match="reads masks over all 4 tokens"):
        Masks().read(mask, 1, 4, 4)
