"""Token ids in memory-mapped files, and the folder of such files that `prepare_text` writes.

    <path>.tokens   the ids of all sentences one after the other, little-endian uint16 or uint32
    <path>.index    n + 1 offsets into the tokens, little-endian int64; sentence i is tokens[index[i]:index[i + 1]]
    <path>.json     format, dtype, counts, checksums, and what the writer was told about the input and the tokenizer

Opening a store takes the same time for ten tokens and for 10^9. Sentences are stored without special tokens.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from subquad.config import nearest
from subquad.data.tokenizers import Tokenizer, load_tokenizer
from subquad.files import (
    CHECKSUM,
    checksum,
    is_alive,
    name_write_errors,
    read_metadata,
    replace_synced,
    wrap_corrupt_data_errors,
    write_metadata,
)

FORMAT = "subquad tokens 1"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
OFFSET = np.dtype("<i8")
BUFFERED_TOKENS = 1 << 20
TEMPORARY = re.compile(r"\..+\.(\d+)")
"""Matches .NAME.PROCESS, the name of a file that is being written."""

DESCRIPTION, DESCRIPTION_FORMAT = "data.json", 3
ENTRIES = ("sample_kind", "fields", "splits", "tokenizers", CHECKSUM)
FIELDS: dict[str, tuple[str, ...]] = {
    "pairs": ("source", "target"),
    "text": ("text",),
    "labelled": ("label", "text"),
}
"""The fields of each kind of sample."""


def dtype_for(size: int) -> str:
    """Returns the narrowest type that can hold the ids of a vocabulary of `size` tokens."""
    return "uint16" if size <= 1 << 16 else "uint32"


class TokenWriter:
    """Writes a store. It is a context manager; the files get their final names at its end if nothing went wrong.

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
        self._names = {part: _temporary_path(self.path, part) for part in ("tokens", "index")}
        self._files = {part: name.open("wb") for part, name in self._names.items()}
        self._sums = {part: hashlib.sha256() for part in self._names}
        self._write("index", np.zeros(1, OFFSET))
        return self

    def add(self, ids: Sequence[int] | np.ndarray) -> None:
        """Appends one sentence, given by its token ids."""
        tokens = np.asarray(ids, dtype=np.int64)
        self.add_many(tokens, np.array([len(tokens)]))

    def add_many(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Appends several sentences, whose ids stand one after the other in `tokens`; `lengths` is (n,)."""
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
        finally:  # temporary files must not fill up the disk after an error
            for name, file in zip(self._names.values(), self._files.values(), strict=True):
                name.unlink(missing_ok=True)
                with suppress(OSError):  # closing may try to write the rest, which is not needed any more
                    file.close()

    def _publish(self) -> None:
        self._flush()
        for part, file in self._files.items():
            with name_write_errors(_part_path(self.path, part)):
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
        _part_path(self.path, "json").unlink(missing_ok=True)
        for part, name in self._names.items():
            replace_synced(name, _part_path(self.path, part))
        write_metadata(_part_path(self.path, "json"), description)

    def _flush(self) -> None:
        if self._buffer:
            self._write("tokens", np.concatenate(self._buffer))
        if self._ends:
            self._write("index", np.concatenate(self._ends).astype(OFFSET))
        self._buffer, self._ends, self._buffered = [], [], 0

    def _write(self, part: str, values: np.ndarray) -> None:
        data = values.tobytes()
        with name_write_errors(_part_path(self.path, part)):
            self._files[part].write(data)
        self._sums[part].update(data)


class TokenStore:
    """The sentences of a store. `store[i]` is a 1-D view of the memory map with the ids of sentence i."""

    def __init__(self, path: Path, meta: dict[str, Any], tokens: np.ndarray, index: np.ndarray) -> None:
        self.path, self.meta = path, meta
        self.tokens, self.index = tokens, index
        self.total = len(tokens)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Opens a store. It checks the description and the sizes of the files, and reads nothing else."""
        path = Path(path)
        name = _part_path(path, "json")
        meta = read_metadata(name, FORMAT, "token store", [CHECKSUM])
        with wrap_corrupt_data_errors(str(name)):
            tokens = _memory_map(_part_path(path, "tokens"), DTYPES[meta["dtype"]], meta["tokens"])
            index = _memory_map(_part_path(path, "index"), OFFSET, meta["sentences"] + 1)
        if index[0] != 0 or index[-1] != len(tokens):
            raise ValueError(f"{_part_path(path, 'index')} is damaged: it does not end where the tokens end")
        return cls(path, meta, tokens, index)

    def __len__(self) -> int:
        return len(self.index) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.path} has {len(self)} sentences, but number {number} was asked for")
        number %= len(self)
        return self.tokens[self.index[number] : self.index[number + 1]]

    @cached_property
    def lengths(self) -> np.ndarray:
        """(n,) int64: the number of tokens of each sentence."""
        return np.diff(self.index).astype(np.int64, copy=False)

    def verify(self) -> None:
        """Reads all files and compares their checksums. A difference raises a ValueError that names the file."""
        for part, expected in self.meta["sha256"].items():
            name = _part_path(self.path, part)
            if checksum(name) != expected:
                raise ValueError(f"{name} is damaged: its checksum differs; prepare the data again")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).open, (self.path,)  # another process maps the files instead of getting a copy of them


def remove_store(path: str | Path) -> None:
    """Deletes the files of a store, the description first. Files that do not exist are no error."""
    for part in ("json", "tokens", "index"):
        _part_path(Path(path), part).unlink(missing_ok=True)


# ---------------------------------------------------------------------- the folder of prepared text


@dataclass(frozen=True)
class PreparedText:
    """A folder of prepared text: a token store for each split and field, and the tokenizers.

    changes: what the call of `prepare_text` that returned this object did, by tokenizer and split.
    """

    folder: Path
    description: Mapping[str, Any]
    changes: Mapping[str, str] = field(default_factory=dict)

    @property
    def sample_kind(self) -> str:
        return self.description["sample_kind"]

    @property
    def fields(self) -> tuple[str, ...]:
        return FIELDS[self.sample_kind]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.description["splits"])

    def skipped(self) -> dict[str, str]:
        """Returns by split how many samples were skipped and why, in words. Other splits are not in the result."""
        found = {}
        for name, split in self.description["splits"].items():
            if reasons := [f"{count:,} {reason}" for reason, count in split["skipped"].items() if count]:
                found[name] = ", ".join(reasons)
        return found

    def reading_notes(self) -> dict[str, list[str]]:
        """Returns by split what was noticed when its files were read: the first lines that could not be, and a header.

        Splits where nothing was noticed are not in the result.
        """
        found = {}
        for name, split in self.description["splits"].items():
            header = split.get("header")
            if notes := [*([header] if header else []), *split.get("first_errors", [])]:
                found[name] = notes
        return found

    def store(self, split: str, field: str) -> TokenStore:
        """Opens the token store of a split and field."""
        for what, name, known in (("split", split, self.splits), ("field", field, self.fields)):
            if name not in known:
                hint = f"{nearest(name, known)} It has {', '.join(known)}"
                raise ValueError(f"{self.folder} has no {what} {name!r}{hint}")
        store = TokenStore.open(self.folder / f"{split}.{field}")
        if store.meta["tokenizer"] != self._fingerprint(field):
            raise ValueError(f"{store.path} was made with another tokenizer; prepare the data again")
        return store

    def verify(self) -> None:
        """Reads all stores and compares their checksums. A difference raises a ValueError that names the file."""
        for split in self.splits:
            for name in self.fields:
                self.store(split, name).verify()

    def tokenizer(self, field: str) -> Tokenizer:
        """Loads the tokenizer of a field."""
        tokenizer = load_tokenizer(self.folder / self.description["fields"][field])
        if tokenizer.fingerprint() != self._fingerprint(field):
            raise ValueError(f"the tokenizer in {self.folder} is not the one of the data; prepare the data again")
        return tokenizer

    def _fingerprint(self, field: str) -> str:
        return self.description["tokenizers"][self.description["fields"][field]]["fingerprint"]


def open_prepared(folder: str | Path) -> PreparedText:
    """Opens a folder that `prepare_text` wrote."""
    folder = Path(folder)
    path = folder / DESCRIPTION
    description = read_metadata(path, DESCRIPTION_FORMAT, "prepared data", ENTRIES)
    with wrap_corrupt_data_errors(str(path)):
        for name, split in description["splits"].items():
            counts = [split["read"], split["samples"], *split["skipped"].values()]
            if any(type(count) is not int for count in counts):
                raise ValueError(f"{path} is damaged: the counts of {name} are not numbers")
    return PreparedText(folder, description)


# ---------------------------------------------------------------------- files


def remove_temporary_files(folder: Path) -> None:
    """Deletes the temporary files in a folder, and in its folders, that a process left behind which was killed.

    The name of a temporary file ends with the id of the process that writes it, and one that is still alive keeps it.
    """
    for path in [*folder.glob(".*"), *folder.glob("*/.*")]:
        found = TEMPORARY.fullmatch(path.name)
        if found and path.is_file() and not is_alive(int(found[1])):
            path.unlink(missing_ok=True)


def _memory_map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
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


def _part_path(path: Path, part: str) -> Path:
    return path.with_name(f"{path.name}.{part}")


def _temporary_path(path: Path, part: str) -> Path:
    return path.with_name(f".{path.name}.{part}.{os.getpid()}")
