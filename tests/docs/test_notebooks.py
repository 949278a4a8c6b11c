"""The notebooks of examples run from their first cell to their last, with small numbers in place of theirs."""

import json
from pathlib import Path
from typing import Any

import pytest

import subquad
from subquad.compare.report.result import Result

EXAMPLES = Path(subquad.__file__).parent / "examples"


def execute(name: str, changes: dict[str, str], before: str | None = None) -> dict[str, Any]:
    """Runs the cells of a notebook, and returns what they have defined.

    changes: lines and what replaces them. before: the line at which to stop.
    """
    cells = [cell for cell in json.loads((EXAMPLES / name).read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    source = "\n".join("".join(cell["source"]) for cell in cells)
    for line, other in changes.items():
        assert source.count(line) == 1
        source = source.replace(line, other)
    source, found, _ = source.partition(before) if before else (source, "", "")
    assert found == (before or "")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), names)
    return names


def test_a_mechanism_in_my_own_model(capsys: pytest.CaptureFixture[str]) -> None:
    names = execute("own_model.ipynb", {'MIXER, STEPS = "eva", 200': 'MIXER, STEPS = "local", 3'})
    assert len(names["written"]) == 100
    assert capsys.readouterr().out.endswith("".join(names["written"]) + "\n")


SMALL = {
    'MIXERS = ["softmax", "lightconv", "local", "eva"]': 'MIXERS = ["softmax", "local"]',
    "UPDATES, SEEDS, LENGTHS = 200, 3, [256, 1024]": "UPDATES, SEEDS, LENGTHS = 2, 1, []",
}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("\n".join(f"line {number} of a text" for number in range(200)))


@pytest.mark.usefixtures("text")
def test_a_text_is_prepared_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    names = execute("which_mechanism.ipynb", SMALL, before="result = subquad.compare(")
    assert not names["found"].problems
    assert "parameters; training takes about" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.usefixtures("text")
def test_which_mechanism_for_my_text() -> None:
    result = execute("which_mechanism.ipynb", SMALL)["result"]
    assert isinstance(result, Result)
    assert {trial.status for trial in result.trials} == {"done"}
    assert Path("comparison/report.html").exists()
