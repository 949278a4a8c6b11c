"""Linearises a run of subquad: the same stages, with the run's own task and data.

    out/run/                    the result, a run whose recipe has the new mixers
    out/transfer/, finetune/    checkpoints and logs of the stages
    out/controls/               the same model from scratch, and with the identity
    out/report.json, report.md  what was measured

The batches are those of the run's own training. What is minimised is the cross-entropy of its targets, without label
smoothing and without regularisers of mixers.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from subquad.compare.measure.swap import copy_weights
from subquad.compare.variants import build_variant
from subquad.interop.checkpoints.run import ConvertedRun, write_run
from subquad.interop.patching.undo import Change
from subquad.linearise.models import Source
from subquad.linearise.options import LineariseOptions
from subquad.linearise.run import Linearisation
from subquad.linearise.stages.batches import Batch
from subquad.linearise.stages.data import Data, Kind
from subquad.linearise.stages.layers import AttentionLayer, AttentionLayers
from subquad.linearise.stages.pipeline import Stages
from subquad.linearise.stages.tasks import TaskBatches, TaskSamples, task_batch
from subquad.models import MODELS, Model
from subquad.models.seeded import build_seeded
from subquad.nn.block import Block
from subquad.nn.stack import MixerChoice, Stack
from subquad.train.recipe import Recipe
from subquad.train.run import LoadedRun, build_task, load_trained
from subquad.train.run_folder import RECIPE

RUN = "run"
KINDS: dict[str, Kind] = {
    "language-model": "causal",
    "masked-language-model": "masked",
    "text-classifier": "texts",
    "encoder-decoder": "pairs",
}
"""What models of a kind compute; all others classify images."""
KEPT_SECTIONS = ("optim", "schedule", "train", "decode")
"""Sections of the recipe that the result has from the run it was made of."""


class RunLayers(AttentionLayers):
    """The mixers of a run's model that a variant of its recipe has others for, by the number of the block."""

    def __init__(self, run: LoadedRun, seed: int, model: Model, choice: MixerChoice) -> None:
        """choice: the mechanism, which stands in every stack that it can stand in, or a pattern for each stack."""
        self.model = model
        recipe = variant_of(run.recipe, choice)
        student = build_seeded(recipe.model_data(run.inputs["model"]), seed).to(next(model.parameters()).device).eval()
        copy_weights(model, student)
        self.layers = {}
        self.blocks = _blocks(model)
        for number, (old, new) in enumerate(zip(self.blocks, _blocks(student), strict=True)):
            if old.mixer.name != new.mixer.name:
                change = Change(old, "mixer", old.mixer, new.mixer)
                self.layers[number] = AttentionLayer(number, new.mixer.name, {}, old.mixer, (), new.mixer, (change,))
        self.numbers = list(range(len(self.blocks)))
        if not self.layers:
            raise ValueError(f"{choice.name} replaces no attention; the model has {', '.join(self.mechanisms())}")

    @property
    def mixers(self) -> list[nn.Module]:
        return [layer.replacement for layer in self.layers.values()]

    def mechanisms(self) -> list[str]:
        """Returns the mechanism of every block, whether its mixer is in place or not."""
        return [
            self.layers[number].mechanism if number in self.layers else block.mixer.name
            for number, block in enumerate(self.blocks)
        ]


class RunLinearisation(Linearisation):
    """One run and its options; `run` does the work, and goes on where it was interrupted."""

    def __init__(self, folder: Path, options: LineariseOptions, out: Path, quiet: bool = False) -> None:
        self.given, self.options, self.out, self.quiet = folder, options, out, quiet
        self.teacher: LoadedRun = load_trained(folder)
        recipe = self.teacher.recipe
        self.task = build_task(recipe, out / "data")
        self.source = Source(self.teacher.model, folder.name)
        kind = KINDS.get(recipe.model_data(self.teacher.inputs["model"])["kind"], "images")
        train, valid = (TaskSamples(self.task, split) for split in ("train", "valid"))
        batches = TaskBatches(self.task, recipe, options.seed)
        self.data = Data(kind, train, valid, "the run's own", batches, partial(RunLayers, self.teacher, options.seed))
        self.settings = {"model": str(folder.resolve())}

    def _build_untrained(self) -> Model:
        return build_seeded(self.teacher.recipe.model_data(self.teacher.inputs["model"]), self.options.seed)

    def _load_again(self) -> Model:
        return load_trained(self.teacher.folder).model

    def _random_text(self, model: nn.Module, length: int) -> Batch:
        return task_batch(self.task, self.task.random_batch(model, 1, length, torch.Generator().manual_seed(0)))

    def _save(self, model: nn.Module, stages: Stages) -> Model:
        """Writes the result as a run, if it is not there yet, and loads it."""
        folder = self.out / RUN
        if not (folder / RECIPE).exists():
            recipe = variant_of(self.teacher.recipe, self.options.mixer)
            content = recipe.model_data(self.teacher.inputs["model"])
            for name in MODELS[content["kind"]].Config.stacks if stages.kept else ():
                content[name]["mixer"] = _mixers_of(getattr(model, name))
            result = build_seeded(content, self.options.seed)
            result.load_state_dict(model.state_dict())
            origin = f"{self.teacher.folder.name} with {self.options.mixer.name} in place of attention"
            sections = recipe.model_dump(mode="json", include=set(KEPT_SECTIONS))
            converted = ConvertedRun(
                origin,
                recipe.task,
                result,
                self.task.tokenizers(),
                self.task.inputs(),
                sections,
                data=recipe.data.model_dump(mode="json"),
                update=self.options.tune_updates if self.options.tune != "none" else 0,
            )
            write_run(converted, folder)
        return load_trained(folder, "last").model


def variant_of(recipe: Recipe, choice: MixerChoice) -> Recipe:
    """Returns a recipe with other mixers."""
    variant = build_variant(recipe, choice.name, choice.name, choice.options, recipe.model)
    return Recipe.parse("recipe", recipe.model_dump(mode="json") | {"model": variant.model})


def _blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


def _mixers_of(stack: Stack) -> dict[str, Any]:
    return MixerChoice.of([block.mixer for block in _blocks(stack)]).model_dump()
