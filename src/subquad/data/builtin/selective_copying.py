"""Selective copying (Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv
2312.00752; here as in MAD, Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures", arXiv
2403.17844).

Symbols are scattered among blanks. After a symbol that says so, they are asked for in their order:

    inputs     . b . . a . c > . . .
    targets    - - - - - - - - b a c

A model has to leave out the blanks and to count what is left, because the places of the symbols are random. MAD has
lengths of 256 to 1,024, 16 to 96 symbols to copy, and a vocabulary of 16 to 128.
"""

import numpy as np
from pydantic import Field

from subquad.data.builtin.recall import NOTHING, RecallOptions
from subquad.data.stable_rng import StableRng

COPY = 1
"""The symbol after which the copy is asked for. Larger ones are those that are copied."""


class SelectiveCopyingOptions(RecallOptions):
    """Options of selective copying: symbols among blanks, which are asked for at the end, in their order."""

    copied: int = Field(8, ge=1, description="The number of symbols that are copied.")

    def check(self) -> None:
        needed = 2 * self.copied + 1
        self.refuse_if(self.length < needed, f"{self.copied} symbols and their copies take {needed} symbols")

    @property
    def answers(self) -> int:
        return self.vocab - COPY - 1

    def sample(self, rng: StableRng) -> tuple[np.ndarray, np.ndarray]:
        words = COPY + 1 + rng.integers(self.answers, self.copied)
        inputs, targets = np.full(self.length, self.BLANK), np.full(self.length, NOTHING)
        end = self.length - self.copied - 1
        inputs[np.sort(rng.choice(end, self.copied))] = words
        inputs[end] = COPY
        targets[end + 1 :] = words
        return inputs, targets
