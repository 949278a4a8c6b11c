"""Several processes on one update, as torchrun starts them: each takes some of its batches, and numbers are summed.

A process of its own is the first of one. Sums run over all processes, so that what follows (division by the targets,
clipping, the optimiser) is the same everywhere: the processes' weights stay equal to the bit. `parallel` says how
gradients are summed.
"""

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Workers:
    """This process among all of them."""

    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and progress."""
        return self.rank == 0

    def wait(self) -> None:
        """Returns when all processes are here."""
        if self.world > 1:
            dist.barrier()

    def sum_numbers(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums by name; a process that lacks a name has 0 of it."""
        if self.world == 1:
            return dict(values)
        sums: dict[str, float] = {}
        for numbers in self.everyones(dict(values)):
            for name, value in numbers.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def everyones(self, content: Any) -> list[Any]:
        """What each process gave, by rank; content: anything that JSON can hold."""
        if self.world == 1:
            return [content]
        return [json.loads(given) for given in self._gathered(json.dumps(content).encode())]

    def gather(self, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """This process's tensors and, under `prefix` and their rank, those of the others."""
        if self.world == 1:
            return dict(tensors)
        own = safetensors.torch.save({name: value.cpu().contiguous() for name, value in tensors.items()})
        first, *others = map(safetensors.torch.load, self._gathered(own))
        for rank, theirs in enumerate(others, 1):
            first |= {f"{prefix}{rank}.{name}": value for name, value in theirs.items()}
        return first

    def _gathered(self, content: bytes) -> list[bytes]:
        """What each process gave, by rank: as bytes, so that nothing that arrives is run."""
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(content)], device=device))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        parts = [torch.zeros_like(padded) for _ in range(self.world)]
        dist.all_gather(parts, padded)
        return [bytes(part[: int(size)].cpu().numpy()) for part, size in zip(parts, sizes, strict=True)]


ALONE = Workers()
_GROUPS = itertools.count()


def whole(value: Tensor) -> Tensor:
    """A sharded tensor (FSDP2) gathered, which all processes must do at once; another as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def local(value: Tensor) -> Tensor:
    """This process's part of a sharded tensor, in the same memory; another as it is."""
    return value.to_local() if hasattr(value, "to_local") else value


def placed_like(value: Tensor, like: Tensor) -> Tensor:
    """A copy of a whole tensor on the device of `like`, and sharded as it is."""
    value = value.to(like.device, copy=True)
    if not hasattr(like, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    # every process has the same tensor: each takes its part, and nothing is sent
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def join() -> Workers:
    """Meets the other processes that torchrun started; alone without it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Workers()
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if (store := _own_attempt()) is None:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=world)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return Workers(dist.get_rank(), dist.get_world_size())


def _own_attempt() -> dist.Store | None:
    """A place in torchrun's store that processes which it started before this attempt never wrote to.

    torchrun keeps one store for all its attempts, in which the addresses of processes that have died are still found:
    whoever reads one of them before its owner's successor has written waits for a dead process.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    # one process may join several times, too: to train, and then to evaluate
    return dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}, group {next(_GROUPS)}", store)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
