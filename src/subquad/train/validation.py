"""Validation: the loss of a split, whose samples the processes of a training share."""

from collections.abc import Callable, Mapping
from contextlib import closing

import torch
from torch import Tensor

from subquad.data.batches import BatchPlan, prefetch, to_device
from subquad.tasks.base import Task
from subquad.tasks.sample_shards import evaluation_budget
from subquad.train.distributed import DistributedLoss, split_batches

COUNT = ".count"  # a name that no task uses
STOP_EVERY = 8
"""Batches after which processes ask one another whether to stop."""


def validate(
    task: Task,
    loss: DistributedLoss,
    split: str,
    device: torch.device,
    threads: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """The task's metrics on a split, in eval mode, over every sample once, which the processes share.

    threads: build batches ahead of need. stop: asked now and then, by all processes at once; if it says so, the
    validation is given up, and there are no metrics.
    """
    samples, model, workers = task.samples(split, training=False), loss.model, loss.workers
    training = model.training
    model.eval()
    sums: dict[str, Tensor | float] = {}
    plan = BatchPlan(*samples.sizes, budget=task.budget(evaluation_budget(samples)), shuffle=False)
    own, idle = split_batches(plan.epoch(0), workers)
    with torch.no_grad(), closing(prefetch(samples.batch, own, threads)) as batches:
        for number, batch in enumerate(batches, 1):
            if number % STOP_EVERY == 0 and stop():
                return {}
            found = loss(to_device(batch, device))
            add_sums(sums, {**found.sums, COUNT: float(found.count)}, counts=not (idle and number == len(own)))
    model.train(training)
    totals = workers.all_reduce(sums, device)
    count = int(totals.pop(COUNT))
    return task.metrics(totals, count)


def add_sums(sums: dict[str, Tensor | float], more: Mapping[str, Tensor | float], counts: bool = True) -> None:
    """Adds numbers by name, in float64; those that do not count add nothing but their names."""
    for name, value in more.items():
        value = value.double() if isinstance(value, Tensor) else value
        sums[name] = sums.get(name, 0.0) + value if counts else sums.get(name, 0.0)
