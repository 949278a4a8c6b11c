"""How far a mechanism is from exact softmax attention, by what it costs.

Mechanisms with queries, keys and values get the projections of a softmax mixer, so that all of them see the same q, k
and v; their output maps are the identity. The error is the relative L2 distance of the outputs, ||y - exact|| /
||exact||, the mean over several draws of what a mechanism draws or initialises at random; what it learns besides (maps
of landmarks, compressions) is as initialised. Cost is the time of a forward pass over that of exact attention.

    random      q, k and v are independent normal values
    trained     they are what the first attention layer of the trained baseline reads on the longest samples of `valid`
"""

import copy
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from subquad.compare.measure.base import Begin, Context, Measurement, Step
from subquad.compare.measure.checks import relative_distance
from subquad.compare.measure.lengths import lengthen_mixer
from subquad.compare.measure.timing import interleaved_seconds, synchronizer
from subquad.compare.plan import Plan
from subquad.compare.records import Point
from subquad.data.batches import to_device
from subquad.mixers import build, mixer_class
from subquad.mixers.attention import AttentionMixer
from subquad.mixers.softmax import Softmax
from subquad.models import build_from_config
from subquad.nn.stack import MixerChoice
from subquad.train.recipe import Recipe
from subquad.train.run import build_task, load_trained

COST_OPTIONS = ("features", "proj_k", "landmarks", "window")
"""Options that trade error for cost, the most important one of a mechanism first."""
VALUES = (4, 16, 64, 256)
DRAWS = 3
ROWS = 4
LONGEST_RANDOM = 1024
SHARED_OPTIONS = {"dim", "heads", "causal", "dropout", "attention_dropout", "qkv_bias", "rotary"}
"""Options that the softmax mixer decides, and dropout, which is off."""
Source = Literal["random", "trained"]


class ApproximationPoint(Point):
    """Relative L2 distance from exact softmax attention on the same queries, keys and values.

    refused: the mechanism does not approximate softmax attention. Only points that are done have numbers.
    """

    option: str = Field("", description="what is varied along the curve, such as `samples=64`")
    error: float | None = Field(None, ge=0)
    cost: float | None = Field(None, gt=0, description="time relative to exact attention")
    source: Source | None = None
    length: int | None = Field(None, ge=1)
    setting: dict[str, Any] = Field(default_factory=dict)


class Approximation(Measurement):
    """One step. It uses the baseline's first finished trial, if there is one with plain softmax attention."""

    name = "approximation"
    point: ClassVar[type[Point]] = ApproximationPoint
    needs_trials = True

    def steps(self, plan: Plan) -> list[Step]:  # noqa: ARG002
        return [Step("approximation", "distance from exact attention", {})]

    def inputs(self, context: Context) -> dict[str, Any]:
        """The baseline's run, relative to the comparison, so that its folder can move."""
        name = context.trials.first_done().get(context.baseline)
        return {"run": None if name is None else os.path.relpath(context.trials.run_folder(name), context.out)}

    def measure(
        self, out: Path, plan: Plan, labels: Sequence[str], arguments: Mapping[str, Any], begin: Begin
    ) -> list[ApproximationPoint]:
        run = arguments["run"]
        return measure_approximation(plan, labels, None if run is None else out / run, begin)


class Subject(NamedTuple):
    """Exact attention and what it reads: x (batch, time, channels), with its grid where there is one."""

    source: Source
    exact: Softmax
    x: Tensor
    grid: tuple[int, int] | None


def not_comparable_reason(mixer: str) -> str | None:
    """Why a mechanism has no error against softmax attention; None if it has one."""
    if mixer_class(mixer) is Softmax:
        return "it is exact"
    return None if issubclass(mixer_class(mixer), AttentionMixer) else "it does not approximate softmax attention"


def measure_approximation(
    plan: Plan, labels: Sequence[str], baseline_run: Path | None, begin: Begin
) -> list[ApproximationPoint]:
    """The points of every mechanism. baseline_run: a finished run with softmax attention."""
    mixers = {label: _first_mixer(plan, label) for label in labels}
    reasons = {label: not_comparable_reason(name) for label, (name, _) in mixers.items()}
    points = [
        ApproximationPoint(mechanism=label, status="refused", reason=reason)
        for label, reason in reasons.items()
        if reason is not None
    ]
    comparable = {label: mixer for label, mixer in mixers.items() if reasons[label] is None}
    subjects = [_random_subject(plan)]
    if baseline_run is not None and (subject := _trained_subject(baseline_run)) is not None:
        subjects.append(subject)
    for subject in subjects:
        begin(f"{subject.source} activations")
        points += _measure(comparable, subject, plan.repeats)
    return points


def _measure(
    comparable: Mapping[str, tuple[str, dict[str, Any]]], subject: Subject, repeats: int
) -> list[ApproximationPoint]:
    """comparable: mechanism and options by label."""
    exact, x, grid = subject.exact, subject.x, subject.grid
    work: dict[str, Callable[[], Tensor]] = {"exact": lambda: exact(x, grid=grid).y}
    points: dict[str, ApproximationPoint] = {}
    with torch.inference_mode():
        target = work["exact"]()
        for label, (name, options) in comparable.items():
            for option, value in _sweep(name, options, x.shape[1], grid):
                mixers = [
                    _with_shared_projections(exact, name, options, option, value, x.shape[1], seed)
                    for seed in range(DRAWS)
                ]
                errors = [relative_distance(mixer(x, grid=grid).y, target) for mixer in mixers]
                key = f"{label} {option} {value}"
                work[key] = lambda mixer=mixers[0]: mixer(x, grid=grid).y  # type: ignore[misc]
                points[key] = ApproximationPoint(
                    mechanism=label,
                    option=f"{option}={value}" if option else "",
                    error=statistics.fmean(errors),
                    source=subject.source,
                    length=x.shape[1],
                    setting=_setting(mixers[0], x),
                )
        seconds = interleaved_seconds(work, repeats, synchronize=synchronizer(x.device))
    for key, point in points.items():
        point.cost = statistics.median(seconds[key]) / statistics.median(seconds["exact"])
    return list(points.values())


def _setting(mixer: AttentionMixer, x: Tensor) -> dict[str, Any]:
    shown = f"{mixer.name}({mixer.extra_repr()})"
    return {"mixer": shown, "rows": x.shape[0], "draws": DRAWS, "threads": torch.get_num_threads()}


def _sweep(name: str, options: dict[str, Any], length: int, grid: tuple[int, int] | None) -> list[tuple[str, Any]]:
    """Values of the option that trades error for cost, none beyond the length; [("", None)] without such an option.

    Windows of a grid are counted by their sides.
    """
    fields = mixer_class(name).Config.model_fields
    option = next((option for option in COST_OPTIONS if option in fields), None)
    if option is None:
        return [("", None)]
    most = max(grid) if grid is not None and option == "window" else length
    values = {*VALUES, options.get(option) or VALUES[0]}
    return [(option, value) for value in sorted({min(value, most) for value in values})]


def _with_shared_projections(
    exact: Softmax, name: str, options: dict[str, Any], option: str, value: Any, length: int, seed: int
) -> AttentionMixer:
    """A mixer with the projections of `exact`, in eval mode."""
    given = {key: own for key, own in options.items() if key not in SHARED_OPTIONS}
    if option == "landmarks":
        given.pop("chunk_size", None)  # the two exclude each other
    if option:
        given[option] = value
    choice = lengthen_mixer(MixerChoice.model_validate({"name": name, **given}), length)
    config = exact.config
    shared: dict[str, Any] = {name: getattr(config, name) for name in ("dim", "heads", "causal", "qkv_bias", "rotary")}
    torch.manual_seed(seed)
    mixer = build(**choice, **shared).to(exact.qkv.weight)
    assert isinstance(mixer, AttentionMixer)
    mixer.qkv.load_state_dict(exact.qkv.state_dict())
    mixer.out = nn.Identity()
    return mixer.eval()


def _first_mixer(plan: Plan, label: str) -> tuple[str, dict[str, Any]]:
    """Mechanism and options of the first layer that mixes the input."""
    with torch.device("meta"):
        model = build_from_config(plan.variant_recipe(label).model_data(plan.data_dependent_model_config))
    config = model.input_stack.config
    return config.mixer.by_layer(config.layers)[0]


# ---------------------------------------------------------------------- what is read


def _random_subject(plan: Plan) -> Subject:
    recipe = Recipe.parse("recipe", plan.recipe)
    with torch.device("meta"):
        model = build_from_config(recipe.model_data(plan.data_dependent_model_config))
    stack, length = model.input_stack.config, model.possible_length(min([LONGEST_RANDOM, *plan.lengths[-1:]]))
    torch.manual_seed(0)
    exact = Softmax(dim=stack.dim, heads=stack.heads, causal=stack.causal, qkv_bias=False)
    nn.init.normal_(exact.qkv.weight, std=stack.dim**-0.5)  # of normal x this makes normal q, k and v
    exact.out = nn.Identity()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(ROWS, length, stack.dim).to(device)
    return Subject("random", exact.to(device).eval(), x, model.grid(length))


def _trained_subject(folder: Path) -> Subject | None:
    """None if the run's first layer is not plain softmax attention."""
    run = load_trained(folder)
    mixer = next(module for module in run.model.input_stack.modules() if isinstance(module, AttentionMixer))
    if not isinstance(mixer, Softmax) or mixer.inner != mixer.config.dim:
        return None
    task = build_task(run.recipe, folder / "data")
    samples = task.samples("valid", training=False)
    longest = np.argsort(-samples.sizes[0], kind="stable")[:ROWS]
    read: list[tuple[Tensor, tuple[int, int] | None]] = []

    def keep(_: nn.Module, given: Sequence[Tensor], named: dict[str, Any]) -> None:
        read.append((given[0], named.get("grid")))

    handle = mixer.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.inference_mode():
        task.loss(run.model, to_device(samples.batch(longest), run.device))
    handle.remove()
    x, grid = read[0]
    if grid is None and task.sized_by_tokens:
        x = x[:, : int(samples.sizes[0][longest].min())]  # rows are padded after their ends
    exact = copy.deepcopy(mixer)
    exact.out = nn.Identity()
    return Subject("trained", exact.eval(), x.contiguous(), grid)
