"""The result of a study: quality and cost of every mechanism by recipe and length, and a map of decisions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from subquad.compare.measure.lengths import LengthPoint
from subquad.compare.records import Record
from subquad.compare.report.conclusions import no_learning
from subquad.compare.report.decision import CRITERIA, decide
from subquad.compare.report.formatting import NOTHING, format_bytes, format_metric, format_number, format_ratio
from subquad.compare.report.html import study_page
from subquad.compare.report.learning import learned_nothing
from subquad.compare.report.quality import quality, verdicts
from subquad.compare.report.result import Result, read_result
from subquad.compare.report.section import Table
from subquad.compare.report.speed import ratios_at, shown_part, task_length
from subquad.files import read_metadata, write_json, write_text

FORMAT = "subquad-study-1"
FILE, PAGE = "study.json", "study.html"
UNDECIDED = ""
"""What stands in the map of decisions where nothing is decided: it stays white."""


class StudyPart(Record):
    """One comparison of a study: a recipe at a length. folder: relative to the study's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str
    length: int | None = Field(None, description="of the samples; none: the recipe's own")
    folder: str

    @property
    def title(self) -> str:
        return self.recipe if self.length is None else f"{self.recipe}, {format_number(self.length)} tokens"


class StudyResult(Record):
    """What a study consists of."""

    format: Literal["subquad-study-1"] = "subquad-study-1"
    title: str
    created: str = ""
    command: str = ""
    parts: list[StudyPart]

    def results(self, out: Path) -> dict[StudyPart, Result]:
        """The results of the comparisons that have one."""
        paths = {part: out / part.folder / "result.json" for part in self.parts}
        return {part: read_result(path) for part, path in paths.items() if path.exists()}


def read_study(out: Path) -> StudyResult:
    """The study in a folder."""
    return StudyResult.model_validate(read_metadata(out / FILE, FORMAT, "study"))


def write_parts(out: Path, parts: Iterable[StudyPart]) -> None:
    """Writes study.json of a study that begins, or adds parts to that of one that is there: recipe by recipe."""
    before = read_study(out).parts if (out / FILE).exists() else []
    known = list(dict.fromkeys([*before, *parts]))
    recipes = list(dict.fromkeys(part.recipe for part in known))
    known.sort(key=lambda part: (recipes.index(part.recipe), part.length or 0))
    write_json(out / FILE, StudyResult(title=out.name, parts=known).model_dump(mode="json"))


def write_study(study: StudyResult, out: Path) -> None:
    """Writes study.json, and study.html with the tables of its results."""
    write_json(out / FILE, study.model_dump(mode="json"))
    results = study.results(out)
    footer = f"Made by subquad, {study.created}. {study.command}"
    links = {part.title: f"{part.folder}/report.html" for part in results}
    write_text(out / PAGE, study_page(study.title, footer, study_tables(results), decision_map(results), links))


def study_tables(results: Mapping[StudyPart, Result]) -> dict[str, Table]:
    """The tables of a study by their titles: mechanisms by comparisons."""
    return {
        "Quality": _table(results, _quality_cell),
        "Speed of training, as a multiple of the baseline's": _table(results, _speed_cell),
        "Peak memory of a training pass": _table(results, _memory_cell),
    }


def decision_map(results: Mapping[StudyPart, Result]) -> Table:
    """For each comparison the cheapest mechanism of sound quality, by time and by memory; undecided cells are empty."""
    rows = [
        [part.title, *(decide(result, criterion) or UNDECIDED for criterion in CRITERIA), _why(result)]
        for part, result in results.items()
    ]
    return Table(["task", *(f"least {name}" for name in CRITERIA), "remark"], rows, [], ["done"] * len(rows))


def _why(result: Result) -> str:
    if no_learning(result) is not None:
        return f"{result.baseline} is below a floor: no answer yet"
    undecided = [label for label, said in verdicts(result).items() if said == "undecided"]
    return f"quality undecided: {', '.join(undecided)}" if undecided else NOTHING


def _table(results: Mapping[StudyPart, Result], cell: Callable[[Result, str], str]) -> Table:
    """The longer of the two, mechanisms and comparisons, is written downwards: a family of tasks has many columns."""
    labels = list(dict.fromkeys(label for result in results.values() for label in result.labels))
    if len(results) > len(labels):
        headers = ["task", *labels]
        rows = [[part.title, *(cell(result, label) for label in labels)] for part, result in results.items()]
    else:
        headers = ["mechanism", *(part.title for part in results)]
        rows = [[label, *(cell(result, label) for result in results.values())] for label in labels]
    return Table(headers, rows, list(range(1, len(headers))), ["done"] * len(rows))


def _quality_cell(result: Result, label: str) -> str:
    found = quality(result, label)
    if found is None:
        return "failed" if result.trials_of(label, "failed") else NOTHING
    shown = format_metric(result.metric, found.mean)
    if learned_nothing(result, label) is not None:
        return f"{shown} (nothing learned)"
    said = verdicts(result).get(label)
    return shown if said is None else f"{shown} ({said})"


def _speed_cell(result: Result, label: str) -> str:
    length = task_length(result)
    ratio = None if length is None else ratios_at(result, shown_part(result), length, "training").get(label)
    if ratio is None:
        return "1" if label == result.baseline and length is not None else NOTHING
    return format_ratio(ratio.ratio) + ("" if ratio.is_decided else " (undecided)")


def _memory_cell(result: Result, label: str) -> str:
    length, part = task_length(result), shown_part(result)
    point: LengthPoint | None = None if length is None else result.lengths_of(label, part).get(length)
    return NOTHING if point is None or point.training_bytes is None else format_bytes(point.training_bytes)


def study_text(results: Mapping[StudyPart, Result]) -> Sequence[tuple[str, Table]]:
    """What a terminal shows: all tables with their titles."""
    return [*study_tables(results).items(), ("What to take", decision_map(results))]
