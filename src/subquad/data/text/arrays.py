"""Token ids that exist already, in files of numpy or fairseq. No tokenizer runs; only its size and special ids matter.

    .npy   with one dimension: a single sample, the stream of a language model; with two: a sample in each row
    .npz   `ids` has all samples one after the other, and `lengths` (n,) or `offsets` (n + 1,) says where each ends
    .idx   what fairseq-preprocess writes, with the ids in a .bin file beside it

.npz files are read as a whole; the others are memory-mapped. Padding at the end of a sample is cut off, and then one
eos, because token stores hold samples without special tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from subquad.data.fairseq.index import INDEX, open_indexed
from subquad.data.numpy_files import read_npy, read_npz
from subquad.data.text.encode import SkipRules, TokenChunk
from subquad.data.tokenizers import Tokenizer

CHUNK_TOKENS = 1 << 22
PIECE_TOKENS = 1 << 16
"""Tokens that are looked at together, since a stream may be larger than memory."""


@dataclass(frozen=True)
class TokenArray:
    """The samples of one file. Sample i is ids[offsets[i]:offsets[i + 1]] - base, special tokens included."""

    path: str
    ids: np.ndarray  # (tokens,) integers; a view of the file if it is memory-mapped
    offsets: np.ndarray  # (n + 1,) int64
    is_stream: bool = False
    base: int = 0

    @classmethod
    def open(cls, path: str) -> Self:
        if path.endswith(INDEX):
            return cls._from_index(path)
        if not Path(path).is_file():
            raise ValueError(f"{path}: there is no such file")
        try:
            if path.endswith(".npz"):
                arrays, _ = read_npz(Path(path), ("ids", "lengths", "offsets"))
            else:
                arrays = {"ids": read_npy(Path(path))}
        except ValueError as error:
            raise ValueError(f"{path} cannot be read as an array of numpy: {error}") from None
        return cls._from_arrays(path, **arrays)

    @classmethod
    def _from_index(cls, path: str) -> Self:
        found = open_indexed(path)
        if not found.ids.size:
            raise ValueError(f"{path}: empty, there are no samples")
        return cls(path, found.ids, found.offsets, base=found.base)

    @classmethod
    def _from_arrays(
        cls,
        path: str,
        ids: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        offsets: np.ndarray | None = None,
    ) -> Self:
        if ids is None or (path.endswith(".npz") and (lengths is None) == (offsets is None)):
            raise ValueError(f"{path} needs the arrays `ids` and either `lengths` or `offsets`")
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{path}: token ids are whole numbers, not {ids.dtype}")
        if ids.ndim not in (1, 2) or (ids.ndim == 2 and path.endswith(".npz")):
            raise ValueError(f"{path}: token ids have one dimension, or two in .npy, but the shape is {ids.shape}")
        if not ids.size:
            raise ValueError(f"{path}: empty, there are no samples")
        if offsets is not None:
            ends = _whole_numbers(path, "offsets", offsets)
        elif lengths is not None:
            ends = np.append(0, np.cumsum(_whole_numbers(path, "lengths", lengths)))
        else:
            ends = np.array([0, ids.size]) if ids.ndim == 1 else np.arange(len(ids) + 1) * ids.shape[1]
        # Whether they go back can be seen from differences only if these do not overflow.
        covers = len(ends) > 1 and ends[0] == 0 and ends[-1] == ids.size and 0 <= ends.min() <= ends.max() <= ids.size
        if not covers or (np.diff(ends) < 0).any():
            raise ValueError(f"{path}: the samples have to cover all {ids.size:,} ids, from 0 on, without going back")
        return cls(path, ids.reshape(-1), ends, ids.ndim == 1 and len(ends) == 2)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def end_within(self, start: int, tokens: int) -> int:
        """Returns the end of a range of samples from `start` on that has at most `tokens` tokens, or one sample."""
        return max(start + 1, int(np.searchsorted(self.offsets, self.offsets[start] + tokens, side="right")) - 1)

    def lengths(self, start: int, stop: int, tokenizer: Tokenizer) -> np.ndarray:
        """Returns (stop - start,) lengths without special tokens at the end. Ids outside the vocabulary are errors."""
        self._check(start, stop, tokenizer.size)
        begin = self.offsets[start:stop]
        end = self._ends_without(tokenizer.pad, begin, self.offsets[start + 1 : stop + 1])
        not_empty = np.flatnonzero(end > begin)
        end[not_empty[self.ids[end[not_empty] - 1] == tokenizer.eos + self.base]] -= 1
        return end - begin

    def _ends_without(self, pad: int, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Returns where samples end without the padding at their end.

        Everything is read once, in pieces: going back token by token would take hours for a file of padding.
        """
        found = begin.copy()
        for first in range(int(begin[0]), int(end[-1]), PIECE_TOKENS):
            stop = min(first + PIECE_TOKENS, int(end[-1]))
            tokens = first + np.flatnonzero(self.ids[first:stop] != pad + self.base)
            if len(tokens):
                here = slice(np.searchsorted(end, first, side="right"), np.searchsorted(begin, stop))
                last = np.searchsorted(tokens, end[here]) - 1  # of the tokens before the end; -1: there are none
                np.maximum(found[here], np.where(last >= 0, tokens[last] + 1, 0), out=found[here])
        return found

    def _check(self, start: int, stop: int, size: int) -> None:
        first = int(self.offsets[start])
        tokens = self.ids[first : int(self.offsets[stop])]
        least, end = self.base, self.base + size
        if len(tokens) and not least <= int(tokens.min()) <= int(tokens.max()) < end:
            wrong = int(np.argmax((tokens < least) | (tokens >= end)))
            sample = int(np.searchsorted(self.offsets, first + wrong, side="right"))
            place = f"sample {sample}, number {first + wrong - int(self.offsets[sample - 1]) + 1}"
            number = int(tokens[wrong]) - self.base
            raise ValueError(f"{self.path}, {place}: {number} is outside the vocabulary of {size:,} tokens")

    def tokens(self, start: int, stop: int, lengths: np.ndarray) -> np.ndarray:
        """Returns the first `lengths` ids of each of the samples, one sample after the other."""
        flat = self.ids[int(self.offsets[start]) : int(self.offsets[stop])]
        if stop == start + 1:
            kept = flat[: int(lengths[0])]  # a view, because a stream may be larger than memory
        else:
            full_lengths = np.diff(self.offsets[start : stop + 1])
            positions = np.arange(len(flat)) - np.repeat(self.offsets[start:stop] - self.offsets[start], full_lengths)
            kept = flat[positions < np.repeat(lengths, full_lengths)]
        return kept - self.base if self.base else kept


def _whole_numbers(path: str, name: str, values: np.ndarray) -> np.ndarray:
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{path}: {name} must be a row of whole numbers, not {values.dtype} of shape {values.shape}")
    return values.astype(np.int64)


def read_token_chunks(files: Sequence[str], tokenizers: Sequence[Tokenizer], rules: SkipRules) -> Iterator[TokenChunk]:
    """Yields the samples of parallel files, one file and tokenizer for each field, in chunks of bounded size."""
    arrays = [TokenArray.open(path) for path in files]
    if len(arrays) > 1:
        if streams := [array.path for array in arrays if array.is_stream]:
            raise ValueError(f"{streams[0]} is one long sample; give a row for each sample, or an .npz with lengths")
        if len({len(array) for array in arrays}) > 1:
            counts = ", ".join(f"{array.path} has {len(array):,}" for array in arrays)
            raise ValueError(f"parallel files need the same number of samples: {counts}")
    start, end = 0, len(arrays[0])
    while start < end:
        stop = min(array.end_within(start, CHUNK_TOKENS) for array in arrays)
        yield tokens_of_arrays(arrays, tokenizers, rules, start, stop)
        start = stop


def tokens_of_arrays(
    arrays: Sequence[TokenArray], tokenizers: Sequence[Tokenizer], rules: SkipRules, start: int, stop: int
) -> TokenChunk:
    """Returns a range of the samples of parallel arrays, without special tokens at their ends."""
    fields = zip(arrays, tokenizers, strict=True)
    lengths = np.stack([array.lengths(start, stop, tokenizer) for array, tokenizer in fields])
    kept, skipped = rules.select(lengths)
    lengths[:, ~kept] = 0
    tokens = [array.tokens(start, stop, own) for array, own in zip(arrays, lengths, strict=True)]
    unknown = [_count(flat, tokenizer.unk) for flat, tokenizer in zip(tokens, tokenizers, strict=True)]
    return TokenChunk(tokens, list(lengths[:, kept]), unknown, stop - start, skipped)


def _count(tokens: np.ndarray, number: int) -> int:
    """Returns how often an id occurs. The tokens are searched piece by piece, because they may be memory-mapped."""
    pieces = (tokens[begin : begin + CHUNK_TOKENS] for begin in range(0, len(tokens), CHUNK_TOKENS))
    return sum(int(np.count_nonzero(piece == number)) for piece in pieces) if number >= 0 else 0
