"""Converts checkpoints of the original programs into run directories: `import_checkpoint(path, out)`.

Every file or folder here that defines these three names reads the checkpoints of one program; it is found by itself.

    SUPPORTED                              a few words that say which checkpoints it reads
    recognises(contents)                   whether `read_pickle` gave a checkpoint of this program; of a folder,
                                           `open_exported` gives the contents
    convert(contents, folder, texts)       returns the checkpoint as a `ConvertedRun`, or raises a ValueError that says
                                           why it cannot

folder: where the checkpoint is. texts: files that the user named, for programs that need dictionaries.
"""

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

from subquad.files import wrap_corrupt_data_errors
from subquad.interop.checkpoints.exported import open_exported
from subquad.interop.checkpoints.run import ConvertedRun, TextFiles, write_run
from subquad.interop.checkpoints.safe_pickle import read_pickle


class Program(Protocol):
    """A module that reads the checkpoints of one program."""

    SUPPORTED: str

    def recognises(self, contents: Any) -> bool: ...

    def convert(self, contents: Any, folder: Path, texts: TextFiles) -> ConvertedRun: ...


@cache
def programs() -> list[Program]:
    """Returns the modules of this folder that read checkpoints. Those with a higher PRIORITY are asked first."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    found = [module for module in modules if hasattr(module, "convert")]
    return [cast(Program, module) for module in sorted(found, key=lambda module: -getattr(module, "PRIORITY", 0))]


def import_checkpoint(path: str | Path, out: str | Path, texts: TextFiles | None = None) -> ConvertedRun:
    """Writes a checkpoint of an original program as a run directory, which every command can use."""
    converted = convert_checkpoint(Path(path), texts or TextFiles())
    write_run(converted, out)
    return converted


def convert_checkpoint(path: Path, texts: TextFiles, folder: Path | None = None) -> ConvertedRun:
    """Converts a checkpoint with the module that recognises it.

    folder: where the files are that belong to the checkpoint, such as dictionaries. None: beside it.
    """
    contents = open_exported(path) if path.is_dir() else read_pickle(path)
    for program in programs():
        if program.recognises(contents):
            try:
                with wrap_corrupt_data_errors("the checkpoint"):
                    return program.convert(contents, folder or path.parent, texts)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    known = "; ".join(program.SUPPORTED for program in programs())
    raise ValueError(f"{path} is not a checkpoint of a known program. These are known: {known}")
