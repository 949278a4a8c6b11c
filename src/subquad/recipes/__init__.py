"""The recipes that come with subquad, which have names in every folder: `subquad train phrases`.

A recipe's name is its path here without `.yaml`, such as `small/phrases`; its last part is enough where no other recipe
has it. Those of the original programs stand here, small ones in `small/`, and those for studies by length in `long/`.
`index.json` says what is in each of them; `make docs` writes it.
"""

import difflib
import functools
import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
INDEX = FOLDER / "index.json"
MOST_SUGGESTED = 3


@dataclass(frozen=True)
class Entry:
    """What `subquad recipes` shows of a recipe.

    title: the first sentence of its comment. mechanisms: those of its model. data: the embedded set that it reads, or
    the folder of its files. parameters: of the model, with a vocabulary as large as the recipe asks for. origin: the
    program or paper that it follows, "subquad" if it is our own.
    """

    name: str
    title: str
    task: str
    mechanisms: list[str]
    data: str
    parameters: int
    origin: str


def names() -> list[str]:
    """Returns the names of all recipes: those of the original programs first, then folder by folder."""
    found = [path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.yaml")]
    return [name.as_posix() for name in sorted(found, key=lambda name: (len(name.parts), name))]


@functools.cache
def short_names() -> dict[str, str]:
    """Returns the shortest name of each recipe by its whole name: `phrases` of `small/phrases`."""
    last = [name.rpartition("/")[2] for name in names()]
    return {name: end if last.count(end) == 1 else name for name, end in zip(names(), last, strict=True)}


def entries() -> list[Entry]:
    """Returns what the index says of every recipe, under its shortest name."""
    return [Entry(**entry) for entry in json.loads(INDEX.read_text())]


def search(word: str | None) -> list[Entry]:
    """Returns the recipes in whose entry the word occurs, or all."""
    wanted = (word or "").lower()
    return [entry for entry in entries() if wanted in " ".join(map(str, vars(entry).values())).lower()]


def find_recipe(given: str | Path) -> Path:
    """Returns the file of a recipe. given: a path, or the name of a recipe that comes with subquad.

    A file is preferred to a recipe of its name. ValueError: there is none; the message has the nearest.

    >>> find_recipe("phrases") == find_recipe("small/phrases") == FOLDER / "small" / "phrases.yaml"
    True
    """
    path, word = Path(given), Path(given).as_posix()
    if path.is_file():
        return path
    found = [name for name, short in short_names().items() if word in (name, short, name.rpartition("/")[2])]
    if len(found) > 1:
        raise ValueError(f"several recipes are called {word}: say {' or '.join(found)}")
    if found:
        return FOLDER / f"{found[0]}.yaml"
    if path.is_dir():
        raise ValueError(f"{path} is a folder, and a recipe is a YAML file; that of a run is {path / 'recipe.yaml'}")
    raise ValueError(
        f"there is no recipe {given}{_nearest(path)} The path starts at the current folder, {Path.cwd()}; "
        "`subquad recipes` lists the names"
    )


def find_folder(given: str | Path) -> Path | None:
    """Returns a folder of recipes: a path, or the name of a folder here such as `long`; None: it is no folder."""
    path = Path(given)
    named = Path(given).as_posix() in {name.rpartition("/")[0] for name in names() if "/" in name}
    if named and not any(path.glob("*.yaml")):
        return FOLDER / path
    return path if path.is_dir() else None


def _nearest(path: Path) -> str:
    """Returns the end of the sentence that there is no such recipe: the files beside it or names that are close."""
    files = {other.stem: other.name for other in path.parent.glob("*.yaml")}  # ".yaml" would make all names alike
    known = {name.rpartition("/")[2]: name for name in short_names().values()} | files
    longer = [name for name in known if path.stem and name.startswith(path.stem)]
    close = list(dict.fromkeys([*longer, *difflib.get_close_matches(path.stem, known)]))[:MOST_SUGGESTED]
    return f"; did you mean {' or '.join(repr(known[name]) for name in close)}?" if close else "."
