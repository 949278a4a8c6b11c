"""Text for language modelling, cut into blocks.

The lines of a store, each with eos after it, form one stream of tokens. A block is a piece `[begin, end)` of the
stream, and every token of the stream is in exactly one block. A block's inputs are the tokens before its targets: the
first target is predicted from the token before the block (eos at the very beginning).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from subquad.config import Options

Breaks = Literal["none", "eos", "complete"]


class Lines(Protocol):
    """What blocks need of a store: lines of token numbers without special symbols."""

    @property
    def lengths(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...


class BlockOptions(Options):
    tokens_per_sample: int = Field(512, ge=1, description="tokens of a block; the most, where breaks is not `eos`")
    breaks: Breaks = Field(
        "none",
        description="none: cut anywhere, all blocks full but the last; eos: every line is a block; complete: as many "
        "whole lines as fit, a longer line is a block by itself",
    )


def cut(lengths: np.ndarray, options: BlockOptions) -> tuple[np.ndarray, np.ndarray]:
    """(begin, end) of the blocks in the stream, both (blocks,) int64; `lengths` (n,) counts lines without eos."""
    ends = np.cumsum(np.asarray(lengths, np.int64) + 1)
    if not len(ends):
        raise ValueError("there are no lines to cut into blocks")
    if options.breaks == "none":
        begin = np.arange(0, ends[-1], options.tokens_per_sample)
        return begin, np.append(begin[1:], ends[-1])
    if options.breaks == "complete":
        ends = _whole_lines(ends, options.tokens_per_sample)
    return np.append(0, ends[:-1]), ends


def _whole_lines(ends: np.ndarray, size: int) -> np.ndarray:
    """Ends of blocks that take whole lines up to `size` tokens, or a single longer one."""
    chosen, line, begin = [], 0, 0
    while line < len(ends):
        fitting = int(np.searchsorted(ends, begin + size, side="right"))
        line = max(fitting, line + 1)
        begin = int(ends[line - 1])
        chosen.append(begin)
    return np.array(chosen, np.int64)


class Blocks:
    """The blocks of a store: `blocks[i]` is (inputs, targets), two arrays of `sizes[i]` tokens."""

    def __init__(self, store: Lines, options: BlockOptions, eos: int) -> None:
        self.store, self.options, self.eos = store, options, eos
        self.begin, self.end = cut(store.lengths, options)
        self.line_ends = np.cumsum(np.asarray(store.lengths, np.int64) + 1)

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def sizes(self) -> np.ndarray:
        return self.end - self.begin

    @property
    def total(self) -> int:
        """Tokens of the stream, eos included."""
        return int(self.line_ends[-1])

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.window(int(self.begin[index]), int(self.end[index]))

    def window(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets) of any piece of the stream; an evaluator moves it to give its targets more context."""
        before = self.stream(begin - 1, begin) if begin else np.array([self.eos], np.int64)
        targets = self.stream(begin, end)
        return np.concatenate([before, targets[:-1]]), targets

    def stream(self, begin: int, end: int) -> np.ndarray:
        """Tokens `begin` to `end` of the stream, int64."""
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


@dataclass(frozen=True)
class BlockBatch:
    """Blocks as tensors, padded on the right: B blocks, T the longest."""

    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, the token after every input
    padding: Tensor  # (B, T) bool, True = ignore
    tokens: int  # targets that count

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        moved = {
            key: getattr(self, key).to(device, non_blocking=non_blocking) for key in ("inputs", "targets", "padding")
        }
        return replace(self, **moved)


def collate_blocks(samples: Sequence[tuple[np.ndarray, np.ndarray]], pad: int) -> BlockBatch:
    """Tensors of (inputs, targets) samples, in the order given."""
    lengths = np.array([len(targets) for _, targets in samples], np.int64)
    there = np.arange(lengths.max(initial=0)) < lengths[:, None]
    inputs, targets = np.full((2, *there.shape), pad, np.int64)
    if samples:
        inputs[there] = np.concatenate([sample[0] for sample in samples])
        targets[there] = np.concatenate([sample[1] for sample in samples])
    return BlockBatch(torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(~there), int(lengths.sum()))
