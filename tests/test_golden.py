"""Every fixture in the golden folder (environment variable SUBQUAD_GOLDEN, default tests/golden) against ours.

A file of a kind that no check understands fails.
"""

from pathlib import Path

import pytest

from tests import (
    golden_checkpoints,
    golden_efficient_attention,
    golden_fairseq,
    golden_linformer,
    golden_primal,
    golden_tables,
)
from tests.golden_beams import check_beams
from tests.golden_files import FOLDER, load

CHECKS = {
    "efficient-attention": golden_efficient_attention.check,
    "fairseq": golden_fairseq.check,
    "linformer": golden_linformer.check,
    "primal": golden_primal.check,
}

DESCRIPTIONS = ("README.md", "README.txt", "INDEX.json")

FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file() and path.name not in DESCRIPTIONS)


def test_the_folder_holds_fixtures() -> None:
    assert FILES, f"no fixtures under {FOLDER}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_fixture(path: Path) -> None:
    relative = path.relative_to(FOLDER)
    if relative.as_posix().startswith("fairseq/ckpt/"):
        golden_checkpoints.check(path)
        return
    if relative.as_posix().startswith("fairseq/beam_"):
        check_beams(path)
        return
    if relative.as_posix() in golden_tables.TABLES:
        golden_tables.check(path, relative.as_posix())
        return
    source = relative.parts[0]
    assert source in CHECKS, f"no check understands fixtures of {source!r}: {path}"
    assert path.suffix == ".safetensors", f"no check understands {path}"
    CHECKS[source](load(path))
