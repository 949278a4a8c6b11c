"""What processes agree on before they train together: where they meet, and which files they go on from.

Where they meet: torchrun keeps one store for all its attempts to run a program, in which the addresses of processes
that have died are still found: whoever reads one of them before its owner's successor has written it waits for a dead
process. The number of an attempt does not tell them apart, since every machine counts for itself: one whose process
died has begun its second attempt, and another, which only joined it again, is still in its first. So the processes
agree on a name that none before them knew, and meet under it.

Which files: network file systems remember which names a folder has, for up to a minute. So the first process says what
there is, and the others wait until they see it, instead of taking what they see: an older checkpoint, or none.
"""

import os
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from subquad.train.checkpoint import latest

if TYPE_CHECKING:
    from subquad.train.distributed import Workers

PATIENCE = timedelta(minutes=30)
"""How long processes wait for one another, as in torch: one of them may still have to load much."""
PREPARATION = timedelta(days=7)
"""How long they wait for the store of the first process, which prepares the data before it opens one."""
VISIBLE_WITHIN = 90.0
"""Seconds, after which a folder that does not have a file is not the folder in which it was written."""
POLL_INTERVAL = 0.05


# ---------------------------------------------------------------------- where they meet


def attempt_store(rank: int, world: int) -> dist.Store:
    """A store that no process of an earlier attempt has written to: a place in torchrun's, or one of the first process.

    The first process may come hours after the others, since it prepares the data first.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        own = dist.TCPStore(address, port, is_master=rank == 0, wait_for_workers=False, timeout=PREPARATION)
        own.set_timeout(PATIENCE)
        return own
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(agree_on_name(store, rank, world), store)


def agree_on_name(store: dist.Store, rank: int, world: int) -> str:
    """A name that the first process has chosen, and that all processes of this attempt know.

    Every process leaves a word of its own under its rank and waits for the answer to that word, which no process of an
    earlier attempt can have given, however long that takes. The first one answers every word that it finds, also old
    ones, until all ranks have said that they know the name.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"subquad word {rank}", own)
        while not store.check([f"subquad answer {own}"]):  # for as long as there is a store, which torchrun sees to
            time.sleep(POLL_INTERVAL)
        name = store.get(f"subquad answer {own}").decode()
        store.set(f"subquad {name} known to {rank}", "yes")
        return name
    missing, end = set(range(1, world)), time.monotonic() + PATIENCE.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"subquad word {other}"]):
                store.set(f"subquad answer {store.get(f'subquad word {other}').decode()}", own)
            if store.check([f"subquad {own} known to {other}"]):
                missing.discard(other)
        if missing and time.monotonic() > end:
            raise ValueError(f"processes {sorted(missing)} of {world} did not come within {PATIENCE}; start all again")
        time.sleep(POLL_INTERVAL)
    return own


# ---------------------------------------------------------------------- which files


def agree_on_checkpoint(folder: Path, workers: "Workers") -> Path | None:
    """The newest checkpoint of a run that is whole, as the first process sees it; None if there is none."""
    path = latest(folder) if workers.is_rank_zero else None
    name = workers.all_gather(None if path is None else path.name)[0]
    if name is None:
        return None
    share_files(folder, [name], workers)
    return folder / name


def share_files(folder: Path, names: list[str], workers: "Workers") -> None:
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
