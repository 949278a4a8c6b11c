"""The samples of a task as linearising reads them: the tensors of a batch, and their targets."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from subquad.data.batches import BatchPlan, batch_seed
from subquad.linearise.stages.batches import IGNORED, Batch
from subquad.tasks import Task
from subquad.train.recipe import Recipe


def task_batch(task: Task, inputs: dict[str, Tensor]) -> Batch:
    """Returns a batch with its targets, of which those that do not count are IGNORED."""
    targets = task.targets(inputs)
    if not targets.is_floating_point():
        targets = targets.masked_fill(targets == task.pad, IGNORED)
    return Batch(inputs, targets, task)


class TaskSamples:
    """The samples of a split, as they are evaluated on."""

    def __init__(self, task: Task, split: str) -> None:
        self.task, self.samples = task, task.samples(split, training=False)

    def __len__(self) -> int:
        return len(self.samples.sizes[0])

    def batch(self, numbers: Sequence[int], seed: int) -> Batch:
        return task_batch(self.task, self.samples.batch(np.asarray(numbers), seed))


class TaskBatches:
    """The batch of every update of a task's training data, from its number alone: those of its own training."""

    def __init__(self, task: Task, recipe: Recipe, seed: int) -> None:
        self.task, self.samples, self.seed = task, task.samples("train", training=True), seed
        self.plan = BatchPlan(*self.samples.sizes, budget=task.budget(recipe.train.budget), seed=seed)
        self.of_epoch = len(self.plan.epoch(0))

    def __getitem__(self, update: int) -> Batch:
        epoch, place = divmod(update, self.of_epoch)
        numbers = self.plan.epoch(epoch)[place]
        return task_batch(self.task, self.samples.batch(numbers, batch_seed(self.seed, epoch, place)))
