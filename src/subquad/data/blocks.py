"""Cuts text into blocks for language modelling.

The lines of a store, each followed by eos, form one stream of tokens. A block is a piece `[begin, end)` of the stream,
and every token of the stream is in exactly one block. The inputs of a block are the tokens before its targets: the
first target is predicted from the token before the block, or from eos at the beginning of the stream.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from subquad.config import Options

Breaks = Literal["none", "eos", "complete"]


class Lines(Protocol):
    """What blocks need of a token store: lines of token ids without special tokens."""

    @property
    def lengths(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...


class BlockOptions(Options):
    """How text is cut into blocks."""

    tokens_per_sample: int = Field(
        512, ge=1, description="The number of tokens of a block. With breaks eos it is not used."
    )
    breaks: Breaks = Field(
        "none",
        description="Where blocks may end. none: anywhere, so that all blocks but the last are full; eos: every line "
        "is a block; complete: a block has as many whole lines as fit, and a longer line is a block by itself.",
    )


def block_bounds(lengths: np.ndarray, options: BlockOptions) -> tuple[np.ndarray, np.ndarray]:
    """Returns begin and end of the blocks in the stream, both (blocks,) int64.

    lengths: (n,), the number of tokens of each line without eos.
    """
    ends = np.cumsum(np.asarray(lengths, np.int64) + 1)
    if not len(ends):
        raise ValueError("there are no lines to cut into blocks")
    if options.breaks == "none":
        begin = np.arange(0, ends[-1], options.tokens_per_sample)
        return begin, np.append(begin[1:], ends[-1])
    if options.breaks == "complete":
        ends = _whole_line_ends(ends, options.tokens_per_sample)
    return np.append(0, ends[:-1]), ends


def _whole_line_ends(ends: np.ndarray, size: int) -> np.ndarray:
    """Returns the ends of blocks that have whole lines of up to `size` tokens together, or a single longer line."""
    block_ends, line, begin = [], 0, 0
    while line < len(ends):
        fitting = int(np.searchsorted(ends, begin + size, side="right"))
        line = max(fitting, line + 1)
        begin = int(ends[line - 1])
        block_ends.append(begin)
    return np.array(block_ends, np.int64)


class Blocks:
    """The blocks of a token store. `blocks[i]` is (inputs, targets), two arrays of `sizes[i]` token ids."""

    def __init__(self, store: Lines, options: BlockOptions, eos: int) -> None:
        self.store, self.options, self.eos = store, options, eos
        self.begin, self.end = block_bounds(store.lengths, options)
        self.line_ends = np.cumsum(np.asarray(store.lengths, np.int64) + 1)

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def sizes(self) -> np.ndarray:
        return self.end - self.begin

    @property
    def total(self) -> int:
        """The number of tokens of the stream, eos included."""
        return int(self.line_ends[-1])

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.window(int(self.begin[index]), int(self.end[index]))

    def window(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (inputs, targets) of any piece of the stream. Evaluation uses it to give targets more context."""
        before = self.stream(begin - 1, begin) if begin else np.array([self.eos], np.int64)
        targets = self.stream(begin, end)
        return np.concatenate([before, targets[:-1]]), targets

    def stream(self, begin: int, end: int) -> np.ndarray:
        """Returns the token ids `begin` to `end` of the stream, int64."""
        assert 0 <= begin < end <= self.total
        tokens = np.full(end - begin, self.eos, np.int64)
        line = int(np.searchsorted(self.line_ends, begin, side="right"))
        start = int(self.line_ends[line - 1]) if line else 0
        while start < end:
            words = self.store[line][max(begin - start, 0) : end - start]
            at = max(start - begin, 0)
            tokens[at : at + len(words)] = words
            start, line = int(self.line_ends[line]), line + 1
        return tokens


def collate_blocks(samples: Sequence[tuple[np.ndarray, np.ndarray]], pad: int) -> dict[str, Tensor]:
    """Returns (inputs, targets) samples as tensors (B, T) that are padded on the right, in the order given.

    inputs and targets: int64. padding: bool, True = ignore.
    """
    lengths = np.array([len(targets) for _, targets in samples], np.int64)
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    inputs, targets = np.full((2, *mask.shape), pad, np.int64)
    if samples:
        inputs[mask] = np.concatenate([sample[0] for sample in samples])
        targets[mask] = np.concatenate([sample[1] for sample in samples])
    tables = {"inputs": inputs, "targets": targets, "padding": ~mask}
    return {name: torch.from_numpy(table) for name, table in tables.items()}
