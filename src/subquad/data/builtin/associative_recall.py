"""Multi-query associative recall, the task of zoology (Arora et al. 2023, "Zoology: Measuring and Improving Recall in
Efficient Language Models", arXiv 2312.04927).

A sample begins with pairs of a key and its value, and every key is asked for once later on:

    inputs     k1 v1 k2 v2 . . k2 . . . k1 .
    targets    -  -  -  -  - - v2 - - - v1 -

With P pairs, the places after them are numbered in steps of two, from 1 on, and a query stands at place g with a
probability that is proportional to g^(a - 1), each place being taken once: with a = 1 all places are equally likely,
and with a near 0 most queries come soon. The paper has 8,192 symbols, half of them keys, a = 0.01, lengths from 64 to
512 and 4 to 64 pairs. Blanks stand between the queries. A value is never an input again, so it has to be recalled.
"""

import numpy as np
from pydantic import Field

from subquad.data.builtin.recall import NOTHING, RecallOptions
from subquad.data.stable_rng import StableRng


class AssociativeRecallOptions(RecallOptions):
    """Options of associative recall: pairs of keys and values, of which every key is asked for later on."""

    pairs: int = Field(8, ge=1, description="The number of pairs of a key and its value.")
    power_a: float = Field(
        0.01, gt=0, le=1, description="How late the queries come: from soon (near 0) to equally likely anywhere (1)."
    )

    def check(self) -> None:
        self.refuse_if(self.length < 4 * self.pairs, f"{self.pairs} pairs and queries take {4 * self.pairs} symbols")
        needed = 2 * self.pairs + 2
        self.refuse_if(self.vocab < needed, f"{self.pairs} different keys and values need a vocab of {needed}")

    @property
    def first_value(self) -> int:
        """Symbols below it are keys, but for the blank."""
        return self.vocab // 2

    @property
    def answers(self) -> int:
        return self.vocab - self.first_value

    def sample(self, rng: StableRng) -> tuple[np.ndarray, np.ndarray]:
        keys = 1 + rng.choice(self.first_value - 1, self.pairs)
        values = self.first_value + rng.choice(self.answers, self.pairs)
        inputs, targets = np.full(self.length, self.BLANK), np.full(self.length, NOTHING)
        context = 2 * self.pairs
        inputs[:context:2], inputs[1:context:2] = keys, values
        queries = context + 2 * self._places(rng)
        inputs[queries], targets[queries] = keys, values
        return inputs, targets

    def _places(self, rng: StableRng) -> np.ndarray:
        """Draws the places (pairs,) of the queries one after the other without replacement.

        The first arrivals of independent exponential waits with these rates are such a draw (Efraimidis and Spirakis
        2006).
        """
        rates = np.arange(1, (self.length - 2 * self.pairs) // 2 + 1) ** (self.power_a - 1)
        waits = -np.log1p(-rng.uniform(len(rates))) / rates
        return np.argsort(waits, kind="stable")[: self.pairs]
