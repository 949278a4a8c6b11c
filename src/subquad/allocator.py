"""Keeping freed memory, so that large tensors do not cost page faults at every allocation.

glibc maps every block above a threshold (at most 32 MB by itself) afresh and gives it back when it is freed; the page
faults of the next one then cost more than most kernels. `keep_freed_memory` raises the thresholds, for the whole
process: the memory of the worst moment stays with it. The library never does this by itself; the commands of `subquad`
do, unless the environment variable SUBQUAD_ALLOCATOR is "system".
"""

import ctypes
import os
import sys

VARIABLE = "SUBQUAD_ALLOCATOR"
CHOICES = ("keep", "system")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # the numbers of malloc.h
LARGEST_KEPT = 2**30  # bytes; larger blocks are still mapped and given back
NEVER_TRIM = 2**31 - 1  # the largest value of the argument, a C int

SMALL_SIZES = range(24, 152, 16)  # bytes that fit chunks of 32 to 144
SMALL_COUNT = 16  # more than the thread cache holds of one size


def keep_freed_memory() -> bool:
    """Makes this process keep freed blocks of up to 1 GiB; returns whether it took effect.

    It takes effect where glibc is the allocator; elsewhere nothing happens. Versions of glibc that refuse so high a
    threshold are left as they are. Best called after `import torch`; calling it twice does no harm.
    """
    library = _glibc()
    if library is None or not library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT):
        return False
    if not library.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM):
        return False
    _fill_thread_cache(library)
    return True


def choice() -> str:
    """Returns what SUBQUAD_ALLOCATOR asks for: "keep" (the default) or "system"."""
    word = os.environ.get(VARIABLE) or CHOICES[0]
    if word not in CHOICES:
        raise ValueError(f"{VARIABLE} is {word!r}; set it to 'system' to leave the allocator alone, or unset it")
    return word


def set_up_command() -> bool:
    """Sets up the allocator for a command. Returns whether freed memory is kept."""
    return choice() == "keep" and keep_freed_memory()


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    # other libraries may have a mallopt too, but only glibc is known to understand these numbers
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None


def _fill_thread_cache(library: ctypes.CDLL) -> None:
    """Lets freed blocks be used again from the first one on, instead of from about the eighth.

    torch asks for aligned blocks; glibc then takes a few bytes more and cuts them off as tiny chunks. As long as its
    cache of tiny chunks has room, it keeps them there, and the large block, when freed, is a few bytes too short for
    the next request of the same size. A full cache leaves them free to join the large block again.
    """
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    for size in SMALL_SIZES:
        for chunk in [library.malloc(size) for _ in range(SMALL_COUNT)]:
            library.free(chunk)
