"""Files of arrays, and what is compressed in them: believed only as far as the files themselves bear it out.

A few kilobytes can promise terabytes, by their header or by what they unpack to. What is refused is a ValueError with
the reason alone; the caller knows what the file was to be.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

MOST_UNPACKED = 1 << 30
MOST_GROWTH = 100
"""Images and tokens become a few times larger. What is below MOST_UNPACKED bytes may be all zeros."""


def check_growth(path: Path, unpacked: int) -> None:
    """Refuses a file whose content would take memory out of all proportion to its size."""
    size = path.stat().st_size
    if unpacked > max(MOST_UNPACKED, MOST_GROWTH * size):
        raise ValueError(f"its {size:,} bytes would become {unpacked:,}")


def read_npy(path: Path) -> np.ndarray:
    """The array of a .npy file, mapped into memory: its header must say what the file holds."""
    try:
        content = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(content, np.ndarray):
            content.close()
            raise ValueError("it is an archive of arrays, an npz")
        return content.view(np.ndarray)
    except Exception as error:  # what damaged bytes lead numpy to
        raise ValueError(_reason(error)) from None


def read_npz(path: Path, names: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Those arrays of a .npz file that are among `names`, in their order, and the names of all that are there."""
    try:
        with zipfile.ZipFile(path) as packed:  # no more is unpacked than is said here
            check_growth(path, sum(member.file_size for member in packed.infolist()))
        with np.load(path, allow_pickle=False) as file:
            keys = list(file.keys())
            return {name: np.asarray(file[name]) for name in names if name in keys}, keys
    except Exception as error:
        raise ValueError(_reason(error)) from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
