"""What happens to the trained baseline when a mechanism takes the place of its own: the loss of the swap.

The baseline's first finished trial gets the mechanism in every layer in which the comparison trains it, and keeps all
weights whose name and shape agree: those outside the mixers, and of mechanisms with queries, keys and values also their
projections. The loss is that of validation, in nats for each target:

    before      right after the swap, when nothing of the mechanism has been trained
    after       after a short adaptation: a few updates of all parameters, at a small constant learning rate, on the
                recipe's own batches

Two references tell what these numbers mean. `no mixing` puts the identity in the place of the mechanism: what is no
better has carried over nothing. `mean of the values` is the baseline with queries of zero, whose attention is uniform:
the mean of the values of all tokens that a position sees. The baseline itself, adapted like the others, is the best
that can be hoped for. None of this is the quality after a whole training, which the trials tell.
"""

import copy
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from subquad.compare.measure.base import Begin, Context, Measurement, Step
from subquad.compare.plan import Plan
from subquad.compare.records import Point, Record
from subquad.compare.variants import FLOOR_LABEL, FLOOR_MIXER, build_variant
from subquad.data.batches import Batch, BatchPlan, batch_seed, to_device
from subquad.mixers import Mixer
from subquad.mixers.identity import Identity
from subquad.mixers.softmax import Softmax
from subquad.models import Model, build_from_config
from subquad.tasks import Task
from subquad.tasks.sample_shards import Samples, evaluation_budget
from subquad.train.optim import build_optimizer, clip_gradients, scale_gradients, set_learning_rate
from subquad.train.recipe import Recipe
from subquad.train.rng import seed_all
from subquad.train.run import LoadedRun, build_task, load_trained

UPDATES, TRAINING_SHARE = 50, 0.1
"""The updates of an adaptation, and the share of the baseline's own that they are at most."""
RATE_SHARE = 0.1
"""The learning rate of an adaptation over the highest one of the recipe."""
MAX_SAMPLES, MAX_TOKENS = 512, 32_768
"""How much is validated at most: evenly spaced samples of `valid`."""
SEED = 0
MEAN_OF_VALUES = "mean of the values"


class SwapReference(Record):
    """What a loss is compared with. reason: why there is none."""

    name: str
    reason: str | None = None
    loss_before: float | None = None
    loss_after: float | None = None


class SwapPoint(Point):
    """The losses of one mechanism, and those that they are compared with. refused: the model cannot have it.

    value_before and value_after are the result's metric, where validation computes it. The point of the baseline holds
    the references, which belong to no mechanism.
    """

    baseline_loss: float | None = Field(None, description="of the trained baseline as it is, in nats for each target")
    loss_before: float | None = Field(None, description="right after the swap")
    loss_after: float | None = Field(None, description="after the adaptation")
    value_before: float | None = None
    value_after: float | None = None
    updates: int | None = Field(None, ge=0, description="of the adaptation")
    new_parameters: int | None = Field(None, ge=0, description="weights that the baseline has no values for")
    references: list[SwapReference] = Field(default_factory=list)
    setting: dict[str, Any] = Field(default_factory=dict)


class Swap(Measurement):
    """One step. It needs a finished trial of the baseline."""

    name = "swap"
    point: ClassVar[type[Point]] = SwapPoint
    needs_trials = True

    def steps(self, plan: Plan) -> list[Step]:  # noqa: ARG002
        return [Step("swap", "swapped into the trained baseline", {})]

    def labels(self, context: Context) -> list[str]:
        """All mechanisms. A model without mixing is among the references already."""
        if context.baseline not in context.trials.first_done():
            return []
        return [variant.label for variant in context.plan.variants if not variant.is_floor]

    def inputs(self, context: Context) -> dict[str, Any]:
        """The baseline and its run, relative to the comparison, so that its folder can move."""
        run = context.trials.run_folder(context.trials.first_done()[context.baseline])
        return {"baseline": context.baseline, "run": os.path.relpath(run, context.out)}

    def measure(
        self, out: Path, plan: Plan, labels: Sequence[str], arguments: Mapping[str, Any], begin: Begin
    ) -> list[SwapPoint]:
        run = load_trained(out / arguments["run"])
        task = build_task(Recipe.parse("recipe", plan.recipe), out / "data")
        return measure_swaps(plan, labels, arguments["baseline"], Adaptation.of(run, task), begin)


def measure_swaps(
    plan: Plan, labels: Sequence[str], baseline: str, adaptation: "Adaptation", begin: Begin
) -> list[SwapPoint]:
    """The points of all labels, with the references in that of the baseline."""
    run = adaptation.run
    config = run.recipe.model_data(run.inputs["model"])
    baseline_loss = adaptation.validate(run.model)["loss"]
    points = []
    for label in labels:
        begin(label)
        point = SwapPoint(mechanism=label, baseline_loss=baseline_loss, setting=adaptation.setting())
        try:
            theirs = plan.variant_recipe(label).model_data(plan.data_dependent_model_config)
            if theirs["kind"] != config["kind"]:
                raise ValueError(f"its model is of the kind {theirs['kind']}, and the baseline's {config['kind']}")
            model = build_swapped(run.model, with_mixers_of(config, theirs))
            point.new_parameters = model.parameter_count() - copy_weights(run.model, model)
            _fill_in(point, adaptation, model)
        except ValueError as refusal:
            point.reason = str(refusal)
            point.status = "refused"
        except FloatingPointError as error:
            point.reason = str(error)
            point.status = "failed"
        if label == baseline:
            point.references = [_no_mixing(adaptation, config), _mean_of_values(adaptation, config)]
        points.append(point)
    return points


def _fill_in(point: SwapPoint, adaptation: "Adaptation", model: Model) -> None:
    metric = adaptation.task.main_metric
    before = adaptation.validate(model)
    point.loss_before, point.value_before = before["loss"], metric.scaled(before.get(metric.key))
    adaptation.adapt(model)
    after = adaptation.validate(model)
    point.loss_after, point.value_after = after["loss"], metric.scaled(after.get(metric.key))
    point.updates = adaptation.updates


# ---------------------------------------------------------------------- models


def with_mixers_of(config: Any, other: Any) -> Any:
    """A model's config with the mixers of another config, which has the same stacks.

    Everything else stays, such as the width of a feed-forward network that makes up for a mixer's parameters.
    """
    if isinstance(config, list | tuple) and isinstance(other, list | tuple) and len(config) == len(other):
        return [with_mixers_of(*pair) for pair in zip(config, other, strict=True)]
    if not isinstance(config, Mapping) or not isinstance(other, Mapping):
        return config
    mixer = {"mixer": other["mixer"]} if "mixer" in other else {}
    return {key: with_mixers_of(value, other.get(key)) for key, value in config.items() if key != "mixer"} | mixer


def build_swapped(like: Model, config: Mapping[str, Any]) -> Model:
    """A model in eval mode, on the device of another one; the same config gives the same weights."""
    seed_all(SEED)
    return build_from_config(config).to(next(like.parameters()).device).eval()


def copy_weights(source: Model, target: Model) -> int:
    """Copies all weights and buffers whose name and shape agree. Returns how many parameters have got a value."""
    theirs = source.state_dict()
    own = {name: value for name, value in target.state_dict().items() if _agree(value, theirs.get(name))}
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(theirs[name])
    return sum(parameter.numel() for name, parameter in target.named_parameters() if name in own)


def _agree(value: Tensor, other: Tensor | None) -> bool:
    return other is not None and other.shape == value.shape


# ---------------------------------------------------------------------- references


def _no_mixing(adaptation: "Adaptation", config: Mapping[str, Any]) -> SwapReference:
    model = build_swapped(adaptation.run.model, _config_without_mixing(adaptation.run.recipe, config))
    copy_weights(adaptation.run.model, model)
    return _reference(FLOOR_LABEL, adaptation, model)


def _mean_of_values(adaptation: "Adaptation", config: Mapping[str, Any]) -> SwapReference:
    """The same layers as without mixing; all of them must have softmax attention."""
    with torch.device("meta"):
        without = build_from_config(_config_without_mixing(adaptation.run.recipe, config))
    names = [name for name, module in without.named_modules() if isinstance(module, Identity)]
    model = copy.deepcopy(adaptation.run.model)
    for mixer in map(model.get_submodule, names):
        if not isinstance(mixer, Softmax):
            assert isinstance(mixer, Mixer)
            why = f"the baseline has {mixer.name}, and only softmax attention has queries that make its weights equal"
            return SwapReference(name=MEAN_OF_VALUES, reason=why)
        make_uniform(mixer)
    return _reference(MEAN_OF_VALUES, adaptation, model)


def _config_without_mixing(recipe: Recipe, config: Mapping[str, Any]) -> Any:
    identity = build_variant(recipe, FLOOR_LABEL, FLOOR_MIXER, {}, recipe.model)
    return with_mixers_of(config, recipe.model_copy(update={"model": identity.model}).model_data({}))


def make_uniform(mixer: Softmax) -> None:
    """Queries of zero, which training does not change: attention is then the mean of the values that it sees."""

    def without_queries(value: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(value[: mixer.inner]), value[mixer.inner :]])

    for parameter in (mixer.qkv.weight, mixer.qkv.bias):
        if parameter is not None:
            with torch.no_grad():
                parameter.copy_(without_queries(parameter))
            parameter.register_hook(without_queries)


def _reference(name: str, adaptation: "Adaptation", model: Model) -> SwapReference:
    reference = SwapReference(name=name)
    try:
        reference.loss_before = adaptation.validate(model)["loss"]
        adaptation.adapt(model)
        reference.loss_after = adaptation.validate(model)["loss"]
    except (FloatingPointError, ValueError) as error:
        reference.reason = str(error)
    return reference


# ---------------------------------------------------------------------- validation and adaptation


@dataclass(frozen=True)
class Adaptation:
    """A short training of models on the data of the trained baseline, the same for all of them, and their validation.

    numbers: the batches of validation.
    """

    run: LoadedRun
    task: Task
    valid: Samples
    numbers: list[Batch]
    updates: int

    @classmethod
    def of(cls, run: LoadedRun, task: Task) -> "Adaptation":
        valid = task.samples("valid", training=False)
        updates = min(UPDATES, max(1, int(TRAINING_SHARE * run.update)))
        return cls(run, task, valid, evaluated_batches(task, valid), updates)

    @property
    def rate(self) -> float:
        return RATE_SHARE * self.run.recipe.schedule.lr

    def setting(self) -> dict[str, Any]:
        """What the losses depend on."""
        samples = sum(len(numbers) for numbers in self.numbers)
        return {"learning rate": self.rate, "samples of valid": samples, "device": self.run.device.type}

    def validate(self, model: Model) -> dict[str, float]:
        """The task's metrics; a loss that is not finite is a FloatingPointError."""
        sums: dict[str, float] = {}
        count = 0
        model.eval()
        with torch.no_grad():
            for numbers in self.numbers:
                found = self.task.loss(model, to_device(self.valid.batch(numbers), self.run.device))
                count += found.count
                for name, value in found.sums.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
        metrics = self.task.metrics(sums, count)
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError("the validation loss is not finite")
        return metrics

    def adapt(self, model: Model) -> None:
        """Trains all parameters; a gradient that is not finite is a FloatingPointError."""
        seed_all(SEED)
        model.train()
        recipe, parameters = self.run.recipe, list(model.parameters())
        optimizer = build_optimizer(recipe.optim, model)
        set_learning_rate(optimizer, self.rate)
        batches = self._training_batches()
        for update in range(1, self.updates + 1):
            optimizer.zero_grad(set_to_none=True)
            targets = 0
            for batch in itertools.islice(batches, recipe.train.accumulate):
                found = self.task.loss(model, to_device(batch, self.run.device))
                found.total.backward()
                targets += found.count
            scale_gradients(parameters, 1 / max(1, targets))
            if not clip_gradients(parameters, recipe.optim.clip).isfinite():
                raise FloatingPointError(f"the gradient of update {update} of the adaptation is not finite")
            optimizer.step()

    def _training_batches(self) -> Iterator[dict[str, Tensor]]:
        samples, config = self.task.samples("train", training=True), self.run.recipe.train
        plan = BatchPlan(*samples.sizes, budget=self.task.budget(config.budget), seed=SEED)
        for epoch in itertools.count():
            for place, numbers in enumerate(plan.epoch(epoch)):
                yield samples.batch(numbers, batch_seed(SEED, epoch, place))


def evaluated_batches(task: Task, valid: Samples) -> list[Batch]:
    """Evenly spaced samples, at most MAX_SAMPLES of them and about MAX_TOKENS tokens."""
    sizes = np.maximum.reduce(valid.sizes)
    count = min(len(sizes), MAX_SAMPLES, max(1, int(MAX_TOKENS / sizes.mean())))
    chosen = np.unique(np.linspace(0, len(sizes) - 1, count).astype(np.int64))
    budget = task.budget(evaluation_budget(valid))
    plan = BatchPlan(*(size[chosen] for size in valid.sizes), budget=budget, shuffle=False)
    return [chosen[batch] for batch in plan.epoch(0)]
