"""What the generated sets of recall share: their options, and splits whose samples are made when they are asked for.

A sample is two aligned sequences of `length` symbols, which are numbers below `vocab`. At a position whose target is a
symbol, a model that has read the inputs up to this position is asked for that symbol; elsewhere nothing is asked.

Sample i of a split depends on the seed, the split and i alone, so a split of any size needs no memory. Every split has
streams of random numbers of its own.
"""

from abc import abstractmethod
from typing import ClassVar

import numpy as np
from pydantic import Field

from subquad.config import Options
from subquad.data.stable_rng import StableRng

NOTHING = -1
"""The target at a position where nothing is asked."""
STREAMS = {"train": 1, "valid": 2, "test": 3}
"""A number for the random streams of each split."""


class RecallOptions(Options):
    """Base of the options of a generated set, which is also what generates it."""

    length: int = Field(128, ge=2, description="The number of symbols of a sample.")
    vocab: int = Field(64, ge=4, description="The number of different symbols.")
    seed: int = Field(0, ge=0, description="The seed; other seeds give other samples.")
    train: int = Field(20_000, ge=1, description="The number of samples for training.")
    valid: int = Field(500, ge=1, description="The number of samples for validation.")
    test: int = Field(1_000, ge=1, description="The number of samples for testing.")

    BLANK: ClassVar[int] = 0
    """The symbol that means nothing."""

    @property
    @abstractmethod
    def answers(self) -> int:
        """The number of different symbols that can be targets."""

    @abstractmethod
    def sample(self, rng: StableRng) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and targets, both (length,) int64."""

    def refuse_if(self, wrong: bool, needed: str) -> None:
        if wrong:
            raise ValueError(f"length {self.length} and vocab {self.vocab} do not do: {needed}")


class RecallSplit:
    """A split of a generated set: a sequence of samples (inputs, targets)."""

    def __init__(self, options: RecallOptions, split: str) -> None:
        self.options, self.stream = options, STREAMS[split]
        self.count: int = getattr(options, split)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= number < self.count:
            raise IndexError(f"sample {number} of {self.count}")
        return self.options.sample(StableRng(self.options.seed, number, self.stream))
