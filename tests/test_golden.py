"""Every fixture in the golden folder (environment variable SUBQUAD_GOLDEN, default tests/golden) against our mixers.

A file of a kind that no check understands fails; a file of a kind that waits for a later layer is skipped by name.
"""

from pathlib import Path

import pytest

from tests import golden_efficient_attention, golden_fairseq, golden_linformer, golden_primal
from tests.golden_files import FOLDER, load

CHECKS = {
    "efficient-attention": golden_efficient_attention.check,
    "fairseq": golden_fairseq.check,
    "linformer": golden_linformer.check,
    "primal": golden_primal.check,
}

FILES = sorted(path for path in FOLDER.rglob("*.safetensors"))


def test_the_folder_holds_fixtures() -> None:
    assert FILES, f"no fixtures under {FOLDER}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER).with_suffix("")))
def test_fixture(path: Path) -> None:
    source = path.relative_to(FOLDER).parts[0]
    assert source in CHECKS, f"no check understands fixtures of {source!r}: {path}"
    CHECKS[source](load(path))
