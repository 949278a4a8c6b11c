"""What the package never does, by its syntax trees: unpickle, evaluate text, start shells, unpack archives, ..."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import subquad
from subquad.compare.report.html import page
from subquad.compare.report.result import Result
from tests.compare.cases import synthetic
from tests.compare.report.test_html import HOSTILE, Elements

pytestmark = pytest.mark.usefixtures("preloaded_programs")

PACKAGE = Path(subquad.__file__).parent
PICKLES = "interop/checkpoints/safe_pickle.py"

FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "os.spawnl",
    "os.spawnv",
    "os.startfile",
    "shutil.unpack_archive",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "tempfile.mktemp",
    "torch.hub.load",
    "torch.hub.download_url_to_file",
    "torch.hub.load_state_dict_from_url",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.full_load_all",
    "yaml.unsafe_load",
    "yaml.unsafe_load_all",
}
FORBIDDEN_MODULES = {
    *("cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "tarfile", "telnetlib", "ftplib", "smtplib"),
    *("socket", "ssl", "http", "urllib", "urllib3", "requests", "httpx", "aiohttp", "xmlrpc", "code", "codeop", "pty"),
}
IMPORTS_BY_NAME = (
    *("__init__.py", "cli/main.py", "packages.py", "kernels/", "mixers/"),
    *("data/tokenizers/__init__.py", "interop/checkpoints/__init__.py", "tasks/__init__.py"),
)
"""Where modules are imported by names that no recipe, run or checkpoint can give."""
ONLY_IN: dict[str, dict[str, set[str]]] = {
    "calls": {
        "torch.load": {PICKLES},
        "pickle.load": set(),
        "pickle.loads": set(),
        "pickle.Unpickler": set(),
        "importlib.metadata.entry_points": {"mixers/registry.py", "tasks/base.py", "recipes/schema.py"},
    },
    "modules": {
        "pickle": {PICKLES},
        "zipfile": {PICKLES, "data/numpy_files.py"},  # they read sizes, and unpack nothing
        "datasets": set(),  # through `require` alone, in data/hub.py
        "huggingface_hub": set(),
        "wandb": set(),  # through `require` alone, in train/artifacts.py
        "subprocess": {"compare/subprocesses.py", "packages.py"},  # a package that is broken may end its process
    },
}


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`np.load` as numpy.load; what is no name of a module is left empty."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        stem = dotted(node.value, names)
        return f"{stem}.{node.attr}" if stem else ""
    return ""


def imported_names(tree: ast.AST) -> dict[str, str]:
    """What the names of a file stand for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names if alias.asname}
            names |= {alias.name.split(".")[0]: alias.name.split(".")[0] for alias in node.names if not alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def problems(code: str, place: str) -> list[str]:
    """What a file does that it must not. place: its path in the package."""
    tree = ast.parse(code)
    names, found = imported_names(tree), []
    for module in modules(tree):
        top = module.split(".")[0]
        if top in FORBIDDEN_MODULES and module != "urllib.parse":
            found.append(f"imports {module}")
        if place not in ONLY_IN["modules"].get(top, {place}):
            found.append(f"imports {module}")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func, names)
        options = {word.arg: word.value for word in node.keywords}
        if name in FORBIDDEN_CALLS or place not in ONLY_IN["calls"].get(name, {place}):
            found.append(f"calls {name}")
        if name == "importlib.import_module" and not place.startswith(IMPORTS_BY_NAME):
            found.append("imports a module by a name, which a file may have given")
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("extract", "extractall"):
            found.append("unpacks an archive")
        if any(word in options and not _is(options[word], False) for word in ("shell", "trust_remote_code")):
            found.append(f"calls {name} with shell or trust_remote_code")
        if name == "torch.load" and not _is(options.get("weights_only"), True):
            found.append("torch.load without weights_only=True")
        if name == "numpy.load" and not _is(options.get("allow_pickle"), False):
            found.append("numpy.load without allow_pickle=False")
    return found


def _is(value: ast.expr | None, wanted: bool) -> bool:
    """Whether an option says so; what is not written out says nothing."""
    return isinstance(value, ast.Constant) and value.value is wanted


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_dangerous_is_done(path: Path) -> None:
    assert not problems(path.read_text(), path.relative_to(PACKAGE).as_posix())


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("import pickle", "data/text/store.py"),
        ("from pickle import loads", "interop/other.py"),
        ("import pickle\npickle.loads(b'')", PICKLES),
        ("import torch\ntorch.load('x', weights_only=True)", "train/checkpoint.py"),
        ("import torch\ntorch.load('x')", PICKLES),
        ("import torch\ntorch.load('x', weights_only=flag)", PICKLES),
        ("from torch import load as read\nread('x', weights_only=False)", PICKLES),
        ("import numpy as np\nnp.load('x')", "data/numpy_files.py"),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", "data/numpy_files.py"),
        ("def f(x):\n    return eval(x)", "cli/main.py"),
        ("import yaml\nyaml.load(x, yaml.Loader)", "files.py"),
        ("from yaml import unsafe_load\nunsafe_load(x)", "files.py"),
        ("import subprocess\nsubprocess.run('ls', shell=True)", "compare/subprocesses.py"),
        ("import subprocess\nsubprocess.run('ls', shell=flag)", "compare/subprocesses.py"),
        ("import subprocess", "train/loop.py"),
        ("import os\nos.system('ls')", "cli/doctor.py"),
        ("import importlib\nimportlib.import_module(recipe['plugin'])", "train/recipe.py"),
        ("from importlib import metadata\nmetadata.entry_points(group=x)", "train/run.py"),
        ("import tarfile", "interop/checkpoints/fairseq/hub.py"),
        ("import zipfile\nzipfile.ZipFile(x).extractall()", "data/numpy_files.py"),
        ("def f():\n    from urllib.request import urlopen", "interop/checkpoints/fairseq/hub.py"),
        ("import requests", "data/hub.py"),
    ],
)
def test_the_walk_finds_what_is_wrong(code: str, place: str) -> None:
    assert problems(code, place)


def test_the_walk_leaves_the_rest_alone() -> None:
    code = "import re, torch\nmodel.eval()\nre.compile('x')\ntorch.compile(model)\nsubprocess = run(shell=False)\n"
    assert problems(code, "train/loop.py") == []


# ---------------------------------------------------------------------- the report of a comparison


def texts(value: Any) -> set[str]:
    """All texts of plain data, names included."""
    if isinstance(value, dict):
        return {*map(str, value), *(text for inner in value.values() for text in texts(inner))}
    if isinstance(value, list):
        return {text for inner in value for text in texts(inner)}
    return {value} if isinstance(value, str) else set()


def replaced(value: Any, old: str, new: str) -> Any:
    """The data with a text replaced wherever it stands, so that what refers to it still does."""
    if isinstance(value, dict):
        return {new if key == old else key: replaced(inner, old, new) for key, inner in value.items()}
    if isinstance(value, list):
        return [replaced(inner, old, new) for inner in value]
    return new if value == old else value


def elements(result: Result) -> list[tuple[str, list[str]]]:
    """Names of the page's elements and of their attributes, in order."""
    return [(tag, sorted(attributes)) for tag, attributes in Elements(page(result)).found]


def test_no_text_of_a_comparison_becomes_an_element() -> None:
    """Every label, title, note and reason, one after the other: the page has the same elements as with a calm word."""
    content = synthetic(2, ("softmax", "eva", "performer")).model_dump(mode="json")
    tried = 0
    for text in sorted(texts(content)):
        try:
            calm, hostile = (Result.model_validate(replaced(content, text, new)) for new in ("calm", HOSTILE))
        except ValidationError:
            continue  # a name that the program gives, not a text
        tried += 1
        assert elements(hostile) == elements(calm), text
    assert tried > 10
