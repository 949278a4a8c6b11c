"""Measuring a piece of work: its seconds and its peak of memory.

Peak memory is what the measured work itself had allocated at its worst moment: tensors that existed before it (inputs,
parameters) are not counted. On the CPU it is the running sum of every allocation and release that torch's profiler
sees, temporaries inside fused kernels included; what a library takes behind torch's allocator is not seen.
"""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own log lines would run through the progress bar

Work = Callable[[], object]
Seconds = Mapping[str, Sequence[float]]
"""The times of pieces of work, by name, round by round."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def no_wait() -> None:
    """Nothing to wait for: the CPU has finished when a call returns."""


def default_dtype(device: torch.device) -> str:
    """The precision in which people run models on a device: half precision on GPUs, float32 elsewhere.

    Softmax attention, which the mechanisms are compared with, has its fast kernel in half precision alone.
    """
    if device.type != "cuda":
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


def in_default_dtype(device: torch.device) -> AbstractContextManager[None]:
    """Within the block, products run in `default_dtype`; where that is float32, in the precision of the weights."""
    dtype = DTYPES[default_dtype(device)]
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done what it was given."""
    return no_wait if device.type == "cpu" else getattr(torch, device.type).synchronize


def interleaved_seconds(
    work: Mapping[str, Work],
    looks: Sequence[int],
    *,
    is_decided: Callable[[Seconds], bool] = lambda _: False,
    warmup: int = 1,
    synchronize: Callable[[], None] = no_wait,
    clock: Callable[[], float] = time.perf_counter,
    after_round: Callable[[int], None] = lambda _: None,
) -> dict[str, list[float]]:
    """Seconds of every piece of work in every round.

    Every round runs each piece once, so that a machine that slows down for a while slows all of them down, and in
    another order, so that no piece always follows the same one. The first `warmup` rounds are not kept. There are as
    many as the last of `looks` says, or as an earlier one after which `is_decided`. `after_round` is told how many were
    kept so far.
    """
    seconds: dict[str, list[float]] = {name: [] for name in work}
    order, shuffle = list(work), random.Random(0).shuffle
    for round_number in range(warmup + looks[-1]):
        shuffle(order)
        for name in order:
            run = work[name]
            synchronize()
            start = clock()
            result = run()
            synchronize()
            elapsed = clock() - start
            del result  # freed outside the measured region, and before the next piece allocates
            if round_number >= warmup:
                seconds[name].append(elapsed)
        kept = round_number + 1 - warmup
        after_round(max(0, kept))
        if kept in looks and is_decided(seconds):
            break
    return seconds


def peak_bytes(work: Work, device: torch.device) -> int:
    """Most bytes that `work` had allocated at any moment, its result included.

    On the CPU with one thread, since the recorder sees the calling thread only: where a kernel works by tiles, each
    further thread has one of its own, a few MB.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        raise ValueError(f"peak memory can be measured on cpu and cuda, not on {device.type}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with profile(profile_memory=True) as recorded:
            work()
    finally:
        torch.set_num_threads(threads)
    live: dict[int, int] = {}
    total = peak = 0
    for address, size in _allocations(recorded):
        if size > 0:
            live[address] = size
            total += size
            peak = max(peak, total)
        else:
            total -= live.pop(address, 0)  # unknown: it was allocated before, and is not this work's to give back
    return peak


def _allocations(recorded: profile) -> list[tuple[int, int]]:
    """Address and size of every allocation, in order of time; a release has a negative size."""
    events = []
    assert recorded.kineto_results is not None
    waiting = list(recorded.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            change: Any = event.extra_fields
            events.append((event.start_time_ns, change.ptr, change.alloc_size))
    return [(address, size) for _, address, size in sorted(events, key=lambda event: event[0])]
