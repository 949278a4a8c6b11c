"""Builds batches ahead of time in threads. The content of a batch depends neither on their number nor on their pace."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from subquad.data.batches import StableRng

AHEAD = 2  # items that each thread works on or has ready

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetch(build: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Generator[Result]:
    """Yields build(item) for every item, in order. With 0 threads each result is built when it is asked for.

    An exception in `build` is raised here when it is the turn of its item. Closing the generator drops the results that
    nobody asked for.
    """
    if not threads:
        yield from map(build, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="batches")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(build, item))
            if len(waiting) > AHEAD * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def batch_seed(seed: int, epoch: int, number: int) -> int:
    """Returns the seed of the random choices in a batch, 0 to 2^63 - 1. It depends only on the place of the batch."""
    # The order of the epoch is drawn from (seed, epoch), which gives the same stream in numpy as (seed, epoch, 0).
    return int(StableRng(seed, epoch, number + 1).bits.random_raw()) >> 1
