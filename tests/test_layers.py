"""A folder of the package imports only from folders that come before it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import subquad

ORDER = ["recipes", "kernels", "mixers", "testing", "nn", "models", "data", "decode"]
ORDER += [
    "evaluate",
    "tasks",
    "train",
    "compare",
    "interop",
    "linearise",
    "run",
    "api",
    "__init__",
    "cli",
    "__main__",
    "examples",
]
PACKAGE = Path(subquad.__file__).parent


def imported_modules(path: Path, package: Path = PACKAGE) -> Iterator[str]:
    """Full names of the subquad modules that a file imports, inside functions too."""
    here = ["subquad", *path.relative_to(package).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            stem = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def later_folders(folder: str) -> list[str]:
    return ORDER[ORDER.index(folder) + 1 :] if folder in ORDER else ORDER  # the package's other files are the bottom


def forbidden_imports(path: Path, package: Path = PACKAGE) -> list[str]:
    folder = path.relative_to(package).parts[0].removesuffix(".py")
    names = [name.split(".") for name in imported_modules(path, package)]
    folders = {parts[1] for parts in names if parts[0] == "subquad" and len(parts) > 1}
    return sorted(folders & set(later_folders(folder)))


def forbidden_names(path: Path, package: Path = PACKAGE) -> list[str]:
    """Strings of a file that are names of modules in later folders: what an upper layer is started by."""
    strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    modules = [text for text in strings if isinstance(text, str) and re.fullmatch(r"subquad(\.\w+)+(:\w+)?", text)]
    if path == package / "__init__.py":  # `import subquad` offers what is above it, and loads it when it is asked for
        return []
    later = later_folders(path.relative_to(package).parts[0].removesuffix(".py"))
    return sorted(module for module in modules if re.split(r"[.:]", module)[1] in later)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_come_from_below(path: Path) -> None:
    assert not forbidden_imports(path), f"{path.relative_to(PACKAGE)} imports from layers above it"
    assert not forbidden_names(path), f"{path.relative_to(PACKAGE)} names modules of layers above it in strings"


def test_every_folder_has_a_place_in_the_order() -> None:
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/*.py")}
    assert folders <= set(ORDER)


@pytest.mark.parametrize(
    ("folder", "code", "wrong"),
    [
        ("mixers", "from subquad.cli.main import run", ["cli"]),
        ("mixers", "def f():\n    import subquad.compare.measure.bench", ["compare"]),
        ("kernels", "from ..mixers import base", ["mixers"]),
        ("train", "from subquad import interop, mixers", ["interop"]),
        ("train", "from subquad.api import train", ["api"]),
        ("cli", "from subquad.mixers import build\nfrom . import main\nimport torch", []),
    ],
)
def test_the_walk_finds_what_is_wrong(tmp_path: Path, folder: str, code: str, wrong: list[str]) -> None:
    path = tmp_path / folder / "file.py"
    path.parent.mkdir()
    path.write_text(code)
    assert forbidden_imports(path, tmp_path) == wrong


@pytest.mark.parametrize(
    ("folder", "code", "wrong"),
    [
        ("compare", 'run_module("subquad.cli.main", ["train"])', ["subquad.cli.main"]),
        ("compare", 'WORKER = "subquad.compare.measure.worker"', []),
        ("train", 'entry = "subquad.interop.lm_eval:main"', ["subquad.interop.lm_eval:main"]),
        ("train", '"""What `subquad.cli.main` calls."""', []),
    ],
)
def test_the_walk_finds_names_in_strings(tmp_path: Path, folder: str, code: str, wrong: list[str]) -> None:
    path = tmp_path / folder / "file.py"
    path.parent.mkdir()
    path.write_text(code)
    assert forbidden_names(path, tmp_path) == wrong
