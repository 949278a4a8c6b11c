"""The published models of EVA by their names, from files that are in the folder of the name."""

from pathlib import Path

import pytest
import torch

from subquad.interop.checkpoints.fairseq.hub import EVA, published_folder
from tests.docs.files import library_language_model, library_translator

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", EVA)
def test_a_checkpoint_and_the_dictionaries_of_its_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the file here is a small golden model of the same library."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"has 0 files \*\.pt, and .* put the checkpoint that its authors published"):
        torch.hub.load(str(ROOT), name, source="local")
    folder, translates = published_folder(name), name.endswith("-mt")
    (folder / "new").mkdir(parents=True)
    (library_translator if translates else library_language_model)(folder / "new" / "checkpoint_last.pt")
    (folder / "new" / "checkpoint_last.pt").rename(folder / "checkpoint_last.pt")
    model = torch.hub.load(str(ROOT), name, source="local")
    assert model.translates == translates
    text = model.sample("w1 w2", max_len_b=5)
    assert text.split()
    scored = model.score("w1 w2", text) if translates else model.score(text)
    assert len(scored["positional_scores"]) == len(scored["tokens"])
