"""Several processes on one update, as torchrun starts them: each takes some of its batches, gradients are summed.

A process of its own is the first of one. Sums run over all processes, so that what follows (division by the targets,
clipping, the optimiser) is the same everywhere: the processes' weights stay equal to the bit.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


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
        everyone: list[Mapping[str, float] | None] = [None] * self.world
        dist.all_gather_object(everyone, dict(values))
        sums: dict[str, float] = {}
        for numbers in everyone:
            for name, value in (numbers or {}).items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients become their sums over all processes; where one has none, it counts as 0."""
        if self.world == 1:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        flat = torch.cat([_gradient(parameter).flatten() for parameter in trained])
        dist.all_reduce(flat)
        for parameter, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
            parameter.grad = part.view_as(parameter)

    def gather(self, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """This process's tensors and, under `prefix` and their rank, those of the others."""
        if self.world == 1:
            return dict(tensors)
        everyone: list[Mapping[str, Tensor] | None] = [None] * self.world
        dist.all_gather_object(everyone, {name: value.cpu() for name, value in tensors.items()})
        gathered = dict(everyone[0] or {})
        for rank, others in enumerate(everyone[1:], 1):
            gathered |= {f"{prefix}{rank}.{name}": value for name, value in (others or {}).items()}
        return gathered


def _gradient(parameter: nn.Parameter) -> Tensor:
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)


def join() -> Workers:
    """Meets the other processes that torchrun started; alone without it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Workers()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return Workers(dist.get_rank(), dist.get_world_size())


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
