"""Reads the token ids that fairseq-preprocess writes: NAME.bin holds the ids, and NAME.idx says where samples begin.

    mmap           "MMIDIDX", two zero bytes, version u64, type u8, n u64,
                   sizes int32 (n,), first bytes int64 (n,)
    lazy, cached   "TNTIDX", two zero bytes, version u64, type u64, bytes per id u64, n u64, m u64,
                   dimensions int64 (n + 1,), first numbers int64 (n + 1,), sizes int64 (m,)

All numbers are little-endian. The older format (TNTIDX) stores every id plus one. A header is accepted only if it
agrees exactly with the sizes of the files.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

INDEX, DATA = ".idx", ".bin"
MMAP, TORCHNET = b"MMIDIDX\0\0", b"TNTIDX\0\0"
VERSION = 1
MAX_TOKENS = 1 << 60
"""More than a file can hold. Sums up to here are exact in int64."""
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}


@dataclass(frozen=True)
class IndexedTokens:
    """Sample i is ids[offsets[i]:offsets[i + 1]], including its eos. Token id 0 is stored as `base`."""

    ids: np.ndarray  # (tokens,), a view of the memory-mapped file
    offsets: np.ndarray  # (n + 1,) int64
    base: int


def data_path(index: str | Path) -> Path:
    """Returns the path of the file with the ids that belong to an index."""
    return Path(index).with_suffix(DATA)


def open_indexed(path: str | Path) -> IndexedTokens:
    """Opens NAME.idx and NAME.bin. The index is read, and the ids are memory-mapped."""
    index, data = Path(path), data_path(path)
    for needed in (index, data):
        if not needed.is_file():
            raise ValueError(f"{needed}: there is no such file")
    with index.open("rb") as file:
        magic = file.read(len(MMAP))
        if magic == MMAP:
            dtype, offsets, base = *_read_mmap_index(file, index), 0
        elif magic.startswith(TORCHNET):
            file.seek(len(TORCHNET))
            dtype, offsets, base = *_read_torchnet_index(file, index), 1
        else:
            raise ValueError(
                f"{index} is no index of fairseq: it begins with {magic!r}. The implementations mmap, lazy and cached "
                "(fairseq-preprocess --dataset-impl) can be read"
            )
    size, expected = data.stat().st_size, int(offsets[-1]) * dtype.itemsize
    if size != expected:
        raise ValueError(f"{data} is damaged: {size:,} bytes, where {index.name} says {expected:,}")
    ids = np.memmap(data, dtype=dtype, mode="r").view(np.ndarray) if size else np.zeros(0, dtype)
    return IndexedTokens(ids, offsets, base)


def _read_mmap_index(file: IO[bytes], path: Path) -> tuple[np.dtype, np.ndarray]:
    version, code, count = _read_header(file, "<QBQ", path)
    dtype = _id_type(path, version, code)
    _check_size(file, path, count, 12 * count)
    offsets = _to_offsets(path, np.fromfile(file, "<i4", count))
    if not np.array_equal(np.fromfile(file, "<i8", count), offsets[:-1] * dtype.itemsize):
        raise ValueError(f"{path} is damaged: its samples are not stored one after the other")
    return dtype, offsets


def _read_torchnet_index(file: IO[bytes], path: Path) -> tuple[np.dtype, np.ndarray]:
    version, code, width, count, sizes = _read_header(file, "<QQQQQ", path)
    dtype = _id_type(path, version, code)
    if width != dtype.itemsize:
        raise ValueError(f"{path} is damaged: ids of type {dtype} have {dtype.itemsize} bytes, not {width}")
    _check_size(file, path, count, 8 * (2 * (count + 1) + sizes))
    dimensions, begins = np.fromfile(file, "<i8", count + 1), np.fromfile(file, "<i8", count + 1)
    if sizes != count or not np.array_equal(dimensions, np.arange(count + 1)):
        raise ValueError(f"{path}: samples of text have one dimension, but these have more")
    offsets = _to_offsets(path, np.fromfile(file, "<i8", count))
    if not np.array_equal(begins, offsets):
        raise ValueError(f"{path} is damaged: its samples are not stored one after the other")
    return dtype, offsets


def _read_header(file: IO[bytes], layout: str, path: Path) -> tuple[int, ...]:
    content = file.read(struct.calcsize(layout))
    if len(content) < struct.calcsize(layout):
        raise ValueError(f"{path} is damaged: it ends inside its header")
    return struct.unpack(layout, content)


def _id_type(path: Path, version: int, code: int) -> np.dtype:
    if version != VERSION:
        raise ValueError(f"{path} has version {version}, but only {VERSION} is known")
    if code not in TYPES:
        raise ValueError(
            f"{path}: token ids have the types {', '.join(map(str, TYPES))}, but this file has type {code}"
        )
    return np.dtype(TYPES[code])


def _check_size(file: IO[bytes], path: Path, count: int, needed: int) -> None:
    """Checks the size of the index before it is read, so that an absurd number of samples does not use memory."""
    rest = path.stat().st_size - file.tell()
    if rest != needed:
        raise ValueError(f"{path} is damaged: it says {count:,} samples, which take {needed:,} bytes, and has {rest:,}")


def _to_offsets(path: Path, lengths: np.ndarray) -> np.ndarray:
    """Returns offsets (n + 1,) int64 of lengths (n,)."""
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"{path} is damaged: sample {int(lengths.argmin()) + 1} has {lengths.min()} tokens")
    # Lengths of 2^62 can be chosen so that their sum, modulo 2^64, is the size of the file.
    if len(lengths) and int(lengths.max()) > MAX_TOKENS // len(lengths):
        raise ValueError(f"{path} is damaged: sample {int(lengths.argmax()) + 1} has {int(lengths.max()):,} tokens")
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
