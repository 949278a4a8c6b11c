"""The result of a comparison: one JSON file that holds every number together with the config it was measured under.

The parts are lists that grow while the comparison runs: what is not there yet, or failed, is said so and not left out.

    floors          what simple models reach on the same data
    tuning          the search for the settings of each mechanism
    trials          one training of one mechanism with one seed: scores, learning curve, cost
    covariance      how the scores of trials vary together over the choice of test samples
    epochs          time and memory of one epoch of training
    measurements    what was measured on the machine, by the name of the measurement: lengths, decoding, swap
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from subquad.compare import measure
from subquad.compare.measure.lengths import LengthPoint, Part
from subquad.compare.records import EpochCost, Point, Record, SampleCovariance, Trial, Tuning
from subquad.files import read_metadata, write_json
from subquad.tasks.base import Floor

if TYPE_CHECKING:
    from subquad.compare.report.conclusions import Finding
    from subquad.compare.report.section import Table

FORMAT = "subquad-comparison-1"
AnyPoint = TypeVar("AnyPoint", bound=Point)


class Metric(Record):
    """The number that quality is judged by."""

    name: str
    better: Literal["higher", "lower"]
    unit: str = ""
    digits: int = Field(2, ge=0, description="decimal places that are shown")
    chance_level: float | None = Field(None, description="a score that is no better than this shows no learning")
    margin: float = Field(0, ge=0, description="a smaller difference makes no practical difference")
    relative_margin: bool = Field(False, description="whether the margin is a share of the baseline's value")


class Mechanism(Record):
    """One of the mechanisms that are compared. Everything else refers to it by its label."""

    label: str = Field(description="unique, for people: the mechanism's name, with options where they differ")
    mixer: str
    options: dict[str, Any] = Field(default_factory=dict)
    floor: bool = Field(False, description="it mixes nothing: the others are compared with it, and it is none of them")


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
    task_lengths: list[int] = Field(
        default_factory=list, description="median and 95th percentile of the task's samples, in tokens"
    )
    floors: list[Floor] = Field(default_factory=list, description="simple models of the data, to compare with")
    tuning: list[Tuning] = Field(default_factory=list)
    trials: list[Trial] = Field(default_factory=list)
    covariance: SampleCovariance | None = None
    epochs: list[EpochCost] = Field(default_factory=list)
    measurements: dict[str, list[SerializeAsAny[Point]]] = Field(default_factory=dict)

    @field_validator("measurements", mode="before")
    @classmethod
    def _points_of_measurements(cls, measurements: Any) -> Any:
        """Reads every point as what its measurement records."""
        if not isinstance(measurements, dict):
            return measurements
        kinds = {one.name: one.point for one in measure.MEASUREMENTS}
        for name in measurements:
            assert name in kinds, f"there is no measurement {name!r}; there are {', '.join(kinds)}"
        return {
            name: [point if isinstance(point, Point) else kinds[name].model_validate(point) for point in points]
            for name, points in measurements.items()
        }

    @model_validator(mode="after")
    def _labels_are_known(self) -> Self:
        labels = self.labels
        assert len(set(labels)) == len(labels), "labels must differ"
        keys = [(trial.mechanism, trial.seed) for trial in self.trials]
        assert len(set(keys)) == len(keys), "a mechanism has one trial for each seed"
        used = {
            self.baseline,
            *(search.mechanism for search in self.tuning),
            *(trial.mechanism for trial in self.trials),
            *(cost.mechanism for cost in self.epochs),
        }
        if self.covariance is not None:
            used |= {label for label, _ in self.covariance.trials}
            shape = {len(self.covariance.values), *map(len, self.covariance.values)}
            assert shape == {len(self.covariance.trials)}, "a covariance has a row and a column for each of its trials"
        used |= {point.mechanism for points in self.measurements.values() for point in points}
        assert used <= set(labels), f"no mechanism is labelled {', '.join(sorted(used - set(labels)))}"
        return self

    # ------------------------------------------------------------------ parts

    @property
    def labels(self) -> list[str]:
        return [mechanism.label for mechanism in self.mechanisms]

    @property
    def competitors(self) -> list[str]:
        """The labels of the mechanisms, without those of trained floors."""
        return [mechanism.label for mechanism in self.mechanisms if not mechanism.floor]

    def trials_of(self, label: str, status: str = "done") -> list[Trial]:
        return [trial for trial in self.trials if trial.mechanism == label and trial.status == status]

    def points(self, kind: type[AnyPoint]) -> list[AnyPoint]:
        """Everything that one measurement has recorded, such as `points(LengthPoint)`."""
        return cast(list[AnyPoint], self.measurements.get(_measurement_of(kind), []))

    def add_points(self, points: Iterable[Point]) -> None:
        for point in points:
            self.measurements.setdefault(_measurement_of(type(point)), []).append(point)

    def lengths_of(self, label: str, part: Part) -> dict[int, LengthPoint]:
        """The costs of a mechanism by length, in ascending order."""
        points = [
            point
            for point in self.points(LengthPoint)
            if (point.mechanism, point.part, point.control) == (label, part, False)
        ]
        return {point.length: point for point in sorted(points, key=lambda point: point.length)}

    # ------------------------------------------------------------------ reports

    @property
    def conclusions(self) -> list["Finding"]:
        """What the numbers show, in sentences; the first is the headline."""
        from subquad.compare.report.conclusions import conclude

        return conclude(self)

    def table(self, section: str = "mechanisms") -> "Table":
        """The rows of a section of the page; by default that with one row for each mechanism."""
        from subquad.compare.report.sections import section_table

        return section_table(self, section)

    def to_html(self, path: str | Path) -> None:
        """Writes the page: one file that opens offline."""
        from subquad.compare.report.html import write_page

        write_page(self, Path(path))

    def to_json(self, path: str | Path) -> None:
        """Checks the result as a whole, and writes it; `read_result` reads it."""
        whole = Result.model_validate(self.model_dump())  # what was appended to its lists was not checked yet
        write_json(Path(path), whole.model_dump(mode="json"))


def _measurement_of(kind: type[Point]) -> str:
    return next(one.name for one in measure.MEASUREMENTS if one.point is kind)


def read_result(path: Path) -> Result:
    """The result in a JSON file."""
    content = read_metadata(path, FORMAT, "comparison")
    try:
        return Result.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path} is damaged: {place or 'result'}: {first['msg']}") from None
