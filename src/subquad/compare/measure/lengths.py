"""Costs of the recipe's model by sequence length, all mechanisms side by side at a constant number of tokens.

At every length and for each part (the mixing stack alone, the whole model), as `subquad bench` does for single mixers:

    check     every mixer against its float64 copy and, when causal, its streaming form
    memory    one inference and one training pass, watched; losses, outputs and gradients must be finite
    time      the same passes, interleaved over the mechanisms

Inference computes the loss of given targets in eval mode without gradients; training adds the backward pass, in train
mode. An image of a grid of H x W patches has the length H W.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad.compare.measure.checks import LONGEST_CHECK, CheckFailedError, check_mixer
from subquad.compare.measure.timing import Work, interleaved_seconds, peak_bytes, synchronizer
from subquad.compare.plan import Plan
from subquad.compare.report.schema import LengthPoint, Part, Timing
from subquad.compare.variants import mixing_of
from subquad.mixers import mixer_class
from subquad.models import MODELS, Model, model_from
from subquad.models.costs import forward_flops
from subquad.models.presets import merged
from subquad.nn.block import Block, BlockInputs
from subquad.nn.stack import MixerChoice
from subquad.tasks import Task, task_class
from subquad.tasks.evaluation import to_device
from subquad.train.recipe import Recipe

Begin = Callable[[str], None]
TIMING = "all, side by side"
"""The step in which no single mechanism is at work."""


@dataclass(frozen=True)
class Shape:
    """batch sequences of length tokens."""

    batch: int
    length: int


def shape_at(plan: Plan, length: int) -> Shape:
    """The batch of a length; images get the square grid of about so many patches."""
    length = MODELS[_kind(plan)].possible_length(length)
    return Shape(max(1, plan.tokens // length), length)


def _kind(plan: Plan) -> str:
    return Recipe.parse("recipe", plan.recipe).model_data({})["kind"]


def parts_of(plan: Plan) -> list[Part]:
    """A pyramid has several stacks, and so no single one to measure alone."""
    return ["encoder", "full"] if MODELS[_kind(plan)].has_one_stack else ["full"]


def measure_length(plan: Plan, part: Part, length: int, labels: Sequence[str], begin: Begin) -> list[LengthPoint]:
    """All mechanisms of `labels` at one length. begin: told before each step, so that whoever started this process
    knows what it died of."""
    shape, device = shape_at(plan, length), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    points, passes = [], {}
    for label in labels:
        begin(label)
        point = LengthPoint(mechanism=label, part=part, length=shape.length, batch=shape.batch)
        points.append(point)
        point.setting = {"device": device.type, "dtype": "float32", "threads": torch.get_num_threads()}
        point.setting |= {"tokens": shape.batch * shape.length}
        try:
            torch.manual_seed(0)
            config = config_at(plan, label, shape)
            point.flops = forward_flops(_on_meta(config, part, shape))
            model = model_from(config).to(device)
            passes[label] = Passes(model, task_class(plan.recipe["task"]), part, shape)
            point.parameters = sum(parameter.numel() for parameter in passes[label].module.parameters())
            point.config = mixing_of(model)
            _check(model, shape)
            point.inference_bytes = peak_bytes(passes[label].checked_inference, device)
            point.training_bytes = peak_bytes(passes[label].checked_training, device)
        except ValueError as refusal:
            point.status, point.reason = "refused", str(refusal)
        except CheckFailedError as failure:
            point.status, point.reason = "failed", str(failure)
        except Exception as crash:  # out of memory, or a mechanism with a mistake: the others are still measured
            point.status, point.reason = "failed", f"{type(crash).__name__}: {crash}".partition("\n")[0]
    begin(TIMING)
    done = [point for point in points if point.status == "done"]
    for kind in ("inference", "training"):
        work: dict[str, Work] = {point.mechanism: getattr(passes[point.mechanism], kind) for point in done}
        seconds = interleaved_seconds(work, plan.repeats, synchronize=synchronizer(device))
        for point in done:
            setattr(point, kind, Timing.of(seconds[point.mechanism]))
    return points


# ---------------------------------------------------------------------- models of any length


def config_at(plan: Plan, label: str, shape: Shape) -> dict[str, Any]:
    """The model's config for inputs of this length: tables with an end are as long as the longest length needs."""
    recipe = Recipe.parse(label, {**plan.recipe, "model": plan.variant(label).model})
    config, longest = recipe.model_data(plan.decided), max(shape.length, *plan.lengths)
    config = MODELS[config["kind"]].config_for_length(config, shape.length)
    for name in ("source", "target", "embedding"):
        if name in config and config[name].get("positions") == "learned":
            config = merged(config, {name: {"max_length": max(longest, config[name].get("max_length", 0))}})
    for name in ("encoder", "decoder"):
        if name in config:
            config = merged(config, {name: {"layer_drop": 0.0, **_long_enough(config[name], longest)}})
    return config


def _long_enough(stack: dict[str, Any], longest: int) -> dict[str, Any]:
    """The mixers of a stack that have a longest length."""
    given = {place: stack[place] for place in ("mixer", "cross") if stack.get(place) is not None}
    return {place: with_room(MixerChoice.model_validate(choice), longest) for place, choice in given.items()}


def with_room(choice: MixerChoice, longest: int) -> dict[str, Any]:
    """The choice as data, with a max_length that is enough, where its mechanism has one."""
    names = {part.partition("*")[0].strip() for part in choice.name.split(",")}
    fields = [mixer_class(name).Config.model_fields.get("max_length") for name in names]
    limits = [choice.options.get("max_length", field.default) for field in fields if field is not None]
    room = {"max_length": longest} if any(limit is not None and limit < longest for limit in limits) else {}
    return {"name": choice.name, **choice.options, **room}


# ---------------------------------------------------------------------- passes


class Passes:
    """Inference and training of a model, or of its main stack, on random inputs that are the same for all models."""

    def __init__(self, model: Model, task: type[Task], part: Part, shape: Shape) -> None:
        self.model, self.task, self.part, self.shape = model, task, part, shape
        self.module: torch.nn.Module = model if part == "full" else model.input_stack
        self.inputs = inputs_of(model, task, part, shape, next(model.parameters()).device)

    def inference(self) -> Tensor:
        self.module.eval()
        with torch.no_grad():
            return self._loss()

    def training(self) -> tuple[Tensor, ...]:
        """The loss, and the gradients of the parameters and of inputs that have one."""
        self.module.train()
        everything: list[Tensor] = [*self.module.parameters(), *self.inputs.values()]
        learned = [value for value in everything if value.requires_grad]
        loss = self._loss()
        gradients = torch.autograd.grad(loss, learned, allow_unused=True)
        return loss.detach(), *(gradient for gradient in gradients if gradient is not None)

    def checked_inference(self) -> None:
        _check_finite("loss", [self.inference()])

    def checked_training(self) -> None:
        loss, *gradients = self.training()
        _check_finite("loss in training", [loss])
        _check_finite("gradient", gradients)

    def _loss(self) -> Tensor:
        if self.part == "encoder":
            x, _, aux = self.module(self.inputs["x"], BlockInputs(grid=self.model.grid(self.shape.length)))
            loss = x.sum()
        else:
            found, aux = self.task.model_loss(self.model, self.inputs)
            loss = found.total
        return loss if aux is None else loss + aux.sum().to(loss.dtype)


def inputs_of(model: Model, task: type[Task], part: Part, shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """Random vectors for the stack, or a random batch of the task."""
    generator = torch.Generator().manual_seed(1)
    if part == "full":
        return to_device(task.random_batch(model, shape.batch, shape.length, generator), device)
    dim = model.input_stack.config.dim
    x = torch.randn(shape.batch, model.stack_length(shape.length), dim, generator=generator)
    return {"x": x.to(device).requires_grad_()}


def _on_meta(config: dict[str, Any], part: Part, shape: Shape) -> Callable[[], object]:
    """The forward pass without computing anything; words are scored in full there."""
    with torch.device("meta"):
        model = model_from(config).eval()
        if part == "full":
            inputs = model.random_inputs(shape.batch, shape.length)
            return lambda: model(*inputs)
        x = torch.empty(shape.batch, model.stack_length(shape.length), model.input_stack.config.dim)
    return lambda: model.input_stack(x, BlockInputs(grid=model.grid(shape.length)))


# ---------------------------------------------------------------------- checks


def _check(model: Model, shape: Shape) -> None:
    """A mixer of every kind in the model, on random vectors of its width."""
    checked = []
    for block in model.modules():
        if isinstance(block, Block) and block.mixer.config not in checked:
            checked.append(block.mixer.config)
            grid = model.grid(shape.length)
            if grid is not None:
                grid = (min(grid[0], math.isqrt(LONGEST_CHECK)),) * 2
            length = min(shape.length, LONGEST_CHECK) if grid is None else grid[0] * grid[1]
            x = torch.randn(1, length, block.mixer.config.dim, generator=torch.Generator().manual_seed(2))
            check_mixer(block.mixer, x.to(next(model.parameters())), grid)


def _check_finite(what: str, values: Sequence[Tensor]) -> None:
    for value in values:
        if not bool(torch.isfinite(value).all()):
            raise CheckFailedError(f"the {what} has values that are not finite")
