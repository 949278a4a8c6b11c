"""Tokens that are numbers already, in files of numpy or fairseq: no tokenizer runs over them, only its size counts.

    .npy   one dimension: a single sample, the stream of a language model; two: a sample in every row. Memory-mapped.
    .npz   `ids`, all samples one after the other, with their `lengths` (n,) or `offsets` (n + 1,). Read as a whole.
    .idx   what fairseq-preprocess writes, with the numbers in .bin beside it. Memory-mapped.

Padding at the end of a sample is cut off, and then one eos: stores hold samples without them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from subquad.data.fairseq.index import INDEX, open_indexed
from subquad.data.numpy_files import read_npy, read_npz
from subquad.data.text.encode import Encoded, Rules, chosen
from subquad.data.tokenizers.base import Tokenizer

CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class TokenArray:
    """Samples of one file: sample i is ids[offsets[i]:offsets[i + 1]] - base, special symbols included."""

    path: str
    ids: np.ndarray  # (tokens,) integers, a view of the file where it is mapped
    offsets: np.ndarray  # (n + 1,) int64
    is_stream: bool = False
    base: int = 0

    @classmethod
    def open(cls, path: str) -> Self:
        if path.endswith(INDEX):
            return cls._of_index(path)
        if not Path(path).is_file():
            raise ValueError(f"{path}: there is no such file")
        try:
            if path.endswith(".npz"):
                arrays, _ = read_npz(Path(path), ("ids", "lengths", "offsets"))
            else:
                arrays = {"ids": read_npy(Path(path))}
        except ValueError as error:
            raise ValueError(f"{path} cannot be read as an array of numpy: {error}") from None
        return cls._of_arrays(path, **arrays)

    @classmethod
    def _of_index(cls, path: str) -> Self:
        found = open_indexed(path)
        if not found.ids.size:
            raise ValueError(f"{path}: empty, there are no samples")
        return cls(path, found.ids, found.offsets, base=found.base)

    @classmethod
    def _of_arrays(
        cls,
        path: str,
        ids: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        offsets: np.ndarray | None = None,
    ) -> Self:
        if ids is None or (path.endswith(".npz") and (lengths is None) == (offsets is None)):
            raise ValueError(f"{path} needs the arrays `ids` and either `lengths` or `offsets`")
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{path}: tokens are whole numbers, not {ids.dtype}")
        if ids.ndim not in (1, 2) or (ids.ndim == 2 and path.endswith(".npz")):
            raise ValueError(f"{path}: tokens are one row of numbers, or in .npy a table of rows, not {ids.shape}")
        if not ids.size:
            raise ValueError(f"{path}: empty, there are no samples")
        if offsets is not None:
            ends = _whole_numbers(path, "offsets", offsets)
        elif lengths is not None:
            ends = np.append(0, np.cumsum(_whole_numbers(path, "lengths", lengths)))
        else:
            ends = np.array([0, ids.size]) if ids.ndim == 1 else np.arange(len(ids) + 1) * ids.shape[1]
        if len(ends) < 2 or ends[0] != 0 or ends[-1] != ids.size or (np.diff(ends) < 0).any():
            raise ValueError(f"{path}: the samples have to cover all {ids.size:,} ids, from 0 on, without going back")
        return cls(path, ids.reshape(-1), ends, ids.ndim == 1 and len(ends) == 2)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows_within(self, start: int, tokens: int) -> int:
        """The end of the samples from `start` on that have so many tokens together; one sample at least."""
        return max(start + 1, int(np.searchsorted(self.offsets, self.offsets[start] + tokens, side="right")) - 1)

    def lengths(self, start: int, stop: int, tokenizer: Tokenizer) -> np.ndarray:
        """(stop - start,) lengths without special symbols at the end. Numbers outside of the vocabulary are errors."""
        self._check(start, stop, tokenizer.size)
        begin, end = self.offsets[start:stop], self.offsets[start + 1 : stop + 1].copy()
        while len(padded := self._ending(begin, end, tokenizer.pad)):
            end[padded] -= 1
        end[self._ending(begin, end, tokenizer.eos)] -= 1
        return end - begin

    def _ending(self, begin: np.ndarray, end: np.ndarray, number: int) -> np.ndarray:
        """Which samples have `number` as their last token."""
        filled = np.flatnonzero(end > begin)
        return filled[self.ids[end[filled] - 1] == number + self.base]

    def _check(self, start: int, stop: int, size: int) -> None:
        first = int(self.offsets[start])
        tokens = self.ids[first : int(self.offsets[stop])]
        least, end = self.base, self.base + size
        if len(tokens) and not least <= int(tokens.min()) <= int(tokens.max()) < end:
            wrong = int(np.argmax((tokens < least) | (tokens >= end)))
            sample = int(np.searchsorted(self.offsets, first + wrong, side="right"))
            place = f"sample {sample}, number {first + wrong - int(self.offsets[sample - 1]) + 1}"
            number = int(tokens[wrong]) - self.base
            raise ValueError(f"{self.path}, {place}: {number} is outside of the vocabulary of {size:,} symbols")

    def tokens(self, start: int, stop: int, lengths: np.ndarray) -> np.ndarray:
        """The first `lengths` tokens of each of the samples, one sample after the other."""
        flat = self.ids[int(self.offsets[start]) : int(self.offsets[stop])]
        if stop == start + 1:
            kept = flat[: int(lengths[0])]  # a view: a stream may be larger than memory
        else:
            whole = np.diff(self.offsets[start : stop + 1])
            place = np.arange(len(flat)) - np.repeat(self.offsets[start:stop] - self.offsets[start], whole)
            kept = flat[place < np.repeat(lengths, whole)]
        return kept - self.base if self.base else kept


def _whole_numbers(path: str, name: str, values: np.ndarray) -> np.ndarray:
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{path}: {name} is one row of whole numbers, not {values.dtype} of shape {values.shape}")
    return values.astype(np.int64)


def array_chunks(files: Sequence[str], tokenizers: Sequence[Tokenizer], rules: Rules) -> Iterator[Encoded]:
    """Samples of parallel files, one file and tokenizer for each side, in chunks of bounded size."""
    arrays = [TokenArray.open(path) for path in files]
    if len(arrays) > 1:
        if streams := [array.path for array in arrays if array.is_stream]:
            raise ValueError(f"{streams[0]} is one long sample; give a row for each, or an .npz with lengths")
        if len({len(array) for array in arrays}) > 1:
            counts = ", ".join(f"{array.path} has {len(array):,}" for array in arrays)
            raise ValueError(f"parallel files need the same number of samples: {counts}")
    sides = list(zip(arrays, tokenizers, strict=True))
    start, end = 0, len(arrays[0])
    while start < end:
        stop = min(array.rows_within(start, CHUNK_TOKENS) for array in arrays)
        lengths = np.stack([array.lengths(start, stop, tokenizer) for array, tokenizer in sides])
        kept, skipped = chosen(lengths, rules)
        lengths[:, ~kept] = 0
        tokens = [array.tokens(start, stop, own) for array, own in zip(arrays, lengths, strict=True)]
        unknown = [_count(flat, tokenizer.unk) for flat, tokenizer in zip(tokens, tokenizers, strict=True)]
        yield Encoded(tokens, list(lengths[:, kept]), unknown, stop - start, skipped)
        start = stop


def _count(tokens: np.ndarray, number: int) -> int:
    """How often a number occurs, looked for in pieces."""
    pieces = (tokens[begin : begin + CHUNK_TOKENS] for begin in range(0, len(tokens), CHUNK_TOKENS))
    return sum(int(np.count_nonzero(piece == number)) for piece in pieces) if number >= 0 else 0
