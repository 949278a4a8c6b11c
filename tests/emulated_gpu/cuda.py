"""What torch.cuda answers about the emulated device, and how Triton launches kernels on it."""

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

from tests.emulated_gpu import device, memory
from tests.emulated_gpu.counts import LAUNCH, SYNCHRONISATION, record

NAME = "emulated GPU"
PROPERTIES = SimpleNamespace(
    name=NAME, major=8, minor=0, total_memory=80 << 30, multi_processor_count=108, gcnArchName="", warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=163 << 10, L2_cache_size=40 << 20, is_integrated=0,
)  # fmt: skip
"""Those of an A100."""


def is_emulated() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_name() == NAME


class Stream:
    """The one stream of the device, on which everything has happened by the time that anybody asks."""

    device = device.DEVICE
    device_index, device_type, stream_id, cuda_stream = 0, 1, 0, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def synchronize(self) -> None:
        record(SYNCHRONISATION, "stream")

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def wait_event(self, event: "Event") -> None:
        pass

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        record(SYNCHRONISATION, "event")

    def elapsed_time(self, end: "Event") -> float:
        return 0.0


def start() -> None:
    """Answers for the rest of the process."""
    stream = Stream()
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "device_of": lambda tensor: contextlib.nullcontext(),
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_properties": lambda device=None: PROPERTIES,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: record(SYNCHRONISATION, "torch.cuda.synchronize"),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "memory_allocated": lambda device=None: memory.allocated,
        "memory_reserved": lambda device=None: memory.allocated,
        "max_memory_allocated": lambda device=None: memory.peak,
        "max_memory_reserved": lambda device=None: memory.peak,
        "reset_peak_memory_stats": lambda device=None: memory.reset_peak(),
        "mem_get_info": lambda device=None: (PROPERTIES.total_memory - memory.allocated, PROPERTIES.total_memory),
        "manual_seed": device.random.seed,
        "manual_seed_all": device.random.seed,
        "get_rng_state": lambda device=0: _random_state(),
        "get_rng_state_all": lambda: [_random_state()],
        "set_rng_state": _set_random_state,
        "set_rng_state_all": lambda states: _set_random_state(states[0]),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "set_stream": lambda stream: None,
        "is_current_stream_capturing": lambda: False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    with contextlib.suppress(ImportError):
        _launch_in_the_interpreter()


def _random_state() -> torch.Tensor:
    return device.random.state.clone()


def _set_random_state(state: torch.Tensor, device_index: Any = 0) -> None:
    device.random.state = state.clone()


def _launch_in_the_interpreter() -> None:
    """Triton's kernels get the numbers of device tensors. A tensor on the CPU is refused, as a GPU cannot read it."""
    from triton.runtime import interpreter

    execute = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not isinstance(value, device.DeviceTensor):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        record(LAUNCH, f"triton.{self.fn.__name__}")
        options = {name: device._numbers(value) for name, value in kwargs.items()}
        execute(self, *map(device._numbers, args), **options)

    interpreter.GridExecutor.__call__ = launch
