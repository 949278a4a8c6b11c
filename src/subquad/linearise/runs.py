"""Linearises a run of subquad: the same stages, with the run's own task and data.

    out/run/                    the result, a run like any other, whose recipe has the new mixers
    out/transfer/               attention transfer, with the weights that the run begins with
    out/controls/               the same model from scratch, and with the identity
    out/report.json, report.md  what was measured

Fine-tuning is an ordinary training that begins with the transferred weights, so it goes on, is evaluated and is
exported as any run is.
"""

import io
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from subquad.compare.measure.swap import copy_weights, evaluated_batches
from subquad.compare.variants import build_variant
from subquad.data.batches import BatchPlan, batch_seed, to_device
from subquad.environment import environment
from subquad.files import read_metadata, write_metadata
from subquad.linearise.options import LineariseOptions
from subquad.linearise.report import describe_scores, write_report
from subquad.linearise.results import OPTIONS, Linearised, check_options
from subquad.linearise.stages.layers import KEPT
from subquad.linearise.stages.objective import Score
from subquad.linearise.stages.pipeline import FORMAT, SWAPPED, TEACHER, TRANSFERRED, TUNED
from subquad.linearise.stages.stage import Plan, Stage
from subquad.linearise.stages.transfer import relative_error
from subquad.models import Model
from subquad.models.seeded import build_seeded
from subquad.nn.block import Block
from subquad.processes import stop_requests
from subquad.progress import Progress
from subquad.tasks import Task
from subquad.train.checkpoint import TrainState, save_weights
from subquad.train.from_run import RunStart
from subquad.train.recipe import RECIPE, Recipe, read_recipe
from subquad.train.run import LoadedRun, build_task, load_trained, locked, train_run

RUN, WEIGHTS = "run", "weights"


@dataclass(frozen=True)
class TaskBatch:
    """A batch of a task, as its samples build it."""

    tensors: Mapping[str, Any]

    def to(self, device: torch.device) -> "TaskBatch":
        return TaskBatch(to_device(dict(self.tensors), device))


class TaskBatches:
    """The batch of every update of a task's training data, from its number alone."""

    def __init__(self, task: Task, recipe: Recipe, seed: int) -> None:
        self.samples, self.seed = task.samples("train", training=True), seed
        self.plan = BatchPlan(*self.samples.sizes, budget=task.budget(recipe.train.budget), seed=seed)
        self.of_epoch = len(self.plan.epoch(0))

    def __getitem__(self, update: int) -> TaskBatch:
        epoch, place = divmod(update, self.of_epoch)
        numbers = self.plan.epoch(epoch)[place]
        return TaskBatch(self.samples.batch(numbers, batch_seed(self.seed, epoch, place)))


class RunTransfer:
    """The gradients of all new mixers from one pass of the teacher; see `transfer.py`. Padded positions are zeros."""

    def __init__(self, task: Task, teacher: Model, pairs: Mapping[str, tuple[nn.Module, nn.Module]]) -> None:
        """pairs: the mixers of teacher and student by their names."""
        self.task, self.teacher, self.pairs = task, teacher, pairs
        self.losses: dict[str, float] = {}

    def __call__(self, batch: Any) -> dict[str, float]:
        self.teacher.eval()
        handles = [
            old.register_forward_hook(partial(self._learn, name, new.eval()), with_kwargs=True)
            for name, (old, new) in self.pairs.items()
        ]
        try:
            with torch.no_grad():
                self.task.loss(self.teacher, batch.tensors)
        finally:
            for handle in handles:
                handle.remove()
        return {"transfer": sum(self.losses.values()) / len(self.losses)}

    def _learn(self, name: str, new: nn.Module, _: Any, arguments: Any, options: dict[str, Any], output: Any) -> None:
        with torch.enable_grad():
            loss = relative_error(new(*arguments, **options).y, output.y)
            loss.backward()
        self.losses[name] = float(loss.detach())


class RunLinearisation:
    """One run and its options; `run` does the work, and goes on where it was interrupted."""

    def __init__(self, folder: Path, options: LineariseOptions, out: Path, quiet: bool = False) -> None:
        if options.tune == "lora" or options.distill or options.keep:
            raise ValueError(
                f"{folder} is a run of subquad, of which all weights are fine-tuned on the task's loss: --tune lora, "
                "--distill and --keep are for models of transformers; a pattern such as eva*3,softmax keeps layers"
            )
        self.folder, self.options, self.out, self.quiet = folder, options, out, quiet

    def run(self) -> Linearised:
        options = self.options
        with ExitStack() as stack:
            stack.enter_context(locked(self.out))
            check_options(self.out / OPTIONS, {"model": str(self.folder.resolve())}, options)
            self.progress = stack.enter_context(Progress(stream=io.StringIO() if self.quiet else None))
            self.teacher: LoadedRun = load_trained(self.folder)
            self.task = build_task(self.teacher.recipe, self.out / "data")
            scores = {TEACHER: self._score(TEACHER, self.teacher.model)}
            student, own = self._linearise(options.mixer.name, options.mixer.options, self.out)
            scores |= own
            if options.controls and options.updates:
                pattern = ",".join(_without_mixing(part) for part in options.mixer.name.split(","))
                _, found = self._linearise(pattern, {}, self.out / "controls" / "identity")
                scores |= {"scratch": self._train_from_scratch(), "identity": list(found.values())[-1]}
            content = self._report(scores, student)
            write_report(self.out, content)
            model = load_trained(self.out / RUN, "last").model if TUNED in own else student
        return Linearised(model, self.out, content)

    # ------------------------------------------------------------------ stages

    def _linearise(self, pattern: str, given: Mapping[str, Any], out: Path) -> tuple[Model, dict[str, Score]]:
        """Puts mixers in the place of attention, and trains; returns the model before fine-tuning, and all scores."""
        options = self.options
        recipe = self._recipe(pattern, given)
        student = build_seeded(recipe.model_data(self.teacher.inputs["model"]), options.seed).to(self.teacher.device)
        copy_weights(self.teacher.model, student)
        student.eval()
        scores = {SWAPPED: self._score(SWAPPED, student, out)}
        pairs = _replaced_mixers(self.teacher.model, student)
        if not pairs:
            raise ValueError(f"{self.folder}: {pattern} replaces no attention; the model has {_mechanisms(student)}")
        mixers = nn.ModuleDict({name.replace(".", "/"): new for name, (_, new) in pairs.items()})
        if options.transfer_updates and any(True for _ in mixers.parameters()):
            plan = Plan(TRANSFERRED, options.transfer_updates, options.transfer_lr, options.seed, options.save_every)
            transfer = RunTransfer(self.task, self.teacher.model, pairs)
            batches = TaskBatches(self.task, recipe, options.seed)
            with stop_requests() as stop:  # the training of a run receives its own
                Stage(plan, mixers, transfer, out / TRANSFERRED).fit(batches, stop, self.progress)
            scores[TRANSFERRED] = self._score(TRANSFERRED, student, out)
        if options.tune == "none" or not options.tune_updates:
            return student, scores
        weights = out / TRANSFERRED / WEIGHTS
        if not weights.exists():
            weights.parent.mkdir(parents=True, exist_ok=True)
            save_weights(weights, student.state_dict(), TrainState())
        start = RunStart(self.folder, read_recipe(self.folder / RECIPE), weights, ("optimizer", "schedule"))
        scores[TUNED] = self._train(recipe, out / RUN, options.tune_updates, options.tune_lr, start)
        return student, scores

    def _train_from_scratch(self) -> Score:
        recipe = self._recipe(self.options.mixer.name, self.options.mixer.options)
        folder = self.out / "controls" / "scratch" / RUN
        return self._train(recipe, folder, self.options.updates, self.options.scratch_lr, None)

    def _train(self, recipe: Recipe, folder: Path, updates: int, rate: float, start: RunStart | None) -> Score:
        """Trains a run, from `start` or from random weights, and evaluates it."""
        warmup = min(updates - 1, max(1, updates // 20))
        changes: dict[str, Any] = {"schedule": {"kind": "cosine", "lr": rate, "warmup_updates": warmup}}
        limits = {"updates": updates, "epochs": None, "minutes": None, "patience": None, "seed": self.options.seed}
        content = recipe.model_dump(mode="json") | changes
        content["train"] = content["train"] | limits | {"validate_every": None}
        new = Recipe.parse("recipe", content)
        if start is not None:
            new = start.recipe_of_new_run(new, [])
        train_run(new, folder, quiet=self.quiet, start=start)
        return self._score(TUNED, load_trained(folder, "last").model, folder.parent)

    def _recipe(self, pattern: str, given: Mapping[str, Any]) -> Recipe:
        """The teacher's recipe with other mixers."""
        recipe = self.teacher.recipe
        variant = build_variant(recipe, pattern, pattern, given, recipe.model)
        return Recipe.parse("recipe", recipe.model_dump(mode="json") | {"model": variant.model})

    # ------------------------------------------------------------------ scores

    def _score(self, name: str, model: Model, out: Path | None = None) -> Score:
        path = (out or self.out) / "scores" / f"{name}.json"
        if path.exists():
            return Score.from_json(read_metadata(path, FORMAT, "score", ["losses"]))
        score = self._evaluate(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_metadata(path, {"format": FORMAT, **score.to_json()})
        self.progress.note(f"{name}: loss {score.loss().value:.4f}")
        return score

    @torch.no_grad()
    def _evaluate(self, model: Model) -> Score:
        """The loss on at most `valid_samples` samples of the run's validation data, batch by batch."""
        valid, rows = self.task.samples("valid", training=False), []
        model.eval()
        for numbers in evaluated_batches(self.task, valid):
            found = self.task.loss(model, to_device(valid.batch(numbers), self.teacher.device))
            nll: Tensor | float = found.sums["nll"]
            rows.append([float(nll), float(found.count)])
        return Score(np.array(rows), None)

    def _report(self, scores: dict[str, Score], student: Model) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.folder.name,
            "mechanism": self.options.mixer.name,
            "options": self.options.model_dump(mode="json"),
            "layers": _mechanisms(student).split(", "),
            "kept": [],
            "layer_losses": {},
            "transfer_errors": {},
            "data": "the run's own",
            "unit": "updates",
            "tokens": self.options.updates,
            "scores": describe_scores(scores),
            "lengths": [],
            "decoding": [],
            "environment": environment(self.teacher.device),
        }


def _replaced_mixers(teacher: Model, student: Model) -> dict[str, tuple[nn.Module, nn.Module]]:
    """The mixers that differ between two models of the same blocks, by the names of the blocks."""
    blocks = [
        {name: module.mixer for name, module in model.named_modules() if isinstance(module, Block)}
        for model in (teacher, student)
    ]
    old, new = blocks
    return {name: (old[name], mixer) for name, mixer in new.items() if old[name].name != mixer.name}


def _mechanisms(model: Model) -> str:
    return ", ".join(module.mixer.name for module in model.modules() if isinstance(module, Block))


def _without_mixing(part: str) -> str:
    name, star, count = part.strip().partition("*")
    return f"{KEPT if name.strip() == KEPT else 'identity'}{star}{count}"
