"""Reads .npy and .npz files of numpy without trusting what their headers promise.

A file of a few kilobytes can claim to hold terabytes. Such files are refused with a ValueError that gives the reason;
the caller adds the name of the file.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ALWAYS_ALLOWED = 1 << 30
MAX_GROWTH = 100
"""A compressed file may grow by this factor, and up to ALWAYS_ALLOWED bytes by any factor: it may be all zeros."""


def check_growth(path: Path, unpacked: int) -> None:
    """Raises a ValueError if the content of a file would need far more memory than the size of the file suggests."""
    size = path.stat().st_size
    if unpacked > max(ALWAYS_ALLOWED, MAX_GROWTH * size):
        raise ValueError(f"its {size:,} bytes would become {unpacked:,}")


def read_npy(path: Path) -> np.ndarray:
    """Returns the array of a .npy file, memory-mapped. Its header must agree with the size of the file."""
    try:
        content = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(content, np.ndarray):
            content.close()
            raise ValueError("it is an archive of arrays, an npz")
        return content.view(np.ndarray)
    except Exception as error:  # numpy raises many kinds of errors for damaged files
        raise ValueError(_reason(error)) from None


def read_npz(path: Path, names: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the arrays of a .npz file that are among `names`, in that order, and the names of all its arrays."""
    try:
        with zipfile.ZipFile(path) as packed:  # numpy unpacks no more than these sizes
            check_growth(path, sum(member.file_size for member in packed.infolist()))
        with np.load(path, allow_pickle=False) as file:
            keys = list(file.keys())
            return {name: np.asarray(file[name]) for name in names if name in keys}, keys
    except Exception as error:
        raise ValueError(_reason(error)) from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
