"""From an old checkpoint to a run directory: who reads it, and what is said when nobody does."""

from pathlib import Path
from typing import cast

from subquad.files import wrap_corrupt_data_errors
from subquad.interop.checkpoints.fairseq import convert as fairseq_checkpoints
from subquad.interop.checkpoints.linformer import convert as linformer_checkpoints
from subquad.interop.checkpoints.run import ImportedRun, Importer, TextFiles, write_run
from subquad.interop.checkpoints.safe_pickle import read_pickle
from subquad.interop.checkpoints.unsupported import refusal
from subquad.interop.checkpoints.vision import convert as vision_checkpoints

IMPORTERS = [cast(Importer, module) for module in (vision_checkpoints, linformer_checkpoints, fairseq_checkpoints)]
"""In the order in which they are asked; programs that build on another one come before it."""


def import_checkpoint(path: str | Path, out: str | Path, texts: TextFiles | None = None) -> ImportedRun:
    """Writes the checkpoint as a run directory, which commands use as any other."""
    path = Path(path)
    imported = convert_checkpoint(path, texts or TextFiles())
    write_run(imported, out)
    return imported


def convert_checkpoint(path: Path, texts: TextFiles, folder: Path | None = None) -> ImportedRun:
    """The checkpoint as the first importer that recognises it converts it.

    folder: where the files are that belong to it, such as dictionaries; None: beside it.
    """
    contents = read_pickle(path)
    if reason := refusal(contents):
        raise ValueError(f"{path}: {reason}")
    for importer in IMPORTERS:
        if importer.recognises(contents):
            try:
                with wrap_corrupt_data_errors("the checkpoint"):
                    return importer.convert(contents, folder or path.parent, texts)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    known = "; ".join(importer.SUPPORTED for importer in IMPORTERS)
    raise ValueError(f"{path} is no checkpoint of a program that is known here; known: {known}")
