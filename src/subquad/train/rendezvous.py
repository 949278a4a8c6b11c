"""How the processes that torchrun has started find one another, also after it has started some of them again.

torchrun keeps one store for all its attempts to run a program, in which the addresses of processes that have died are
still found: whoever reads one of them before its owner's successor has written it waits for a dead process. The number
of an attempt does not tell them apart, since every machine counts for itself: one whose process died has begun its
second attempt, and another, which only joined it again, is still in its first.

So the processes agree on a name that none before them knew, and meet under it.
"""

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

PATIENCE = timedelta(minutes=30)
"""How long processes wait for one another, as in torch: one of them may still have to load much."""
POLL_INTERVAL = 0.01


def attempt_store(rank: int, world: int) -> dist.Store | None:
    """A place in torchrun's store that no process of an earlier attempt has written to; None if there is no store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(agree_on_name(store, rank, world), store)


def agree_on_name(store: dist.Store, rank: int, world: int) -> str:
    """A name that the first process has chosen, and that all processes of this attempt know.

    Every process leaves a word of its own under its rank and waits for the answer to that word, which no process of an
    earlier attempt can have given. The first one answers every word that it finds, also old ones, until all ranks have
    said that they know the name.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"subquad word {rank}", own)
        store.wait([f"subquad answer {own}"], PATIENCE)
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
