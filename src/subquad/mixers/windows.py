"""Windows over sequences and grids: what they cover, relative biases, and the streaming window.

A window holds `size` cells per axis. Its keys begin `look_back` cells before it and end `look_forward` cells after it.
What is cut into windows has the shape (T,) or (H, W). Windows are counted row by row, and so are the cells in one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from subquad.kernels import tracing
from subquad.kernels.masking import keep
from subquad.kernels.precision import at_least_float32
from subquad.kernels.window_attention import Windows
from subquad.mixers.attention import AttentionConfig, AttentionMixer
from subquad.mixers.layout import Layout
from subquad.mixers.state import State, fresh_lengths, keep_last

LARGE, WASTE = 16, 4
"""A window on a grid above both, in cells and in sides of the grid, is a mistake, such as the default for texts."""


class WindowConfig(AttentionConfig):
    """Options of every mechanism with windows."""

    window: int = Field(64, ge=1, description="window size; per side on a grid")
    overlap: bool = Field(
        False, description="keys reach half a window further on both sides (decoder variant of eva: one back)"
    )
    dims: Literal[1, 2] | None = Field(
        None,
        description="1: always windows over the sequence; 2: a grid is required; default: a grid when one is given",
    )
    relative: Literal["none", "table", "t5"] = Field(
        "none",
        description="relative bias of window logits: a learned table, or T5 buckets; for sequences unless dims=2",
    )

    def check(self) -> None:
        super().check()
        if self.causal and self.dims == 2:
            raise ValueError("a causal mixer reads sequences: dims=2 is not possible")

    @property
    def look(self) -> tuple[int, int]:
        """look_back and look_forward: how far keys reach before and after the window."""
        extension = max(1, self.window // 2) if self.overlap else 0
        return extension, extension


# ---------------------------------------------------------------------- whole windows


def crop(y: Tensor, padded_shape: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Undoes `pad_to_windows`: (batch, cells of padded_shape, channels) -> (batch, cells of shape, channels)."""
    if len(shape) == 1:
        if not tracing.may_branch_on_length():  # a slice is contiguous or not: two graphs; a lookup always is
            return y.index_select(1, torch.arange(shape[0], device=y.device))
        return y[:, : shape[0]]
    return y if padded_shape == shape else y.unflatten(1, tuple(padded_shape))[:, : shape[0], : shape[1]].flatten(1, 2)


# ---------------------------------------------------------------------- relative biases


def t5_buckets(window: int, extension: int, rows: int, columns: int, causal: bool) -> Tensor:
    """Bucket of query row i and key column j, by their distance i - j: (rows, columns) int64.

    Near distances have a bucket each, farther ones share logarithmic buckets up to window + extension. Both indices
    start at 0 at the beginning of what they index, also when the keys reach back: a quirk that trained models rely on.
    """
    buckets, furthest = t5_bucket_count(window, extension), window + extension
    distance = torch.arange(rows)[:, None] - torch.arange(columns)
    if causal:
        base, distance = torch.zeros_like(distance), distance.clamp(min=0)
    else:
        buckets //= 2
        base, distance = (distance < 0) * buckets, distance.abs()
    exact = buckets // 2
    if furthest <= exact:  # no logarithmic range: all far distances share the last bucket
        return base + distance.clamp(max=buckets - 1)
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(furthest / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return base + torch.where(distance < exact, distance, far)


def t5_bucket_count(window: int, extension: int) -> int:
    return max(min((window + extension) // 2, 64), 16)


class PairTable(nn.Module):
    """One learned bias for each pair of query and key places in a window: (heads, queries, keys)."""

    def __init__(self, heads: int, queries: int, keys: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(heads, queries, keys))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self) -> Tensor:
        return self.table


class OffsetTable(nn.Module):
    """Learned biases by the two-dimensional offset between query and key cell: (heads, queries, keys).

    The row of offset (dy, dx) is (dy + m) * side + dx + m, m = window + extension - 1, side = window + 2 extension. The
    stride is the side of the keys, not the number of offsets 2m + 1, so some offsets share a row: published
    checkpoints depend on it.
    """

    rows: Tensor

    def __init__(self, heads: int, window: int, extension: int) -> None:
        super().__init__()
        furthest, side = window + extension - 1, window + 2 * extension
        self.table = nn.Parameter(torch.empty(2 * furthest * (side + 1) + 1, heads))
        nn.init.trunc_normal_(self.table, std=0.02)
        query = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        key = torch.cartesian_prod(torch.arange(side), torch.arange(side)) - extension
        offset = query[:, None] - key + furthest
        self.register_buffer("rows", offset[..., 0] * side + offset[..., 1], persistent=False)

    def forward(self) -> Tensor:
        return self.table[self.rows].permute(2, 0, 1)


class T5Bias(nn.Module):
    """Learned biases by bucketed distance, times d^-1/2: (heads or 1, queries, keys)."""

    buckets: Tensor

    def __init__(
        self, heads: int, scale: float, extension: int, window: int, shape: tuple[int, int], causal: bool
    ) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.randn(t5_bucket_count(window, extension), heads))
        self.register_buffer("buckets", t5_buckets(window, extension, *shape, causal), persistent=False)

    def forward(self) -> Tensor:
        return self.weight[self.buckets].permute(2, 0, 1) * self.scale


# ---------------------------------------------------------------------- the mixer


@dataclass
class WindowState(State):
    """Keys and values that the next token's window can reach: (batch, heads, before + window - 1, d), newest last."""

    k: Tensor
    v: Tensor


WindowConfigT = TypeVar("WindowConfigT", bound=WindowConfig)


class WindowMixer(AttentionMixer[WindowConfigT]):
    """Queries in windows with the keys that they reach."""

    t5_heads_shared = False

    def setup(self) -> None:
        super().setup()
        config = self.config
        self.look_back, self.look_forward = look_back, look_forward = config.look
        axes = config.dims or 1
        queries, keys = config.window**axes, (look_back + config.window + look_forward) ** axes
        self.bias: PairTable | OffsetTable | T5Bias | None = None
        if config.relative == "t5":
            heads = 1 if self.t5_heads_shared else config.heads
            self.bias = T5Bias(heads, self.scale, look_back, config.window, (queries, keys), config.causal)
        elif config.relative == "table":
            pairs = axes == 1
            self.bias = (
                PairTable(config.heads, queries, keys) if pairs else OffsetTable(config.heads, config.window, look_back)
            )

    def sees_grid(self, grid: tuple[int, int]) -> bool:
        if self.config.dims is None and self.bias is not None:
            raise ValueError(
                f"{self.name}: its relative bias is one for sequences, but a grid {tuple(grid)} was given; build it "
                "with dims=2 for windows on the grid, or dims=1 to read the grid row by row"
            )
        return self.config.dims != 1

    def shape_of(self, x: Tensor, layout: Layout) -> tuple[int, ...]:
        if layout.grid is None and self.config.dims == 2:
            raise ValueError(f"{self.name} was built with dims=2: give grid=(H, W)")
        return layout.grid or (x.shape[1],)

    def window_on(self, shape: tuple[int, ...]) -> int:
        """The side of the windows on a shape."""
        window = self.config.window
        if len(shape) == 2 and window > LARGE and window >= WASTE * max(shape):
            raise ValueError(
                f"{self.name}: windows of {window} x {window} on a grid of {shape[0]} x {shape[1]} would be nearly "
                f"empty and cost as much as full ones; give window={max(shape)} or less"
            )
        return window

    def look_on(self, shape: tuple[int, ...]) -> tuple[int, int]:  # noqa: ARG002
        """How far keys reach before and after a window on a shape."""
        return self.look_back, self.look_forward

    def pad_to_windows(
        self, x: Tensor, layout: Layout, shape: tuple[int, ...], may_cut: bool = True
    ) -> tuple[Tensor, Windows, Tensor | None]:
        """x with zeros at the end, or at the bottom and right, up to whole windows: (batch, cells, channels).

        Also the windows over the padded shape, and a mask of its cells: (batch or 1, cells) bool, None when all are
        tokens. may_cut: a sequence that is shorter than its only window need not be filled up; a CPU then cuts the
        window to its length.
        """
        may_cut = may_cut and len(shape) == 1 and tracing.may_branch_on_length() and x.device.type == "cpu"
        if may_cut and shape[0] < self.config.window:
            return x, Windows(shape, shape[0], causal=self.config.causal), layout.mask
        size = self.window_on(shape)
        padded_shape = tuple(((cells + size - 1) // size + tracing.is_symbolic(cells)) * size for cells in shape)
        windows = Windows(padded_shape, size, *self.look_on(padded_shape), self.config.causal)
        # Compiled code always pads and masks: a branch on the length would cost a graph of its own.
        if layout.mask is None and tracing.may_branch_on_length() and padded_shape == shape:
            return x, windows, None
        mask = layout.mask if layout.mask is not None else x.new_ones((1, x.shape[1]), dtype=torch.bool)
        pads = [0, 0]
        for cells, whole in zip(reversed(shape), reversed(padded_shape), strict=True):
            pads += [0, whole - cells]
        grown = F.pad(x.unflatten(1, shape), pads).flatten(1, -2)
        return grown, windows, F.pad(mask.view(-1, *shape, 1), pads).flatten(1)

    def bias_values(self, windows: Windows) -> Tensor | None:
        """What the relative bias adds to the logits of a window: (heads or 1, queries, keys)."""
        if self.bias is None:
            return None
        values, size = self.bias(), windows.size
        if len(windows.shape) == 1 and size < self.config.window:  # the window was cut, and reaches nothing else
            return values[:, :size, self.look_back : self.look_back + size]
        return values

    def new_window(self, batch: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Lengths, keys and values of an empty streaming window."""
        capacity = self.look_back + self.config.window - 1
        empty = torch.zeros(batch, self.config.heads, capacity, self.config.head_width, device=device, dtype=dtype)
        return fresh_lengths(batch, device), empty, empty

    def stream_window(self, q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
        """Logits (batch, heads, t, capacity + t) of the t newest tokens' queries to old and new keys (capacity + t).

        lengths: (batch,) tokens before these t. The bias is looked up at each query's true place in its window.
        """
        window = self.config.window
        position = lengths[:, None] + torch.arange(q.shape[2], device=q.device)
        key_position = position[:, -1:] + 1 - torch.arange(k.shape[2], 0, -1, device=q.device)
        first = (position // window * window - self.look_back)[..., None]
        column = key_position[:, None, :] - first
        mask = (column >= 0) & (key_position >= 0)[:, None, :] & (key_position[:, None, :] <= position[..., None])
        logits = at_least_float32((q * self.scale) @ k.transpose(-1, -2))
        if self.bias is not None:
            table = self.bias()
            row = (position % window)[..., None].expand_as(column)
            logits = logits + table[:, row, column.clamp(0, table.shape[-1] - 1)].transpose(0, 1)
        return keep(logits, mask[:, None])

    def slide(self, state: WindowState, k: Tensor, v: Tensor, new: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values that stay in the window after `new` tokens; k, v as given to `stream_window`."""
        capacity = state.k.shape[2]
        return keep_last(k, new, capacity, dim=2), keep_last(v, new, capacity, dim=2)
