"""Fuzzy recall, a task of MAD (Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures", arXiv
2403.17844): associative recall whose keys and values are one to several symbols long.

Pairs of a key and its value follow one another. A key that was there before has the same value as before, which is
asked for symbol by symbol:

    inputs     a b x | c y z | a w | a b x | c y
    targets    - - - | - - - | - - | - x - | y z

The bars are not there: keys and values have symbols of their own, and a key is a whole run of the former. Above,
`a b` and `a` are different keys. All sizes up to the largest are equally likely, and so are all keys of a size. The
last pair always repeats an earlier one, and blanks fill up the beginning. MAD has keys and values of up to 3 symbols,
lengths of 128 to 1,024, and a vocabulary of 16 to 128. Its keys have no symbol twice, and its tests ask for the longest
keys only; here training and tests are alike.
"""

import numpy as np
from pydantic import Field

from subquad.data.builtin.recall import NOTHING, RecallOptions
from subquad.data.stable_rng import StableRng


class FuzzyRecallOptions(RecallOptions):
    """Options of fuzzy recall: keys of several symbols, which come again with the values that they had."""

    vocab: int = Field(16, ge=4, description="The number of different symbols.")
    key_symbols: int = Field(3, ge=1, le=4, description="The most symbols of a key.")
    value_symbols: int = Field(3, ge=1, le=4, description="The most symbols of a value.")

    def check(self) -> None:
        longest = self.key_symbols + self.value_symbols
        self.refuse_if(self.length < 2 * longest, f"two pairs take up to {2 * longest} symbols")

    @property
    def first_value(self) -> int:
        """Symbols below it are those of keys, but for the blank."""
        return 1 + (self.vocab - 1) // 2

    @property
    def answers(self) -> int:
        return self.vocab - self.first_value

    def sample(self, rng: StableRng) -> tuple[np.ndarray, np.ndarray]:
        pairs = self._pairs(rng)
        # A key as one number, from the digits of its symbols. Its value is that of the first pair with this key.
        codes = pairs[:, : self.key_symbols] @ self.first_value ** np.arange(self.key_symbols)
        _, first, number = np.unique(codes, return_index=True, return_inverse=True)
        shown = first[number]
        # As many pairs as fit, with room for a last one.
        ends = np.cumsum(np.count_nonzero(pairs[shown], 1))
        fitting = int(np.searchsorted(ends, self.length + 1 - pairs.shape[1], side="right"))
        shown = np.append(shown[:fitting], shown[rng.integers(fitting, 1)])
        known = shown < np.arange(fitting + 1)  # so the last pair always is
        asked = known[:, None] & (np.arange(pairs.shape[1]) >= self.key_symbols)
        written = pairs[shown]
        stream, asked = written[written != self.BLANK], asked[written != self.BLANK]
        inputs, targets = np.full(self.length + 1, self.BLANK), np.full(self.length + 1, NOTHING)
        inputs[-len(stream) :], targets[-len(stream) :] = stream, np.where(asked, stream, NOTHING)
        return inputs[:-1], targets[1:]

    def _pairs(self, rng: StableRng) -> np.ndarray:
        """Draws keys and values (pairs, most symbols of both), more than fit; blanks follow the symbols of each."""
        count = (self.length + 1) // 2
        sides = ((1, self.first_value - 1, self.key_symbols), (self.first_value, self.answers, self.value_symbols))
        parts = []
        for first, symbols, most in sides:
            drawn = first + rng.integers(symbols, count * most).reshape(count, most)
            sizes = 1 + rng.integers(most, count)
            parts.append(np.where(np.arange(most) < sizes[:, None], drawn, self.BLANK))
        return np.concatenate(parts, 1)
