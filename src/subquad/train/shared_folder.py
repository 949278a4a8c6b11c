"""Files that one process writes and others read, perhaps on other machines, whose view of a shared folder may be old.

Network file systems remember which names a folder has, for up to a minute. So the first process says what there is, and
the others wait until they see it, instead of taking what they see: an older checkpoint, or none.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from subquad.train.checkpoint import latest
from subquad.train.distributed import Workers

VISIBLE_WITHIN = 90.0
"""Seconds, after which a folder that does not have a file is not the folder in which it was written."""
POLL_INTERVAL = 0.2


def agree_on_checkpoint(folder: Path, workers: Workers) -> Path | None:
    """The newest checkpoint of a run that is whole, as the first process sees it; None if there is none."""
    path = latest(folder) if workers.is_rank_zero else None
    name = workers.all_gather(None if path is None else path.name)[0]
    if name is None:
        return None
    share_files(folder, [name], workers)
    return folder / name


def share_files(folder: Path, names: list[str], workers: Workers) -> None:
    """Returns when all processes see what the first one sees under these names of files and folders in `folder`."""
    seen = file_sizes(folder, names) if workers.is_rank_zero else {}
    expected = workers.all_gather(seen)[0]
    if not workers.is_rank_zero:
        wait_for_files(folder, expected)


def file_sizes(folder: Path, names: list[str]) -> dict[str, int]:
    """Sizes of files by their paths within `folder`; hidden ones are somebody's unfinished work."""
    paths = [path for name in names for path in (folder / name, *(folder / name).rglob("*"))]
    shown = [path for path in paths if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.stat().st_size for path in shown}


def wait_for_files(folder: Path, expected: Mapping[str, int], seconds: float | None = None) -> None:
    """Waits until all files are there with these sizes; a ValueError after so many seconds (VISIBLE_WITHIN)."""
    end = time.monotonic() + (VISIBLE_WITHIN if seconds is None else seconds)
    for name, size in expected.items():
        while not _has(folder / name, size):
            if time.monotonic() > end:
                raise ValueError(
                    f"this process does not see {folder / name} as the first process wrote it; the run directory must "
                    "be in a folder that all machines share"
                )
            time.sleep(POLL_INTERVAL)


def _has(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:  # not there yet, or what was there has just been replaced
        return False
