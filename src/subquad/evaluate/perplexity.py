"""Perplexity. Text is cut into pieces, so that every token is scored once, with earlier text as context.

With tokens_per_sample T and a context window of c tokens, a piece has up to T - c tokens that are scored, and c tokens
of context before them. With c = 0 pieces have no context, as in training. More context costs T / (T - c) passes over
the text, and gives a lower perplexity. Of the context only those tokens are read that the scored ones depend on: where
every layer looks back a limited number of tokens, as convolutions and windows do, that is less, with the same result.

The samples of a test of significance are documents: neighbouring pieces of one text are too much alike to count as
independent. Perplexity is exp of the mean loss: per token, including the ends of lines; per word, where words are
separated by white space and the end of a line is a word too (with a tokenizer of words, the same as per token). Bits
are counted per byte of UTF-8, including the ends of lines.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from subquad.data.batches import Batch
from subquad.data.blocks import BlockOptions, Blocks, Lines, collate_blocks
from subquad.evaluate.measure import Measure

MAX_EXPONENT = 700.0  # exp of more overflows in float64


class TokenLines:
    """Lines of tokens in memory, with the interface of a token store."""

    def __init__(self, lines: Sequence[Sequence[int]]) -> None:
        self.lines = [np.asarray(line, np.int64) for line in lines]

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(line) for line in self.lines], np.int64)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.lines[index]


class ContextBlocks:
    """Blocks of T - c tokens that are scored, each with up to c tokens of context before them: pieces of T tokens."""

    def __init__(
        self,
        store: Lines,
        options: BlockOptions,
        context_window: int,
        pad: int,
        eos: int,
        reads_from: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """reads_from: for the position in a piece at which its scored tokens begin, the position at which a model has
        to begin to read it."""
        size = options.tokens_per_sample
        if not 0 <= context_window < size:
            raise ValueError(
                f"a context window of {context_window} tokens leaves nothing to score in samples of {size}; "
                f"it must be 0 to {size - 1}"
            )
        shorter = options.model_copy(update={"tokens_per_sample": size - context_window})
        self.blocks, self.pad = Blocks(store, shorter, eos), pad
        piece_begin = np.maximum(0, self.blocks.begin - context_window)
        self.longest = int((self.blocks.end - piece_begin).max())
        places, which = np.unique(self.blocks.begin - piece_begin, return_inverse=True)
        self.start = np.array([reads_from(int(place)) for place in places], np.int64)[which]
        self.begin = piece_begin + self.start
        self.sizes: tuple[np.ndarray, ...] = (self.blocks.end - self.begin,)

    def __len__(self) -> int:
        return len(self.blocks)

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]:  # noqa: ARG002
        """Returns inputs and targets (B, T). Targets in the context and after the end of a block are padding.

        start: (B,), the positions in their pieces of the first tokens of the rows; context: (B,), how many tokens
        follow in each that are not scored.
        """
        pieces = [self.blocks.window(int(self.begin[i]), int(self.blocks.end[i])) for i in numbers]
        found = collate_blocks(pieces, self.pad)
        context = torch.from_numpy(self.blocks.begin[numbers] - self.begin[numbers])
        is_context = torch.arange(found["targets"].shape[1]) < context[:, None]
        targets = found["targets"].masked_fill(is_context, self.pad)
        start = torch.from_numpy(self.start[numbers])
        return {"inputs": found["inputs"], "targets": targets, "start": start, "context": context}


@dataclass(frozen=True)
class TextSize:
    """The size of a text, for perplexities that do not depend on the tokenizer."""

    lines: int
    words: int
    bytes: int

    @classmethod
    def of(cls, lines: Iterable[str]) -> "TextSize":
        count = words = size = 0
        for line in lines:
            count += 1
            words += len(line.split()) + 1
            size += len(line.encode()) + 1
        return cls(count, words, size)


def sum_by_document(losses: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Returns the sums (documents, 2) of the losses (pieces, 2) of the pieces that begin in each document.

    A document ends with an empty line. Where the text does not show documents of several pieces in this way, runs of
    sqrt(n) of its n pieces take their place.
    """
    pieces = len(losses)
    is_empty = np.asarray(blocks.store.lengths) == 0
    document_of_line = np.cumsum(is_empty)
    numbers = document_of_line[np.searchsorted(blocks.line_ends, blocks.begin, side="right")]
    if len(np.unique(numbers)) < 2 or 2 * len(np.unique(numbers)) > pieces:
        numbers = np.arange(pieces) // max(1, round(math.sqrt(pieces)))
    first = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
    return np.add.reduceat(losses, first)


def perplexity(losses: np.ndarray, per: float = 1.0, signature: str = "") -> Measure:
    """Returns exp of the mean loss. losses: (documents, 2), the summed -log p in nats and the tokens of each.

    per: the number of units (such as words) for each token, if the mean is over units instead of tokens.
    """
    return Measure(losses, lambda sums: perplexity_score(sums, per), signature, "lower")


def perplexity_score(sums: np.ndarray, per: float = 1.0) -> float:
    """Computes the score of `perplexity` from sums of its losses."""
    return math.exp(min(MAX_EXPONENT, sums[0] / (sums[1] * per)))


def bits_per_unit(losses: np.ndarray, per: float, signature: str) -> Measure:
    """Returns the bits for each unit (such as a byte). per: units for each token. losses: as for `perplexity`."""
    return Measure(losses, lambda sums: float(sums[0] / (sums[1] * per) / math.log(2)), signature, "lower", decimals=4)
