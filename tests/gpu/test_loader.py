"""Batches on their way to a GPU: the same as on the CPU, from pinned memory, and images that are normalised there."""

from contextlib import closing

import numpy as np
import pytest
import torch

from subquad.data.batches import batch_seed
from subquad.data.images.mixup import MixingOptions
from subquad.data.images.transforms import AugmentOptions
from subquad.data.loader import BatchLoader, pin
from subquad.tasks.image_classification import ImageClassificationTask
from tests.data.test_loader import images

CUDA = torch.device("cuda")


@pytest.mark.parametrize("workers", [0, 1])
def test_images_of_a_batch_are_those_of_the_cpu(workers: int) -> None:
    """Erased boxes, mixup and CutMix are drawn with the batch, so that both devices have the same."""
    pytest.importorskip("PIL", reason="augmentation needs the vision extra")
    options = AugmentOptions(size=8, erase=0.5)
    task = ImageClassificationTask({"train": images(40)}, augment=options, mixing=MixingOptions())
    samples = {"train": task.samples("train", training=True)}
    items = [(np.arange(8), batch_seed(1, 0, place)) for place in range(6)]
    with closing(BatchLoader(samples, workers, CUDA, task.builds_in_processes)) as loader:
        found = list(loader.load("train", items))
    kinds: set[str] = set()
    for batch, item in zip(found, items, strict=True):
        assert {value.device.type for value in batch.values()} == {"cuda"}
        assert batch["images"].dtype == torch.uint8
        kinds |= batch.keys()
        ours, expected = task.model_inputs(batch), task.model_inputs(samples["train"].batch(*item))
        assert ours.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(ours[name].cpu(), expected[name], rtol=1e-6, atol=1e-6)
    assert {"noise", "cut"} <= kinds


def test_batches_are_pinned() -> None:
    tensors = {"images": torch.ones(2, 3, dtype=torch.uint8), "labels": torch.arange(2)}
    assert all(value.is_pinned() for value in pin(tensors).values())
    assert torch.equal(pin(tensors)["labels"], tensors["labels"])
