"""Grouping by merging the closest slots, in rounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..slots import Slots
from .groups import Groups
from .nearest import Blocks, cheapest
from .points import Given, KeysAndValues, Points


def group_closest(
    slots: Slots,
    weight: Tensor,
    count: int | Tensor,
    share: float,
    chosen: Tensor | None = None,
    sizes: Tensor | None = None,
) -> tuple[Groups, Tensor]:
    """Group slots by merging the closest in rounds, each of which leaves all but ``share`` of the
    slots (``group_pairs``): a full page that is only a little too full takes one round, a prompt
    several. Rows that have as few groups as they may drop out.

    Merging two slots errs by how far apart their keys are times how far apart their values are, so
    that equal keys are not yet a good pair: values count beside keys (``points.KeysAndValues``).

    Args:
        slots: ``[batch, heads, N, ...]``, R = batch x heads.
        weight: ``[R, n]``, float32 or float64, as for ``group_pairs``.
        count: groups per row, 1 <= count <= n, or int64 ``[R]``.
        share: in (0, 1/2].
        chosen: which slots are grouped, int64 ``[R, n]``, rising; None: all.
        sizes: how many of these are a row's, the first ones, int64 ``[R]``; the others have weight
            0. None: all.

    Returns:
        The groups, and bool ``[R]``: False for a row in which ``group_pairs`` found too few in
        some round, whose groups mean nothing.
    """
    live = (weight > 0).to(weight.dtype)
    if chosen is None:
        chosen = torch.arange(weight.shape[1], device=weight.device).expand(weight.shape)
    else:
        live = live.new_zeros(len(live), slots.count).scatter_add_(1, chosen, live)
    points = KeysAndValues(slots, live)
    if sizes is None:
        sizes = torch.full((len(weight),), weight.shape[1], device=weight.device)
    rows = _Rows(points, points.places(chosen), weight, sizes, None)
    wanted = torch.as_tensor(count, device=weight.device).expand(len(weight))
    found = torch.ones_like(wanted, dtype=torch.bool)
    while True:
        less = (rows.sizes.double() * share).long().clamp(min=1)
        left = torch.maximum(wanted, rows.sizes - less)
        edges, found = rows.edges(left, found)
        more = found & (left > wanted)
        if not bool(more.any()):
            return _groups(rows.grouped(edges), wanted, found), found
        rows = rows.merged(edges, left, more)


def group_pairs(points: Tensor, weight: Tensor, count: int | Tensor) -> tuple[Groups, Tensor]:
    """Group by merging only the closest: n - count edges of the nearest-neighbour forest.

    What it costs to merge two slots is what k-means loses by it (``nearest.cheapest``). Each slot
    points to its cheapest partner within its block; an edge counts only if it leads to a slot whose
    own (cost, index) is less, so that there are no cycles; the cheapest edges are taken, and what
    hangs together is one group.

    Args:
        points: ``[R, n, d]``, float32 or float64; the mean should be near 0.
        weight: ``[R, n]``, >= 0. Slots of weight 0 are grouped with no other while groups are left.
        count: groups per row, 1 <= count <= n, or int64 ``[R]``.

    Returns:
        The groups, and bool ``[R]``: False for a row whose forest has too few edges, because more
        than half its slots must go or many costs are equal; its groups mean nothing.
    """
    rows, n = weight.shape
    left = torch.as_tensor(count, device=weight.device).expand(rows)
    found = torch.ones_like(left, dtype=torch.bool)
    given, columns = Given(points), torch.arange(n, device=weight.device).expand(rows, n)
    whole = _Rows(given, given.places(columns), weight, torch.full_like(left, n), None)
    edges, found = whole.edges(left, found)
    return _groups(edges.number, left, found), found


def _groups(index: Tensor, count: Tensor, found: Tensor) -> Groups:
    return Groups(torch.where(found.unsqueeze(1), index, 0), int(count.max()))


@dataclass(frozen=True)
class _Edges:
    """What is merged in a round, all ``[R, width]``.

    Attributes:
        taken: bool: slots that become part of another one.
        root: int64: the column of that one, and of each other slot its own.
        number: int64: the group that each slot is in.
    """

    taken: Tensor
    root: Tensor
    number: Tensor


@dataclass(frozen=True)
class _Rows:
    """R rows of slots before a round.

    Attributes:
        points: of the slots.
        places: where a slot's point is, int64 ``[R, width]``.
        weight: ``[R, width]``; 0 for dead slots and behind a row's end.
        sizes: columns that are a row's, int64 ``[R]``.
        index: columns of the slots that there were before the first round, int64 ``[R, n]``; None:
            this is the first.
    """

    points: Points
    places: Tensor
    weight: Tensor
    sizes: Tensor
    index: Tensor | None

    def edges(self, left: Tensor, found: Tensor) -> tuple[_Edges, Tensor]:
        """The edges that leave ``left`` (``[R]``) slots of each row, and in which of the rows that
        are ``found`` (bool ``[R]``) there are enough."""
        rows, n = self.weight.shape
        live = self.weight > 0
        total = live.sum(1, keepdim=True)
        wanted = (total - left.unsqueeze(1)).clamp_(min=0) * found.unsqueeze(1)
        own = torch.arange(n, device=live.device).expand(rows, n)
        taken, root, most = torch.zeros_like(live), own, int(wanted.max())
        if most:
            some = wanted.squeeze(1).nonzero().squeeze(1)
            blocks = Blocks.of(some, self.sizes[some], n)
            cost, partner = cheapest(self.points, self.places, self.weight, blocks)
            theirs = cost.gather(1, partner)
            falling = (theirs < cost) | ((theirs == cost) & (partner < own))
            # Of two that are each other's partners the first stays, whatever rounding says.
            mutual = partner.gather(1, partner) == own
            falling = torch.where(mutual, partner < own, falling)
            price = cost.masked_fill_(~falling, torch.inf)
            lowest, index = price.topk(most, largest=False, sorted=True)
            chosen = own[:, :most] < wanted
            found = found & ~(chosen & torch.isinf(lowest)).any(1)
            # Without enough edges a path may be a circle, which leads to no slot.
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
        """The groups that the slots before the first round are in, int64 ``[R, n]``."""
        return edges.number if self.index is None else edges.number.gather(1, self.index)

    def merged(self, edges: _Edges, left: Tensor, more: Tensor) -> _Rows:
        """The rows after the round; points only of those that go on (``more``, bool ``[R]``)."""
        rows, n = self.weight.shape
        given, places = self.points, self.places
        weight = self.weight.clone(memory_format=torch.contiguous_format)
        if isinstance(given, Given):
            points = given
        else:  # merged ones will differ
            some = more.nonzero().squeeze(1)
            points = Given(given.formed(some, places[some]))
            places = torch.zeros_like(places)
            columns = torch.arange(n, device=places.device).expand(len(some), n)
            places[some] = points.places(columns)
        # Everything in groups of two and more, in order, with numbers of these groups.
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
