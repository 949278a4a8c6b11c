"""Which packages are installed, and whether they are what the metadata of subquad asks for."""

import re
from importlib import metadata


def requirements() -> dict[str | None, dict[str, str]]:
    """Packages and the versions asked for, by extra, as the installed metadata states them; None: always needed.

    `dev`, for those who work on subquad itself, is left out.
    """
    found: dict[str | None, dict[str, str]] = {}
    for requirement in metadata.requires("subquad") or []:
        package, _, marker = requirement.partition(";")
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        name = re.match(r"[\w.-]+", package)
        if name and (extra is None or extra[1] != "dev"):
            found.setdefault(extra[1] if extra else None, {})[name[0]] = package[name.end() :].strip()
    return found


def problem_of(package: str, wanted: str) -> str | None:
    """What is wrong with an installed package, if anything."""
    version = version_of(package)
    if version is None:
        return f"{package} not installed"
    return None if version_allowed(version, wanted) else f"{package} {version} is not {wanted}"


def version_of(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def version_allowed(version: str, wanted: str) -> bool:
    """Whether "3.11.2" is within ">=3.11,<3.15"."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", text))

    tests = {">=": lambda a, b: a >= b, "<": lambda a, b: a < b}
    bounds = re.findall(r"(>=|<)\s*([\d.]+)", wanted)
    return all(tests[sign](numbers(version), numbers(bound)) for sign, bound in bounds)
