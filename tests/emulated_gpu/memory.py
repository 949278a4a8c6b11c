"""How much of the emulated device's memory is in use, and was at most."""

import weakref

from torch import Tensor

BLOCK = 512
"""Bytes that CUDA's caching allocator rounds up to."""

_sizes: dict[int, int] = {}
allocated = 0
peak = 0


def add(host: Tensor) -> None:
    """Counts the storage of a tensor until nothing uses it any more."""
    global allocated, peak
    storage = host.untyped_storage()
    key = storage._cdata
    if key in _sizes:
        return
    _sizes[key] = -(-storage.nbytes() // BLOCK) * BLOCK
    allocated += _sizes[key]
    peak = max(peak, allocated)
    weakref.finalize(storage, _remove, key).atexit = False


def _remove(key: int) -> None:
    global allocated
    allocated -= _sizes.pop(key)


def reset_peak() -> None:
    global peak
    peak = allocated
