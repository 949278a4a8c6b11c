"""Where the tokens of a batch are: lengths, grids, and how any padding becomes right padding."""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels import tracing


class Layout(NamedTuple):
    """What a mechanism is told about the positions of `x`: (batch, time, channels).

    `valid` (batch, time) is True at tokens, or None when every position is one. On a sequence the tokens of a row
    come first, so that a row is described by its length; on a grid they may be anywhere. Every row has a token:
    a fully padded one is presented as zeros that count.
    """

    valid: Tensor | None = None
    grid: tuple[int, int] | None = None

    def lengths(self, x: Tensor) -> Tensor:
        """Tokens of each row: (batch,) int64."""
        if self.valid is None:
            return torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)
        return self.valid.sum(1)


def right_padded(lengths: Tensor, time: int) -> Tensor:
    """True at the first `lengths[b]` of `time` positions: (batch, time) bool."""
    return torch.arange(time, device=lengths.device) < lengths[:, None]


class RightPadding:
    """Moves the tokens of every row to its front, in order, and results back to where the tokens were.

    place: (batch, time), where each position's content goes; None: everything stays where it is.
    """

    def __init__(self, padding: Tensor) -> None:
        self.padding = padding
        self.lengths = padding.logical_not().sum(1)
        self.place = None if _is_right_already(padding) else self._places()

    def layout(self) -> Layout:
        return Layout(right_padded(self.lengths.clamp(min=1), self.padding.shape[1]))

    def pack(self, x: Tensor) -> Tensor:
        """x: (batch, time, channels), padded anywhere -> tokens first, zeros after them."""
        cleared = x.masked_fill(self.padding[..., None], 0)
        if self.place is None:
            return cleared
        return torch.empty_like(cleared).scatter(1, self.place[..., None].expand_as(x), cleared)

    def unpack(self, y: Tensor) -> Tensor:
        """The inverse of `pack`; padded positions come back as zeros."""
        if self.place is not None:
            y = y.gather(1, self.place[..., None].expand_as(y))
        return y.masked_fill(self.padding[..., None], 0)

    def _places(self) -> Tensor:
        """Tokens keep their order, and so does what follows them. Counting instead of sorting: ONNX cannot sort so."""
        token, other = self.padding.logical_not().cumsum(1) - 1, self.padding.cumsum(1) - 1
        return torch.where(self.padding, self.lengths[:, None] + other, token)


def _is_right_already(padding: Tensor) -> bool:
    """Whether nothing has to move. Other devices would wait for the answer; a compiled graph cannot depend on it."""
    if padding.device.type != "cpu" or not tracing.may_read_values(padding):
        return False
    return not bool((padding[:, :-1] & padding[:, 1:].logical_not()).any())
