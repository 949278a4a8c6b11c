"""Attention inside windows, jointly with summaries of the rest.

Positions are read in windows of w. The keys of a window begin `look_back` positions before it and end `look_forward`
positions after it. Beside them every query may look at summaries, which all windows share:

    y_i = sum_j A_ij v_j + sum_c A_ic u_c
    A_i = softmax over [s q_i.k_j + b(i, j), all keys j of i's window | s q_i.f_c, all summaries c],    s = d^-1/2

On a grid windows are squares of w x w cells, which look as far in all four directions. Windows are counted row by row,
and so are the cells in a window.
"""

from typing import NamedTuple

from torch import Tensor

from subquad.kernels.dispatch import choose


class Windows(NamedTuple):
    """Where the windows lie and which keys a query sees."""

    shape: tuple[int, ...]
    """(time,), or (rows, columns) of a grid; multiples of the size."""
    size: int
    look_back: int = 0
    look_forward: int = 0
    causal: bool = False
    """Whether keys after the query are hidden. Only sequences can be causal."""

    @property
    def keys(self) -> int:
        """Keys of a window, along one axis."""
        return self.look_back + self.size + self.look_forward


class Summaries(NamedTuple):
    """Keys f and values u that stand for parts of the sequence."""

    k: Tensor
    """(batch, heads, n, d)."""
    v: Tensor
    """(batch, heads, n, d)."""
    mask: Tensor | None = None
    """(batch or 1, n) bool, False for summaries that do not exist; None: all exist."""
    chunk: int | Tensor = 0
    """0: every query sees all summaries. Else summary c stands for the positions c chunk .. (c + 1) chunk - 1, and only
    positions after these see it. A tensor (batch, 1) int64 gives each row of the batch its own chunk size."""


def window_attention(
    qkv: Tensor,
    windows: Windows,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    summaries: Summaries | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """y (batch, N, heads, d) of projections qkv (batch, N, 3, heads, d) of the N positions or cells.

    bias: b (heads or 1, queries, keys) of a window. mask: (batch or 1, N) bool, False for positions that are no keys.
    dropout: the rate at which entries of A are dropped.
    """
    needs = []
    if len(windows.shape) == 2:
        needs.append("grids")
    if dropout:
        needs.append("dropout")
    if summaries is not None and isinstance(summaries.chunk, Tensor):
        needs.append("chunks of a size for each row")
    if qkv.shape[-1] > 128:
        needs.append("heads of more than 128 channels")
    kernel = choose("window_attention", qkv, *needs)
    return kernel.window_attention(qkv, windows, bias, mask, summaries, dropout)
