"""Masks tokens for masked language models, as BERT and RoBERTa do.

Some tokens of a text are targets. Most targets are replaced by the mask token; the others stay as they are or become a
random word, so that a model cannot rely on any input token.
"""

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from subquad.config import Options


class MaskOptions(Options):
    """Which tokens are targets, and what the model reads in their place."""

    share: float = Field(0.15, gt=0, le=1, description="The share of tokens that are targets, at least one.")
    kept: float = Field(0.1, ge=0, le=1, description="The share of targets that stay as they are.")
    random: float = Field(0.1, ge=0, le=1, description="The share of targets that become a random word.")

    def check(self) -> None:
        if self.kept + self.random > 1:
            raise ValueError(f"kept and random are shares of the targets, but their sum is {self.kept + self.random:g}")


@dataclass(frozen=True)
class Masking:
    """mask_id: the id of the mask token; word_ids: (n,) int64, the ids that a random word is drawn from."""

    options: MaskOptions
    mask_id: int
    word_ids: np.ndarray

    def apply(self, tokens: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """tokens: (time,). Returns the inputs of the model, (time,), and which tokens are targets, (time,) bool.

        The number of targets is `share` of the tokens, rounded up or down at random so that its mean is exact.
        """
        count = max(1, int(self.options.share * len(tokens) + rng.random()))
        chosen = rng.permutation(len(tokens))[:count]
        fate = rng.random(len(chosen))
        replacement = np.full(len(chosen), self.mask_id, np.int64)
        replacement = np.where(fate < self.options.kept, tokens[chosen], replacement)
        random_words = rng.choice(self.word_ids, len(chosen))
        replacement = np.where(fate >= 1 - self.options.random, random_words, replacement)
        inputs, is_target = tokens.copy(), np.zeros(len(tokens), bool)
        inputs[chosen], is_target[chosen] = replacement, True
        return inputs, is_target
