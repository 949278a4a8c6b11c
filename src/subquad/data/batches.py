"""Batches of about equal cost: each has samples of similar length, as many as a token budget allows.

A batch costs (number of samples) × (length of its longest sample), because shorter samples are padded to that length.
Every sample is in exactly one batch of an epoch. The order depends only on the seed and the number of the epoch.
loader.py builds batches ahead of time; what is in a batch depends on its place in the epoch alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from pydantic import Field
from torch import Tensor

from subquad.config import Options
from subquad.data.stable_rng import StableRng

Batch = np.ndarray  # (samples,) int64: the indices of the samples
Item = TypeVar("Item")


class Budget(Options):
    """The limits of the size of a batch."""

    max_tokens: int | None = Field(
        4096, ge=1, description="The most tokens of a batch: samples × longest sample, eos included."
    )
    max_sentences: int | None = Field(None, ge=1, description="The most samples of a batch.")
    multiple: int = Field(8, ge=1, description="A batch of more samples than this is cut to a multiple of it.")
    skip_long: bool = Field(
        False, description="Whether samples that exceed max_tokens by themselves are left out and counted."
    )

    def check(self) -> None:
        if self.max_tokens is None and self.max_sentences is None:
            raise ValueError("a batch needs a limit: give max_tokens, max_sentences or both")


def too_long(sizes: np.ndarray, budget: Budget) -> np.ndarray:
    """Returns the indices of the samples that exceed the budget by themselves."""
    if budget.max_tokens is None:
        return np.empty(0, np.int64)
    return np.flatnonzero(sizes > budget.max_tokens)


def batches_by_tokens(order: np.ndarray, sizes: np.ndarray, budget: Budget) -> list[Batch]:
    """Cuts `order` (sample indices) into batches; `sizes[i]` is the number of tokens of sample i, eos included.

    A batch takes samples while samples × longest stays within max_tokens and their number within max_sentences. If it
    then holds more than `multiple` samples, those above the last multiple begin the next batch. No sample is lost: the
    samples that remain at the end form a last batch, however few they are. A sample above max_tokens is an error; with
    `skip_long` it is left out (see `too_long`).
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
        count = _num_fitting(ordered, start, budget)
        if count > budget.multiple:
            count -= count % budget.multiple
        batches.append(order[start : start + count])
        start += count
    return batches


def _num_fitting(ordered: np.ndarray, start: int, budget: Budget) -> int:
    """Returns how many samples from `start` on fit into one batch."""
    most = len(ordered) - start
    if budget.max_sentences is not None:
        most = min(most, budget.max_sentences)
    if budget.max_tokens is None:
        return most
    most = min(most, budget.max_tokens // max(1, int(ordered[start])))
    costs = np.maximum.accumulate(ordered[start : start + most]) * np.arange(1, most + 1)
    return int(np.searchsorted(costs, budget.max_tokens, side="right"))


@dataclass(frozen=True)
class Cursor:
    """The position of training in the data: `batch` batches of epoch `epoch` are done, counted over all ranks."""

    epoch: int = 0
    batch: int = 0

    def after(self, used: int, total: int) -> Self:
        """Returns the cursor after `used` more of the epoch's `total` batches."""
        batch = self.batch + used
        if batch > total:
            raise ValueError(f"batch {batch} of an epoch that has {total}: the data or the budget have changed")
        return replace(self, batch=batch) if batch < total else replace(self, epoch=self.epoch + 1, batch=0)


class BatchPlan:
    """The batches of every epoch.

    sizes: one array (n,) for each field of a sample, source first, eos included; the longest field counts. Samples are
    sorted by the size of the first field, then of the second. With `shuffle`, samples of equal sizes are in random
    order, and so are the batches. `skipped` holds the indices of the samples that `budget.skip_long` leaves out.
    """

    def __init__(self, *sizes: ArrayLike, budget: Budget, seed: int = 0, shuffle: bool = True) -> None:
        assert sizes, "a plan needs the sizes of its samples"
        self.field_sizes = [np.asarray(field, np.int64) for field in sizes]
        if len({len(field) for field in self.field_sizes}) > 1:
            counts = [len(field) for field in self.field_sizes]
            raise ValueError(f"the fields have different numbers of samples: {counts}")
        self.sizes = np.maximum.reduce(self.field_sizes)
        if not len(self.sizes):
            raise ValueError("there are no samples to form batches of")
        self.budget, self.seed, self.shuffle = budget, seed, shuffle
        self.skipped = too_long(self.sizes, budget) if budget.skip_long else np.empty(0, np.int64)
        if len(self.skipped) == len(self.sizes):
            raise ValueError(f"every sample is longer than max_tokens={budget.max_tokens}: raise it")

    def order(self, rng: StableRng | None = None) -> np.ndarray:
        """Returns sample indices sorted by size. Samples of equal sizes are in the order that `rng` or the data has."""
        order = np.arange(len(self.sizes)) if rng is None else rng.permutation(len(self.sizes))
        for field in reversed(self.field_sizes):
            order = order[np.argsort(field[order], kind="stable")]
        return order

    def epoch(self, number: int) -> list[Batch]:
        """Returns the batches of epoch `number` (0 or more), in the order of training."""
        if not self.shuffle:
            return batches_by_tokens(self.order(), self.sizes, self.budget)
        rng = StableRng(self.seed, number)
        batches = batches_by_tokens(self.order(rng), self.sizes, self.budget)
        return [batches[i] for i in rng.permutation(len(batches))]

    def rest(self, cursor: Cursor) -> list[Batch]:
        """Returns the batches of the cursor's epoch that are not done yet."""
        batches = self.epoch(cursor.epoch)
        if cursor.batch > len(batches):
            raise ValueError(
                f"the cursor is at batch {cursor.batch} of epoch {cursor.epoch}, which has {len(batches)}: the data, "
                "the seed or the budget are not those of the interrupted run"
            )
        return batches[cursor.batch :]


def shard(batches: Sequence[Item], rank: int, world: int) -> list[Item]:
    """Returns the batches of one of `world` ranks: every world-th one, so that a step uses neighbouring batches.

    The sizes of the shards differ by at most one batch.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of {world} ranks (0 to {world - 1})")
    return list(batches[rank::world])


def split_batches(batches: Sequence[Item], rank: int, world: int) -> tuple[list[Item], bool]:
    """Returns the batches of one of `world` ranks, and whether the last of them belongs to another rank.

    Every rank gets the same number of batches, because all of them exchange gradients in each pass. A rank that has one
    batch too few takes a batch of another rank along, which must not count.
    """
    own = shard(batches, rank, world)
    idle = len(own) * world < len(batches)
    return [*own, batches[0]] if idle else own, idle


@dataclass(frozen=True)
class UpdatePlan:
    """What one rank does in an update of the model.

    batches: the numbers of their samples, and the seed that follows from their place in all of training. idle: whether
    the last of them is another rank's, see `split_batches`. after: the place in the data after the update. of_epoch:
    the number of batches of its epoch.
    """

    batches: list[tuple[Batch, int]]
    idle: bool
    after: Cursor
    of_epoch: int


def plan_updates(plan: BatchPlan, cursor: Cursor, accumulate: int, rank: int, world: int) -> Iterator[UpdatePlan]:
    """Yields what one of `world` ranks does from `cursor` on, without end; an update has `accumulate` batches.

    The last update of an epoch has those that are left.
    """
    while True:
        rest = plan.rest(cursor)
        total = cursor.batch + len(rest)
        for start in range(0, len(rest), accumulate):
            group = rest[start : start + accumulate]
            seeded = [
                (batch, batch_seed(plan.seed, cursor.epoch, place)) for place, batch in enumerate(group, cursor.batch)
            ]
            cursor = cursor.after(len(group), total)
            yield UpdatePlan(*split_batches(seeded, rank, world), cursor, total)


def collate_pairs(samples: Sequence[tuple[ArrayLike, ArrayLike]], pad: int, eos: int) -> dict[str, Tensor]:
    """Returns (source, target) samples, which have no special tokens, as tensors that are padded on the right.

    source: (B, S) int64; every row ends with eos. source_padding: (B, S) bool, True = ignore. target_in: (B, T), what
    the decoder reads: eos, then the target. target_out: (B, T), what it shall predict: the target, then eos.
    """
    source, source_padding = _pad_rows([np.asarray(source, np.int64) for source, _ in samples], pad, eos)
    target, target_padding = _pad_rows([np.asarray(target, np.int64) for _, target in samples], pad, eos)
    target_in = torch.full_like(target, pad)
    target_in[:, :1] = eos
    target_in[:, 1:] = target[:, :-1].masked_fill(target_padding[:, 1:], pad)
    return {"source": source, "source_padding": source_padding, "target_in": target_in, "target_out": target}


def collate_texts(texts: Sequence[ArrayLike], pad: int, eos: int) -> dict[str, Tensor]:
    """Returns texts, which have no special tokens, as tensors that are padded on the right.

    tokens: (B, T) int64; every row begins with eos, as texts do in language models. padding: (B, T) bool, True =
    ignore.
    """
    rows = [np.append(eos, np.asarray(text, np.int64)) for text in texts]
    lengths = np.array([len(row) for row in rows], np.int64)
    mask = np.arange(lengths.max(initial=1)) < lengths[:, None]
    tokens = np.full(mask.shape, pad, np.int64)
    if rows:
        tokens[mask] = np.concatenate(rows)
    return {"tokens": torch.from_numpy(tokens), "padding": torch.from_numpy(~mask)}


def _pad_rows(rows: Sequence[np.ndarray], pad: int, eos: int) -> tuple[Tensor, Tensor]:
    """Returns the rows with eos after each, and where their padding is, both of shape (rows, longest + 1)."""
    lengths = np.array([len(row) for row in rows], np.int64)
    positions = np.arange(lengths.max(initial=0) + 1)
    table = np.full((len(rows), len(positions)), pad, np.int64)
    if rows:
        table[positions < lengths[:, None]] = np.concatenate(rows)
        table[np.arange(len(rows)), lengths] = eos
    return torch.from_numpy(table), torch.from_numpy(positions > lengths[:, None])


# ---------------------------------------------------------------------- building them


def batch_seed(seed: int, epoch: int, number: int) -> int:
    """Returns the seed of the random choices in a batch, 0 to 2^63 - 1. It depends only on the place of the batch."""
    # The order of the epoch is drawn from (seed, epoch), which gives the same stream in numpy as (seed, epoch, 0).
    return int(StableRng(seed, epoch, number + 1).bits.random_raw()) >> 1


READ_BY_THE_PROGRAM = ("target_words",)
"""Entries of batches on which shapes depend: a GPU that was asked for them would keep the pass waiting."""


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies a batch to a device, where it can without waiting. What the program itself reads stays on the CPU."""
    return {
        name: value if name in READ_BY_THE_PROGRAM else value.to(device, non_blocking=True)
        for name, value in batch.items()
    }
