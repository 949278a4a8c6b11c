"""Language models by counting: what a trained model has to beat.

    unigram     p(w) = (max(c(w) - d, 0) + d t / V) / n
    bigram      p(w | v) = (max(c(v, w) - d, 0) + d t(v) p'(w)) / c(v), and p'(w) where v was never seen

Both discount every count by d = n1 / (n1 + 2 n2), where n1 and n2 are how many counts are 1 and 2, and give what they
took to a simpler model: the uniform one over V words, and p'. The bigram is interpolated Kneser-Ney: p' is the unigram
formula with the number of different words before w in the place of c(w). n is the sum of the counts, t how many words
have one, c(v) how often v was followed by a word, and t(v) by how many different ones.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

CHUNK_TOKENS = 1 << 22
"""Pairs that are sorted at once; beyond these, memory is needed for different pairs only."""
DEFAULT_DISCOUNT = 0.5
"""Where no count is 1, so that the usual estimate would leave nothing for words that were never seen."""


@dataclass(frozen=True)
class Unigram:
    """probs: (vocab,)."""

    probs: np.ndarray

    @classmethod
    def of(cls, counts: np.ndarray) -> Self:
        """counts: (vocab,), how often each word was seen."""
        total, size = counts.sum(), len(counts)
        if not total:
            return cls(np.full(size, 1 / size))
        discount = absolute_discount(counts[counts > 0])
        shared = discount * np.count_nonzero(counts) / size
        return cls((np.maximum(counts - discount, 0) + shared) / total)

    def log_probs(self, words: np.ndarray) -> np.ndarray:
        """words: (n,). Returns (n,), in nats."""
        return np.log(self.probs[words])


@dataclass(frozen=True)
class Bigram:
    """keys: (pairs,) int64, sorted: v V + w of the pairs (v, w) that were seen, counts: (pairs,) how often.

    lower: p'. seen, followers: (vocab,), c(v) and t(v).
    """

    keys: np.ndarray
    counts: np.ndarray
    lower: Unigram
    seen: np.ndarray
    followers: np.ndarray

    @classmethod
    def of(cls, keys: np.ndarray, counts: np.ndarray, vocab: int) -> Self:
        """The model of counted pairs, as `PairCounts` has them."""
        before, words = np.divmod(keys, vocab)
        lower = Unigram.of(np.bincount(words, minlength=vocab))
        seen = np.bincount(before, weights=counts, minlength=vocab)
        return cls(keys, counts, lower, seen, np.bincount(before, minlength=vocab))

    def log_probs(self, before: np.ndarray, words: np.ndarray) -> np.ndarray:
        """The words (n,), each after the word at its place in `before` (n,). Returns (n,), in nats."""
        discount, lower = absolute_discount(self.counts), self.lower.probs[words]
        seen = self.seen[before]
        discounted = np.maximum(self._counts_of(before, words) - discount, 0)
        probs = (discounted + discount * self.followers[before] * lower) / np.maximum(seen, 1)
        return np.log(np.where(seen > 0, probs, lower))

    def _counts_of(self, before: np.ndarray, words: np.ndarray) -> np.ndarray:
        wanted = before.astype(np.int64) * len(self.seen) + words
        places = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where(self.keys[places] == wanted, self.counts[places], 0)


def absolute_discount(counts: np.ndarray) -> float:
    """n1 / (n1 + 2 n2) of counts that are all at least 1 (Ney, Essen and Kneser 1994)."""
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    return once / (once + 2 * twice) if once else DEFAULT_DISCOUNT


class PairCounts:
    """Counts pairs of neighbouring words of a text that comes in pieces."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.keys, self.counts = np.empty(0, np.int64), np.empty(0, np.int64)

    def add(self, before: np.ndarray, words: np.ndarray) -> None:
        """The words (n,), each after the word at its place in `before` (n,)."""
        for start in range(0, len(words), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            new, count = np.unique(before[part].astype(np.int64) * self.vocab + words[part], return_counts=True)
            keys, places = np.unique(np.concatenate([self.keys, new]), return_inverse=True)
            weights = np.concatenate([self.counts, count])
            self.keys, self.counts = keys, np.bincount(places, weights=weights).astype(np.int64)

    def unigram(self) -> Unigram:
        words = np.bincount(self.keys % self.vocab, weights=self.counts, minlength=self.vocab)
        return Unigram.of(words)

    def bigram(self) -> Bigram:
        return Bigram.of(self.keys, self.counts, self.vocab)

    def reversed_bigram(self) -> Bigram:
        """The model of a word given the one after it."""
        before, words = np.divmod(self.keys, self.vocab)
        keys = words * self.vocab + before
        order = np.argsort(keys)
        return Bigram.of(keys[order], self.counts[order], self.vocab)
