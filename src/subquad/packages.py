"""Installed packages: optional ones are imported here, so that a missing one is named with the extra that brings it.

The modules that a user names with `--plugin` are remembered here. `subquad doctor` asks here which versions there are,
and whether they are what the metadata of subquad asks for.
"""

import functools
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# torchvision registers shape functions for these operators when it is imported, and fails if its compiled part is
# missing (a build for another torch). Image functions do not use the operators, so declaring them is enough.
TORCHVISION_OPERATORS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def require(module: str, purpose: str, extra: str | None = None, *, package: str | None = None) -> Any:
    """Imports an optional module; one that is missing is a ValueError which says what to install.

    purpose: what needs the module, for the message. extra: the extra of subquad that brings it; None: it has none.
    package: its name for people, where that is not the first part of the module's.

    >>> require("json", "this example").loads("[1]")
    [1]
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        broken = "" if isinstance(error, ModuleNotFoundError) else f", which cannot be imported ({error})"
        raise ValueError(_missing(package or module.partition(".")[0], purpose, extra, broken)) from None


def require_folder(package: str, purpose: str, extra: str) -> Path:
    """Returns the folder of an optional package, of which only the files are used. Nothing is imported."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ValueError(_missing(package, purpose, extra))
    return Path(found.submodule_search_locations[0])


@functools.cache
def require_torchvision() -> Any:
    """Makes torchvision importable for timm and transformers, also where its compiled part cannot load."""
    import torch

    module, purpose = "torchvision.transforms.v2.functional", "timm"
    try:
        return require(module, purpose)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]  # the failed import left them behind
    for name, schema in TORCHVISION_OPERATORS.items():
        torch.library.define(name, schema)
    try:
        return require(module, purpose)
    except RuntimeError as error:
        raise ValueError(f"torchvision does not fit torch {torch.__version__}: {error}") from None


def require_transformers(purpose: str) -> Any:
    """Imports transformers, which imports a torchvision that is there: one that cannot load is hidden from it."""
    if importlib.util.find_spec("torchvision") is not None:
        try:
            require_torchvision()
        except (ValueError, RuntimeError):
            sys.modules["torchvision"] = None  # type: ignore[assignment]  # as if it were not installed
    return require("transformers", purpose, "hf")


def _missing(package: str, purpose: str, extra: str | None, broken: str = "") -> str:
    install = package if extra is None else f"'subquad[{extra}]'"
    return f"{purpose} needs the package {package}{broken}: pip install {install}"


# ---------------------------------------------------------------------- packages that are installed and do not work

TRIED = "tried:"
TRY_IMPORTS = f"""
import importlib, sys
for name in sys.argv[1:]:
    problem = ""
    try:
        importlib.import_module(name)
    except BaseException as error:
        problem = " ".join(f"{{type(error).__name__}}: {{error}}".split())
    print(f"\\n{TRIED}{{name}} {{problem}}", flush=True)
"""


@functools.cache
def find_broken(*packages: str) -> dict[str, str]:
    """Returns why packages that are installed cannot be imported, by package.

    They are imported in another process, which a package may end.
    """
    from importlib import metadata

    from packaging.utils import canonicalize_name

    modules: dict[str, str] = {}
    for module, owners in metadata.packages_distributions().items():
        for owner in owners:
            if not module.startswith("_"):
                modules.setdefault(canonicalize_name(owner), module)
    asked = {modules[name]: package for package in packages if (name := canonicalize_name(package)) in modules}
    problems = try_imports(list(asked))
    return {asked[module]: problem for module, problem in problems.items() if problem}


def try_imports(modules: Sequence[str]) -> dict[str, str]:
    """Imports modules in another process; returns what is wrong with each of them, or an empty text."""
    found: dict[str, str] = {}
    while rest := [module for module in modules if module not in found]:
        command = [sys.executable, "-c", TRY_IMPORTS, *rest]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        for line in done.stdout.splitlines():
            if line.startswith(TRIED):
                name, _, problem = line.removeprefix(TRIED).partition(" ")
                found[name] = problem
        if left := [module for module in rest if module not in found]:
            found[left[0]] = f"it ends the process (exit code {done.returncode})"
    return found


# ---------------------------------------------------------------------- modules that the user names

PLUGINS = "SUBQUAD_PLUGINS"
"""The environment variable that holds them, separated by commas: child processes inherit it."""


def plugins() -> list[str]:
    """Returns the modules that the user named, in this process or in the one that started it."""
    return [module for module in os.environ.get(PLUGINS, "").split(",") if module]


def name_plugins(*modules: str) -> None:
    """Names modules with mechanisms; the registry imports them when mechanisms are asked for."""
    os.environ[PLUGINS] = ",".join(dict.fromkeys([*plugins(), *modules]))


# ---------------------------------------------------------------------- versions


def requirements() -> dict[str | None, list["Requirement"]]:
    """Returns the packages that subquad needs on this machine, by extra; those of None are always needed.

    `dev`, for those who work on subquad itself, is left out.
    """
    from importlib import metadata

    from packaging.requirements import Requirement

    asked = [Requirement(text) for text in metadata.requires("subquad") or []]
    found: dict[str | None, list[Requirement]] = {None: [one for one in asked if _applies(one, "")]}
    for extra in metadata.metadata("subquad").get_all("Provides-Extra") or []:
        if extra != "dev":
            found[extra] = [one for one in asked if _applies(one, extra) and not _applies(one, "")]
    return found


def _applies(requirement: "Requirement", extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def find_problem(requirement: "Requirement") -> str | None:
    """Returns what is wrong with the installed version of a package, or None."""
    version = installed_version(requirement.name)
    if version is None:
        return f"{requirement.name} not installed"
    fits = requirement.specifier.contains(version, prereleases=True)
    return None if fits else f"{requirement.name} {version} is not {requirement.specifier}"


def installed_version(package: str) -> str | None:
    """Returns the installed version of a package, or None."""
    from importlib import metadata  # here: it would slow `subquad --help` down

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
