"""What the files of the package say: one version, exact constraints, no index. The wheel is tried in test_wheel.py."""

import tomllib
from pathlib import Path

import subquad

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version() -> None:
    assert PROJECT["version"] == subquad.__version__


def test_set_up_files_name_no_index() -> None:
    for name in ("Makefile", "constraints.txt", "pyproject.toml", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "index-url" not in text, name
        assert "http" not in text, name


def test_constraints_are_exact_and_allowed_by_the_project() -> None:
    from packaging.requirements import Requirement

    extras = PROJECT["optional-dependencies"].values()
    ranges = {r.name.lower(): r for r in map(Requirement, [*PROJECT["dependencies"], *(i for e in extras for i in e)])}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert ranges[pin.name.lower()].specifier.contains(specifier.version), line
