"""Counts a training pass of a whole model, with the loss of its task, on full batches."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.counting import Counter, Kernel, counting, pass_seconds
from benchmarks.gpu.fake_cuda import DEVICE, fake_cuda, move_to_fake_cuda
from benchmarks.gpu.hardware import FLOAT32, GPU
from subquad.compare.measure.lengths import lengthen_config
from subquad.models import Model, build_from_config
from subquad.nn.heads import AdaptiveHead
from subquad.tasks import available_tasks, task_class

FLOAT_BYTES = 4
UPDATE_NUMBERS = 10
"""Numbers of a parameter that an update moves: the gradient once for its norm and twice for clipping; then it is read
with the weight and Adam's two averages, and these three are written."""
UPDATE_FLOPS = 16
UPDATE_LAUNCHES = 3


@dataclass(frozen=True)
class Training:
    """What a model launches in a forward and a backward pass. tokens: of the batch, both sides of a translation.

    peak: bytes of all tensors but weights and inputs, gradients among them.
    """

    parameters: int
    tokens: int
    kernels: list[Kernel]
    peak: int

    def seconds(self, gpu: GPU) -> float:
        return pass_seconds(self.kernels, gpu)

    def update_seconds(self, gpu: GPU) -> float:
        """The optimiser's part of an update, of fused kernels: see UPDATE_NUMBERS."""
        moved = UPDATE_NUMBERS * FLOAT_BYTES * self.parameters
        return (UPDATE_LAUNCHES - 1) * gpu.launch + gpu.seconds(moved, {FLOAT32: UPDATE_FLOPS * self.parameters})


def count_training(
    config: Mapping[str, Any], tokens: int, length: int, dtype: torch.dtype = torch.bfloat16
) -> Training:
    """config: of a model, complete; tokens: about those of a batch, of each side; images have a length of their own.

    dtype: of autocast; float32 is none.
    """
    config = lengthen_config(dict(config), length)
    with torch.device("meta"):
        model = build_from_config(config)
    length = model.native_length or length
    batch = max(1, tokens // length)
    task = _task_of(config["kind"])
    inputs = task.random_batch(model, batch, length, torch.Generator())
    with fake_cuda():
        move_to_fake_cuda(model.train())
        given = {name: torch.empty(one.shape, dtype=one.dtype, device=DEVICE) for name, one in inputs.items()}
        with counting() as counter, _zipf_tails(model, counter):
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                loss, aux = task.model_loss(model, given)
            counter.phase = "backward"
            total = loss.total if aux is None else loss.total + aux.sum()
            total.backward()
    sides = 2 if config["kind"] == "encoder-decoder" else 1
    return Training(model.parameter_count(), sides * batch * length, counter.kernels, counter.peak)


def _task_of(kind: str) -> Any:
    return next(task for task in map(task_class, available_tasks()) if kind in task.model_kinds)


@contextmanager
def _zipf_tails(model: Model, counter: Counter) -> Iterator[None]:
    """Words of an adaptive softmax fall into its bands by Zipf's law: the n-th word has a share of 1 / n."""
    head = getattr(model, "head", None)
    if not isinstance(head, AdaptiveHead):
        yield
        return
    weights = [sum(1 / (word + 1) for word in range(first, end)) for first, end in head.bands]
    original = head.nll

    def nll(features: Tensor, target: Tensor, words: Tensor | None = None) -> Tensor:  # noqa: ARG001
        counter.shares = iter([weight / sum(weights) for weight in weights[1:]])
        return original(features, target)

    with patch.object(head, "nll", nll):
        yield
