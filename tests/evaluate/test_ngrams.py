"""Language models by counting: against probabilities computed by hand and an implementation with loops."""

import math
from collections import Counter

import numpy as np
import pytest

from subquad.evaluate import ngrams
from subquad.evaluate.ngrams import PairCounts, Unigram, absolute_discount

VOCAB = 6


def counted(text: list[int], vocab: int = VOCAB, start: int = 0) -> PairCounts:
    counts = PairCounts(vocab)
    counts.add(np.array([start, *text[:-1]]), np.array(text))
    return counts


def random_text(length: int = 200, vocab: int = VOCAB, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).choice(vocab - 1, length, p=np.arange(1, vocab) / sum(range(1, vocab))).tolist()


def kneser_ney(text: list[int], before: int, word: int, vocab: int = VOCAB, start: int = 0) -> float:
    """The formula of the docstring, with dictionaries."""
    pairs = Counter(zip([start, *text[:-1]], text, strict=True))

    def discount(counts: list[int]) -> float:
        once, twice = counts.count(1), counts.count(2)
        return once / (once + 2 * twice) if once else 0.5

    continuations = Counter(w for _, w in pairs)
    d = discount(list(continuations.values()))
    uniform = d * len(continuations) / vocab
    lower = (max(continuations[word] - d, 0) + uniform) / len(pairs)
    seen = sum(count for (v, _), count in pairs.items() if v == before)
    if not seen:
        return lower
    d = discount(list(pairs.values()))
    followers = len([v for v, _ in pairs if v == before])
    return (max(pairs[before, word] - d, 0) + d * followers * lower) / seen


def test_a_unigram_by_hand() -> None:
    """Counts 3, 2, 1, 0: one word is there once and one twice, so the discount is 1 / 3."""
    unigram = Unigram.of(np.array([3, 2, 1, 0]))
    third = 1 / 3
    assert unigram.probs == pytest.approx([(count - third + 0.25) / 6 for count in (3, 2, 1)] + [0.25 / 6])
    assert unigram.log_probs(np.array([3])) == pytest.approx([math.log(0.25 / 6)])


def test_a_bigram_by_hand() -> None:
    """The pairs are (0, 1), (1, 2), (2, 1), (1, 2): three once or twice, and two different words."""
    bigram = counted([1, 2, 1, 2], vocab=3).bigram()
    # n1 = 2 and n2 = 1 of the pairs; 1 follows two words, 2 follows one: n1 = n2 = 1 there
    d, lower_d = 2 / 4, 1 / 3
    lower = [2 * lower_d / 3 / 3, (2 - lower_d + 2 * lower_d / 3) / 3, (1 - lower_d + 2 * lower_d / 3) / 3]
    assert bigram.lower.probs == pytest.approx(lower)
    found = np.exp(bigram.log_probs(np.array([1, 1]), np.array([2, 1])))
    assert found == pytest.approx([(2 - d + d * lower[2]) / 2, d * lower[1] / 2])


@pytest.mark.parametrize("seed", range(3))
def test_probabilities_sum_to_one(seed: int) -> None:
    counts = counted(random_text(seed=seed))
    assert counts.unigram().probs.sum() == pytest.approx(1)
    words = np.arange(VOCAB)
    for bigram in (counts.bigram(), counts.reversed_bigram()):
        for before in range(VOCAB):  # the last one never occurs
            assert np.exp(bigram.log_probs(np.full(VOCAB, before), words)).sum() == pytest.approx(1)


def test_every_bigram_agrees_with_the_loops() -> None:
    text = random_text(60)
    bigram = counted(text).bigram()
    for before in range(VOCAB):
        ours = np.exp(bigram.log_probs(np.full(VOCAB, before), np.arange(VOCAB)))
        assert ours == pytest.approx([kneser_ney(text, before, word) for word in range(VOCAB)])


def test_the_reversed_bigram_is_that_of_the_reversed_text() -> None:
    text = random_text(50)
    ours = counted(text).reversed_bigram()
    backwards = PairCounts(VOCAB)
    backwards.add(np.array(text), np.array([0, *text[:-1]]))
    theirs = backwards.bigram()
    words = np.arange(VOCAB)
    for after in range(VOCAB):
        assert ours.log_probs(np.full(VOCAB, after), words) == pytest.approx(
            theirs.log_probs(np.full(VOCAB, after), words)
        )


def test_pieces_are_counted_as_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_text(100)
    whole = counted(text)
    monkeypatch.setattr(ngrams, "CHUNK_TOKENS", 7)
    pieces = counted(text)
    assert (whole.keys == pieces.keys).all()
    assert (whole.counts == pieces.counts).all()
    assert whole.counts.sum() == 100


def test_the_discount_without_single_counts() -> None:
    assert absolute_discount(np.array([1, 1, 2, 5])) == 2 / 4
    assert absolute_discount(np.array([4, 5])) == 0.5


def test_a_text_that_repeats_itself_is_predicted() -> None:
    text = [1, 2, 3, 4] * 50
    bigram = counted(text).bigram()
    found = bigram.log_probs(np.array(text[:-1]), np.array(text[1:]))
    assert np.exp(-found.mean()) < 1.05
