"""Batches made ahead of need by threads; what is in them does not depend on how many there are, nor on their pace."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from subquad.data.batches import Draws

AHEAD = 2  # items in the making for each thread

Item = TypeVar("Item")
Made = TypeVar("Made")


def prefetched(make: Callable[[Item], Made], items: Iterable[Item], threads: int) -> Generator[Made]:
    """make(item) for every item, in their order. 0 threads: each when it is asked for.

    What `make` raises is raised here, in the item's turn. Closing the iterator drops what nobody asked for.
    """
    if not threads:
        yield from map(make, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="batches")
    waiting: deque[Future[Made]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > AHEAD * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def batch_seed(seed: int, epoch: int, number: int) -> int:
    """The seed of a batch's random choices, 0 to 2^63 - 1: it depends on the batch's place and on nothing else."""
    # The order of the epoch is drawn from (seed, epoch), to which numpy would take (seed, epoch, 0) as equal.
    return int(Draws(seed, epoch, number + 1).bits.random_raw()) >> 1
