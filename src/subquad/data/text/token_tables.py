"""Token ids in the columns of a table: a data set of the hub or a parquet file with lists of numbers, or a .npz file
whose arrays, named as the columns, have a sample in each row.

No tokenizer runs; only its size and special ids matter. One bos at the beginning of a sample is cut off, padding at its
end, and one eos before that, because token stores hold samples without special tokens.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from subquad.data.hub import load_hub
from subquad.data.numpy_files import read_npz
from subquad.data.text.arrays import TokenArray, tokens_of_arrays
from subquad.data.text.encode import CHUNK_SAMPLES, SkipRules, TokenChunk
from subquad.data.text.sources import TextSource
from subquad.data.text.tables import look_up, parquet_rows
from subquad.data.tokenizers import Tokenizer

Sample = tuple[np.ndarray, ...]
"""The ids of each field."""


def read_table_chunks(
    source: TextSource, fields: Sequence[str], tokenizers: Sequence[Tokenizer], rules: SkipRules
) -> Iterator[TokenChunk]:
    """Yields the samples of a table in chunks of bounded size. tokenizers: one for each field."""
    path, columns = source.files[0], source.columns
    if len(source.files) > 1 or len(columns) != len(fields):
        raise ValueError(f"{path}: one file and {len(fields)} columns of token ids are needed ({', '.join(fields)})")
    if source.is_hub:
        data_set = load_hub(path, source.subset, source.split)
        samples = _samples(((f"{path}, sample {number}", row) for number, row in enumerate(data_set, 1)), columns)
    elif path.endswith(".parquet"):
        samples = _samples(parquet_rows(path), columns)
    elif path.endswith(".npz"):
        samples = _npz_samples(path, columns)
    else:
        raise ValueError(f"{path}: columns of token ids are read from .npz and .parquet files, and from the hub")
    first = 1
    while chunk := list(itertools.islice(samples, CHUNK_SAMPLES)):
        place = f"{path}, counted from sample {first:,}"
        arrays = [
            _array(place, [sample[field] for sample in chunk], tokenizer.bos)
            for field, tokenizer in enumerate(tokenizers)
        ]
        yield tokens_of_arrays(arrays, tokenizers, rules, 0, len(chunk))
        first += len(chunk)
    if first == 1:
        raise ValueError(f"{path}: empty, there are no samples")


def _samples(rows: Iterator[tuple[str, Any]], columns: Sequence[int | str]) -> Iterator[Sample]:
    for place, row in rows:
        yield tuple(_numbers(f"{place}: column {column}", look_up(place, row, column)) for column in columns)


def _npz_samples(path: str, columns: Sequence[int | str]) -> Iterator[Sample]:
    arrays, _ = read_npz(Path(path), tuple(map(str, columns)))
    for column in columns:
        if arrays.get(str(column)) is None:
            raise ValueError(f"{path} has no array {column!r}")
    named = [arrays[str(column)] for column in columns]
    if len({len(array) for array in named}) > 1 or any(array.ndim != 2 for array in named):
        shapes = ", ".join(str(array.shape) for array in named)
        raise ValueError(f"{path}: the columns need a row for each sample, as many in each; their shapes are {shapes}")
    return (
        tuple(_numbers(f"{path}, sample {number}", row) for row in rows)
        for number, rows in enumerate(zip(*named, strict=True), 1)
    )


def _numbers(place: str, values: Any) -> np.ndarray:
    try:
        ids = np.asarray(values)
    except ValueError:
        ids = np.zeros((), object)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"{place}: a list of token ids is needed, got {str(values)[:40]}")
    return ids.astype(np.int64, copy=False)


def _array(place: str, rows: Sequence[np.ndarray], bos: int) -> TokenArray:
    """The samples of a chunk one after the other, each without the bos at its beginning."""
    cut = [row[1:] if bos >= 0 and len(row) and row[0] == bos else row for row in rows]
    return TokenArray(place, np.concatenate(cut), np.cumsum([0, *map(len, cut)]))
