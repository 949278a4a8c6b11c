"""What tuning searches for a mechanism: settings of every recipe, of its task, and options of the mechanism itself.

The learning rate and the weight decay are searched for every mechanism, `Task.tuned` names what else a task needs, and
`Mixer.tuned` the options of a mechanism. All values are relative to those that the mechanism would have untuned.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from subquad.compare.plan import Plan
from subquad.compare.settings import change_recipe, read_settings
from subquad.compare.variants import RECIPE_MODEL, Variant, variant_recipe
from subquad.config import Choices, Scale, Tunable
from subquad.mixers import mixer_class
from subquad.models import MODELS, build_from_config
from subquad.models.base import ModelConfig
from subquad.nn.stack import StackConfig
from subquad.train.recipe import Recipe

EVERY_RECIPE: Mapping[str, Tunable] = {
    "schedule.lr": Scale(0.1, 10),
    "optim.weight_decay": Choices((0.0, 0.001, 0.01, 0.1)),
}


@dataclass(frozen=True)
class LogRange:
    """Numbers from `low` to `high`, drawn evenly by their logarithm."""

    own: float
    low: float
    high: float


@dataclass(frozen=True)
class Values:
    """Single values, in ascending order if they are numbers."""

    own: Any
    values: tuple[Any, ...]


class SearchSpace:
    """What is searched for one mechanism of a comparison, by the names of options."""

    def __init__(self, plan: Plan, variant: Variant) -> None:
        self.plan, self.variant = plan, variant
        recipe = Recipe.parse(variant.label, variant_recipe(plan.recipe, variant))
        self.model = self._model_config(recipe)
        self.stacks = [name for name in type(self.model).stacks if isinstance(getattr(self.model, name), StackConfig)]
        content = recipe.model_dump(mode="json")
        self.dimensions: dict[str, LogRange | Values] = {}
        for name, tunable in {**EVERY_RECIPE, **plan.task.tuned, **self._mixer_options()}.items():
            own = self._own_value(content, name)
            if (dimension := self._dimension(name, own, tunable)) is not None:
                self.dimensions[name] = dimension

    def apply(self, settings: Mapping[str, Any]) -> Variant:
        """The mechanism with these settings; what does not go together is a ValueError."""
        options = {name: value for name, value in settings.items() if "." not in name}
        changes = {
            name.replace("*", stack): value
            for name, value in settings.items()
            if "." in name
            for stack in (self.stacks if "*" in name else ("",))
        }
        mixers = {f"model.{s}.mixer.{name}": value for s in self._own_stacks() for name, value in options.items()}
        content = change_recipe(variant_recipe(self.plan.recipe, self.variant), {**changes, **mixers})
        changed = Recipe.parse(self.variant.label, content)
        with torch.device("meta"):
            build_from_config(changed.model_data(self.plan.data_dependent_model_config))
        return self.variant.model_copy(
            update={
                "options": {**self.variant.options, **options},
                "settings": {**self.variant.settings, **changes},
                "model": changed.model_dump(mode="json")["model"],
            }
        )

    # ------------------------------------------------------------------ what the mechanism has untuned

    def _model_config(self, recipe: Recipe) -> ModelConfig:
        options = recipe.model_data(self.plan.data_dependent_model_config)
        return MODELS[options["kind"]].Config.parse(self.variant.label, options)

    def _own_stacks(self) -> list[str]:
        """The stacks that the mechanism is used in; a pattern of several has no options of its own."""
        return [name for name in self.stacks if getattr(self.model, name).mixer.mechanisms == [self.variant.mixer]]

    def _mixer_options(self) -> Mapping[str, Tunable]:
        if self.variant.mixer == RECIPE_MODEL or not self._own_stacks():
            return {}
        return mixer_class(self.variant.mixer).tuned

    def _own_value(self, recipe: Mapping[str, Any], name: str) -> Any:
        if "*" in name:
            option = name.removeprefix("model.*.")
            return getattr(getattr(self.model, self.stacks[0]), option) if self.stacks else None
        if "." in name:
            return read_settings(recipe, [name])[name]
        given = getattr(self.model, self._own_stacks()[0]).mixer.options
        return given.get(name, mixer_class(self.variant.mixer).Config.model_fields[name].default)

    # ------------------------------------------------------------------ what can be tried

    def _dimension(self, name: str, own: Any, tunable: Tunable) -> LogRange | Values | None:
        """None: there is nothing to choose from."""
        if isinstance(tunable, Scale):
            if not own:  # an option that is left out, or that no factor changes
                return None
            if isinstance(own, float):
                return LogRange(own, tunable.low * own, tunable.high * own)
            exponents = range(math.ceil(math.log2(tunable.low)), math.floor(math.log2(tunable.high)) + 1)
            wanted = [max(1, round(own * 2.0**exponent)) for exponent in exponents]
        else:
            wanted = [*tunable.values, own]
        distinct = [value for number, value in enumerate(wanted) if value not in wanted[:number]]
        values = [value for value in distinct if value == own or self._is_possible(name, value)]
        if all(isinstance(value, int | float) for value in values):
            values.sort()
        return Values(own, tuple(values)) if len(values) > 1 else None

    def _is_possible(self, name: str, value: Any) -> bool:
        try:
            self.apply({name: value})
        except ValueError:
            return False
        return True
