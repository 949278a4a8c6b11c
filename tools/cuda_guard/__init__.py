"""Lets a torch that was built without CUDA differentiate tensors that say they are on a GPU (`guard.cpp`).

`load` compiles the few lines once for each version of torch, with the system's C++ compiler, and loads them.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).parent / "guard.cpp"


def why_unavailable() -> str | None:
    """Why `load` would fail; None if it would not."""
    return None if torch.version.cuda or shutil.which("c++") else "there is no C++ compiler (c++)"


@cache
def load() -> None:
    """Registers the guard in this process, which cannot be undone. A torch with CUDA has its own and is left alone."""
    if torch.version.cuda is None:
        ctypes.CDLL(str(_compile()))


def _compile() -> Path:
    """The library, from the user's cache if this torch has had it compiled before."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + torch.__file__.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "subquad"
    library = folder / f"cuda_guard-{key}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    torch_libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / library.name
        subprocess.run(
            [
                "c++", "-O1", "-shared", "-fPIC", "-std=c++20",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
                *(f"-I{path}" for path in cpp_extension.include_paths()),
                str(SOURCE), "-o", str(made),
                f"-L{torch_libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_libraries}",
            ],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        made.replace(library)  # whole or not there, when several processes compile at once
    return library
