"""Words that a masked language model has to find: some tokens of a text are hidden, as BERT and RoBERTa do it.

Of the tokens that are asked for most are replaced by a symbol of their own; the others stay as they are, or become a
random word, so that a model cannot rely on what it reads in any place.
"""

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from subquad.config import Options


class MaskOptions(Options):
    share: float = Field(0.15, gt=0, le=1, description="of the tokens are asked for, at least one of each sample")
    kept: float = Field(0.1, ge=0, le=1, description="of the tokens that are asked for stay as they are")
    random: float = Field(0.1, ge=0, le=1, description="of the tokens that are asked for become a random word")

    def check(self) -> None:
        if self.kept + self.random > 1:
            raise ValueError(f"kept and random are shares of one whole; together they are {self.kept + self.random:g}")


@dataclass(frozen=True)
class Masking:
    """symbol: what hides a token; words: (n,) int64, the numbers that a random word is drawn from."""

    options: MaskOptions
    symbol: int
    words: np.ndarray

    def hide(self, tokens: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """tokens: (time,). What the model reads, (time,), and where it is asked, (time,) bool.

        The number of hidden tokens is `share` of them, rounded up or down at random so that the mean is right.
        """
        count = max(1, int(self.options.share * len(tokens) + generator.random()))
        chosen = generator.permutation(len(tokens))[:count]
        fate = generator.random(len(chosen))
        becomes = np.full(len(chosen), self.symbol, np.int64)
        becomes = np.where(fate < self.options.kept, tokens[chosen], becomes)
        drawn = generator.choice(self.words, len(chosen))
        becomes = np.where(fate >= 1 - self.options.random, drawn, becomes)
        read, asked = tokens.copy(), np.zeros(len(tokens), bool)
        read[chosen], asked[chosen] = becomes, True
        return read, asked
