"""Recipes: one YAML file says what is trained on what, and how. Everything is checked before anything is loaded.

task: translation
data: {embedded: phrases}
model: {preset: translation_small, encoder: {mixer: eva}}
schedule: {kind: inverse-sqrt, lr: 3e-3, warmup_updates: 200}
train: {updates: 1000, budget: {max_tokens: 2048}}
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, SerializeAsAny, create_model

from subquad.config import Options, apply_change, merge_options, unknown_task
from subquad.data.batches import Budget
from subquad.decode.options import DecodeOptions
from subquad.files import read_yaml, wrap_corrupt_data_errors
from subquad.mixers.registry import check_origins, origins
from subquad.models import MODELS, PRESETS, preset
from subquad.nn.stack import mixer_names
from subquad.recipes import find_recipe
from subquad.recipes.schema import check_data_options
from subquad.tasks import DataConfig, Task, available_tasks, task_class
from subquad.train.checkpoint import CheckpointRetention
from subquad.train.optim import OptimConfig
from subquad.train.schedules import Schedule, ScheduleConfig
from subquad.train.trackers import TrackConfig

ENVIRONMENT = "environment.json"
MECHANISMS = "mechanisms"


class TrainConfig(Options):
    """How long a model is trained, and in which steps."""

    updates: int | None = Field(None, ge=1, description="The run ends after this many updates.")
    epochs: int | None = Field(None, ge=1, description="The run ends after this many passes over the training data.")
    minutes: float | None = Field(None, gt=0, description="The run ends after this many minutes, validations included.")
    budget: Budget = Field(default_factory=Budget, description="How large a batch may become.")
    accumulate: int = Field(1, ge=1, description="The number of batches of an update, over all processes.")
    data_workers: int = Field(
        0,
        ge=0,
        description="How many workers of each process build batches ahead of time: processes for augmented images, "
        "threads for other data.",
    )
    smoothing: float = Field(0.0, ge=0, lt=1, description="The label smoothing of the loss.")
    aux_weight: float = Field(0.0, ge=0, description="The weight of the mixers' regulariser, for each target.")
    seed: int = Field(1, ge=0, description="The seed of the weights, the order of the data and all random numbers.")
    precision: Literal["float32", "bfloat16", "float16", "auto"] = Field(
        "float32",
        description="The precision of activations. auto: bfloat16 on GPUs that have it, float16 on older ones, float32 "
        "on a CPU.",
    )
    tf32: bool = Field(
        True, description="Whether GPUs may round the factors of float32 products to TF32, which is much faster."
    )
    compile: bool = Field(False, description="Whether torch.compile compiles the blocks of the model.")
    checkpoint_activations: bool = Field(
        False, description="Whether blocks keep only their inputs, and compute the rest again for the backward pass."
    )
    sharded: bool = Field(
        False, description="Whether each process of torchrun holds a part of every weight (FSDP2), not all (DDP)."
    )
    timeout: float = Field(
        30, gt=0, description="The minutes after which a process that waits for another one in an exchange gives up."
    )
    validate_every: int | None = Field(None, ge=1, description="The updates between two validations; null: an epoch.")
    patience: int | None = Field(None, ge=1, description="The run ends after this many validations without a new best.")
    log_every: int = Field(50, ge=1, description="The number of updates between two lines of metrics.jsonl.")

    def check(self) -> None:
        if self.updates is None and self.epochs is None and self.minutes is None:
            raise ValueError("training needs an end: give updates, epochs or minutes")


class End(NamedTuple):
    """Why a training ends. reason: the option that ends it, such as train.updates. text: the same in words."""

    reason: str
    text: str


class Recipe(Options):
    """What is trained on what, and how."""

    task: str = Field(description="The name of the task.")
    data: SerializeAsAny[DataConfig] = Field(description="The data. Each task has options of its own.")
    model: dict[str, Any] = Field(description="The model: `preset: NAME` and changes, or `kind: KIND` and options.")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="The optimiser.")
    schedule: ScheduleConfig = Field(description="The learning rate.")
    train: TrainConfig = Field(description="How long the model is trained, and in which steps.")
    decode: DecodeOptions = Field(default_factory=DecodeOptions, description="How the model writes text.")
    checkpoints: CheckpointRetention = Field(
        default_factory=CheckpointRetention, description="Which checkpoints are kept."
    )
    track: TrackConfig = Field(default_factory=TrackConfig, description="Trackers of the numbers of metrics.jsonl.")

    @classmethod
    def parse(cls, owner: str, options: Mapping[str, Any]) -> Self:
        """Reads a recipe as `Options.parse` does. The task decides which options the section `data` has."""
        name = options.get("task")
        if cls is not Recipe or name is None:
            return super().parse(owner, options)
        known = available_tasks()
        if name not in known:
            raise ValueError(unknown_task(owner, name, known))
        fields = {task: task_class(task).Data.model_fields for task in known}
        check_data_options(owner, name, options.get("data"), fields)
        return recipe_class(name).parse(owner, options)  # type: ignore[return-value]

    @property
    def task_class(self) -> type[Task]:
        return task_class(self.task)

    def check(self) -> None:
        task = self.task_class
        self.data.check_smoothing(self.train.smoothing)
        Schedule(self.schedule, self.train.updates, self.train.epochs)  # refuses what has no length, or too little
        options = self.model_data({})
        kind = options.get("kind")
        if kind not in task.model_kinds:
            able = [name for name, data in PRESETS.items() if data["kind"] in task.model_kinds]
            raise ValueError(
                f"task {self.task} trains models of kind {' or '.join(task.model_kinds)}, not {kind}; such presets: "
                f"{', '.join(able)}"
            )
        MODELS[kind].Config.parse("model", options)

    def find_end(
        self, schedule: Schedule, *, update: int, epoch: int, late: bool, bad_validations: int, ended_early: bool
    ) -> End | None:
        """Returns why a training ends after so many updates and epochs; None: it goes on.

        late: whether its time is up. bad_validations: so many in a row were no new best. ended_early: whether what
        asked to be asked after validations has ended it.
        """
        config = self.train
        if ended_early:
            return End("early", "it was ended early after a validation")
        if config.updates is not None and update >= config.updates:
            return End("train.updates", f"train.updates is {config.updates:,}")
        if config.epochs is not None and epoch >= config.epochs:
            return End("train.epochs", f"train.epochs is {config.epochs:,}")
        if late:
            return End("train.minutes", f"train.minutes is {config.minutes:g}")
        if config.patience is not None and bad_validations >= config.patience:
            return End("train.patience", f"train.patience is {config.patience:,}: so many validations were no new best")
        if schedule.finished(update, epoch):
            rate, lowest = schedule.learning_rate(update, epoch), schedule.config.stop_lr
            return End("schedule.stop_lr", f"the learning rate is {rate:g}, and schedule.stop_lr is {lowest:g}")
        return None

    def model_data(self, data_dependent: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the model's config, with the options of `Task.data_dependent_model_config`."""
        given = dict(self.model)
        name = given.pop("preset", None)
        base = preset(name, given) if name is not None else given
        kind = base.get("kind")
        ignored = MODELS[kind].Config.ignored_data_options if isinstance(kind, str) and kind in MODELS else frozenset()
        return merge_options(base, {key: value for key, value in data_dependent.items() if key not in ignored})


@functools.cache
def recipe_class(task: str) -> type[Recipe]:
    """Returns the class of the recipes of a task, which has the task's section `data`."""
    field: Any = (task_class(task).Data, Field(description=Recipe.model_fields["data"].description))
    return create_model("Recipe", __base__=Recipe, __doc__=Recipe.__doc__, data=field)


Changes = Sequence[str | Mapping[str, Any]]
"""Changes to a recipe: words such as "train.updates=100", or mappings such as {"train": {"updates": 100}}.

Mappings are merged into what the recipe says. The word "data:={fairseq: data-bin}" replaces a whole section, or a part
of one, as in "data.tokenizer:={kind: bpe}".
"""


def read_recipe(recipe: "str | Path | Mapping[str, Any] | Recipe", changes: Changes = ()) -> Recipe:
    """Reads a recipe and applies changes. recipe: as for `find_recipe`, or its content, or a recipe that was read.

    Changes that say where the data comes from, such as data.fairseq, take the place of what the recipe says about it.
    """
    if isinstance(recipe, str | Path):
        owner, data = f"recipe {recipe}", _read_file(recipe)
    else:
        owner, data = "recipe", recipe.model_dump() if isinstance(recipe, Recipe) else dict(recipe)
    data = _apply(_make_room(data, _apply({}, changes)), changes)
    return Recipe.parse(owner, data)


def _apply(data: dict[str, Any], changes: Changes) -> dict[str, Any]:
    for change in changes:
        data = apply_change(data, change) if isinstance(change, str) else merge_options(data, change)
    return data


def _make_room(recipe: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe without what its section `data` says about where data comes from, if changes say something else."""
    given, other, task = recipe.get("data"), changes.get("data"), recipe.get("task")
    if not isinstance(given, Mapping) or not isinstance(other, Mapping) or task not in available_tasks():
        return recipe
    return {**recipe, "data": task_class(task).Data.make_room(given, other)}


def _read_file(given: str | Path) -> dict[str, Any]:
    path = find_recipe(given)
    data = read_yaml(path, "recipe")
    check_stored_origins(path.parent)
    return data


# ---------------------------------------------------------------------- where the mechanisms of a run came from

# Nothing is imported because a file names it: what is missing is named, and the user decides.


def describe_origins(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what environment.json says about mechanisms of other packages in a model; empty if there are none."""
    found = origins(sorted(mixer_names(model)))
    return {MECHANISMS: found} if found else {}


def check_stored_origins(folder: Path) -> None:
    """Refuses a run whose mechanisms are not here, and says which package they came from."""
    path = folder / ENVIRONMENT
    if not path.is_file():
        return
    with wrap_corrupt_data_errors(f"{path}"):
        try:
            stored = json.loads(path.read_text()).get(MECHANISMS, {})
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        check_origins(f"the run {folder}", stored)
