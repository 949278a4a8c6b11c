"""What a mixer remembers between calls when it reads a sequence piece by piece.

A call returns the next state and leaves the one that it was given as it was. Where a state grows with every token, that
means to copy it for every token. Decoding, which never looks back, reserves room instead:

    reserve(n)           room for n tokens: calls write there, and a state that was given to one must not be used again.
                         States that come of it by `reorder` may share the room: only one of them may go on
    with_fixed_size()    a state with room whose shapes no call changes, as CUDA graphs and compiled steps need them
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor


@dataclass
class State:
    """Base of all streaming states: plain tensors whose first axis is the batch.

    lengths: (batch,) int64, tokens each row has read. Padded positions do not advance a row.
    """

    lengths: Tensor

    def reorder(self, index: Tensor) -> Self:
        """The state of the rows `index` (new_batch,) int64: beam search keeps, drops and repeats hypotheses with it."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(
            self, **{name: value.index_select(0, index) for name, value in tensors.items() if isinstance(value, Tensor)}
        )

    def reserve(self, tokens: int) -> Self:  # noqa: ARG002
        """The state with room for so many tokens, or more, into which calls write; for inference alone.

        A state without room is copied, so that this one stays whole. One of fixed size gets so much room in addition to
        what it may have left. States that do not grow are returned as they are.
        """
        return self

    def with_fixed_size(self) -> Self:
        """The state with shapes that stay: calls write into its room, and read all of it with a mask.

        There has to be room for all tokens that will be read. States that do not grow are returned as they are.
        """
        return self


@dataclass
class CrossState(State):
    """Base of what cross-attention keeps of its context; `lengths` are those of the context."""


def fresh_lengths(batch: int, device: torch.device | str | None) -> Tensor:
    return torch.zeros(batch, dtype=torch.int64, device=device)


def advanced(lengths: Tensor, new: Tensor | None, time: int) -> Tensor:
    """Lengths after a chunk of `time` positions, of which the first new[b] are tokens; None: all are."""
    return lengths + (time if new is None else new)


def keep_last(buffer: Tensor, new: Tensor | None, count: int, dim: int) -> Tensor:
    """The `count` entries along `dim` that end at each row's newest token.

    buffer: (batch, ...) whose axis `dim` holds `count` old entries and then the chunk's; new: (batch,) how many
    entries of the chunk are tokens, None: all are. Row b keeps entries new[b] .. new[b] + count - 1.
    """
    if new is None:
        last = buffer.narrow(dim, buffer.shape[dim] - count, count)
        return last.clone() if buffer.shape[dim] > 2 * count else last  # a view would keep a long chunk alive
    index = new[:, None] + torch.arange(count, device=new.device)
    shape = [1] * buffer.dim()
    shape[0], shape[dim] = buffer.shape[0], count
    target = list(buffer.shape)
    target[dim] = count
    return buffer.gather(dim, index.view(shape).expand(target))


LEAST_ROOM = 32
"""Entries for which a buffer that grows has room at least."""


def with_room(buffer: Tensor, filled: int, count: int) -> Tensor:
    """A copy of the first `filled` entries of a buffer (batch, heads, entries, width), with room for `count` more.

    It is at least twice as large, so that the copies of a long stream take no longer than a few passes over its end.
    """
    size = max(2 * filled, filled + count, LEAST_ROOM)
    return torch.nn.functional.pad(buffer[:, :, :filled], (0, 0, 0, size - filled))


def select_rows(buffer: Tensor, index: Tensor, filled: int) -> Tensor:
    """The rows `index` of a buffer (batch, heads, entries, width), of which entries from `filled` on do not count.

    The CPU is slow to copy into a buffer with room, and copies what counts alone.
    """
    if filled == buffer.shape[2] or buffer.device.type == "cpu":
        return buffer[:, :, :filled].index_select(0, index)
    rows = buffer.new_empty(index.shape[0], *buffer.shape[1:])
    torch.index_select(buffer[:, :, :filled], 0, index, out=rows[:, :, :filled])
    return rows


def extend(buffer: Tensor, entries: Tensor, room: int | None, rows: tuple[Tensor, Tensor] | None) -> Tensor:
    """A buffer (batch, heads, size, width) with `entries` (batch, heads, n, width) behind those that each row has.

    room: how many places at the end of the buffer no row has reached; if they are enough, entries are written into the
    buffer. None: that is not known, and they are enough. rows: the first free place of each row (batch,) and a mask
    (batch, n) of the entries that count; None: the first place of the room, in all rows, and all entries.
    """
    count, filled = entries.shape[2], buffer.shape[2] - (room or 0)
    if room is not None and room < count:
        old = buffer[:, :, :filled]
        return torch.cat([old, entries], 2) if rows is None else append_at(old, entries, *rows, filled + count)
    buffer = buffer.to(torch.promote_types(buffer.dtype, entries.dtype))
    if rows is None:
        buffer[:, :, filled : filled + count] = entries
        return buffer
    if room is not None:  # some of it stays free in shorter rows, where weights of 0 must meet what is finite
        buffer[:, :, filled : filled + count] = 0
    return write_at(buffer, entries, rows[0])


def write_at(buffer: Tensor, entries: Tensor, at: Tensor) -> Tensor:
    """Writes `entries` (batch, heads, n, width) into a buffer, at the places at[b] .. at[b] + n - 1 of row b.

    at: (batch,) int64. Entries that do not count are written as well: what a row reads next takes their places.
    """
    place = at[:, None] + torch.arange(entries.shape[2], device=at.device)
    return buffer.scatter_(2, place[:, None, :, None].expand_as(entries), entries.to(buffer.dtype))


def append_at(buffer: Tensor, entries: Tensor, at: Tensor, mask: Tensor, capacity: int) -> Tensor:
    """Writes `entries` behind what each row already holds, in a buffer for `capacity` entries.

    buffer: (batch, heads, entries, width); entries: (batch, heads, n, width); at: (batch,) first free place of a row;
    mask: (batch, n) bool, False for entries that are not to be written. Places never written hold zeros. The result has
    the wider of the two precisions, as that of `torch.cat`: autocast lowers entries, not a state that began without it.
    """
    dtype = torch.promote_types(buffer.dtype, entries.dtype)
    buffer, entries = buffer.to(dtype), entries.to(dtype)
    grown = torch.nn.functional.pad(buffer, (0, 0, 0, capacity + 1 - buffer.shape[2]))
    place = at[:, None] + torch.arange(entries.shape[2], device=at.device)
    place = torch.where(mask, place, capacity)  # the one spare place takes what is not to be kept
    index = place[:, None, :, None].expand_as(entries)
    return grown.scatter(2, index, entries)[:, :, :capacity]
