"""Batches of every task as linearising reads them: their logits and targets have the loss that the task computes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from subquad.linearise.stages.batches import IGNORED
from subquad.linearise.stages.objective import logits_of, task_loss
from subquad.linearise.stages.tasks import TaskSamples
from subquad.models.seeded import build_seeded
from subquad.testing import close
from subquad.train.recipe import read_recipe
from subquad.train.run import build_task

pytest.importorskip("sklearn")
FILES = "data:={tokenizer: {kind: bytes}, splits: {train: FILES, valid: FILES}}"
RECIPES = {
    "digits": "train.smoothing=0",
    "phrases": FILES.replace("FILES", "[TEXT, TEXT]"),
    "small/associative_recall": "data.options.pairs=2",
    "small/listops": "data.options:={min_length: 8, max_length: 20, depth: 2, train: 20, valid: 9, test: 9}",
    "own_text": FILES.replace("FILES", "[TEXT]"),
    "speeches_masked": FILES.replace("FILES", "[TEXT]").replace("data:={", "data:={blocks: {tokens_per_sample: 32}, "),
}


@pytest.mark.parametrize("name", RECIPES)
def test_logits_and_targets_have_the_loss_of_the_task(name: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text {'on and on ' * (number % 3)}\n" for number in range(60)))
    recipe = read_recipe(name, [RECIPES[name].replace("TEXT", str(text))])
    task = build_task(recipe, tmp_path / "data")
    model = build_seeded(recipe.model_data(task.data_dependent_model_config()), 1).eval()
    samples = TaskSamples(task, "valid")
    assert len(samples) > 3
    batch = samples.batch([0, 3, 2], 0)
    with torch.no_grad():
        expected = task.loss(model, samples.samples.batch(np.array([0, 3, 2]), 0))
        logits = logits_of(model, batch)
        assert logits.shape[:-1] == batch.targets.shape
        assert int((batch.targets != IGNORED).sum()) == expected.count
        assert close(task_loss(logits, batch.targets) * expected.count, expected.nll, 1e-4)
