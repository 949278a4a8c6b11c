"""Where the tokens of a batch are: masks, lengths, grids, and how any padding becomes right padding.

Two polarities, one word for each: a `mask` is True at what counts, a `padding` is True at what is to be ignored.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels import tracing

MANY_VALUES = 1 << 15
"""From so many on, a CPU finds the padded positions first and fills them whole: `masked_fill` asks for every value."""


class Layout(NamedTuple):
    """What a mechanism is told about the positions of `x`: (batch, time, channels).

    `mask` (batch, time) is True at tokens, and `padding` the opposite; both are None when every position is a token.
    On a sequence the tokens of a row come first, so that a row is described by its length: `lengths` (batch,) int64,
    None when `mask` is. On a grid they may be anywhere, and there are no lengths. Every row has a token: a fully
    padded one is presented as zeros that count.
    """

    mask: Tensor | None = None
    padding: Tensor | None = None
    lengths: Tensor | None = None
    grid: tuple[int, int] | None = None

    def lengths_of(self, x: Tensor) -> Tensor:
        """Tokens of each row of a sequence, padded or not: (batch,) int64."""
        if self.lengths is not None:
            return self.lengths
        return torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)


class Padding(NamedTuple):
    """Where a batch is padded, and everything that layers need to know about it. A stack computes it once for all.

    padding: (batch, time) bool, True = ignore. lengths: (batch,) int64, tokens of each row, 0 where there is none.
    layout: of the rows with their tokens moved to the front. place: (batch, time) int64, where each position's content
    goes for that; None: everything stays where it is.
    """

    padding: Tensor
    lengths: Tensor
    layout: Layout
    place: Tensor | None

    @classmethod
    def of(cls, padding: "Tensor | Padding") -> "Padding":
        if isinstance(padding, Padding):
            return padding
        lengths = padding.logical_not().sum(1)
        place = None if _is_right_already(padding) else _places(padding, lengths)
        return cls(padding, lengths, _front_layout(lengths, padding.shape[1]), place)

    @classmethod
    def right(cls, lengths: Tensor, time: int) -> "Padding":
        """That of rows whose first lengths[b] of `time` positions are tokens. lengths: (batch,) int64.

        Whoever makes a batch knows that it is padded at the right. A GPU's bool tensor would have to be read to see it,
        so `of` moves its rows, even if to where they are.
        """
        return cls(right_padded(lengths, time).logical_not(), lengths, _front_layout(lengths, time), None)

    def of_front(self) -> "Padding":
        """The padding of what `to_front` gives."""
        if self.place is None:
            return self
        return Padding(right_padded(self.lengths, self.padding.shape[1]).logical_not(), self.lengths, self.layout, None)

    def to_front(self, x: Tensor) -> Tensor:
        """x (batch, time, channels) with the tokens of every row first, in their order, and all else behind them."""
        if self.place is None:
            return x
        return torch.empty_like(x).scatter(1, self.place[..., None].expand_as(x), x)

    def from_front(self, y: Tensor) -> Tensor:
        """The inverse of `to_front`."""
        return y if self.place is None else y.gather(1, self.place[..., None].expand_as(y))

    def pack(self, x: Tensor) -> Tensor:
        """x (batch, time, channels), padded anywhere -> tokens first, zeros behind them."""
        return self.to_front(zero_padding(x, self.padding))

    def unpack(self, y: Tensor) -> Tensor:
        """The inverse of `pack`; padded positions come back as zeros."""
        return zero_padding(self.from_front(y), self.padding)


def padding_tensor(padding: Tensor | Padding | None) -> Tensor | None:
    """The bool tensor (batch, time), True = ignore, of either form that a padding is given in."""
    return padding.padding if isinstance(padding, Padding) else padding


def zero_padding(x: Tensor, padding: Tensor | None) -> Tensor:
    """x (batch, time, channels) with zeros where padding (batch, time) is True; None: nowhere."""
    if padding is None:
        return x
    readable = x.device.type == "cpu" and type(x) is Tensor and tracing.may_read_values(x)
    if not readable or tracing.is_transformed() or x.numel() < MANY_VALUES:
        return x.masked_fill(padding[..., None], 0)
    rows = padding.flatten().nonzero().squeeze(1)
    return x.flatten(0, 1).index_fill(0, rows, 0).view(x.shape)


def right_padded(lengths: Tensor, time: int) -> Tensor:
    """True at the first `lengths[b]` of `time` positions: (batch, time) bool."""
    return torch.arange(time, device=lengths.device) < lengths[:, None]


def _front_layout(lengths: Tensor, time: int) -> Layout:
    """The layout of rows that begin with `lengths` (batch,) tokens; a row without any has one of zeros."""
    some = lengths.clamp(min=1)
    mask = right_padded(some, time)
    return Layout(mask, mask.logical_not(), some)


def _places(padding: Tensor, lengths: Tensor) -> Tensor:
    """Tokens keep their order, and so does what follows them. Counting instead of sorting: ONNX cannot sort so."""
    token, other = padding.logical_not().cumsum(1) - 1, padding.cumsum(1) - 1
    return torch.where(padding, lengths[:, None] + other, token)


def _is_right_already(padding: Tensor) -> bool:
    """Whether nothing has to move. Other devices would wait for the answer; a compiled graph cannot depend on it."""
    if padding.device.type != "cpu" or not tracing.may_read_values(padding):
        return False
    return not bool((padding[:, :-1] & padding[:, 1:].logical_not()).any())
