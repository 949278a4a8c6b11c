"""The generated sets of recall: every sample follows the rules of its source, for any size and seed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.data.builtin import load
from subquad.data.builtin.recall import NOTHING, RecallSplit
from subquad.data.builtin.selective_copying import COPY

BLANK = 0
NAMES = ("associative_recall", "selective_copying", "fuzzy_recall")
LARGE: dict[str, dict[str, Any]] = {
    "associative_recall": {"length": 65_536, "pairs": 1_000, "vocab": 8_192},
    "selective_copying": {"length": 65_536, "copied": 96},
    "fuzzy_recall": {"length": 65_536, "vocab": 128},
}


def sample(name: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """One sample, whose number and seed follow from nothing but the options."""
    inputs, targets = load(name, **options).train[3]
    assert inputs.shape == targets.shape == (options["length"],)
    assert inputs.min() >= 0
    assert max(inputs.max(), targets.max()) < options["vocab"]
    return inputs, targets


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 20), st.floats(0.01, 1), st.integers(0, 99))
def test_associative_recall(pairs: int, more: int, symbols: int, power_a: float, seed: int) -> None:
    vocab = 2 * pairs + 2 + symbols
    inputs, targets = sample(
        "associative_recall", length=4 * pairs + more, pairs=pairs, vocab=vocab, power_a=power_a, seed=seed
    )
    context = inputs[: 2 * pairs].reshape(pairs, 2)
    value_of = {int(key): int(value) for key, value in context}
    assert len(value_of) == pairs == len(set(value_of.values())), "keys and values differ"
    assert all(0 < key < vocab // 2 <= value for key, value in value_of.items())
    (asked,) = np.nonzero(targets != NOTHING)
    assert asked.min() >= 2 * pairs
    assert {int(inputs[place]): int(targets[place]) for place in asked} == value_of, "every key is asked for once"
    rest = np.delete(inputs[2 * pairs :], asked - 2 * pairs)
    assert (rest == BLANK).all(), "no value is an input after the pairs"


@pytest.mark.parametrize("power_a", [0.01, 0.5, 1.0])
def test_the_first_query_is_drawn_by_the_power_law(power_a: float) -> None:
    """With one pair the place of its query has the stated probabilities."""
    split = load("associative_recall", length=18, pairs=1, vocab=8, power_a=power_a, train=4_000).train
    places = [int(np.flatnonzero(split[number][1] != NOTHING)[0] - 2) // 2 for number in range(4_000)]
    expected = np.arange(1, 9) ** (power_a - 1)
    shares = np.bincount(places, minlength=8) / 4_000
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.03)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 40), st.integers(4, 20), st.integers(0, 99))
def test_selective_copying(copied: int, more: int, vocab: int, seed: int) -> None:
    inputs, targets = sample("selective_copying", length=2 * copied + 1 + more, copied=copied, vocab=vocab, seed=seed)
    scattered, end = inputs[: -copied - 1], inputs[-copied:]
    assert inputs[-copied - 1] == COPY
    assert (end == BLANK).all()
    words = scattered[scattered != BLANK]
    assert (words > COPY).all()
    assert targets[-copied:].tolist() == words.tolist(), "in their order"
    assert (targets[:-copied] == NOTHING).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 60), st.integers(0, 12), st.integers(0, 99))
def test_fuzzy_recall(keys: int, values: int, more: int, symbols: int, seed: int) -> None:
    vocab = 4 + symbols
    inputs, targets = sample(
        "fuzzy_recall",
        length=2 * (keys + values) + more,
        vocab=vocab,
        key_symbols=keys,
        value_symbols=values,
        seed=seed,
    )
    begin = np.flatnonzero(inputs)[0]
    stream, asked = np.append(inputs, targets[-1])[begin:].tolist(), np.append(NOTHING, targets)[begin:].tolist()
    is_value = np.array(stream) >= 1 + (vocab - 1) // 2
    value_of: dict[tuple[int, ...], list[int]] = {}
    place = 0
    while place < len(stream):
        run = place + int(np.argmax(is_value[place:]))  # the first symbol of the value
        key = tuple(stream[place:run])
        size = int(np.argmin(is_value[run:])) or len(stream) - run
        value, wanted = stream[run : run + size], asked[run : run + size]
        assert 1 <= len(key) <= keys
        assert 1 <= len(value) <= values
        assert asked[place:run] == [NOTHING] * len(key)
        assert wanted == (value if key in value_of else [NOTHING] * size), "asked for where the key was there before"
        assert value_of.setdefault(key, value) == value
        place = run + size
    assert targets[-1] != NOTHING, "the last pair is always asked for"


@pytest.mark.parametrize("name", NAMES)
def test_samples_depend_on_seed_split_and_number_alone(name: str) -> None:
    few, many = load(name, train=5, seed=4), load(name, train=10**9, seed=4)
    for number in (4, 0, 2):  # in any order
        for one, other in zip(few.train[number], many.train[number], strict=True):
            np.testing.assert_array_equal(one, other)
    assert len(many.train) == 10**9
    many.train[10**9 - 1]
    with pytest.raises(IndexError):
        few.train[5]
    everything = [
        split[number][0].tobytes()
        for split in (few.train, few.valid, few.test, load(name, seed=5).train)
        for number in range(5)
    ]
    assert len(set(everything)) == len(everything), "no two splits, numbers or seeds give the same sample"


def test_samples_are_the_same_in_every_version() -> None:
    """Numbers that this code gave once: only the raw output of PCG64 is used, which numpy guarantees."""
    inputs, targets = load("associative_recall", length=16, pairs=3, vocab=16).train[0]
    assert inputs.tolist() == [7, 8, 5, 14, 6, 13, 7, 0, 5, 0, 6, 0, 0, 0, 0, 0]
    assert targets[6:11].tolist() == [8, NOTHING, 14, NOTHING, 13]
    inputs, _ = load("selective_copying", length=16, copied=4, vocab=10).train[1]
    assert inputs.tolist() == [8, 0, 0, 4, 0, 0, 0, 0, 3, 9, 0, 1, 0, 0, 0, 0]
    inputs, _ = load("fuzzy_recall", length=16, vocab=9).train[1]
    assert inputs.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 4, 5, 7, 4, 5, 7, 4, 5]


@pytest.mark.parametrize("name", NAMES)
def test_samples_may_be_long(name: str) -> None:
    split: RecallSplit = load(name, **LARGE[name]).test
    inputs, targets = split[0]
    assert len(inputs) == 65_536
    assert np.count_nonzero(targets != NOTHING) >= 96


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("associative_recall", {"length": 16, "pairs": 5}, "5 pairs and queries take 20 symbols"),
        ("associative_recall", {"vocab": 16, "pairs": 8}, "need a vocab of 18"),
        ("associative_recall", {"pair": 5}, "did you mean 'pairs'"),
        ("associative_recall", {"power_a": 0}, "power_a"),
        ("selective_copying", {"length": 16, "copied": 8}, "take 17 symbols"),
        ("fuzzy_recall", {"length": 8}, "two pairs take up to 12 symbols"),
        ("fuzzy_recall", {"vocab": 3}, "vocab"),
        ("fuzy_recall", {}, "did you mean 'fuzzy_recall'"),
    ],
)
def test_what_cannot_be_generated_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(name, **options)
