"""Passes over the samples of a split that several processes share.

Each result travels with the number of its sample, so none is counted twice, and one that is missing is known.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from subquad.data.batches import Batch, BatchPlan, Budget, shard

MAX_TOKENS = 8192
"""Tokens of a batch for which no gradients are kept."""
STEPS = 10
"""How often a pass over the samples reports its progress."""


class Samples(Protocol):
    """A split of a task's data."""

    sizes: tuple[np.ndarray, ...]
    """Tokens of every sample, eos included: one array for each side."""

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]:
        """The samples of these numbers as tensors; padding is True where there is nothing.

        seed: of the random choices, where there are any; the result depends on nothing else. Threads call it at once.
        """
        ...


def evaluation_budget(samples: Samples) -> Budget:
    """Limits of a batch where nothing is kept for gradients: a sample that is longer is a batch by itself."""
    longest = max(int(sizes.max()) for sizes in samples.sizes)
    return Budget(max_tokens=max(MAX_TOKENS, longest), multiple=1)


class SampleShards:
    """Work on numbered samples, shared by `world_size` processes of which this is number `rank`."""

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        all_gather: Callable[[Any], list[Any]] = lambda content: [content],
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """all_gather: gives what each process gave, by rank. report: gets a message `STEPS` times a pass."""
        self.rank, self.world_size, self.all_gather, self.report = rank, world_size, all_gather, report

    def own(self, count: int) -> range:
        """Numbers of the samples that are this process's."""
        return range(self.rank, count, self.world_size)

    def steps(self, items: Sequence[Any], what: str) -> Iterable[Any]:
        """The items, with a report after each tenth of them."""
        reported = 0
        for done, item in enumerate(items, 1):
            yield item
            if done * STEPS // len(items) > reported:
                reported = done * STEPS // len(items)
                self.report(f"{what}: {done:,} of {len(items):,}")

    def rows(
        self,
        samples: Samples,
        losses: Callable[[dict[str, Tensor]], list[list[float]]],
        what: str,
        first: int | None = None,
    ) -> np.ndarray:
        """Numbers (samples, k) of every sample, or of the `first`; losses: those of a batch, one row for each."""
        sizes = [side[:first] for side in samples.sizes]
        plan = BatchPlan(*sizes, budget=evaluation_budget(samples), shuffle=False)
        found: dict[int, Any] = {}
        for batch in self.steps(shard(plan.epoch(0), self.rank, self.world_size), what):
            found.update(zip(batch.tolist(), losses(samples.batch(batch)), strict=True))
        everything = self.gather(found)
        count = len(sizes[0])
        assert everything.keys() == set(range(count)), "every sample has one row"
        return np.array([everything[number] for number in range(count)], np.float64)

    def gather(self, found: Mapping[int, Any]) -> dict[int, Any]:
        """The results of all processes by number."""
        everything: dict[int, Any] = {}
        for part in self.all_gather(list(found.items())):
            for number, result in part:
                assert number not in everything, f"sample {number} was counted twice"
                everything[number] = result
        return everything

    def sum(self, count: int) -> int:
        """The sum of what each process counted."""
        return sum(self.all_gather(count))


def fingerprint(samples: Any) -> str:
    """SHA-256 of samples that JSON can hold: two evaluations are compared on the same samples only."""
    return hashlib.sha256(json.dumps(samples).encode()).hexdigest()
