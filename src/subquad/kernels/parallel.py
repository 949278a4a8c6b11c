"""Independent pieces of an operation on several threads, each piece alone on one.

Operations that work by tiles call torch for small pieces. If every call were spread over all threads, they would meet
twice in each; where another program takes one of the cores, all would wait for it there, and the operation becomes
many times slower. Here a thread takes a whole piece, such as a head, and they meet once, at the end.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_lock = threading.Lock()
_workers: ThreadPoolExecutor | None = None
_number = 0


def parallel_map(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """work(item) of all items, in their order, each as soon as it and those before it are there.

    Nothing is certain to be done before the results are taken: `list(parallel_map(...))` waits for all. Pieces must not
    write to the same place.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(items) < threads:
        return map(work, items)
    inference = torch.is_inference_mode_enabled()

    def alone(item: Item) -> Result:
        # what an operation runs in is the caller's, and threads do not inherit it
        with torch.inference_mode(inference), torch.no_grad():
            return work(item)

    return _pool(threads).map(alone, items)


def _pool(threads: int) -> ThreadPoolExecutor:
    """As many threads as torch has, each of which works on its own: torch's number is one of the calling thread."""
    global _workers, _number
    with _lock:
        if _workers is None or _number != threads:
            if _workers is not None:
                _workers.shutdown(wait=False)
            together, alone = threading.Barrier(threads), threading.Lock()

            def begin() -> None:
                with (
                    alone
                ):  # in a forked process the first to ask makes torch's pool anew, and others must not see none
                    torch.get_num_threads()  # a thread's first look at its number sets it
                    torch.set_num_threads(1)
                together.wait()

            _workers = ThreadPoolExecutor(threads, "subquad", initializer=begin)
            _number = threads
            list(_workers.map(lambda _: None, range(threads)))
            torch.set_num_threads(threads)  # threads that begin later start with the number that was set last
        return _workers


def _forget() -> None:
    """A forked process has none of the threads."""
    global _workers
    _workers = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
