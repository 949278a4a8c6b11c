"""The loss of a model that one process holds, or several: each a replica (DDP), or each a part of every tensor (FSDP2).

However it is held, the backward pass leaves the same gradients: those of the sum of the losses of all workers' batches.
torch averages over processes unless it is told otherwise; here it is.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from subquad.data.batches import shard
from subquad.mixers import Mixer
from subquad.models import Model
from subquad.nn.block import Block
from subquad.nn.stack import Stack
from subquad.tasks.losses import LossOutput
from subquad.train.distributed import ALONE, Workers, whole

TensorBatch = Mapping[str, Tensor]
LossOf = Callable[[TensorBatch], LossOutput]
ModelType = TypeVar("ModelType", bound=Model)
Item = TypeVar("Item")


class _LossModule(nn.Module):
    """batch -> LossOutput. DDP and FSDP2 watch the forward pass of a module, and tasks call a model's parts one by one:
    this module's forward pass is all of it, the loss of the head included."""

    def __init__(self, model: Model, loss: Callable[[Any, TensorBatch], LossOutput]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: TensorBatch) -> LossOutput:
        return self.loss(self.model, batch)


class SharedLoss:
    """loss(model, batch) of this worker's batches, with gradients that are summed over all workers.

    All workers call it equally often: `evenly` gives each of them as many batches.
    """

    def __init__(
        self,
        model: ModelType,
        loss: Callable[[ModelType, TensorBatch], LossOutput],
        workers: Workers = ALONE,
        sharded: bool = False,
    ) -> None:
        """sharded: parameters, gradients and all that follows them are spread over the workers. Then the model's
        parameters are other objects afterwards: build the optimiser later."""
        self.model, self.loss, self.workers = model, loss, workers
        self.sharded = sharded and workers.world > 1
        self.module: nn.Module = _LossModule(model, loss)
        if self.sharded:
            self.module = _sharded(self.module, workers)
        elif workers.world > 1:
            self.module = _replicated(self.module)

    def __call__(self, batch: TensorBatch) -> LossOutput:
        found: LossOutput = self.module(batch)
        if self.sharded and not torch.is_grad_enabled():
            self.module.reshard()  # type: ignore[operator]  # otherwise the backward pass does it
        return found

    def unsummed(self) -> AbstractContextManager[Any]:
        """Replicas sum gradients in the last backward pass of an update; the others run within this context.

        Shards sum in each: whole gradients are what they have no room for.
        """
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()

    def alone(self) -> tuple[Model, LossOf]:
        """The model and its loss without any exchange; a sharded one is gathered into a copy by all workers at once."""
        model = self.model
        if self.sharded:
            weights = {name: whole(value) for name, value in model.state_dict().items()}
            device = next(iter(weights.values())).device
            model = type(model)(model.config).to(device).train(model.training)
            model.load_state_dict(weights)
        return model, partial(self.loss, model)


def _replicated(module: nn.Module) -> DistributedDataParallel:
    # Buffers are constant here. Parameters may be left without a gradient: skipped blocks, maps that a mechanism needs
    # for grids only, those of a regulariser that does not count.
    replica = DistributedDataParallel(module, forward_sync_buffers=False, find_unused_parameters=True)
    replica.register_comm_hook(None, _summed)
    return replica


def _summed(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sums a bucket of gradients while the backward pass goes on."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _sharded(module: nn.Module, workers: Workers) -> nn.Module:
    """Every block is gathered when it is needed; what is in no block belongs to the module itself."""
    from torch.distributed.device_mesh import init_device_mesh  # together more than a second to import
    from torch.distributed.fsdp import FSDPModule, fully_shard

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
    for part in [*(part for part in module.modules() if isinstance(part, Block)), module]:
        fully_shard(part, mesh=mesh)
        assert isinstance(part, FSDPModule)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    return module


def _skips_blocks(module: nn.Module) -> bool:
    return any(isinstance(part, Stack) and part.config.layer_drop > 0 for part in module.modules())


def evenly(batches: Sequence[Item], workers: Workers) -> tuple[list[Item], bool]:
    """This worker's batches, and whether the last of them is another's.

    Every worker has the same number, for they meet in each pass. One whose batches ran out takes along what another
    has; nothing of it counts.
    """
    own = shard(batches, workers.rank, workers.world)
    idle = len(own) * workers.world < len(batches)
    return [*own, batches[0]] if idle else own, idle
