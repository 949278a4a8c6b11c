"""ListOps: the value of a nested expression such as `[MAX 4 [MIN 8 2 ] [SM 7 6 ] ]`, which is 4.

Nangia and Bowman (2018, arXiv:1804.06028) made it to see whether models find the structure of a sequence; Long Range
Arena (Tay et al., 2020, arXiv:2011.04006) made it long. The symbols are the operators, the digits and the bracket that
ends an expression. An operator has two arguments or more, each a digit or an expression:

    [MIN, [MAX      the smallest, the largest argument
    [MED            the median; of an even number of arguments the mean of the two in the middle, rounded down
    [SM             the sum modulo 10

Expressions grow as in Long Range Arena's program: an argument is an expression with probability 1/4, except at the
greatest depth; the number of arguments, operators and digits are uniform; expressions of other lengths are thrown away.
Where expressions of that share would rarely be long enough, the share is raised until their mean length is
`min_length`; that begins above 525 symbols with the default depth and arguments. The parentheses that the original
files have around every pair are left out, as Long Range Arena leaves them out.

How hard it is: a value can depend on every digit, through up to nine operators. But classes are uneven, because a
minimum is mostly 0 and a maximum mostly 9. Of the first 4,000 training expressions with the default options the most
frequent class has 16.0 %, and the rule "0 if the first symbol is [MIN, 9 if it is [MAX, otherwise 4" is right for
35.0 %. The mechanisms in Long Range Arena's own table have 16 % to 37 %, so none of them is far above that rule: only
scores beyond it say something about nested structure.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence

from pydantic import Field

from subquad.config import Options
from subquad.data.stable_rng import StableRng

OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: _median(sorted(values)),
    "[SM": lambda values: sum(values) % 10,
}
NAMES, END, DIGITS = tuple(OPERATORS), "]", 10
SHARE = 0.25
"""The share of arguments that are expressions, in Long Range Arena."""
TRIES = 50_000
"""Expressions that are grown for one sample, before an error says that the lengths are too rare."""
CHUNK = 1024
RESIDUES = {"valid": (0,), "test": (1,), "train": (2, 3, 4, 5, 6, 7)}
"""An expression belongs to a split by the checksum of its text modulo 8, so no expression is in two splits."""


class ListOpsOptions(Options):
    """Options of ListOps: nested expressions of MIN, MAX, MED and SM (sum modulo 10), and their values, 0 to 9."""

    min_length: int = Field(500, ge=4, le=65_536, description="The fewest symbols of an expression.")
    max_length: int = Field(2000, ge=4, le=65_536, description="The most symbols of an expression.")
    depth: int = Field(10, ge=2, le=20, description="The greatest depth, where arguments are digits; the root has 1.")
    arguments: int = Field(10, ge=2, le=20, description="The most arguments of an operator.")
    seed: int = Field(0, ge=0, description="The seed; other seeds give other expressions.")
    train: int = Field(96_000, ge=1, description="The number of expressions for training.")
    valid: int = Field(2000, ge=1, description="The number of expressions for validation.")
    test: int = Field(2000, ge=1, description="The number of expressions for testing.")

    def check(self) -> None:
        if 10 * self.max_length < 11 * self.min_length:
            raise ValueError(
                f"max_length is {self.max_length}, which is not a tenth above min_length, {self.min_length}: "
                "expressions of so few lengths are too rare to draw"
            )
        self.expression_share()

    def expression_share(self) -> float:
        """The smallest share of arguments that are expressions, from 1/4 on, whose mean length is min_length."""
        for percent in range(round(100 * SHARE), 101):
            if self._mean_length(percent / 100) >= self.min_length:
                return percent / 100
        raise ValueError(
            f"expressions of depth {self.depth} with up to {self.arguments} arguments rarely have {self.min_length} "
            "symbols: raise depth or arguments, or lower min_length"
        )

    def _mean_length(self, share: float) -> float:
        """The mean length of expressions, from the greatest depth up to the root, which is always an operator."""
        arguments, length = (2 + self.arguments) / 2, 1.0
        for _ in range(self.depth - 2):
            length = (1 - share) + share * (2 + arguments * length)
        return 2 + arguments * length


class ListOpsSplit:
    """The samples (value, expression) of a split. Sample i depends on the seed, the split and i, and on nothing else.

    A sample is generated when it is asked for, so a split of any size takes no memory.
    """

    def __init__(self, options: ListOpsOptions, split: str) -> None:
        self.options, self.split = options, split
        self.share = options.expression_share()

    def __len__(self) -> int:
        return int(getattr(self.options, self.split))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> tuple[str, str]:
        if not 0 <= number < len(self):
            raise IndexError(f"split {self.split} of listops has {len(self)} samples, but {number} was asked for")
        draws = _draws(self.options.seed, list(RESIDUES).index(self.split), number)
        for _ in range(TRIES):
            symbols, value = self._grow(draws)
            if self.options.min_length <= len(symbols) <= self.options.max_length:
                text = " ".join(symbols)
                if zlib.crc32(text.encode()) % 8 in RESIDUES[self.split]:
                    return str(value), text
        low, high = self.options.min_length, self.options.max_length
        raise ValueError(
            f"none of {TRIES:,} expressions has {low} to {high} symbols: widen the range, or change depth or arguments"
        )

    def _grow(self, draws: Iterator[int]) -> tuple[list[str], int]:
        """The symbols of an expression and its value. Growing ends early when it has more than max_length symbols.

        A draw has 64 bits: the upper half says whether an argument is an expression, the lower half says which.
        """
        bound, most = int(self.share * 2**32), self.options.max_length
        symbols: list[str] = []
        unfinished: list[tuple[str, int, list[int]]] = []  # operators, how many arguments they get, those they have
        while len(symbols) <= most:
            draw = next(draws)
            which = draw & 0xFFFFFFFF
            can_nest = len(unfinished) + 1 < self.options.depth
            if not unfinished or (can_nest and draw >> 32 < bound):
                count, operator = divmod(which, len(NAMES))
                symbols.append(NAMES[operator])
                unfinished.append((NAMES[operator], 2 + count % (self.options.arguments - 1), []))
                continue
            value = which % DIGITS
            symbols.append(str(value))
            while unfinished:
                name, count, values = unfinished[-1]
                values.append(value)
                if len(values) < count:
                    break
                value = OPERATORS[name](values)
                symbols.append(END)
                unfinished.pop()
            if not unfinished:
                return symbols, value
        return symbols, -1


def _draws(*seeds: int) -> Iterator[int]:
    """Numbers of 64 bits, the same in every version of Python and numpy."""
    bits = StableRng(*seeds).bits
    while True:
        yield from bits.random_raw(CHUNK).tolist()


def _median(values: Sequence[int]) -> int:
    """The median of sorted values, rounded down."""
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2
