"""Builds batches ahead of need: the same ones in the same order, in this thread, in threads or in processes.

A batch depends on the numbers of its samples and on its seed alone, so neither the number of workers nor their pace
changes it. Threads are for batches that are cheap to build. Python runs one thread at a time, so where a batch costs
much (decoding and augmenting images) processes build it, and it comes back in shared memory.

Processes are started by a fork server, because a process that uses CUDA or runs threads must not be forked. They get
the samples once, through a pipe, and live as long as the loader. They take no signals: Ctrl-C and SIGTERM reach every
process of a job, and the one that trains decides what follows. They end with it, however it ends.
"""

import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from subquad.data.batches import Batch, to_device

AHEAD = 2  # batches that each worker works on or has ready
SIGNALS = (signal.SIGINT, signal.SIGTERM)
DIED = (
    "a process that builds batches (train.data_workers) died. If memory ran out, fewer of them need less; "
    "if /dev/shm was full, through which they hand batches over, give it more room (docker run --shm-size); a script "
    'that trains must do so under `if __name__ == "__main__":`'
)


class BatchSource(Protocol):
    """Samples that become batches. Those that workers skip are added to `skipped`, a dict, if there is one."""

    sizes: tuple[np.ndarray, ...]

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]: ...


class BuiltBatch(NamedTuple):
    """A batch and what its worker has to report: names of samples that could not be read, with reasons; warnings."""

    tensors: dict[str, Tensor]
    skipped: dict[str, str] = {}  # noqa: RUF012 - nobody changes it
    said: tuple[warnings.WarningMessage, ...] = ()


class BatchLoader:
    """Batches of the splits of a task on the device that needs them. Close it when no more are needed."""

    def __init__(
        self,
        samples: Mapping[str, BatchSource],
        workers: int = 0,
        device: torch.device | None = None,
        processes: bool = False,
    ) -> None:
        """samples: those of each split. workers: how many build batches ahead; 0: each is built when it is asked for.

        processes: workers are processes and not threads; `samples` must then be picklable.
        """
        self.samples, self.workers, self.device = dict(samples), workers, device or torch.device("cpu")
        self.pool: Executor | None = None
        self.lifeline: Connection | None = None  # the processes end when this end of their pipe is closed
        if workers and processes:
            self.pool, self.lifeline = _start_processes(self.samples, workers)
        elif workers:
            self.pool = ThreadPoolExecutor(workers, thread_name_prefix="batches")
        self.pins = self.device.type == "cuda"
        # a thread copies batches into pinned memory, which would keep the one that trains waiting
        self.pinning = ThreadPoolExecutor(1, thread_name_prefix="pinning") if self.pins and workers else None

    def load(self, split: str, items: Iterable[tuple[Batch, int]]) -> Generator[dict[str, Tensor]]:
        """Yields a batch for each item, which is the numbers of its samples and its seed, in order.

        An error of a batch is raised when it is its turn, as it would be without workers. Closing the generator drops
        the batches that nobody asked for.
        """
        samples, waiting = self.samples[split], deque[Future[BuiltBatch]]()
        try:
            for numbers, seed in items:
                if self.pool is None:
                    tensors = samples.batch(numbers, seed)
                    yield to_device(pin(tensors) if self.pins else tensors, self.device)
                    continue
                waiting.append(self._submit(split, numbers, seed))
                if len(waiting) > AHEAD * self.workers:
                    yield self._receive(samples, waiting.popleft())
            while waiting:
                yield self._receive(samples, waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()

    def _submit(self, split: str, numbers: Batch, seed: int) -> Future[BuiltBatch]:
        assert self.pool is not None
        if self.lifeline is None:
            samples = self.samples[split]
            built = self.pool.submit(lambda: BuiltBatch(samples.batch(numbers, seed)))
        else:
            with _blocked_signals():  # it starts a process if there are fewer than wanted
                built = self.pool.submit(_build_in_worker, split, numbers, seed)
        return built if self.pinning is None else self.pinning.submit(_pin_result, built)

    def _receive(self, samples: BatchSource, built: Future[BuiltBatch]) -> dict[str, Tensor]:
        try:
            found = built.result()
        except BrokenProcessPool:
            assert self.lifeline is not None
            self.lifeline.close()
            raise ChildProcessError(DIED) from None
        if found.skipped:
            samples.skipped.update(found.skipped)  # type: ignore[attr-defined]
        for warning in found.said:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return to_device(found.tensors, self.device)

    def close(self) -> None:
        """Ends the workers when they have built what they work on."""
        try:
            for pool in (self.pool, self.pinning):
                if pool is not None:
                    pool.shutdown(cancel_futures=True)
        finally:
            if self.lifeline is not None:
                self.lifeline.close()


def pin(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a copy in pinned memory, from which a GPU reads while the process goes on."""
    return {name: value.pin_memory() for name, value in tensors.items()}


def _pin_result(built: Future[BuiltBatch]) -> BuiltBatch:
    found = built.result()
    return found._replace(tensors=pin(found.tensors))


# ---------------------------------------------------------------------- processes


def _start_processes(samples: dict[str, BatchSource], workers: int) -> tuple[ProcessPoolExecutor, Connection]:
    """Returns the pool, whose processes start as batches are submitted, and the end of a pipe that they live by."""
    context = multiprocessing.get_context("forkserver")
    # What the server has imported its processes have at once.
    context.set_forkserver_preload(sorted({__name__, *(type(part).__module__ for part in samples.values())}))
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (samples, theirs))
    return pool, ours


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Processes that are started within have the signals blocked until they ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_samples: dict[str, BatchSource] = {}  # of a worker


def _start_worker(samples: dict[str, BatchSource], lifeline: Connection) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    _samples.update(samples)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    lifeline.poll(None)  # nothing is ever sent, so this waits until the other end is closed
    os._exit(0)


def _build_in_worker(split: str, numbers: Batch, seed: int) -> BuiltBatch:
    samples = _samples[split]
    skipped: dict[str, str] = getattr(samples, "skipped", {})
    known = set(skipped)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensors = samples.batch(numbers, seed)
    return BuiltBatch(tensors, {name: why for name, why in skipped.items() if name not in known}, tuple(caught))
