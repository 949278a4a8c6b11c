"""The position of a token, as a vector that is added to its embedding.

    sinusoidal   [sin(p f_i) | cos(p f_i)],  f_i = 10000^(-i / (C/2 - 1)),  p = 2, 3, ...   fairseq's
    sin-cos      the same with f_i = 10000^(-i / (C/2)),  p = 0, 1, ...                     halves, not interleaved
    learned      a row of a table of max_length rows

Padding is not counted: the first token of a row has position 0 wherever it is. Rotary positions rotate queries and
keys instead, and are an option of the mixers.
"""

import torch
from torch import Tensor, nn

from subquad.kernels import tracing

FAIRSEQ_OFFSET = 2
"""fairseq counts positions from the id of its padding token plus one."""


def position_ids(padding: Tensor | None, time: int, start: Tensor | None, device: torch.device) -> Tensor:
    """Returns the position of each token in its row, (batch or 1, time) int64, counted from `start` (batch,) or 0."""
    if padding is None:
        number = torch.arange(time, device=device)[None]
    else:
        number = (padding.logical_not().cumsum(1) - 1).clamp(min=0)
    return number if start is None else number + start[:, None]


class Sinusoids(nn.Module):
    """Maps positions (batch, time) int64 to vectors (batch, time, dim)."""

    def __init__(self, dim: int, first: int, steps: int) -> None:
        """first: added to every position. steps: frequency i is 10000^(-i / steps)."""
        super().__init__()
        self.dim, self.first = dim, first
        self.rate = float(torch.log(torch.tensor(10000.0, device="cpu")) / max(1, steps))  # rounded as fairseq does

    def forward(self, number: Tensor) -> Tensor:
        half = self.dim // 2
        frequency = torch.exp(torch.arange(half, device=number.device, dtype=torch.float32) * -self.rate)
        angle = (number + self.first).float()[..., None] * frequency
        waves = torch.cat([angle.sin(), angle.cos()], -1)
        return waves if self.dim % 2 == 0 else nn.functional.pad(waves, (0, 1))


class LearnedPositions(nn.Module):
    """Maps positions (batch, time) int64 to vectors (batch, time, dim)."""

    def __init__(self, dim: int, max_length: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_length, dim))
        nn.init.normal_(self.table, std=dim**-0.5)

    def forward(self, number: Tensor) -> Tensor:
        # Other devices would be waited for: they are asked only if the number of positions allows for a mistake.
        on_cpu = number.device.type == "cpu"
        if (on_cpu or number.shape[1] > self.table.shape[0]) and tracing.may_read_values(number):
            longest = int(number.max()) + 1
            if longest > self.table.shape[0]:
                raise ValueError(
                    f"a sequence of {longest} tokens is longer than the {self.table.shape[0]} learned positions; "
                    "build the model with a larger max_length"
                )
        return self.table[number]


def build_positions(kind: str, dim: int, max_length: int) -> nn.Module | None:
    """Builds the positions of a kind, or returns None if nothing is added to the embedding."""
    if kind == "sinusoidal":
        return Sinusoids(dim, FAIRSEQ_OFFSET, dim // 2 - 1)
    if kind == "sin-cos":
        return Sinusoids(dim, 0, dim // 2)
    return LearnedPositions(dim, max_length) if kind == "learned" else None
