"""A shared folder as a network shows it: operations take long, and what is in a folder is what was there a while ago.

`python -m torture.stale RANK FILE train ...` under torchrun lets the process of one rank see the folders that FILE
describes (`View.write`) as they were.

A machine remembers the names in a folder for some time, or until it changes something there itself. Until then files of
others that are new do not exist for it, and files that are gone are listed.
"""

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from subquad.cli.main import run

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.symlink")


@dataclass
class View:
    """What a machine sees of `folder`.

    delay: seconds that every operation takes. names: of each folder in it, what there was, and whether it was a folder.
    seconds: how long they are remembered.
    """

    folder: str
    delay: float = 0.0
    seconds: float = 0.0
    names: dict[str, dict[str, bool]] = field(default_factory=dict)

    @classmethod
    def remember(cls, folder: Path, seconds: float, delay: float = 0.0) -> Self:
        """What there is now."""
        names = {
            where: {**dict.fromkeys(folders, True), **dict.fromkeys(files, False)}
            for where, folders, files in os.walk(folder)
        }
        return cls(str(folder), delay, seconds, names or {str(folder): {}})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    def install(self) -> None:
        """Lets this process see it so, from now on."""
        self.end: float | None = None  # counted from the first look at the folder, for which a process may need long
        self.scandir, self.listdir, self.stat, self.open = os.scandir, os.listdir, os.stat, io.open
        os.scandir, os.listdir = self._scandir, self._listdir  # type: ignore[assignment]
        os.stat, os.lstat = self._looked_up(os.stat), self._looked_up(os.lstat)  # type: ignore[assignment]
        io.open = self._looked_up(io.open)  # type: ignore[assignment]
        sys.addaudithook(self._seen)

    def _seen(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Every operation takes its time; what this process changes itself, it sees."""
        if event not in (*CHANGES, "open", "os.scandir", "os.listdir"):
            return
        paths = [os.fspath(one) for one in arguments[:2] if isinstance(one, str | os.PathLike)]
        own = [str(path) for path in paths if str(path).startswith(self.folder)]
        if not own:
            return
        time.sleep(self.delay)
        if event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT):
            for path in own:
                self.names.pop(os.path.dirname(path), None)
                self.names.pop(path, None)  # a folder of its own making, in which libraries write unseen

    def _remembered(self, folder: Any) -> dict[str, bool] | None:
        """The names that are remembered of a folder; None: it is seen as it is."""
        names = self.names.get(os.fspath(folder)) if isinstance(folder, str | os.PathLike) else None
        if names is not None and self.end is None:
            self.end = time.monotonic() + self.seconds
        return None if self.end is None or time.monotonic() > self.end else names

    def _scandir(self, path: Any = ".") -> Any:
        names = self._remembered(path)
        return self.scandir(path) if names is None else Entries(os.fspath(path), names)

    def _listdir(self, path: Any = ".") -> list[str]:
        names = self._remembered(path)
        return self.listdir(path) if names is None else list(names)

    def _is_unknown(self, path: str) -> bool:
        """Whether it, or a folder that it is in, is not among the names that are remembered."""
        while path.startswith(self.folder) and path != self.folder:
            path, name = os.path.split(path)
            names = self._remembered(path)
            if names is not None and name not in names:
                return True
        return False

    def _looked_up(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A function of a path, to which files do not exist that are not remembered."""

        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            mode = arguments[0] if arguments else options.get("mode", "r")
            changes = isinstance(mode, str) and bool(set(mode) & set("wax+"))
            if isinstance(path, str | os.PathLike) and not changes and self._is_unknown(os.fspath(path)):
                raise FileNotFoundError(2, os.strerror(2), os.fspath(path))
            return real(path, *arguments, **options)

        return call


class Entries:
    """What `os.scandir` returns."""

    def __init__(self, folder: str, names: dict[str, bool]) -> None:
        self.entries = [Entry(name, os.path.join(folder, name), is_folder) for name, is_folder in names.items()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def __iter__(self) -> Iterator["Entry"]:
        return iter(self.entries)


@dataclass(frozen=True)
class Entry:
    """A name in a folder."""

    name: str
    path: str
    is_folder: bool

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        return self.is_folder

    def is_file(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        return not self.is_folder

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)


def main() -> int:
    rank, file, *words = sys.argv[1:]
    if os.environ["RANK"] == rank:
        View(**json.loads(Path(file).read_text())).install()
    return run(words)


if __name__ == "__main__":
    sys.exit(main())
