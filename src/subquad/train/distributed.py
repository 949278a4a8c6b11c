"""Several processes on one update, as torchrun starts them: each takes some of its batches, and sums run over all.

Every process may hold a replica of the model (DDP), or a part of every tensor (FSDP2). However it is held, the backward
pass leaves the same gradients: those of the sum of the losses of all processes' batches, where torch by itself would
average. What follows (division by the targets, clipping, the optimiser) is the same everywhere, so the processes'
weights stay equal to the bit. A process without torchrun is the only one.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from subquad.data.batches import BatchPlan, split_batches
from subquad.data.loader import BatchLoader
from subquad.kernels import tracing
from subquad.mixers import Mixer
from subquad.models import Model
from subquad.nn.block import Block
from subquad.nn.stack import Stack
from subquad.tasks.base import Task
from subquad.tasks.losses import LossOutput
from subquad.tasks.sample_shards import evaluation_budget
from subquad.train.agreement import PATIENCE, attempt_store
from subquad.train.rng import set_rng_state, torch_rng_state

TensorBatch = Mapping[str, Tensor]
LossOf = Callable[[TensorBatch], LossOutput]
ModelType = TypeVar("ModelType", bound=Model)
COUNT = ".count"  # a name that no task uses
STOP_EVERY = 8
"""Batches after which processes ask one another whether to stop."""


@dataclass(frozen=True)
class Workers:
    """The place of this process (`rank`) among all `world` processes."""

    rank: int = 0
    world: int = 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the process that writes files and progress."""
        return self.rank == 0

    def barrier(self) -> None:
        """Returns when all processes are here."""
        if self.world > 1:
            dist.barrier()

    def all_reduce(self, values: Mapping[str, Tensor | float], device: torch.device) -> dict[str, float]:
        """Returns sums over all processes, which must give the same names. It exchanges one float64 tensor."""
        if self.world == 1 and not any(isinstance(value, Tensor) for value in values.values()):
            return {name: float(value) for name, value in values.items()}
        return dict(zip(sorted(values), self.all_reduce_on_device(values, device).tolist(), strict=True))

    def all_reduce_on_device(self, values: Mapping[str, Tensor | float], device: torch.device) -> Tensor:
        """Returns the sums of `all_reduce` as a float64 tensor, by sorted name, without waiting for the device."""
        if not values:
            return torch.zeros(0, dtype=torch.float64, device=device)
        numbers = [0.0 if isinstance(values[name], Tensor) else values[name] for name in sorted(values)]
        copied = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True).unbind()
        given = [values[name] for name in sorted(values)]
        own = [value.double() if isinstance(value, Tensor) else at for value, at in zip(given, copied, strict=True)]
        sums = torch.stack(own)
        if self.world > 1:
            dist.all_reduce(sums)
        return sums

    def all_gather(self, content: Any) -> list[Any]:
        """Returns what each process gave, by rank. content: anything that JSON can hold."""
        if self.world == 1:
            return [content]
        return [json.loads(given) for given in self._all_gather_bytes(json.dumps(content).encode())]

    def gather_tensors(self, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        """Returns the first process's tensors, and under `prefix` and their rank those of the others."""
        if self.world == 1:
            return dict(tensors)
        own = safetensors.torch.save({name: value.cpu().contiguous() for name, value in tensors.items()})
        first, *others = map(safetensors.torch.load, self._all_gather_bytes(own))
        for rank, theirs in enumerate(others, 1):
            first |= {f"{prefix}{rank}.{name}": value for name, value in theirs.items()}
        return first

    def _all_gather_bytes(self, content: bytes) -> list[bytes]:
        """Returns what each process gave, by rank. Bytes are exchanged instead of pickles, which could run code."""
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


def full_tensor(value: Tensor) -> Tensor:
    """Gathers a sharded tensor (FSDP2), which all processes must do at once. Other tensors are returned as they are."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def gather_to_first(tensors: Mapping[str, Tensor], workers: Workers) -> dict[str, Tensor]:
    """Returns whole tensors on the CPU of the first process, and nothing on the others. All must call it at once.

    Sharded tensors are gathered one by one, so that no device ever holds more than one whole tensor for it. What is on
    the CPU already is not copied.
    """
    gathered = {}
    for name, value in tensors.items():
        whole = full_tensor(value.detach())
        if workers.is_rank_zero:
            gathered[name] = whole.cpu().contiguous()
    return gathered


def to_local(value: Tensor) -> Tensor:
    """Returns this process's part of a sharded tensor, in the same memory. Other tensors are returned as they are."""
    return value.to_local() if hasattr(value, "to_local") else value


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Returns a copy of a whole tensor on the device of `like`, sharded in the same way."""
    value = value.to(like.device, copy=True)
    if not hasattr(like, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    # every process has the same tensor: each takes its part, and nothing is sent
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def expected_workers() -> Workers:
    """The place that torchrun gave to this process, which may not have joined the others yet."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return Workers(int(os.environ["RANK"]), world) if world > 1 else Workers()


def join(timeout: timedelta = PATIENCE) -> Workers:
    """Joins the other processes that torchrun started. Without torchrun this process is the only one.

    timeout: how long an exchange may take before this process gives up.
    """
    workers = expected_workers()
    if workers.world > 1 and not dist.is_initialized():
        device = _claim_gpu()  # first of all: NCCL takes the current one
        dist.init_process_group(
            "gloo" if device is None else "nccl",
            store=attempt_store(workers.rank, workers.world),
            rank=workers.rank,
            world_size=workers.world,
            timeout=timeout,
            device_id=device,
        )
    return workers


def _claim_gpu() -> torch.device | None:
    """Makes the GPU of this process the current one; None: there is none."""
    if not torch.cuda.is_available():
        return None
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        raise ValueError(
            f"process {number} of this machine has no GPU: there are {count}; give torchrun --nproc-per-node={count}"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


# ---------------------------------------------------------------------- the loss of a model that processes share


class LossModule(nn.Module):
    """batch -> LossOutput, under autocast in half precision.

    DDP and FSDP2 watch the forward pass of a module, and tasks call a model's parts one by one: this module's forward
    pass is all of it, the loss of the head included.
    """

    def __init__(
        self, model: Model, loss: Callable[[Any, TensorBatch], LossOutput], dtype: torch.dtype | None = None
    ) -> None:
        """dtype: of the forward pass; None: that of the weights."""
        super().__init__()
        self.model, self.loss, self.dtype = model, loss, dtype

    def forward(self, batch: TensorBatch) -> LossOutput:
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, self.dtype) if self.dtype is not None else nullcontext():
            return self.loss(self.model, batch)


class DistributedLoss:
    """loss(model, batch) of this worker's batches, with gradients that are summed over all workers.

    All workers call it equally often: `split_batches` gives each of them as many batches.
    """

    def __init__(
        self,
        model: ModelType,
        loss: Callable[[ModelType, TensorBatch], LossOutput],
        workers: Workers = ALONE,
        sharded: bool = False,
        dtype: torch.dtype | None = None,
        example: Callable[[], TensorBatch] | None = None,
    ) -> None:
        """dtype: of the forward pass; None: that of the weights. example: makes a small batch, the same everywhere.

        sharded: parameters, gradients and all that follows them are spread over the workers. Then the model's
        parameters are other objects afterwards: build the optimiser later.
        """
        self.model, self.loss, self.workers, self.dtype = model, loss, workers, dtype
        self.sharded = sharded and workers.world > 1
        self.module: nn.Module = LossModule(model, loss, dtype)
        if self.sharded:
            # autocast of a CPU leaves layer norms alone, which then refuse weights of another precision than x's
            on_gpu = next(model.parameters()).device.type == "cuda"
            self.module = shard(self.module, workers, dtype if on_gpu else None)
        elif workers.world > 1:
            self.module = _replicate(self.module, example)

    def __call__(self, batch: TensorBatch) -> LossOutput:
        found: LossOutput = self.module(batch)
        if self.sharded and not torch.is_grad_enabled():
            self.module.reshard()  # type: ignore[operator]  # otherwise the backward pass does it
        return found

    def no_sync(self) -> AbstractContextManager[Any]:
        """Replicas sum gradients in the last backward pass of an update; the others run within this context.

        Shards sum in each: whole gradients are what they have no room for.
        """
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()

    def release(self) -> None:
        """Lets go of the replica, which must not outlive the group of processes.

        Whoever holds the group last waits for its threads. A replica would do so while it has Python's lock, for which
        these threads may be waiting to let go of a tensor: the process would never end.
        """
        self.module = LossModule(self.model, self.loss, self.dtype)

    def unwrapped(self) -> tuple[Model, LossOf]:
        """Returns the model and its loss without any exchange. All workers must gather a sharded model at once."""
        model = self.model
        if self.sharded:
            weights = {name: full_tensor(value) for name, value in model.state_dict().items()}
            device = next(iter(weights.values())).device
            model = type(model)(model.config).to(device).train(model.training)
            model.load_state_dict(weights)
        return model, LossModule(model, self.loss, self.dtype)


def _leaves_parameters_unused(module: nn.Module, example: Callable[[], TensorBatch]) -> bool:
    """Whether a backward pass may leave parameters without a gradient, of which DDP has to find out every time.

    Skipped blocks do, at random. Otherwise one pass shows it: maps that a mechanism needs for grids only, those of a
    regulariser that does not count. None of our mechanisms uses other parameters for other inputs; those of other
    packages are not known to.
    """
    mixers = [part for part in module.modules() if isinstance(part, Mixer)]
    if _skips_blocks(module) or not all(type(mixer).__module__.startswith("subquad.") for mixer in mixers):
        return True
    with _trial_pass(module, example):
        return any(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())


@contextmanager
def _trial_pass(module: nn.Module, example: Callable[[], TensorBatch]) -> Iterator[None]:
    """Within the block the gradients of a batch are there; afterwards there are none, and nothing was drawn."""
    before = torch_rng_state()
    with tracing.uncompiled():
        module(example()).total.backward()
    yield
    set_rng_state(before)
    module.zero_grad(set_to_none=True)


def _replicate(module: nn.Module, example: Callable[[], TensorBatch] | None) -> DistributedDataParallel:
    unused = example is None or _leaves_parameters_unused(module, example)
    replica = DistributedDataParallel(
        module,
        forward_sync_buffers=False,  # buffers are constant here
        find_unused_parameters=unused,
        gradient_as_bucket_view=True,  # gradients are summed where they are, without a copy of all of them
    )
    replica.register_comm_hook(None, _sum_bucket)
    if example is not None and not unused:
        # After its first pass torch puts gradients into other buckets, in the order in which they came. Sums over more
        # than two processes depend on the place in a bucket: a run that goes on must not begin with others again.
        with _trial_pass(replica, example):
            pass
    return replica


def _sum_bucket(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sums a bucket of gradients while the backward pass goes on."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def shard(module: nn.Module, workers: Workers, dtype: torch.dtype | None) -> nn.Module:
    """Shards every block, which is gathered when it is needed, and with the module all that is in no block.

    dtype: in which blocks are gathered, since their products are computed in it; None: that of the weights. What is in
    no block, such as embeddings, begins the residual path, and stays as it is. Gradients are summed in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh  # together more than a second to import
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if _skips_blocks(module):
        raise ValueError(
            "train.sharded: layer_drop lets each process skip other blocks, but a shard is needed by all; set one to 0"
        )
    if any(isinstance(part, Mixer) and part.borrows_weights for part in module.modules()):
        raise ValueError(
            "train.sharded: share_layers lets blocks read the weights of another one, which are gathered for that "
            "block alone; set one to false"
        )
    mesh = init_device_mesh(next(module.parameters()).device.type, (workers.world,))
    of_blocks = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False) if dtype else None
    for part in [*(part for part in module.modules() if isinstance(part, Block)), module]:
        policy = of_blocks if isinstance(part, Block) else None
        fully_shard(part, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
        assert isinstance(part, FSDPModule)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    return module


def _skips_blocks(module: nn.Module) -> bool:
    return any(isinstance(part, Stack) and part.config.layer_drop > 0 for part in module.modules())


# ---------------------------------------------------------------------- a validation that processes share


def validate(
    task: Task,
    loss: DistributedLoss,
    loader: BatchLoader,
    split: str,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Returns the task's metrics on a split, in eval mode, over every sample once. The processes share the samples.

    stop: asked now and then, by all processes at once; if it says so, the
    validation is given up, and there are no metrics.
    """
    samples, model, workers = loader.samples[split], loss.model, loss.workers
    training = model.training
    model.eval()
    sums: dict[str, Tensor | float] = {}
    plan = BatchPlan(*samples.sizes, budget=task.budget(evaluation_budget(samples)), shuffle=False)
    own, idle = split_batches(plan.epoch(0), workers.rank, workers.world)
    with torch.no_grad(), closing(loader.load(split, ((numbers, 0) for numbers in own))) as batches:
        for number, batch in enumerate(batches, 1):
            if number % STOP_EVERY == 0 and stop():
                model.train(training)
                return {}
            found = loss(batch)
            add_sums(sums, {**found.sums, COUNT: float(found.count)}, counts=not (idle and number == len(own)))
    model.train(training)
    totals = workers.all_reduce(sums, loader.device)
    count = int(totals.pop(COUNT))
    return task.metrics(totals, count)


def add_sums(sums: dict[str, Tensor | float], more: Mapping[str, Tensor | float], counts: bool = True) -> None:
    """Adds numbers by name, in float64. If they do not count, only their names are added, with zeros."""
    for name, value in more.items():
        value = value.double() if isinstance(value, Tensor) else value
        sums[name] = sums.get(name, 0.0) + value if counts else sums.get(name, 0.0)
