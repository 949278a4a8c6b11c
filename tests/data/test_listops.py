"""ListOps: values by an evaluator of its own, limits, splits, and the same samples everywhere."""

import statistics
from itertools import combinations
from typing import Any

import pytest

from subquad.data.builtin import load

NAMES = ("[MIN", "[MAX", "[MED", "[SM")


def small(**options: Any) -> Any:
    return load("listops", **{"min_length": 64, "max_length": 128, "train": 60, "valid": 30, "test": 30} | options)


def evaluated(symbols: list[str]) -> tuple[int, int, int]:
    """The value of a whole expression, its depth with the digits, and the most arguments, by reading it recursively."""
    place = 0

    def read() -> tuple[int, int, int]:
        nonlocal place
        symbol, place = symbols[place], place + 1
        if symbol not in NAMES:
            return int(symbol), 1, 0
        arguments = []
        while symbols[place] != "]":
            arguments.append(read())
        place += 1
        values = [value for value, _, _ in arguments]
        value = {
            "[MIN": min(values),
            "[MAX": max(values),
            "[MED": int(statistics.median(values)),
            "[SM": sum(values) % 10,
        }[symbol]
        deepest = 1 + max(depth for _, depth, _ in arguments)
        return value, deepest, max(len(values), *(most for _, _, most in arguments))

    found = read()
    assert place == len(symbols), "one expression, and nothing after it"
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"depth": 5, "arguments": 5},
        {"min_length": 8, "max_length": 20},
        {"min_length": 900, "max_length": 1000, "train": 9, "valid": 3, "test": 3},
    ],
)
def test_labels_are_the_values_within_all_limits(options: dict[str, Any]) -> None:
    listops = small(**options)
    low, high = options.get("min_length", 64), options.get("max_length", 128)
    for split in (listops.train, listops.valid, listops.test):
        for label, text in split:
            symbols = text.split(" ")
            value, depth, arguments = evaluated(symbols)
            assert label == str(value)
            assert low <= len(symbols) <= high
            assert depth <= options.get("depth", 10)
            assert 2 <= arguments <= options.get("arguments", 10)


def test_the_median_of_an_even_number_is_rounded_down() -> None:
    samples = [(label, text.split()) for label, text in small(min_length=4, max_length=5, train=2000).train]
    medians = [(label, symbols[1:-1]) for label, symbols in samples if symbols[0] == "[MED" and len(symbols) == 4]
    assert any((int(first) + int(second)) % 2 for _, (first, second) in medians)
    assert all(label == str((int(first) + int(second)) // 2) for label, (first, second) in medians)


def test_samples_depend_on_seed_split_and_number_alone() -> None:
    listops = small()
    assert list(small().test) == list(listops.test)
    assert small(train=5000).train[59] == listops.train[59], "a larger split begins with the smaller one"
    assert small(train=1).test[3] == listops.test[3]
    assert small(seed=1).train[0] != listops.train[0]
    assert listops.train[0] != listops.valid[0]
    with pytest.raises(IndexError, match="60 samples"):
        listops.train[60]


def test_the_first_sample_is_the_same_on_every_machine() -> None:
    assert small(min_length=10, max_length=16).train[0] == ("3", "[MIN 7 [MIN 6 7 5 3 ] 6 ]")
    assert load("listops").train[0][1].split()[:6] == ["[SM", "9", "3", "6", "4", "[SM"]


def test_splits_do_not_overlap_even_where_there_are_few_expressions() -> None:
    listops = small(min_length=4, max_length=6, train=3000, valid=300, test=300)
    texts = [{text for _, text in split} for split in (listops.train, listops.valid, listops.test)]
    assert not any(one & other for one, other in combinations(texts, 2))
    assert len(texts[1]) > 100


@pytest.mark.parametrize("length", [64, 512, 4096, 65_536])
def test_every_length_can_be_reached(length: int) -> None:
    listops = small(min_length=int(0.8 * length), max_length=length, train=2)
    for label, text in listops.train:
        assert 0.8 * length - 1 <= len(text.split()) <= length
        assert label == str(evaluated(text.split())[0])


def test_the_growth_is_that_of_long_range_arena_up_to_its_lengths() -> None:
    assert load("listops").train.share == 0.25
    assert small(min_length=525, max_length=2000).train.share == 0.25
    assert small(min_length=560, max_length=2000).train.share > 0.25


def test_classes_are_uneven_and_the_first_operator_tells_much() -> None:
    """What the docstring says of trivial rules, with fewer samples."""
    samples = [load("listops", train=400).train[number] for number in range(400)]
    constant = max(sum(label == str(value) for label, _ in samples) for value in range(10)) / 400
    guess = {"[MIN": "0", "[MAX": "9"}
    rule = sum(label == guess.get(text.split()[0], "4") for label, text in samples) / 400
    assert 0.12 < constant < 0.22
    assert 0.28 < rule < 0.42


def test_a_split_is_identified_without_generating_it() -> None:
    assert small().key == small().key
    assert small(seed=2).key != small().key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_length": 100, "max_length": 105}, "not a tenth above min_length"),
        ({"min_length": 5000, "max_length": 9000, "depth": 3}, "raise depth or arguments"),
        ({"lenght": 5}, "has no option"),
        ({"max_length": 10**6}, "max_length"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        small(**options)
    assert "\n" not in str(caught.value)
