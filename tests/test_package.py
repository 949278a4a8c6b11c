"""What a user installs: a pure-Python wheel with everything in it, and one version."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import subquad

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_wheel_is_pure_python_and_complete(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    source = tmp_path / "src" / "subquad"
    shutil.copytree(ROOT / "src" / "subquad", source, ignore=shutil.ignore_patterns("__pycache__"))
    flags = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", str(tmp_path / "out")]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, str(tmp_path)], check=True)
    (wheel,) = (tmp_path / "out").iterdir()
    assert wheel.name == f"subquad-{subquad.__version__}-py3-none-any.whl"
    expected = {f"subquad/{path.relative_to(source).as_posix()}" for path in source.rglob("*") if path.is_file()}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


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
