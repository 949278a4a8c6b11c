"""Time and memory of a preset by length: of the whole model, or of its input stack alone, with a constant batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from subquad.compare.measure.costs import Costs, measure_costs
from subquad.compare.measure.lengths import ModelPasses, Part, Shape, lengthen_config
from subquad.compare.measure.timing import DTYPES
from subquad.models import MODELS, build_from_config, preset
from subquad.progress import Progress
from subquad.tasks import available_tasks, task_class
from subquad.tasks.base import Task


@dataclass(frozen=True)
class PresetPlan:
    """tokens: of a batch, at every length. changes: to the preset's config."""

    name: str
    lengths: Sequence[int]
    part: Part = "full"
    tokens: int = 16384
    repeats: int = 5
    device: str = "cpu"
    dtype: str = "float32"
    changes: Mapping[str, Any] | None = None


def measure_preset(plan: PresetPlan, progress: Progress) -> dict[Shape, Costs]:
    """The costs at every length, from the shortest on."""
    config = preset(plan.name, plan.changes)
    with torch.device("meta"):
        build_from_config(config)  # a wrong change is refused before anything is measured
    task, device = _task_of(config["kind"]), torch.device(plan.device)
    found = {}
    for done, length in enumerate(sorted(plan.lengths)):
        shape = Shape(max(1, plan.tokens // length), length)
        progress.report(done, len(plan.lengths), f"{plan.name} at {length:,} tokens")
        longer = lengthen_config(MODELS[config["kind"]].config_for_length(config, length), length)
        build = partial(_build, longer, task, plan, shape, device)
        found[shape] = measure_costs({plan.name: build}, [plan.repeats], device)[plan.name]
    return found


def _build(
    config: dict[str, Any], task: type[Task], plan: PresetPlan, shape: Shape, device: torch.device
) -> ModelPasses:
    torch.manual_seed(0)
    return ModelPasses(build_from_config(config).to(device), task, plan.part, shape, DTYPES[plan.dtype])


def _task_of(kind: str) -> type[Task]:
    """A task that trains models of this kind."""
    return next(task_class(name) for name in available_tasks() if kind in task_class(name).model_kinds)
