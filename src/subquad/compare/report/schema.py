"""What a comparison has measured: one JSON file that holds every number together with the config it was measured under.

The parts are lists that grow while the comparison runs: what is not there yet, or failed, is said so and not left out.

    trials           one training of one mechanism with one seed: scores, learning curve, cost
    paired          the difference of two trials of the same seed on the same samples
    lengths         time, memory and FLOPs at one sequence length
    approximation   distance from exact softmax attention
    epochs          time and memory of one epoch
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from subquad.files import read_metadata, write_json

FORMAT = "subquad-comparison-1"

Part = Literal["encoder", "full"]
"""encoder: the mixing stack without decoder and vocabulary; full: the whole model."""


class Record(BaseModel):
    """Base of every part: unknown keys and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


class Metric(Record):
    """The number that quality is judged by."""

    name: str
    better: Literal["higher", "lower"]
    unit: str = ""
    digits: int = Field(2, ge=0, description="decimal places that are shown")
    floor: float | None = Field(None, description="a score that is no better than this shows no learning")


class Mechanism(Record):
    """One column of the comparison. Everything else refers to it by its label."""

    label: str = Field(description="unique, for people: the mechanism's name, with options where they differ")
    mixer: str
    options: dict[str, Any] = Field(default_factory=dict)


class Score(Record):
    """A metric of one run, with the interval that resampling its samples gave."""

    value: float
    low: float | None = None
    high: float | None = None
    samples: int | None = None
    signature: str | None = Field(None, description="how it was computed, such as the signature of sacrebleu")


class CurvePoint(Record):
    """A validation. seconds: training time until then; value: the result's metric, where validation computes it."""

    update: int = Field(ge=0)
    seconds: float | None = Field(None, ge=0)
    loss: float | None = None
    value: float | None = None


class Trial(Record):
    """One run. missing: not trained yet; failed: with the reason."""

    mechanism: str
    seed: int
    status: Literal["done", "failed", "missing"] = "missing"
    reason: str | None = None
    run: str | None = Field(None, description="the run's folder, relative to the result")
    parameters: int | None = Field(None, ge=0)
    scores: dict[str, Score] = Field(default_factory=dict)
    per_sample: str | None = Field(None, description="file with the scores of all samples, relative to the result")
    curve: list[CurvePoint] = Field(default_factory=list)
    training_seconds: float | None = Field(None, gt=0)
    tokens_per_second: float | None = Field(None, gt=0, description="of training")
    peak_bytes: int | None = Field(None, gt=0, description="of training")
    decoded_per_second: float | None = Field(None, gt=0, description="tokens decoded a second")
    data_order: str | None = Field(None, description="checksum of the batches in the order they were seen")
    setting: dict[str, Any] = Field(default_factory=dict, description="what the times depend on: batch, threads, ...")
    config: dict[str, Any] = Field(default_factory=dict, description="the mixers of the trained model")

    @model_validator(mode="after")
    def _failures_have_a_reason(self) -> Self:
        assert self.status != "failed" or self.reason, "a failed trial needs a reason"
        return self


class Paired(Record):
    """Metric of a trial minus that of the baseline with the same seed, on the same samples."""

    mechanism: str
    seed: int
    difference: float
    low: float
    high: float
    p_value: float = Field(ge=0, le=1)
    samples: int
    method: str = "paired bootstrap"


class Timing(Record):
    """Milliseconds of one pass: the median of the repeats, and their quartiles."""

    median: float = Field(gt=0)
    low: float = Field(gt=0)
    high: float = Field(gt=0)
    repeats: int = Field(ge=1)

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """From the repeats of a measurement. Fewer than three have no quartiles: their range is taken."""
        ms = sorted(1000 * value for value in seconds)
        low, high = (ms[0], ms[-1]) if len(ms) < 3 else statistics.quantiles(ms, n=4, method="inclusive")[::2]
        return cls(median=statistics.median(ms), low=low, high=high, repeats=len(ms))


class LengthPoint(Record):
    """One mechanism at one length. refused: the mechanism does not take this length or form."""

    mechanism: str
    part: Part
    length: int = Field(ge=1)
    batch: int = Field(ge=1, description="sequences at once; batch * length is the token budget")
    status: Literal["done", "failed", "refused"] = "done"
    reason: str | None = None
    training: Timing | None = None
    inference: Timing | None = None
    training_bytes: int | None = Field(None, gt=0, description="peak of a training pass")
    inference_bytes: int | None = Field(None, gt=0, description="peak of a forward pass")
    flops: int | None = Field(None, gt=0, description="of a forward pass")
    parameters: int | None = Field(None, ge=0)
    setting: dict[str, Any] = Field(default_factory=dict, description="what the numbers depend on: device, dtype, ...")
    config: dict[str, Any] = Field(default_factory=dict, description="the mixers of the measured model")


class ApproximationPoint(Record):
    """Relative L2 distance from exact softmax attention on the same queries, keys and values."""

    mechanism: str
    option: str = Field("", description="what is varied along the curve, such as `samples=64`")
    error: float = Field(ge=0)
    cost: float = Field(gt=0, description="time relative to exact attention")
    source: Literal["random", "trained"]
    length: int = Field(ge=1)
    setting: dict[str, Any] = Field(default_factory=dict)


class EpochCost(Record):
    """One epoch of training on the recipe's data."""

    mechanism: str
    seconds: float = Field(gt=0)
    peak_bytes: int | None = Field(None, gt=0)
    updates: int = Field(ge=1)
    setting: dict[str, Any] = Field(default_factory=dict)


class Result(Record):
    """A comparison, finished or under way."""

    format: Literal["subquad-comparison-1"] = "subquad-comparison-1"
    title: str
    created: str = Field("", description="date and time, ISO 8601")
    command: str = Field("", description="what made this result")
    task: str
    metric: Metric
    baseline: str
    mechanisms: list[Mechanism]
    recipe: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list, description="sentences on what limits the result, for the page")
    focus_length: int | None = Field(None, description="the length at which costs are stated; null: the longest")
    trials: list[Trial] = Field(default_factory=list)
    paired: list[Paired] = Field(default_factory=list)
    lengths: list[LengthPoint] = Field(default_factory=list)
    approximation: list[ApproximationPoint] = Field(default_factory=list)
    epochs: list[EpochCost] = Field(default_factory=list)

    @model_validator(mode="after")
    def _labels_are_known(self) -> Self:
        labels = self.labels
        assert len(set(labels)) == len(labels), "labels must differ"
        for found in (self.trials, self.paired):
            keys = [(item.mechanism, item.seed) for item in found]
            assert len(set(keys)) == len(keys), "a mechanism has one trial and one pair for each seed"
        parts = (self.trials, self.paired, self.lengths, self.approximation, self.epochs)
        used = {self.baseline, *(item.mechanism for part in parts for item in part)}
        assert used <= set(labels), f"no mechanism is labelled {', '.join(sorted(used - set(labels)))}"
        return self

    @property
    def labels(self) -> list[str]:
        return [mechanism.label for mechanism in self.mechanisms]

    def trials_of(self, label: str, status: str = "done") -> list[Trial]:
        return [trial for trial in self.trials if trial.mechanism == label and trial.status == status]

    def lengths_of(self, label: str, part: Part) -> dict[int, LengthPoint]:
        """By length, in ascending order."""
        points = [point for point in self.lengths if point.mechanism == label and point.part == part]
        return {point.length: point for point in sorted(points, key=lambda point: point.length)}


def write_result(result: Result, path: Path) -> None:
    """Checks the result as a whole, then replaces the file."""
    whole = Result.model_validate(result.model_dump())  # parts appended to its lists were not compared with the labels
    write_json(path, whole.model_dump(mode="json"))


def read_result(path: Path) -> Result:
    content = read_metadata(path, FORMAT, "comparison")
    try:
        return Result.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path} is damaged: {place or 'result'}: {first['msg']}") from None
