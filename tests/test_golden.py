"""Every fixture in the golden folder (environment variable SUBQUAD_GOLDEN, default tests/golden) against ours.

A file of a kind that no check understands fails.
"""

from pathlib import Path

import pytest

from tests.originals import (
    checkpoints,
    efficient_attention,
    fairseq,
    linformer,
    primal,
    tables,
)
from tests.originals.beams import check_beams
from tests.originals.files import FOLDER, load

CHECKS = {
    "efficient-attention": efficient_attention.check,
    "fairseq": fairseq.check,
    "linformer": linformer.check,
    "primal": primal.check,
}

DESCRIPTIONS = ("README.md", "README.txt", "INDEX.json")

FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file() and path.name not in DESCRIPTIONS)


def test_the_folder_holds_fixtures() -> None:
    assert FILES, f"no fixtures under {FOLDER}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_fixture(path: Path) -> None:
    relative = path.relative_to(FOLDER)
    if relative.as_posix().startswith("fairseq/ckpt/"):
        checkpoints.check(path)
        return
    if relative.as_posix().startswith("fairseq/beam_"):
        check_beams(path)
        return
    if relative.as_posix() in tables.TABLES:
        tables.check(path, relative.as_posix())
        return
    source = relative.parts[0]
    assert source in CHECKS, f"no check understands fixtures of {source!r}: {path}"
    assert path.suffix == ".safetensors", f"no check understands {path}"
    CHECKS[source](load(path))
