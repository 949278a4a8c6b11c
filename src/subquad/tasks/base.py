"""What a task is: the samples of its data, a loss, metrics, evaluation, and what a comparison asks about it.

A task is one file: a config of the recipe's section `data` (a `DataConfig`) and a `Task`, registered by name. Nothing
outside that file knows the name. A task of another package registers itself through the entry point `subquad.tasks`.

Losses are sums, so that the trainer divides once, by the targets of all micro-batches and processes together.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from subquad.config import Options, Tunable, nearest
from subquad.data import builtin
from subquad.data.batches import Budget
from subquad.data.text.prepare import ReportProgress
from subquad.data.tokenizers import Tokenizer
from subquad.decode.options import DecodeOptions
from subquad.evaluate.report import Evaluation
from subquad.files import write_metadata
from subquad.models import Model
from subquad.tasks.losses import LossOutput, add_regularizer
from subquad.tasks.sample_shards import Samples, SampleShards

INPUTS, TOKENIZERS = "inputs.json", "tokenizers"
INPUTS_FORMAT = 1
PLUGINS = "subquad.tasks"
"""The group of entry points through which other packages add tasks."""


class DataConfig(Options):
    """The section `data` of a recipe. Every task has a class of its own."""

    alternatives: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The options of which one says where the data comes from, each with those that belong to it alone."""

    @classmethod
    def make_room(cls, given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        """The options that are given, without those that say that data comes from elsewhere than `changes` do."""
        chosen = [name for name in cls.alternatives if changes.get(name)]
        if len(chosen) != 1:
            return dict(given)
        gone = {part for name, parts in cls.alternatives.items() if name not in chosen for part in (name, *parts)}
        return {name: value for name, value in given.items() if name not in gone}

    def with_run_tokenizers(self) -> Self:
        """The same data, read with the tokenizers that the run directory has already."""
        return self

    def in_run(self, run: Path) -> Self:  # noqa: ARG002
        """The same data with the paths of the tokenizers that a run directory has of its own."""
        return self

    def split_files(self, split: str) -> Sequence[str] | None:  # noqa: ARG002
        """Files and hub data sets that a split is read from; None if the recipe does not name them split by split."""
        return None

    def input_files(self) -> dict[str, list[str]]:
        """The files and folders that are read, by what they are for: a split, a tokenizer, a folder."""
        return {}

    def example(self, split: str) -> str:
        """How a user names the files of a split on the command line."""
        return f"data.splits.{split}=FILE"

    def count_vocabularies(self) -> list[int]:
        """The sizes of the vocabularies that the data has already; none if they follow from text."""
        return []

    def check_first_sample(self, split: str) -> None:
        """Raises a ValueError if the first sample of a split cannot be read, where this can be told at once."""

    def check_smoothing(self, smoothing: float) -> None:
        """Raises a ValueError if the data does not go together with label smoothing of the loss."""

    def is_available(self, cache: Path) -> bool:  # noqa: ARG002
        """Whether the data can be opened without preparing it anew. cache: where prepared data is kept."""
        return True


class TrainedModel(Protocol):
    """A model with everything that its use needs beside the weights. `load_trained` makes one of a run directory."""

    @property
    def folder(self) -> Path: ...

    @property
    def model(self) -> Model: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The content of inputs.json (see `Task.inputs`)."""
        ...

    @property
    def data(self) -> DataConfig: ...

    @property
    def decode(self) -> DecodeOptions: ...

    @property
    def prepared_data(self) -> Path | None:
        """The folder in which training prepared this same data; None if there is none."""
        ...

    def tokenizer(self, side: str) -> Tokenizer: ...


@dataclass(frozen=True)
class MainMetric:
    """The metric by which comparisons judge a task's models.

    key: its name in evaluations and validations. title: what people read. score: the value of the summed statistics of
    samples, as in `Measure.score`. Values are multiplied by `scale` and followed by `unit` where people read them.
    margin: a difference smaller than this, as people read it, makes no practical difference; with `relative_margin` it
    is a share of the baseline's value.
    """

    key: str
    title: str
    better: Literal["higher", "lower"]
    score: Callable[[np.ndarray], float]
    margin: float
    relative_margin: bool = False
    scale: float = 1.0
    unit: str = ""

    def scaled(self, value: float | None) -> float | None:
        """The value as people read it, if there is one."""
        return None if value is None else self.scale * value


class Floor(BaseModel):
    """What a simple model reaches on the split that quality is measured on."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(description="of the simple model, such as `unigram`")
    kind: Literal["trivial", "linear"] = Field(
        description="trivial: it does not look at its input, or copies it: a model that is no better has learned "
        "nothing. linear: it has no hidden layer, as a linear map of pixels or counts of neighbouring words."
    )
    value: float = Field(description="of the main metric, as people read it")
    how: str = Field(description="how it was computed, in one sentence")


@dataclass(frozen=True)
class EvaluationOptions:
    """What of a split is evaluated, and how.

    context_window: tokens of earlier text that a language model reads before those that count. first: so many samples,
    from the first one on; None: all. data_workers: how many workers read images ahead of time.
    """

    context_window: int = 0
    first: int | None = None
    data_workers: int = 0


class Task(ABC):
    """One kind of task on one data set."""

    name: ClassVar[str]
    Data: ClassVar[type[DataConfig]]
    """The class of the recipe's section `data`."""
    model_kinds: ClassVar[tuple[str, ...]]
    """The kinds of model that it trains."""
    metric: ClassVar[str] = "loss"
    """The validation metric that says which checkpoint is best."""
    better: ClassVar[Literal["higher", "lower"]] = "lower"
    """Which values of `metric` are better."""
    main_metric: ClassVar[MainMetric]
    tuned: ClassVar[Mapping[str, Tunable]] = {}
    """Settings of the recipe, by dotted names, that tuning searches besides those of every task: the learning rate and
    the weight decay. A star stands for every stack of the model."""
    decodes: ClassVar[bool] = False
    """Whether its models write text: then there is a `decoding_workload`."""
    evaluation_passes: ClassVar[int] = 1
    """How many passes over the samples `evaluate` reports."""
    reads_context: ClassVar[bool] = False
    """Whether `evaluate` knows a context window."""
    target_unit: ClassVar[str] = "targets"
    """What progress calls the things that an update learns to predict, of which it shows how many a second."""
    sized_by_tokens: ClassVar[bool] = True
    """Whether the size of a sample is the number of its tokens; False: every sample counts 1."""

    def __init__(self, smoothing: float = 0.0, aux_weight: float = 0.0) -> None:
        """smoothing: the label smoothing. aux_weight: the weight of the mixers' regulariser, for each target."""
        self.smoothing, self.aux_weight = smoothing, aux_weight

    # ------------------------------------------------------------------ data

    @classmethod
    @abstractmethod
    def open(
        cls,
        data: Any,
        cache: Path,
        smoothing: float = 0.0,
        aux_weight: float = 0.0,
        report: ReportProgress | None = None,
    ) -> Self:
        """The task on the data of a recipe. cache: where data is kept that has to be prepared first."""

    @property
    @abstractmethod
    def split_names(self) -> Sequence[str]:
        """The splits that there are."""

    @abstractmethod
    def samples(self, split: str, training: bool) -> Samples:
        """The samples of a split. With `training` they may be augmented, mixed or repeated."""

    @property
    def builds_in_processes(self) -> bool:
        """Whether workers that build batches are processes, as suits costly samples, or threads."""
        return False

    @classmethod
    def budget(cls, budget: Budget) -> Budget:
        """The limits of a batch, where the task knows better than the recipe's defaults."""
        return budget

    def notes(self) -> dict[str, str]:
        """For each split of which samples were skipped or changed: how many and why, in words."""
        return {}

    # ------------------------------------------------------------------ model

    @abstractmethod
    def data_dependent_model_config(self) -> dict[str, Any]:
        """Options of the model that follow from the data: vocabularies, classes."""

    @classmethod
    def expected_model_config(cls, data: Any) -> dict[str, Any]:  # noqa: ARG003
        """What the recipe alone tells about `data_dependent_model_config`, before the data is read."""
        return {}

    @classmethod
    @abstractmethod
    def typical_batch(cls, data: Any, budget: Budget) -> tuple[int, int | None]:
        """The samples of a batch and the tokens of each, estimated from the recipe; None if there are no tokens."""

    @classmethod
    def at_length(cls, data: Any, model: Mapping[str, Any], budget: Budget, length: int) -> dict[str, Any]:  # noqa: ARG003
        """Changes to a recipe with these sections, by dotted names, that make its samples `length` tokens long.

        A task whose batches are sized by samples also changes the budget, so that a batch has as many tokens as before.
        """
        raise ValueError(f"samples of the task {cls.name} have lengths of their own, which no option changes")

    def tokenizers(self) -> dict[str, Tokenizer]:
        """The tokenizers of inputs and outputs, by side; a task without text has none."""
        return {}

    def inputs(self) -> dict[str, Any]:
        """What else is needed to turn raw inputs into tensors and outputs into words, as JSON-compatible data."""
        return {}

    def save_inputs(self, folder: Path) -> None:
        """Writes inputs.json and tokenizers/ beside the weights, so that using the model needs no training data."""
        write_inputs(folder, self.name, self.tokenizers(), self.data_dependent_model_config(), self.inputs())

    # ------------------------------------------------------------------ loss and validation

    @classmethod
    @abstractmethod
    def model_loss(
        cls, model: Any, batch: Mapping[str, Tensor], pad: int = -1, smoothing: float = 0.0
    ) -> tuple[LossOutput, Tensor | None]:
        """The loss of a batch, summed over its targets, and the mixers' regulariser. pad: targets that do not count."""

    @property
    def pad(self) -> int:
        """The number of the target that does not count; -1: all of them count."""
        return -1

    def loss(self, model: Model, batch: Mapping[str, Tensor]) -> LossOutput:
        """What training minimises: the summed loss of a batch, with the regulariser for every target of it."""
        found, aux = self.model_loss(model, batch, self.pad, self.smoothing)
        return add_regularizer(found, aux, self.aux_weight)

    @abstractmethod
    def logits(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """What a model predicts of a batch of samples: (batch, classes) or (batch, time, vocab)."""

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """What `logits` are to predict: (batch,), (batch, time), or after mixing the shares (batch, classes)."""
        return batch["targets"]

    def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        """The metrics that are shown and logged, from sums over `count` targets."""
        mean = {name: value / max(1, count) for name, value in sums.items()}
        return {"loss": mean.pop("nll"), **mean}

    # ------------------------------------------------------------------ evaluation and comparison

    @classmethod
    @abstractmethod
    def evaluate(cls, run: TrainedModel, split: str, shards: SampleShards, options: EvaluationOptions) -> Evaluation:
        """The quality of a trained model on a split, the same for all processes that share its samples."""

    @classmethod
    @abstractmethod
    def chance_level(cls, model_config: Mapping[str, Any], samples: int) -> float:
        """The value of the main metric, as people read it, up to which a model may as well have learned nothing.

        model_config: see `data_dependent_model_config`. samples: how many were evaluated.
        """

    def floors(self, data: Any, split: str) -> list[Floor]:  # noqa: ARG002
        """What models reach on a split that are fitted by counting or linearly, scored exactly as `evaluate` scores.

        data: the recipe's section `data` that the task was opened with. A task without such models has no floors.
        """
        return []

    @classmethod
    @abstractmethod
    def random_batch(cls, model: Any, batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
        """A batch of random samples of `length` tokens for `model_loss`, to measure costs with."""

    @classmethod
    def decoding_workload(cls, run: TrainedModel, split: str) -> Callable[[], int]:
        """A function that decodes the first samples of a split and returns how many tokens it wrote."""
        raise NotImplementedError(f"models of the task {cls.name} do not write text")


# ---------------------------------------------------------------------- registry

_TASKS: dict[str, type[Task]] = {}
_loaded_plugins = False
TaskType = TypeVar("TaskType", bound=type[Task])


def register_task(task: TaskType) -> TaskType:
    """Class decorator: makes a task known under its name."""
    _TASKS[task.name] = task
    return task


def available_tasks() -> list[str]:
    """The names of all tasks, those of other packages included."""
    global _loaded_plugins
    if not _loaded_plugins:
        _loaded_plugins = True
        for plugin in entry_points(group=PLUGINS):
            plugin.load()
    return list(_TASKS)


def task_class(name: str) -> type[Task]:
    """The task of this name; an unknown one is a ValueError with the nearest known name."""
    known = available_tasks()
    if name not in known:
        raise ValueError(f"there is no task {name!r}{nearest(name, known, 'task')} Tasks: {', '.join(known)}.")
    return _TASKS[name]


# ---------------------------------------------------------------------- what several tasks use


def write_inputs(
    folder: Path,
    task: str,
    tokenizers: Mapping[str, Tokenizer],
    model_config: Mapping[str, Any],
    inputs: Mapping[str, Any],
) -> None:
    """inputs.json and tokenizers/ of a run: see `tokenizers`, `data_dependent_model_config` and `inputs` of `Task`."""
    for side, tokenizer in tokenizers.items():
        tokenizer.save(folder / TOKENIZERS / side)
    write_metadata(folder / INPUTS, {"format": INPUTS_FORMAT, "task": task, "model": dict(model_config), **inputs})


def add_perplexity(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics with the perplexity of the plain loss of targets: neither smoothing nor regularisers are in it."""
    return metrics | {"ppl": math.exp(min(700.0, metrics["loss"]))}


def load_embedded(name: str, options: Mapping[str, Any], kind: str, task: str) -> builtin.BuiltinSet:
    """An embedded data set, which must hold samples of a kind."""
    found = builtin.load(name, **options)
    if found.kind != kind:
        raise ValueError(f"the embedded set {name!r} holds {found.kind}; task {task} needs {kind}")
    return found


def check_split(split: str, known: Mapping[str, Any] | Sequence[str]) -> None:
    if split not in known:
        raise ValueError(f"the data has no split {split!r}{nearest(split, known)} It has {', '.join(known)}.")
