"""Random numbers that stay the same in every version of numpy: the order of the data depends on nothing else."""

import numpy as np


class StableRng:
    """A random generator whose numbers depend only on the given seeds, in every version of numpy.

    It uses the raw output of PCG64, which numpy guarantees. What `Generator.permutation` gives may change.
    """

    def __init__(self, *seeds: int) -> None:
        if min(seeds) < 0:
            raise ValueError(f"seeds and numbers of epochs must be 0 or more, got {min(seeds)}")
        self.bits = np.random.PCG64(np.random.SeedSequence(seeds))

    def permutation(self, count: int) -> np.ndarray:
        return np.argsort(self.bits.random_raw(count), kind="stable")

    def choice(self, count: int, size: int) -> np.ndarray:
        """Returns `size` different numbers below `count` in random order: the beginning of a permutation."""
        drawn = self.bits.random_raw(count)
        first = np.argpartition(drawn, size - 1)[:size] if size < count else np.arange(count)
        return first[np.argsort(drawn[first], kind="stable")]

    def uniform(self, count: int) -> np.ndarray:
        """Returns random numbers (count,) from 0 to below 1."""
        return (self.bits.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def integers(self, below: int, count: int) -> np.ndarray:
        """Returns random numbers (count,) from 0 to below - 1, int64."""
        return (self.uniform(count) * below).astype(np.int64)
