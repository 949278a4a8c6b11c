"""Optional packages: a missing one is named with the extra that brings it, and every extra that is named exists."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import subquad
from subquad.packages import find_broken, require, require_folder, try_imports
from tests.preloaded import afresh

ROOT = Path(__file__).parent.parent
PACKAGE = Path(subquad.__file__).parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_a_missing_package_is_named_with_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"^reading x needs the package nosuch: pip install 'subquad\[hub\]'$"):
        require("nosuch.inner", "reading x", "hub")
    with pytest.raises(ValueError, match=r"^reading x needs the package Such: pip install Such$"):
        require("nosuch", "reading x", package="Such")
    with pytest.raises(ValueError, match=r"^the set needs the package nosuch: pip install 'subquad\[demo\]'$"):
        require_folder("nosuch", "the set", "demo")


def test_a_broken_package_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfbuilt.py").write_text("raise ImportError('libx.so is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"halfbuilt, which cannot be imported \(libx.so is missing\): pip install"):
        require("halfbuilt", "reading x", "hub")


def test_packages_are_tried_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfbuilt.py").write_text("raise RuntimeError('operator x::y does not exist')")
    (tmp_path / "deadly.py").write_text("import os; print('tried', flush=True); os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = try_imports(["json", "halfbuilt", "deadly", "csv"])
    assert found["json"] == found["csv"] == ""
    assert found["halfbuilt"] == "RuntimeError: operator x::y does not exist"
    assert found["deadly"] == "it ends the process (exit code 3)"
    assert not {"halfbuilt", "deadly"} & sys.modules.keys()


@pytest.mark.usefixtures("preloaded_programs")
def test_transformers_works_beside_a_torchvision_that_does_not_load(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install 'subquad[hf]'")
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text("raise RuntimeError('compiled for another CUDA')")
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "from subquad.packages import require_transformers\n"
        "print(require_transformers('this test').LlamaConfig(vocab_size=7).vocab_size)\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.stdout == "7\n", done.stderr


def test_what_is_installed_and_works_is_not_broken() -> None:
    with afresh():
        assert find_broken("PyYAML", "nosuch") == {}


def test_the_folder_of_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onlyfiles").mkdir()
    (tmp_path / "onlyfiles/__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert require_folder("onlyfiles", "the set", "demo") == tmp_path / "onlyfiles"
    assert "onlyfiles" not in sys.modules


def test_every_extra_that_the_code_names_exists() -> None:
    named = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("require", "require_folder"):
                named |= {argument.value for argument in node.args[2:3] if isinstance(argument, ast.Constant)}
    assert {"demo", "hub", "vision"} <= named <= EXTRAS.keys()
