"""What trials and measurements record: validated data that is stored in JSON files and becomes part of the result."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Record(BaseModel):
    """Base of all records: unknown keys and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


# ---------------------------------------------------------------------- tuning


class TuningTrial(Record):
    """One training of a search. stopped: it was among the worse ones at a validation; failed: with the reason."""

    settings: dict[str, Any] = Field(description="what was tried, by the names of options")
    status: Literal["done", "stopped", "failed"]
    value: float | None = Field(None, description="the best validation")
    updates: int = Field(0, ge=0)
    reason: str | None = None


class Tuning(Record):
    """The search for the settings of one mechanism."""

    mechanism: str
    metric: str = Field(description="of the validations")
    better: Literal["higher", "lower"]
    trials: list[TuningTrial]
    chosen: dict[str, Any] = Field(description="the settings of the best trial; none if no trial came to its end")
    edges: list[str] = Field(default_factory=list, description="settings whose best value is the last that was tried")


# ---------------------------------------------------------------------- trials


class Score(Record):
    """A metric of one run, with the interval that resampling its samples gave."""

    value: float
    low: float | None = None
    high: float | None = None
    samples: int | None = None
    signature: str | None = Field(None, description="how it was computed, such as the signature of sacrebleu")


class PositionLoss(Record):
    """The mean loss of a language model, in nats, for tokens at the positions `first` to `last` of their blocks."""

    first: int = Field(ge=0)
    last: int = Field(ge=0)
    loss: float
    tokens: int = Field(ge=1)


class CurvePoint(Record):
    """A validation. seconds: training time until then; value: the result's metric, where validation computes it."""

    update: int = Field(ge=0)
    seconds: float | None = Field(None, ge=0)
    loss: float | None = None
    value: float | None = None


class EpochCost(Record):
    """What one epoch of training on the recipe's data costs."""

    mechanism: str
    seconds: float = Field(gt=0)
    peak_bytes: int | None = Field(None, gt=0)
    updates: int = Field(ge=1)
    setting: dict[str, Any] = Field(default_factory=dict)


class Trial(Record):
    """The training of one mechanism with one seed. missing: it has not ended yet; failed: with the reason."""

    mechanism: str
    seed: int
    status: Literal["done", "failed", "missing"] = "missing"
    reason: str | None = None
    run: str | None = Field(None, description="the run's folder, relative to the result")
    parameters: int | None = Field(None, ge=0)
    scores: dict[str, Score] = Field(default_factory=dict)
    per_sample: str | None = Field(None, description="file with the scores of all samples, relative to the result")
    loss_by_position: list[PositionLoss] = Field(default_factory=list, description="of a language model, on the split")
    curve: list[CurvePoint] = Field(default_factory=list)
    training_seconds: float | None = Field(None, gt=0)
    training_spans: list[tuple[float, float]] = Field(
        default_factory=list, description="begin and end of the training's processes, in seconds of the machine's clock"
    )
    tokens_per_second: float | None = Field(None, gt=0, description="of training")
    peak_bytes: int | None = Field(None, gt=0, description="of training")
    data_order: str | None = Field(None, description="checksum of the batches in the order they were seen")
    setting: dict[str, Any] = Field(default_factory=dict, description="what the times depend on: batch, threads, ...")
    config: dict[str, Any] = Field(default_factory=dict, description="the mixers of the trained model")

    @model_validator(mode="after")
    def _failures_have_a_reason(self) -> Self:
        assert self.status != "failed" or self.reason, "a failed trial needs a reason"
        return self


class SampleCovariance(Record):
    """The covariance of the scores of trials over the choice of test samples, (trials, trials).

    trials: mechanism and seed of each, all of them evaluated on the same samples. samples: how many independent ones
    there are; in running text these are documents.
    """

    trials: list[tuple[str, int]]
    values: list[list[float]]
    samples: int = Field(ge=1)


# ---------------------------------------------------------------------- measurements


class Point(Record):
    """Base of what measurements record of one mechanism. refused: the mechanism cannot do it; failed: it went wrong."""

    mechanism: str
    status: Literal["done", "failed", "refused"] = "done"
    reason: str | None = None
