"""What a user installs: a pure-Python wheel with everything in it, and one version."""

import os
import shutil
import site
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import subquad

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "subquad", folder / "src" / "subquad", ignore=ignored)
    flags = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", str(folder / "out")]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, str(folder)], check=True)
    (built,) = (folder / "out").iterdir()
    return built


def test_the_wheel_is_pure_python_and_complete(wheel: Path) -> None:
    source = wheel.parents[1] / "src" / "subquad"
    assert wheel.name == f"subquad-{subquad.__version__}-py3-none-any.whl"
    expected = {f"subquad/{path.relative_to(source).as_posix()}" for path in source.rglob("*") if path.is_file()}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.nightly
def test_the_wheel_works_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment, which takes only what subquad needs from the one of the tests."""
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    flags = ["--no-deps", "--no-index", "--ignore-installed", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", *flags, str(wheel)], check=True)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    (packages / "shared.pth").write_text("\n".join(site.getsitepackages()))  # read after the environment's own

    def call(*words: str, program: str = "subquad") -> str:
        command = [str(environment / "bin" / program), *words]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables["OMP_NUM_THREADS"] = "1"
        done = subprocess.run(command, cwd=elsewhere, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{program} {' '.join(words)}: {done.stderr}"
        return done.stdout

    assert call("-c", "import subquad; print(subquad.__file__)", program="python").startswith(str(packages))
    assert "phrases" in call("recipes")
    assert "wmt16_en_de_dynamicconv" in call("recipes", "dynamicconv")
    small = ["data.options={train: 200, valid: 20, test: 20}", "train.updates=2", "schedule.warmup_updates=1"]
    assert "after 2 updates" in call("train", "phrases", *small)
    assert (elsewhere / "runs/phrases/recipe.yaml").is_file()
    assert "subquad demo" in call("demo", "--help")
    call("recipes", "--copy", "digits")
    assert (elsewhere / "digits.yaml").is_file()
    assert "step 1: loss" in call("-m", "subquad.examples.own_model", "eva", "--steps", "1", program="python")


@pytest.mark.nightly
def test_the_source_distribution_has_what_its_tests_need(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "site", "*.egg-info")
    shutil.copytree(ROOT, tmp_path / "checkout", ignore=ignored)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=tmp_path / "checkout", check=True)
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("CHANGELOG.md", "docs", "tests", "tools", "src/subquad/recipes"):
        path = ROOT / name
        files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
        expected = {one.relative_to(ROOT).as_posix() for one in files if "__pycache__" not in one.parts}
        assert expected <= names, sorted(expected - names)[:5]


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
