"""Batches of about equal cost: samples of similar length together, as many as a token budget allows.

A batch costs sentences × its longest sample, because shorter ones are padded to it. Every sample is in exactly one
batch of an epoch; the order depends on the seed and the number of the epoch and on nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from pydantic import Field
from torch import Tensor

from subquad.config import Options

Batch = np.ndarray  # (samples,) int64: the numbers of the samples
Item = TypeVar("Item")


class Budget(Options):
    """How large a batch may become."""

    max_tokens: int | None = Field(4096, ge=1, description="most of sentences × longest sample, eos included")
    max_sentences: int | None = Field(None, ge=1, description="most samples")
    multiple: int = Field(8, ge=1, description="batches of more samples than this are cut to a multiple of it")
    skip_long: bool = Field(False, description="leave out samples that exceed max_tokens alone, and count them")

    def check(self) -> None:
        if self.max_tokens is None and self.max_sentences is None:
            raise ValueError("a batch needs a limit: give max_tokens, max_sentences or both")


def too_long(sizes: np.ndarray, budget: Budget) -> np.ndarray:
    """Numbers of the samples that exceed the budget alone."""
    if budget.max_tokens is None:
        return np.empty(0, np.int64)
    return np.flatnonzero(sizes > budget.max_tokens)


def batches_by_tokens(order: np.ndarray, sizes: np.ndarray, budget: Budget) -> list[Batch]:
    """Cuts `order` (sample numbers) into batches; `sizes[i]` is the number of tokens of sample i, eos included.

    A batch takes samples while sentences × longest stays within max_tokens and their number within max_sentences.
    If it then holds more than `multiple` samples, those above the last multiple begin the next batch. Nothing is lost:
    the samples that remain at the end form a last batch, however few. A sample above max_tokens is an error, or is left
    out with `skip_long`; `too_long` tells which.
    """
    order, sizes = np.asarray(order, np.int64), np.asarray(sizes, np.int64)
    long = too_long(sizes, budget)
    if len(long) and not budget.skip_long:
        raise ValueError(
            f"sample {long[0]} has {sizes[long[0]]} tokens, more than max_tokens={budget.max_tokens} ({len(long)} such "
            "samples): raise max_tokens, shorten them, or set skip_long to leave them out"
        )
    order = order[~np.isin(order, long)] if len(long) else order
    ordered = sizes[order]
    batches, start = [], 0
    while start < len(order):
        count = _fitting(ordered, start, budget)
        if count > budget.multiple:
            count -= count % budget.multiple
        batches.append(order[start : start + count])
        start += count
    return batches


def _fitting(ordered: np.ndarray, start: int, budget: Budget) -> int:
    """How many samples from `start` on fit into one batch."""
    most = len(ordered) - start
    if budget.max_sentences is not None:
        most = min(most, budget.max_sentences)
    if budget.max_tokens is None:
        return most
    most = min(most, budget.max_tokens // max(1, int(ordered[start])))
    costs = np.maximum.accumulate(ordered[start : start + most]) * np.arange(1, most + 1)
    return int(np.searchsorted(costs, budget.max_tokens, side="right"))


class Draws:
    """Permutations that depend on the given numbers only.

    Built on the raw output of PCG64, which numpy guarantees; the stream behind `Generator.permutation` may change.
    """

    def __init__(self, *seeds: int) -> None:
        if min(seeds) < 0:
            raise ValueError(f"seeds and epoch numbers are 0 or more, not {min(seeds)}")
        self.bits = np.random.PCG64(np.random.SeedSequence(seeds))

    def permutation(self, count: int) -> np.ndarray:
        return np.argsort(self.bits.random_raw(count), kind="stable")


@dataclass(frozen=True)
class Cursor:
    """Where training is: `batch` batches of epoch `epoch` are used up, counted over all ranks."""

    epoch: int = 0
    batch: int = 0

    def after(self, used: int, total: int) -> Self:
        """The cursor once `used` more of the epoch's `total` batches are done."""
        batch = self.batch + used
        if batch > total:
            raise ValueError(f"batch {batch} of an epoch that has {total}: the data or the budget have changed")
        return replace(self, batch=batch) if batch < total else replace(self, epoch=self.epoch + 1, batch=0)


class BatchPlan:
    """The batches of every epoch.

    sizes: one array (n,) for every side of a sample, source first, eos included; the longer side counts.
    Without `shuffle` samples are sorted by the first side, then the second. With it, samples of equal sizes come in
    random order, and so do the batches. `skipped` holds the numbers of samples left out by `budget.skip_long`.
    """

    def __init__(self, *sizes: ArrayLike, budget: Budget, seed: int = 0, shuffle: bool = True) -> None:
        assert sizes, "a plan needs the sizes of its samples"
        self.sides = [np.asarray(side, np.int64) for side in sizes]
        if len({len(side) for side in self.sides}) > 1:
            raise ValueError(f"the sides have different numbers of samples: {[len(side) for side in self.sides]}")
        self.sizes = np.maximum.reduce(self.sides)
        if not len(self.sizes):
            raise ValueError("there are no samples to make batches of")
        self.budget, self.seed, self.shuffle = budget, seed, shuffle
        self.skipped = too_long(self.sizes, budget) if budget.skip_long else np.empty(0, np.int64)
        if len(self.skipped) == len(self.sizes):
            raise ValueError(f"every sample is longer than max_tokens={budget.max_tokens}: raise it")

    def order(self, draws: Draws | None = None) -> np.ndarray:
        """Sample numbers by length; `draws` decides between samples of equal lengths, else their number does."""
        order = np.arange(len(self.sizes)) if draws is None else draws.permutation(len(self.sizes))
        for side in reversed(self.sides):
            order = order[np.argsort(side[order], kind="stable")]
        return order

    def epoch(self, number: int) -> list[Batch]:
        """The batches of epoch `number` (0 or more), in the order of training."""
        if not self.shuffle:
            return batches_by_tokens(self.order(), self.sizes, self.budget)
        draws = Draws(self.seed, number)
        batches = batches_by_tokens(self.order(draws), self.sizes, self.budget)
        return [batches[i] for i in draws.permutation(len(batches))]

    def rest(self, cursor: Cursor) -> list[Batch]:
        """What the cursor's epoch has left."""
        batches = self.epoch(cursor.epoch)
        if cursor.batch > len(batches):
            raise ValueError(
                f"the cursor is at batch {cursor.batch} of epoch {cursor.epoch}, which has {len(batches)}: the data, "
                "the seed or the budget are not those of the interrupted run"
            )
        return batches[cursor.batch :]


def shard(batches: Sequence[Item], rank: int, world: int) -> list[Item]:
    """The batches of one of `world` ranks: every world-th one, so that a step uses neighbours of the common order.

    Shards differ by at most one batch.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of {world} ranks (0 to {world - 1})")
    return list(batches[rank::world])


@dataclass(frozen=True)
class PairBatch:
    """Pairs of sentences as tensors, padded on the right. B sentences, S and T the longest source and target."""

    source: Tensor  # (B, S) int64, every row ends with eos
    source_padding: Tensor  # (B, S) bool, True = ignore
    target_in: Tensor  # (B, T) what the decoder reads: eos, then the target
    target_out: Tensor  # (B, T) what it shall say: the target, then eos
    target_padding: Tensor  # (B, T) bool, of both
    tokens: int  # targets that count, eos included

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        fields: dict[str, Any] = vars(self)
        moved = {key: field.to(device, non_blocking=non_blocking) for key, field in fields.items() if key != "tokens"}
        return replace(self, **moved)


def collate_pairs(samples: Sequence[tuple[ArrayLike, ArrayLike]], pad: int, eos: int) -> PairBatch:
    """Tensors of (source, target) samples, which come without special symbols, in the order given."""
    sources = [np.asarray(source, np.int64) for source, _ in samples]
    targets = [np.asarray(target, np.int64) for _, target in samples]
    source, source_padding = _padded(sources, pad, eos)
    target, target_padding = _padded(targets, pad, eos)
    shifted = torch.full_like(target, pad)
    shifted[:, :1] = eos
    shifted[:, 1:] = target[:, :-1].masked_fill(target_padding[:, 1:], pad)
    return PairBatch(source, source_padding, shifted, target, target_padding, int((~target_padding).sum()))


def _padded(rows: Sequence[np.ndarray], pad: int, eos: int) -> tuple[Tensor, Tensor]:
    """Rows with eos after each, and where the padding is: both (rows, longest + 1)."""
    lengths = np.array([len(row) for row in rows], np.int64)
    positions = np.arange(lengths.max(initial=0) + 1)
    table = np.full((len(rows), len(positions)), pad, np.int64)
    if rows:
        table[positions < lengths[:, None]] = np.concatenate(rows)
        table[np.arange(len(rows)), lengths] = eos
    return torch.from_numpy(table), torch.from_numpy(positions > lengths[:, None])
