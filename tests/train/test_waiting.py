"""What an update of every task makes the CPU wait for, and what the optimiser launches, on the emulated GPU."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from subquad.nn.heads import AdaptiveHead, HeadConfig, WordHead
from subquad.tasks.losses import losses_by_position, losses_by_row
from subquad.train.optim import OptimConfig, build_optimizer, clip_gradients, scale_gradients
from subquad.train.recipe import Recipe, read_recipe
from tests.emulated_gpu.counts import SYNCHRONISATION, counted, record
from tests.emulated_gpu.programs import needs_emulated_gpu, run_tests_on_emulated_gpu
from tests.train.test_trainer import recipe, trainer

BACKWARD = "backward"


@needs_emulated_gpu
@pytest.mark.nightly
def test_every_task() -> None:
    """tests/emulated_gpu/test_gpu_tests.py runs what is not for the night."""
    run_tests_on_emulated_gpu(__file__, "-k", "check_")


# ---------------------------------------------------------------------- on the device


def shipped(name: str, *changes: str) -> Recipe:
    """A small recipe that is shipped, with smaller data and batches."""
    smaller = ["train.updates=9", "train.budget={max_sentences: 4}", "model.dim=16"]
    return read_recipe(f"small/{name}", [*smaller, *changes])


RECIPES: dict[str, Callable[[], Recipe]] = {
    "images": lambda: recipe("image-classification", updates=9),
    "pairs": lambda: recipe("translation", updates=9, precision="bfloat16"),
    "pairs in float16": lambda: recipe("translation", updates=9, precision="float16"),
    "masked text": lambda: shipped("speeches_masked", "data.tokenizer={kind: characters}"),
    "labelled text": lambda: shipped("listops", "data.options={min_length: 10, train: 64, valid: 8, test: 8}"),
    "recall": lambda: shipped("associative_recall"),
    "text, adaptive softmax": lambda: shipped(
        "speeches",
        "data.tokenizer={kind: characters}",
        "data.blocks.tokens_per_sample=16",
        "model.decoder={layers: 1, mixer: lightconv}",
        "model.embedding={cutoffs: [10, 30], factor: 2}",
        "model.head={cutoffs: [10, 30], factor: 2}",
    ),
}
NIGHTLY = dict.fromkeys(("pairs", "masked text", "text, adaptive softmax"), pytest.mark.nightly)
"""Triton's interpreter takes seconds for each."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=NIGHTLY.get(name, ())) for name in RECIPES])
def check_an_update_waits_once_and_after_its_backward_passes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, backward = trainer(RECIPES[name](), tmp_path), torch.Tensor.backward
    assert next(trained.model.parameters()).is_cuda

    def marked(*args: Any, **options: Any) -> None:
        backward(*args, **options)
        record(BACKWARD, BACKWARD)

    monkeypatch.setattr(torch.Tensor, "backward", marked)
    updates = trained.updates()
    next(updates)
    with counted() as counts:
        next(updates)
    kinds = [event.kind for event in counts.events if event.kind in (BACKWARD, SYNCHRONISATION)]
    assert kinds == [BACKWARD] * trained.recipe.train.accumulate + [SYNCHRONISATION], counts.report()


@pytest.mark.parametrize("name", ["adam", "adamw", "nag", "radam", "sgd"])
def check_an_optimiser_launches_as_much_for_many_parameters_as_for_few(name: str) -> None:
    launches = []
    for layers in (2, 9):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))).to("cuda")
        optimizer = build_optimizer(OptimConfig.parse("optim", {"name": name, "decay_vectors": False}), model)
        for _ in range(2):  # the first one makes the state
            model(torch.ones(2, 3, device="cuda")).sum().backward()
            with counted() as counts:
                scale_gradients(model.parameters(), torch.ones((), device="cuda"))
                clip_gradients(model.parameters(), 1.0)
                optimizer.step()
        assert counts.synchronisations == 0, counts.report()
        launches.append(counts.launches)
    assert launches[0] == launches[1], counts.report()


@pytest.mark.parametrize(("head", "waits"), [("words", 1), ("adaptive", 2)])
def check_losses_of_rows_wait_for_all_of_them_together(head: str, waits: int) -> None:
    """An adaptive head waits once more, for the targets: where its bands are is found on the CPU."""
    features, target = torch.randn(3, 5, 4), torch.tensor([[2, 3, 4, 1, 1], [5, 6, 7, 8, 1], [9, 2, 10, 2, 3]])
    adaptive = HeadConfig(cutoffs=(5,), tied=False)
    model = WordHead(4, 11) if head == "words" else AdaptiveHead(4, 11, adaptive, None)
    by_position = partial(losses_by_position, buckets=[slice(0, 2), slice(2, 5)], rows=[(0, 0), (0, 1), (1, 0)])
    expected = losses_by_row(model, features, target), by_position(model, features, target)
    model, features, target = model.to("cuda"), features.to("cuda"), target.to("cuda")
    found = []
    for losses in (losses_by_row, by_position):
        with counted() as counts, torch.inference_mode():
            found.append(losses(model, features, target))
        assert counts.synchronisations == waits, counts.report()
    for ours, cpus in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(cpus))
