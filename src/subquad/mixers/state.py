"""What a mixer remembers between calls when it reads a sequence piece by piece."""

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
