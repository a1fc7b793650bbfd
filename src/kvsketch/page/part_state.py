"""The state of a part of a page."""

from __future__ import annotations

from torch import Tensor

from kvsketch.page.fields import EMPTY, NEW, read_columns, read_fields, with_room
from kvsketch.page.kind import Kind
from kvsketch.page.part import Part
from kvsketch.page.quantized import Quantized
from kvsketch.page.ragged import Blocks, Ragged
from kvsketch.state import Reader, State


def part_state(part: Part) -> State:
    """The state of a part: all slots, and the room after them: at most twice as much."""
    blocks, room = part.blocks, part.room
    if blocks is not None:
        layout = Ragged(blocks.layout.start, part.held, blocks.layout.total)
        if layout.roomy and room:
            return part_state(part.grown(0))
    else:
        room = min(room, 2 * part.count)
    state = State(values={"base": part.base, "appended": part.appended, "room": room})
    state.values |= {"grows": part.grows, "packed": bool(part.packed)}

    def laid(tensor: Tensor) -> Tensor:
        return tensor[:, :, : part.count] if blocks is None else layout.packed(tensor)

    state.keep(**{name: laid(tensor) for name, tensor in part.fields.items()})
    for name, few in part.packed.items():
        state.put(name, few.map_slots(laid).to_state())
    if blocks is not None:
        state.keep(sizes=part.sizes)
        state.put("layout", blocks.to_state(part.held))
    return state


def restored(reader: Reader, kind: Kind) -> Part:
    """Restore the result of ``part_state``.

    Raises:
        InputError: inconsistent tensors or numbers.
    """
    heads = (kind.batch, kind.heads)
    part = Part.over({}, {}, (*heads, reader.whole("base")))
    part.appended, part.room = reader.whole("appended"), reader.whole("room")
    part.grows, packed = reader.flag("grows"), reader.flag("packed")
    if (part.grows or packed) and (part.room or part.appended):
        raise reader.wrong("room", part.room, "0, as nothing is appended in place")
    lead: tuple[int, ...] = (*heads, part.count)
    if reader.has("layout"):
        part.sizes = reader.integers("sizes", heads, 0, part.base)
        if part.base > 16 * int(part.sizes.max()) + 1024 or part.grows:
            raise reader.wrong("base", part.base, "about the size of the largest head")
        held = part.held
        part.blocks = Blocks.from_state(reader.part("layout"), part.sizes, held, part.room)
        layout = Ragged(part.blocks.layout.start, held, part.blocks.layout.total)
        part.next_place, lead = layout.behind(held), (int(held.sum()),)
    elif part.room > 2 * part.count:
        raise reader.wrong("room", part.room, "at most twice the slots there are")

    def laid(tensor: Tensor, name: str) -> Tensor:
        if part.blocks is None:
            return with_room(tensor, part.room, NEW.get(name))
        return layout.unpacked(tensor, EMPTY.get(name, 0.0))

    if packed:
        for name, dim in (("keys", kind.key_dim), ("values", kind.value_dim)):
            few = Quantized.from_state(reader.part(name), lead, heads, dim, name == "keys")
            part.packed[name] = few.map_slots(lambda t: laid(t, ""))
    fields = read_columns(reader, lead) if packed else read_fields(reader, lead, kind)
    part.fields = {name: laid(tensor, name) for name, tensor in fields.items()}
    reader.close()
    return part
