"""The base class of compressors: (slots, budget, observed queries) -> slots."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvsketch import random_numbers
from kvsketch.errors import InputError
from kvsketch.methods.order import order
from kvsketch.methods.ragged import compress_ragged
from kvsketch.methods.requirements import FORMER, Requirements
from kvsketch.methods.rotation import Turn
from kvsketch.methods.window import check_window, split
from kvsketch.observed import Observed
from kvsketch.slots import Slots
from kvsketch.state import Reader, State


class Compressor(random_numbers.Seeded, ABC):
    """Base class of all compressors. A new method overrides ``reduce`` (and ``observe``, if it uses
    queries) and is registered in ``methods/__init__.py``.

    Input may be weighted (the output of an earlier compression) and may hold dead slots; the
    order of the slots is the order of the tokens, and the output keeps it.

    Between calls a method stores only the state of the random generator and per-row state that
    ``map_batch`` handles (D2O's thresholds). Numbers of a slot are stored with it, in
    ``Slots.score``.

    The result for a row of the batch depends on its own slots and queries, its number in the batch,
    the seed and earlier calls. It does not depend on the contents or the number of other rows,
    except for the rounding of products that are computed together.

    Args:
        seed: seeds the object's own ``torch.Generator``; the same seed gives the same bytes.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    #: what is proved about the output, in one line; "": nothing
    guarantee: ClassVar[str] = ""
    #: what it requires from what calls it
    requires: ClassVar[Requirements] = Requirements()

    #: whether ``reduce`` accepts a budget for each head; if not, it is called once for every
    #: distinct budget
    ragged: ClassVar[bool] = False

    #: whether its slots are some of the tokens as they are, with a mass of 1, which is not stored
    keeps_tokens: ClassVar[bool] = False

    #: how ``SketchCache`` spends a budget unless told: "even", or "measured" where it lowers errors
    allocation: ClassVar[str] = "even"

    #: the same after a second reading (``kvsketch.prefill``); None: as after one reading
    allocation_reread: ClassVar[str | None] = None

    #: in how many bits ``SketchCache`` stores slots unless told: 16, or "measured" where it lowers
    #: errors
    bits: ClassVar[int | str] = 16

    #: the number of last queries of a prompt that it uses; None: all of them
    window: int | None = None

    #: numbers of first and of last tokens that ``compress`` keeps unchanged unless told
    around: tuple[int, int] = (0, 0)

    #: whether slots that it has compressed can be compressed again, to any size
    recompresses: ClassVar[bool] = True

    #: whether only slots of low scores are reduced, so that a page may be compressed while it
    #: decodes without all others (``cache.compress.compress_newest``)
    local: ClassVar[bool] = False

    #: numbers of its rows, int64 ``[batch]``, if they are part of a larger batch; None: 0, 1, 2 and
    #: so on. Random choices of rows with different numbers are independent.
    rows: Tensor | None = None

    #: weight of the layer's output projection W_O, ``[num_attention_heads, value_dim, hidden]``,
    #: if it ``requires`` it: the model's own tensor, not a copy
    output: Tensor | None = None

    #: how the model rotates queries and keys by their positions, if it ``requires`` it
    turn: Turn | None = None

    # places in the batch of the heads of a call, int64 ``[batch, heads]``, if not in order
    _places: Tensor | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "fits" in vars(cls):
            raise InputError(
                f"{cls.__name__}.fits is no attribute any more: reduce gets no queries; a method "
                "that needs more than scores of them keeps ``observed`` in its own compress"
            )
        for name, now in FORMER.items():
            if name in vars(cls):
                raise InputError(
                    f"{cls.__name__}.{name} is no attribute any more: requires = "
                    f"Requirements({now})"
                )

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.generator = random_numbers.generator(seed)

    def compress(
        self,
        slots: Slots,
        budget: int | Tensor,
        observed: Observed | None = None,
        *,
        sink: int | None = None,
        recent: int | None = None,
        scored: bool = False,
        decoding: bool = False,
    ) -> Slots:
        """Reduce ``slots`` to at most ``budget`` per KV head.

        The first ``sink`` and the last ``recent`` live slots of a head are kept unchanged; the
        slots between them are reduced to the rest of the budget. If the budget is smaller than
        ``sink + recent``, the recent window is shortened first. Dead slots (left padding) never
        count as sink or recent.

        Args:
            slots: ``[batch, num_key_value_heads, n, ...]``; returned unchanged if n <= budget.
            budget: slots per KV head, >= 1, or one budget for each, int64 ``[batch,
                num_key_value_heads]``.
            observed: queries of the newest tokens; required if it scores by queries, unless
                ``slots.score`` is known from earlier ones.
            sink: number of first slots to keep, >= 0; None: the method's own.
            recent: number of last slots to keep, likewise.
            scored: ``slots.score`` already includes these queries (``observe``).
            decoding: whether the newest tokens were decoded, and are no part of a prompt.

        Returns:
            ``[batch, num_key_value_heads, min(budget, n), ...]``. With a budget for each head, as
            many slots as the largest budget: each head has its own first, in the order of the
            tokens, and dead slots after them (m = 0, u = 0, key 0). A head whose budget is n or
            more keeps its slots bit for bit (and updated scores); a head whose live slots fit its
            budget keeps these.

        Raises:
            InputError: a budget < 1 or of another shape or dtype, sink or recent negative or not
                int, non-finite keys or values, or queries missing or of another shape.
        """
        sink = self.around[0] if sink is None else sink
        recent = self.around[1] if recent is None else recent
        check_window(sink, recent)
        check_input(slots, budget)
        least = budget if isinstance(budget, int) else int(budget.min())
        if slots.count <= least:
            return slots
        if not scored:
            slots = self.observe(slots, observed)
        asked_again = observed is not None and observed.after
        ready = self.prepared(slots, budget, sink, recent)
        kept = self._kept(ready, budget, sink, recent, asked_again)
        return self.finished(kept, slots, budget, decoding)

    def __call__(self, *arguments: Any, **options: Any) -> Slots:
        """``compress``."""
        return self.compress(*arguments, **options)

    def _kept(
        self, slots: Slots, budget: int | Tensor, sink: int, recent: int, asked_again: bool
    ) -> Slots:
        """Sinks, the reduced middle, and recent window."""
        if isinstance(budget, Tensor):
            return compress_ragged(self, slots, budget, sink, recent, asked_again)
        first = min(sink, budget)
        last = min(recent, budget - first)
        if first == last == 0:
            return self.reduce(slots, budget, asked_again)
        start, middle, end = split(slots, first, last)
        if budget == first + last:
            return Slots.cat([start, end])
        return Slots.cat([start, self.reduce(middle, budget - first - last, asked_again), end])

    def prepared(self, slots: Slots, budget: int | Tensor, sink: int, recent: int) -> Slots:
        """All scored slots, as an input of ``reduce``: a method may add numbers that depend on all
        slots (``beside.with_columns``). Arguments as for ``compress``."""
        return slots

    def finished(self, kept: Slots, slots: Slots, budget: int | Tensor, decoding: bool) -> Slots:
        """What ``compress`` returns.

        Args:
            kept: the result for the ``prepared`` slots, including sinks and recent window.
            slots: all before that.
            budget, decoding: as for ``compress``.
        """
        return kept

    def observe(self, slots: Slots, observed: Observed | None) -> Slots:
        """``slots`` with ``score`` updated by the observed queries and everything else unchanged.
        It gets all slots, including sinks and recent ones."""
        return slots

    def echo(self, slots: Slots, asked: Observed, sample: Tensor | None, alone: bool) -> Slots:
        """``slots``, scored by the prompt's last queries, with ``score`` updated by all of its
        queries, which are asked again after it. For a method that ``requires`` it.

        Args:
            slots: all tokens of the prompt.
            asked: queries ``after`` all of them.
            sample: the tokens whose queries they are, int64, in order; None: of all.
            alone: no other queries have scored the prompt, or they count no more.
        """
        raise NotImplementedError

    def weights_of(self, observed: Observed) -> Tensor | None:
        """For a method whose ``observe`` adds up the attention that slots receive, and keeps the
        scores before where they are larger: the weight of each query, float32 ``[q]``, if these
        queries of decoded tokens count so. A page can then be scored where it is. None: they do
        not."""
        return None

    def reread(self, slots: Slots, observed: Observed, about: slice | Tensor) -> Slots:
        """The tokens of a context, with ``score`` updated by the queries of a part of its second
        reading.

        Args:
            slots: ``[batch, heads, n + q, ...]``: the context's n tokens, scored by the parts read
                before, followed by the q tokens read now.
            observed: the queries of the q tokens.
            about: the tokens of the context that are read again now, in order: a slice, or int64
                indices.
        """
        context = slots.narrow(0, slots.count - observed.queries.shape[2])
        return self.observe(context, replace(observed, after=True, total=None))

    def complete(self, slots: Slots, sample: Tensor, echo: Tensor | None) -> Slots:
        """The tokens of a context, of which a second reading has read only a sample: also with
        scores of the others, if ``reread`` does not score them.

        Args:
            slots: ``[batch, heads, n, ...]``: the context.
            sample: int64: the tokens that were read again, in order.
            echo: scores of all tokens by ``echo``, ``[batch, heads, n]``, if the method has one.
        """
        return slots

    def importance(self, slots: Slots) -> Tensor | None:
        """The importance of slots, ``[batch, heads, n]``, by which the needs of heads are compared
        (see ``cache.needs``): their score. None: the method has none."""
        return slots.score

    @abstractmethod
    def reduce(self, slots: Slots, budget: int | Tensor, asked_again: bool) -> Slots:
        """Reduce the slots between sinks and recent window; may use ``slots.score``.

        Args:
            slots: ``[batch, heads, n, ...]``: all KV heads, or ``[R, 1, n, ...]``: some of them.
            budget: the exact number of slots to return, 1 <= budget < n. If the class is
                ``ragged``, also int64 ``[batch, heads]``, each less than the head's live slots;
                dead slots then follow the live ones in every head. The result has as many slots as
                the largest budget, each head's own first; the slots after these are ignored.
            asked_again: whether the queries were asked after all slots (an echo, a second
                reading), and have asked for the whole context.
        """

    def reset(self) -> None:
        """Remove all per-row state and renumber the rows; the random stream starts again."""
        self.generator.manual_seed(self.seed)
        self.rows = None

    def map_batch(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn``, which acts on axis 0, to all per-row state; the rows are renumbered."""
        self.rows = None

    def tensors(self) -> list[Tensor]:
        """The per-row state, for byte counting."""
        return []

    def to_state(self) -> State:
        """The state between calls: that of the random generator and of rows."""
        state = State()
        state.keep(rows=self.rows)
        state.put("generator", random_numbers.generator_state(self.generator, self.seed))
        return state

    def restore(self, reader: Reader, batch: int, heads: int) -> None:
        """Restore the result of ``to_state`` for this many rows and KV heads.

        Raises:
            InputError: tensors that do not fit.
        """
        if reader.has("rows"):
            self.rows = reader.integers("rows", (batch,), 0, 1 << 40)
        random_numbers.restore_generator(self.generator, reader)
        reader.close()

    def number_rows(self, rows: Tensor) -> None:
        """Declare which rows of a larger batch these are (int64 ``[batch]``): from now on they keep
        what they would keep there."""
        self.rows = rows

    def without_numbers(self) -> Compressor:
        """This compressor for rows of any number, as those of several batches together: it must
        draw no random numbers."""
        twin = self._twin()
        twin.rows = None
        return twin

    def restart(self, rows: Tensor) -> None:
        """Begin the random stream of the seed anew, for rows of these numbers."""
        self.generator.manual_seed(self.seed)
        self.rows = rows

    def fresh(self) -> Compressor:
        """A copy that goes on from the same random numbers."""
        return copy.deepcopy(self)

    def streams(self, batch: int, heads: int, device: torch.device) -> Tensor:
        """A new random stream for every row and head: keys, int64 ``[batch, heads]``. Takes one
        number of the object's generator, so the number of calls must not depend on the contents of
        the rows."""
        number = torch.tensor(random_numbers.drawn(self.generator), device="cpu")
        places = self._places
        if places is None:
            rows = torch.arange(batch, device="cpu") if self.rows is None else self.rows
            places = random_numbers.places(rows.to(device), heads)
        return random_numbers.derived(number, places)

    def random(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
        """Uniform float64 numbers in [0, 1) of a shape ``[batch, heads, ...]``, from fresh
        ``streams``: those of a row do not depend on the number of other rows."""
        return random_numbers.uniform(self.streams(shape[0], shape[1], device), *shape[2:])

    def at(self, places: Tensor, generator: torch.Generator) -> Compressor:
        """This compressor for some of the heads, as rows: ``places`` (int64 ``[R, 1]``) are their
        places in the batch (``random_numbers.places``), so that random choices are the same as
        there."""
        twin = self._twin()
        twin._places, twin.generator = places, generator
        return twin

    def _twin(self) -> Compressor:
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Without the model's weight, which the layer passes again."""
        return {**super().__getstate__(), "output": None}

    def __deepcopy__(self, memo: dict[int, object]) -> Compressor:
        """Copies continue the random stream from the same state (torch.Generator itself cannot be
        deep-copied)."""
        twin = self._twin()
        twin.generator = self.generator.clone_state()
        return twin


def check_input(slots: Slots, budget: int | Tensor) -> None:
    """Check the budget and that the input is finite, before anything changes."""
    if isinstance(budget, Tensor):
        if budget.dtype != torch.int64 or budget.shape != slots.keys.shape[:2]:
            raise InputError(
                f"budget: {budget.dtype} {tuple(budget.shape)}, must be int64 "
                f"{tuple(slots.keys.shape[:2])}: slots of every row and KV head"
            )
        smallest = int(budget.min())
    else:
        smallest = budget
    if smallest < 1:
        raise InputError(f"budget={smallest} must be at least 1 slot per KV head")
    for name, tensor in (("keys", slots.keys), ("values", slots.values)):
        if not all_finite(tensor):
            raise InputError(f"{name} are not finite (NaN or infinity)")


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite. One sum is almost always sufficient and an order of
    magnitude faster than checking every element."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def keep_top(slots: Slots, score: Tensor, budget: int | Tensor) -> Slots:
    """Keep the ``budget`` live slots of highest score per head, in their old order.

    Args:
        score: float ``[batch, heads, n]``.
        budget: as for ``Compressor.reduce``: one for all heads, or int64 ``[batch, heads]``.
    """
    live = slots.live()
    if live is not None:
        score = score.masked_fill(~live, -torch.inf)
    if isinstance(budget, int):
        return slots.take(score.topk(budget, dim=-1).indices.sort(dim=-1).values)
    return slots.take(first_in_order(order(score, descending=True), budget))


def first_in_order(order: Tensor, budget: Tensor) -> Tensor:
    """The first ``budget`` entries of each head's ``order``, in increasing order; the entries after
    these are arbitrary.

    Args:
        order: int64 ``[batch, heads, n]``, places in the order of preference.
        budget: int64 ``[batch, heads]``, each at most n.

    Returns:
        int64 ``[batch, heads, largest budget]``.
    """
    n, width = order.shape[-1], int(budget.max())
    own = torch.arange(width, device=order.device) < budget.unsqueeze(-1)
    places = torch.where(own, order[..., :width], n).sort(dim=-1).values
    return places.clamp(max=n - 1)
