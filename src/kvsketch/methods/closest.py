"""Grouping of slots by merging the closest, in rounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.kernels import native, pairs
from kvsketch.methods.groups import Groups
from kvsketch.methods.nearest import SlotBlocks, cheapest
from kvsketch.methods.points import Given, KeysAndValues, Points
from kvsketch.slots import Slots

# Coordinates of points that the compiled kernel is given at a time, at least one row per thread:
# 16 MB in float32.
_POINTS = 1 << 22


def group_closest(
    slots: Slots,
    weight: Tensor,
    count: int | Tensor,
    share: float,
    chosen: Tensor | None = None,
    sizes: Tensor | None = None,
) -> tuple[Groups, Tensor]:
    """Group slots by merging the closest in rounds (``_Rows.edges``). A round removes at most the
    share ``share`` of the slots: a page that is slightly above its budget takes one round, a prompt
    several. Rows that have reached ``count`` groups take no part in further rounds.

    The error of merging two slots is about the distance of their keys times that of their values.
    Equal keys alone are therefore not enough for a good pair, so that values count as well as keys
    (``points.KeysAndValues``).

    Args:
        slots: ``[batch, heads, N, ...]``, R = batch x heads.
        weight: ``[R, n]``, float32 or float64, >= 0. Slots of weight 0 are grouped with others only
            if too few groups are left.
        count: groups per row, 1 <= count <= n, or int64 ``[R]``.
        share: in (0, 1/2].
        chosen: the slots that are grouped, int64 ``[R, n]``, ascending. None: all.
        sizes: the number of these that belong to a row, int64 ``[R]``. They are the first ones, and
            the others have weight 0. None: all.

    Returns:
        The groups, and bool ``[R]``: False for a row in which a round found too few edges, because
        more than half of its slots must go or many costs are equal, and whose groups are undefined.
    """
    live = (weight > 0).to(weight.dtype)
    if chosen is None:
        chosen = torch.arange(weight.shape[1], device=weight.device).expand(weight.shape)
    else:
        live = live.new_zeros(len(live), slots.count).scatter_add_(1, chosen, live)
    points = KeysAndValues(slots, live)
    if sizes is None:
        sizes = torch.full((len(weight),), weight.shape[1], device=weight.device)
    wanted = torch.as_tensor(count, device=weight.device).expand(len(weight))
    if pairs.compiled(weight):
        index, found = _compiled(points, points.places(chosen), weight, sizes, wanted, share)
        return _groups(index, wanted, found), found
    rows = _Rows(points, points.places(chosen), weight, sizes, None)
    found = torch.ones_like(wanted, dtype=torch.bool)
    while True:
        less = (rows.sizes.double() * share).long().clamp(min=1)
        left = torch.maximum(wanted, rows.sizes - less)
        edges, found = rows.edges(left, found)
        more = found & (left > wanted)
        if not bool(more.any()):
            return _groups(rows.grouped(edges), wanted, found), found
        rows = rows.merged(edges, left, more)


def _compiled(
    points: KeysAndValues,
    places: Tensor,
    weight: Tensor,
    sizes: Tensor,
    wanted: Tensor,
    share: float,
) -> tuple[Tensor, Tensor]:
    """The groups, int64 ``[R, n]``, and which rows have some, bool ``[R]``."""
    rows, n = weight.shape
    step = max(native.threads(), _POINTS // (n * points.dim))
    found = []
    for start in range(0, rows, step):
        some = slice(start, start + step)
        formed = points.formed(torch.arange(rows, device="cpu")[some], places[some])
        found.append(pairs.grouped(formed, weight[some], sizes[some], wanted[some], share))
    indices, enough = zip(*found, strict=True)
    return torch.cat(indices), torch.cat(enough)


def _groups(index: Tensor, count: Tensor, found: Tensor) -> Groups:
    return Groups(torch.where(found.unsqueeze(1), index, 0), int(count.max()))


@dataclass(frozen=True)
class _Edges:
    """The merges of one round, all ``[R, width]``.

    Attributes:
        taken: bool, the slots that are merged into another one.
        root: int64, the column of the slot into which a slot is merged, or its own column.
        number: int64, the group of each slot.
    """

    taken: Tensor
    root: Tensor
    number: Tensor


@dataclass(frozen=True)
class _Rows:
    """R rows of slots before a round.

    Attributes:
        points: the points of the slots.
        places: the place of each slot's point, int64 ``[R, width]``.
        weight: ``[R, width]``, 0 for dead slots and after the end of a row.
        sizes: the number of columns of each row, int64 ``[R]``.
        index: the columns into which the slots before the first round were merged, int64 ``[R,
            n]``. None: this is the first round.
    """

    points: Points
    places: Tensor
    weight: Tensor
    sizes: Tensor
    index: Tensor | None

    def edges(self, left: Tensor, found: Tensor) -> tuple[_Edges, Tensor]:
        """The edges of the nearest-neighbour forest after whose merging ``left`` (``[R]``) slots of
        each row remain, and which of the rows ``found`` (bool ``[R]``) have enough edges.

        Each slot has an edge to its cheapest partner within its block (``nearest.cheapest``). An
        edge counts only if it leads to a slot whose own (cost, index) is smaller, so that there are
        no cycles. The cheapest edges are taken, and each connected component is one group."""
        rows, n = self.weight.shape
        live = self.weight > 0
        total = live.sum(1, keepdim=True)
        wanted = (total - left.unsqueeze(1)).clamp_(min=0) * found.unsqueeze(1)
        own = torch.arange(n, device=live.device).expand(rows, n)
        taken, root, most = torch.zeros_like(live), own, int(wanted.max())
        if most:
            some = wanted.squeeze(1).nonzero().squeeze(1)
            blocks = SlotBlocks.of(some, self.sizes[some], n)
            cost, partner = cheapest(self.points, self.places, self.weight, blocks)
            theirs = cost.gather(1, partner)
            falling = (theirs < cost) | ((theirs == cost) & (partner < own))
            # Of two slots that are each other's partners the first stays, whatever the rounding.
            mutual = partner.gather(1, partner) == own
            falling = torch.where(mutual, partner < own, falling)
            price = cost.masked_fill_(~falling, torch.inf)
            lowest, index = price.topk(most, largest=False, sorted=True)
            chosen = own[:, :most] < wanted
            found = found & ~(chosen & torch.isinf(lowest)).any(1)
            # In a row without enough edges a path may be a cycle.
            taken.scatter_(1, index, chosen & found.unsqueeze(1))
            root = torch.where(taken, partner, own)
            end = root.gather(1, index)
            while not torch.equal(end, further := root.gather(1, end)):
                root, end = root.scatter(1, index, further), further
        number = (live & ~taken).cumsum(1).sub_(1).gather(1, root)
        spare = torch.minimum(total - wanted, left.unsqueeze(1) - 1)
        number = torch.where(live & found.unsqueeze(1), number, spare)
        return _Edges(taken, root, number), found

    def grouped(self, edges: _Edges) -> Tensor:
        """The groups of the slots from before the first round, int64 ``[R, n]``."""
        return edges.number if self.index is None else edges.number.gather(1, self.index)

    def merged(self, edges: _Edges, left: Tensor, more: Tensor) -> _Rows:
        """The rows after the round. Points are computed only for rows with further rounds
        (``more``, bool ``[R]``)."""
        rows, n = self.weight.shape
        given, places = self.points, self.places
        weight = self.weight.clone(memory_format=torch.contiguous_format)
        if isinstance(given, Given):
            points = given
        else:  # the points of merged slots will differ
            some = more.nonzero().squeeze(1)
            points = Given(given.formed(some, places[some]))
            places = torch.zeros_like(places)
            columns = torch.arange(n, device=places.device).expand(len(some), n)
            places[some] = points.places(columns)
        # All members of groups of two or more, in order, with the numbers of these groups.
        taken = edges.taken & more.unsqueeze(1)
        start = torch.arange(0, rows * n, n, device=places.device).unsqueeze(1)
        root = (edges.root + start).flatten()
        grown = torch.zeros_like(root, dtype=torch.bool)
        grown[root[taken.flatten()]] = True
        member = (taken.flatten() | grown).nonzero().squeeze(1)
        grown = grown.nonzero().squeeze(1)
        group = torch.searchsorted(grown, root[member])
        mine = weight.flatten()[member]
        total = mine.new_zeros(len(grown)).scatter_add_(0, group, mine)
        points.merge(places.flatten()[member], places.flatten()[grown], group, mine, total)
        weight.view(-1)[grown] = total
        kept = (weight > 0) & ~edges.taken
        width = int(left.max())
        target = torch.where(kept, edges.number, width)

        def moved(table: Tensor) -> Tensor:
            return table.new_zeros(rows, width + 1).scatter_(1, target, table)[:, :width]

        return _Rows(points, moved(places), moved(weight), left, self.grouped(edges))
