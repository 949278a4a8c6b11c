"""Costs of the recipe's model by sequence length, all mechanisms side by side at a constant number of tokens.

The lengths of the task's own samples come first. Each length is measured for two parts: the mixing stack alone, and the
whole model. `costs` says how. The inputs are random, and the loss is that of given targets. An image of a grid of H x W
patches has the length H W.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from subquad.compare.measure.base import SIDE_BY_SIDE, Begin, Context, Measurement, Step
from subquad.compare.measure.cache import stored_points
from subquad.compare.measure.checks import LONGEST_CHECK, check_mixer
from subquad.compare.measure.costs import Costs, measure_costs
from subquad.compare.measure.timing import DTYPES, Seconds, default_dtype
from subquad.compare.plan import Plan
from subquad.compare.records import Point, Record
from subquad.compare.statistics.times import all_decided
from subquad.compare.variants import mixer_options
from subquad.config import merge_options
from subquad.data.batches import to_device
from subquad.mixers import mixer_class
from subquad.models import MODELS, Model, build_from_config
from subquad.models.costs import forward_flops
from subquad.nn.block import Block, BlockInputs
from subquad.nn.stack import MixerChoice
from subquad.tasks import Task
from subquad.train.recipe import Recipe

Part = Literal["encoder", "full"]
"""encoder: the mixing stack without decoder and vocabulary; full: the whole model."""
PART_TITLES: dict[Part, str] = {"encoder": "encoder", "full": "whole model"}


class Timing(Record):
    """Milliseconds of one pass, with their median and quartiles. rounds: those of each round, in order, if kept.

    All mechanisms of a length were timed in the same rounds.
    """

    median: float = Field(gt=0)
    low: float = Field(gt=0)
    high: float = Field(gt=0)
    rounds: list[float] = Field(default_factory=list)

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """From the times of a measurement. Fewer than three have no quartiles: their range is taken."""
        ms = [1000 * value for value in seconds]
        low, high = (min(ms), max(ms)) if len(ms) < 3 else statistics.quantiles(ms, n=4, method="inclusive")[::2]
        return cls(median=statistics.median(ms), low=low, high=high, rounds=ms)


class LengthPoint(Point):
    """The costs of one mechanism at one length. refused: the mechanism does not take this length or form.

    control: a second copy of the baseline, timed like the other mechanisms: it must come out as fast as the first.
    """

    part: Part
    control: bool = False
    length: int = Field(ge=1)
    batch: int = Field(ge=1, description="sequences at once; batch * length is the token budget")
    training: Timing | None = None
    inference: Timing | None = None
    training_bytes: int | None = Field(None, gt=0, description="peak of a training pass")
    inference_bytes: int | None = Field(None, gt=0, description="peak of a forward pass")
    flops: int | None = Field(None, gt=0, description="of a forward pass")
    parameters: int | None = Field(None, ge=0)
    setting: dict[str, Any] = Field(default_factory=dict, description="what the numbers depend on: device, dtype, ...")
    config: dict[str, Any] = Field(default_factory=dict, description="the mixers of the measured model")


class Lengths(Measurement):
    """A step is one part at one length. A mechanism that failed or was too slow at a length is not tried at the next.

    Too slow is one whose training pass took longer than `max_seconds` of the comparison.
    """

    name = "lengths"
    point: ClassVar[type[Point]] = LengthPoint
    needs_trials = False

    def inputs(self, context: Context) -> dict[str, Any]:
        """The baseline is timed twice."""
        return {"baseline": context.baseline}

    def steps(self, plan: Plan) -> list[Step]:
        if not plan.lengths:
            return []
        own = [shape_at(plan, length).length for length in plan.task_lengths]
        others = sorted({shape_at(plan, length).length for length in plan.lengths} - set(own))
        return [_step(part, length) for group in (own, others) for part in parts_of(plan) for length in group]

    def measure(
        self,
        out: Path,  # noqa: ARG002
        plan: Plan,
        labels: Sequence[str],
        arguments: Mapping[str, Any],
        begin: Begin,
    ) -> list[LengthPoint]:
        return measure_length(plan, arguments["part"], arguments["length"], labels, arguments["baseline"], begin)

    def refused(self, context: Context, step: Step) -> list[LengthPoint]:
        part, length = step.arguments["part"], step.arguments["length"]
        shorter = [
            other
            for other in self.steps(context.plan)
            if other.arguments["part"] == part and other.arguments["length"] < length
        ]
        reasons: dict[str, str] = {}
        for point in stored_points(self, context, shorter):
            assert isinstance(point, LengthPoint)
            if point.status != "done":
                reasons.setdefault(point.mechanism, str(point.reason))
            elif point.training is not None and point.training.median > 1000 * context.max_seconds:
                took = f"a training pass took {point.training.median / 1000:.1f} s at {point.length:,} tokens"
                limit = f"the limit is {context.max_seconds:g} s"
                reasons.setdefault(point.mechanism, f"over the time limit: {took}, {limit}")
        return [self._without_costs(context.plan, step, label, "refused", why) for label, why in reasons.items()]

    def failed(self, plan: Plan, step: Step, label: str, reason: str) -> LengthPoint:
        return self._without_costs(plan, step, label, "failed", reason)

    def _without_costs(
        self, plan: Plan, step: Step, label: str, status: Literal["failed", "refused"], reason: str
    ) -> LengthPoint:
        part, length = step.arguments["part"], step.arguments["length"]
        batch = shape_at(plan, length).batch
        return LengthPoint(mechanism=label, part=part, length=length, batch=batch, status=status, reason=reason)


def _step(part: Part, length: int) -> Step:
    title = f"{PART_TITLES[part]} at {length:,} tokens"
    return Step(f"lengths-{part}-{length}", title, {"part": part, "length": length})


@dataclass(frozen=True)
class Shape:
    """batch sequences of length tokens."""

    batch: int
    length: int


def shape_at(plan: Plan, length: int) -> Shape:
    """The batch of a length; images get the square grid of about so many patches.

    At the task's own lengths it is the batch of a training.
    """
    if length in plan.task_lengths:
        return Shape(_training_batch(plan, length), length)
    length = MODELS[_model_kind(plan)].possible_length(length)
    return Shape(max(1, plan.tokens // length), length)


def _training_batch(plan: Plan, length: int) -> int:
    """As many samples of a length as the recipe takes at once."""
    budget = plan.task.budget(Recipe.parse("recipe", plan.recipe).train.budget)
    size = length if plan.task.sized_by_tokens else 1
    limits = [budget.max_sentences, None if budget.max_tokens is None else budget.max_tokens // size]
    return max(1, min(limit for limit in limits if limit is not None))


def parts_of(plan: Plan) -> list[Part]:
    """A model with several stacks has no single one to measure alone."""
    return ["encoder", "full"] if MODELS[_model_kind(plan)].has_one_stack else ["full"]


def _model_kind(plan: Plan) -> str:
    return Recipe.parse("recipe", plan.recipe).model_data({})["kind"]


CONTROL = "control of the baseline"
"""The name of the second copy of the baseline while times are measured."""
MAX_TIMING_SECONDS = 120.0
"""Rounds that would make the timing of one kind of pass at one length take longer than this are left out."""


def measure_length(
    plan: Plan, part: Part, length: int, labels: Sequence[str], baseline: str, begin: Begin
) -> list[LengthPoint]:
    """All mechanisms of `labels` at one length, and the baseline a second time."""
    shape, device = shape_at(plan, length), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = default_dtype(device)
    setting = {"device": device.type, "dtype": dtype, "threads": torch.get_num_threads()}
    setting |= {"tokens": shape.batch * shape.length}
    points = {
        label: LengthPoint(mechanism=label, part=part, length=shape.length, batch=shape.batch, setting=setting)
        for label in labels
    }

    def build(point: LengthPoint) -> ModelPasses:
        torch.manual_seed(0)
        config = config_for_shape(plan, point.mechanism, shape)
        point.flops = forward_flops(_forward_on_meta(config, part, shape))
        model = build_from_config(config).to(device)
        point.config = mixer_options(model)
        return ModelPasses(model, plan.task, part, shape, DTYPES[dtype])

    if baseline in labels:
        points[CONTROL] = points[baseline].model_copy(update={"control": True})
    builders = {name: partial(build, point) for name, point in points.items()}
    costs = measure_costs(
        builders,
        plan.looks,
        device,
        is_decided=partial(_is_enough, baseline=baseline),
        before=lambda name: begin(points[name].mechanism),
        before_timing=lambda: begin(SIDE_BY_SIDE),
    )
    for name, found in costs.items():
        _fill_in(points[name], found)
    return list(points.values())


def _is_enough(seconds: Seconds, baseline: str) -> bool:
    """Whether all ratios are decided, or as many rounds again would take too long. The control decides nothing."""
    if sum(map(sum, seconds.values())) > MAX_TIMING_SECONDS / 2:
        return True
    times = {name: found for name, found in seconds.items() if name != CONTROL}
    return baseline in times and all_decided(times, baseline)


def _fill_in(point: LengthPoint, costs: Costs) -> None:
    point.reason = costs.reason
    point.status, point.parameters = costs.status, costs.parameters
    point.inference_bytes, point.training_bytes = (costs.peak_bytes.get(kind) for kind in ("inference", "training"))
    if costs.seconds:
        point.inference, point.training = (Timing.of(costs.seconds[kind]) for kind in ("inference", "training"))


# ---------------------------------------------------------------------- models of any length


def config_for_shape(plan: Plan, label: str, shape: Shape) -> dict[str, Any]:
    """The model's config for inputs of this length: tables with an end are as long as the longest length needs."""
    config = plan.variant_recipe(label).model_data(plan.data_dependent_model_config)
    config = MODELS[config["kind"]].config_for_length(config, shape.length)
    return lengthen_config(config, max([shape.length, *plan.lengths, *plan.task_lengths]))


def lengthen_config(config: dict[str, Any], longest: int) -> dict[str, Any]:
    """The config with tables of positions that are long enough, and without dropping layers."""
    for name in ("source", "target", "embedding"):
        if name in config and config[name].get("positions") == "learned":
            config = merge_options(config, {name: {"max_length": max(longest, config[name].get("max_length", 0))}})
    for name in ("encoder", "decoder"):
        if name in config:
            config = merge_options(config, {name: {"layer_drop": 0.0, **_lengthen_mixers(config[name], longest)}})
    return config


def _lengthen_mixers(stack: dict[str, Any], longest: int) -> dict[str, Any]:
    """The mixers of a stack that have a longest length."""
    given = {place: stack[place] for place in ("mixer", "cross") if stack.get(place) is not None}
    return {place: lengthen_mixer(MixerChoice.model_validate(choice), longest) for place, choice in given.items()}


def lengthen_mixer(choice: MixerChoice, longest: int) -> dict[str, Any]:
    """The choice as data, with a max_length that is enough, where its mechanism has one."""
    names = {part.partition("*")[0].strip() for part in choice.name.split(",")}
    fields = [mixer_class(name).Config.model_fields.get("max_length") for name in names]
    limits = [choice.options.get("max_length", field.default) for field in fields if field is not None]
    longer = {"max_length": longest} if any(limit is not None and limit < longest for limit in limits) else {}
    return {"name": choice.name, **choice.options, **longer}


# ---------------------------------------------------------------------- passes


class ModelPasses:
    """Inference and training of a model, or of its input stack, on random inputs that are the same for all models.

    dtype: that of autocast, as in training; float32 is none.
    """

    shapes: Mapping[str, torch.Size] = {}

    def __init__(
        self, model: Model, task: type[Task], part: Part, shape: Shape, dtype: torch.dtype = torch.float32
    ) -> None:
        self.model, self.task, self.part, self.shape, self.dtype = model, task, part, shape, dtype
        self.module: torch.nn.Module = model if part == "full" else model.input_stack
        self.inputs = _random_inputs(model, task, part, shape, next(model.parameters()).device)
        named = {**dict(self.module.named_parameters()), **self.inputs}
        self.learned = {name: value for name, value in named.items() if value.requires_grad}

    def check(self) -> dict[str, Any]:
        """Checks one mixer of every kind in the model, on random vectors of its width."""
        checked: list[Any] = []
        for block in self.model.modules():
            if isinstance(block, Block) and block.mixer.config not in checked:
                checked.append(block.mixer.config)
                grid = self.model.grid(self.shape.length)
                if grid is not None:
                    grid = (min(grid[0], math.isqrt(LONGEST_CHECK)),) * 2
                length = min(self.shape.length, LONGEST_CHECK) if grid is None else grid[0] * grid[1]
                x = torch.randn(1, length, block.mixer.config.dim, generator=torch.Generator().manual_seed(2))
                with self._autocast():
                    check_mixer(block.mixer, x.to(next(self.model.parameters())), grid)
        return {}

    def inference(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"loss": self._loss()}

    def training(self) -> dict[str, Tensor]:
        """The loss, and the gradients of the parameters and of inputs that have one."""
        loss = self._loss()
        gradients = torch.autograd.grad(loss, list(self.learned.values()), allow_unused=True)
        pairs = zip(self.learned, gradients, strict=True)
        results = {f"gradient of {name}": gradient for name, gradient in pairs if gradient is not None}
        return {"loss in training": loss.detach(), **results}

    def _autocast(self) -> AbstractContextManager[None]:
        device = next(self.model.parameters()).device.type
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(device, self.dtype)

    def _loss(self) -> Tensor:
        with self._autocast():
            if self.part == "encoder":
                x, _, aux = self.module(self.inputs["x"], BlockInputs(grid=self.model.grid(self.shape.length)))
                loss = x.sum()
            else:
                found, aux = self.task.model_loss(self.model, self.inputs)
                loss = found.total
        return loss if aux is None else loss + aux.sum().to(loss.dtype)


def _random_inputs(model: Model, task: type[Task], part: Part, shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """Random vectors for the stack, or a random batch of the task."""
    generator = torch.Generator().manual_seed(1)
    if part == "full":
        return to_device(task.random_batch(model, shape.batch, shape.length, generator), device)
    dim = model.input_stack.config.dim
    x = torch.randn(shape.batch, model.stack_length(shape.length), dim, generator=generator)
    return {"x": x.to(device).requires_grad_()}


def _forward_on_meta(config: dict[str, Any], part: Part, shape: Shape) -> Callable[[], object]:
    """The forward pass without computing anything; words are scored in full there."""
    with torch.device("meta"):
        model = build_from_config(config).eval()
        if part == "full":
            inputs = model.random_inputs(shape.batch, shape.length)
            return lambda: model(*inputs)
        x = torch.empty(shape.batch, model.stack_length(shape.length), model.input_stack.config.dim)
    return lambda: model.input_stack(x, BlockInputs(grid=model.grid(shape.length)))
