"""Random numbers that stay the same in every version of numpy: the order of the data depends on nothing else."""

import numpy as np


class StableRng:
    """A random generator whose permutations depend only on the given seeds, in every version of numpy.

    It uses the raw output of PCG64, which numpy guarantees. What `Generator.permutation` gives may change.
    """

    def __init__(self, *seeds: int) -> None:
        if min(seeds) < 0:
            raise ValueError(f"seeds and numbers of epochs must be 0 or more, got {min(seeds)}")
        self.bits = np.random.PCG64(np.random.SeedSequence(seeds))

    def permutation(self, count: int) -> np.ndarray:
        return np.argsort(self.bits.random_raw(count), kind="stable")
