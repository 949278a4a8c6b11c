"""The lowest versions that pyproject.toml allows of every package that subquad needs, as constraints for pip.

    python tools/lowest.py > constraints-lowest.txt

It needs nothing but Python, as it is called before anything is installed.
"""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def lowest_versions(dependencies: list[str]) -> list[str]:
    """["rich>=13,<15"] -> ["rich==13"]. ValueError: a package has no lower bound."""
    found = []
    for dependency in dependencies:
        bound = re.fullmatch(r"([\w-]+)>=([\w.]+)(?:,.*)?", dependency)
        if bound is None:
            raise ValueError(f"{dependency!r} has no lower bound")
        found.append(f"{bound[1]}=={bound[2]}")
    return found


if __name__ == "__main__":
    print("\n".join(lowest_versions(tomllib.loads(PROJECT.read_text())["project"]["dependencies"])))
