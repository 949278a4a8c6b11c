"""Sentences of tokens in files that are mapped into memory: opening costs the same for ten tokens and for 10^9.

    <path>.tokens   all sentences one after the other, little-endian uint16 or uint32
    <path>.index    int64, little-endian, n + 1 offsets into the tokens; sentence i is tokens[index[i]:index[i + 1]]
    <path>.json     format, dtype, counts, checksums, and what the writer was told about input and tokenizer

Sentences are stored without special symbols.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from subquad.files import CHECKSUM, checksum, read_metadata, replace_synced, wrap_corrupt_data_errors, write_metadata

FORMAT = "subquad tokens 1"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
OFFSET = np.dtype("<i8")
BUFFERED_TOKENS = 1 << 20


def dtype_for(size: int) -> str:
    """The narrowest type for a vocabulary of `size` symbols."""
    return "uint16" if size <= 1 << 16 else "uint32"


class TokenWriter:
    """Writes a store; used as a context. The files get their names at its end, and only if all went well.

    with TokenWriter(path, "uint16", {"tokenizer": tokenizer.fingerprint()}) as writer:
        writer.add(ids)
    """

    def __init__(self, path: str | Path, dtype: str = "uint32", meta: Mapping[str, Any] | None = None) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"a token store holds {' or '.join(DTYPES)}, not {dtype!r}")
        self.path = Path(path)
        self.dtype = dtype
        self.meta = dict(meta or {})
        self.count = self.total = 0
        self._buffer: list[np.ndarray] = []
        self._ends: list[np.ndarray] = []
        self._buffered = 0

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._names = {part: _temporary(self.path, part) for part in ("tokens", "index")}
        self._files = {part: name.open("wb") for part, name in self._names.items()}
        self._sums = {part: hashlib.sha256() for part in self._names}
        self._write("index", np.zeros(1, OFFSET))
        return self

    def add(self, ids: Sequence[int] | np.ndarray) -> None:
        """Appends one sentence."""
        tokens = np.asarray(ids, dtype=np.int64)
        self.add_many(tokens, np.array([len(tokens)]))

    def add_many(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Appends sentences that stand one after the other in `tokens`."""
        assert tokens.ndim == 1
        assert int(lengths.sum()) == len(tokens)
        limit = np.iinfo(DTYPES[self.dtype]).max
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) <= limit:
            raise ValueError(f"{self.path}: tokens must be 0 to {limit} to be stored as {self.dtype}")
        self._ends.append(self.total + np.cumsum(lengths, dtype=np.int64))
        self._buffered += len(lengths)
        for start in range(0, len(tokens), BUFFERED_TOKENS):  # a single sentence may be larger than memory
            piece = tokens[start : start + BUFFERED_TOKENS]
            self._buffer.append(piece.astype(DTYPES[self.dtype]))
            self._buffered += len(piece)
            if self._buffered >= BUFFERED_TOKENS:
                self._flush()
        self.count += len(lengths)
        self.total += len(tokens)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._publish()
        finally:  # what a full disk could not take must not stay on it
            for name, file in zip(self._names.values(), self._files.values(), strict=True):
                name.unlink(missing_ok=True)
                with suppress(OSError):  # what is left to write is not wanted any more
                    file.close()

    def _publish(self) -> None:
        self._flush()
        for file in self._files.values():
            file.close()
        description = {
            **self.meta,
            "format": FORMAT,
            "dtype": self.dtype,
            "sentences": self.count,
            "tokens": self.total,
            "sha256": {part: value.hexdigest() for part, value in self._sums.items()},
        }
        # An old description must not stand beside new tokens, not even for a moment.
        _named(self.path, "json").unlink(missing_ok=True)
        for part, name in self._names.items():
            replace_synced(name, _named(self.path, part))
        write_metadata(_named(self.path, "json"), description)

    def _flush(self) -> None:
        if self._buffer:
            self._write("tokens", np.concatenate(self._buffer))
        if self._ends:
            self._write("index", np.concatenate(self._ends).astype(OFFSET))
        self._buffer, self._ends, self._buffered = [], [], 0

    def _write(self, part: str, values: np.ndarray) -> None:
        data = values.tobytes()
        self._files[part].write(data)
        self._sums[part].update(data)


class TokenStore:
    """Sentences of a store, read on demand: `store[i]` is a 1-D view of the memory map."""

    def __init__(self, path: Path, meta: dict[str, Any], tokens: np.ndarray, index: np.ndarray) -> None:
        self.path, self.meta = path, meta
        self.tokens, self.index = tokens, index
        self.total = len(tokens)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Checks the description and the sizes of the files, and reads nothing else."""
        path = Path(path)
        name = _named(path, "json")
        meta = read_metadata(name, FORMAT, "token store", [CHECKSUM])
        with wrap_corrupt_data_errors(str(name)):
            tokens = _map(_named(path, "tokens"), DTYPES[meta["dtype"]], meta["tokens"])
            index = _map(_named(path, "index"), OFFSET, meta["sentences"] + 1)
        if index[0] != 0 or index[-1] != len(tokens):
            raise ValueError(f"{_named(path, 'index')} is damaged: it does not end where the tokens end")
        return cls(path, meta, tokens, index)

    def __len__(self) -> int:
        return len(self.index) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.path} has {len(self)} sentences, there is none with number {number}")
        number %= len(self)
        return self.tokens[self.index[number] : self.index[number + 1]]

    @cached_property
    def lengths(self) -> np.ndarray:
        """(n,) int64: tokens of each sentence."""
        return np.diff(self.index).astype(np.int64, copy=False)

    def verify(self) -> None:
        """Reads everything and compares checksums; a difference is a ValueError."""
        for part, expected in self.meta["sha256"].items():
            name = _named(self.path, part)
            if checksum(name) != expected:
                raise ValueError(f"{name} is damaged: its checksum differs; prepare the data again")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).open, (self.path,)  # another process maps the files again instead of getting a copy


def remove_store(path: str | Path) -> None:
    """Deletes the files of a store, the description first; missing ones are no error."""
    for part in ("json", "tokens", "index"):
        _named(Path(path), part).unlink(missing_ok=True)


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; prepare the data again") from None
    if size != count * dtype.itemsize:
        raise ValueError(f"{path} is damaged: {size:,} bytes instead of {count * dtype.itemsize:,}")
    if count == 0:
        return np.zeros(0, dtype)  # an empty file cannot be mapped
    # A plain view: slicing the memmap class itself costs several times as much.
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def _named(path: Path, part: str) -> Path:
    return path.with_name(f"{path.name}.{part}")


def _temporary(path: Path, part: str) -> Path:
    return path.with_name(f".{path.name}.{part}.{os.getpid()}")
