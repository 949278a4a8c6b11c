"""The result of an evaluation in files: NAME.json for people and programs, NAME.samples.safetensors for paired tests.

The JSON says what was measured, how, and how sure it is. The other file holds the statistics of every sample, from
which a later evaluation of another system tests whether the two differ.
"""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file, save_file

from subquad.evaluate.measure import Measure
from subquad.evaluate.significance import RESAMPLES, Comparison, confidence_interval, paired_test
from subquad.files import read_metadata, replace_synced, write_json

FORMAT = 1
WHAT = "evaluation"


@dataclass(frozen=True)
class MetricEstimate:
    """The value of a metric, and the interval from `low` to `high` of the resamples; see `Interval` and `Measure`."""

    value: float
    low: float
    high: float
    level: float
    resamples: int
    better: Literal["higher", "lower"]
    percent: bool
    decimals: int
    signature: str

    def format(self, value: float) -> str:
        """A value of this metric as people read it."""
        text = f"{100 * value if self.percent else value:.{self.decimals}f}"
        return f"{text} %" if self.percent else text


@dataclass(frozen=True)
class Differences:
    """One evaluation minus another one, which is in the file `evaluation`, metric by metric.

    not_compared: metrics that the two computed differently, such as perplexities of other tokens, with the reason.
    """

    evaluation: str
    metrics: dict[str, Comparison]
    not_compared: dict[str, str]


@dataclass(frozen=True)
class EvaluationReport:
    """The result of an evaluation, as its JSON file at `path` has it.

    samples: how many there are; lost: how many of them have no result. data: a fingerprint of the samples, and where
    they come from; settings: options that the result depends on; counts: denominators and the like. run, checkpoint and
    update say what was evaluated.
    """

    path: Path
    task: str
    split: str
    samples: int
    lost: int
    metrics: dict[str, MetricEstimate]
    data: dict[str, str]
    settings: dict[str, Any]
    counts: dict[str, int]
    run: str
    checkpoint: str
    update: int
    seconds: float
    environment: dict[str, Any]
    against: Differences | None = None

    def to_json(self) -> dict[str, Any]:
        """The content of the file."""
        content = {name: value for name, value in asdict(self).items() if value is not None and name != "path"}
        return {"format": FORMAT, **content}


@dataclass(frozen=True)
class Evaluation:
    """What a system does on a split.

    samples: how many there are; lost: how many of them have no result. data: a fingerprint of the samples, and where
    they come from; settings: options that the result depends on; counts: denominators and the like.
    """

    task: str
    split: str
    samples: int
    lost: int
    measures: dict[str, Measure]
    data: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    hypotheses: list[str] | None = None

    def estimates(self, resamples: int = RESAMPLES) -> dict[str, MetricEstimate]:
        """The value of every metric, with its interval."""
        return {
            name: MetricEstimate(
                value=measure.value,
                **asdict(confidence_interval(measure, resamples)),
                better=measure.better,
                percent=measure.percent,
                decimals=measure.decimals,
                signature=measure.signature,
            )
            for name, measure in self.measures.items()
        }

    def differences(self, other: Path, resamples: int = RESAMPLES) -> Differences:
        """How this evaluation differs from a stored one of the same samples."""
        stored = read_metadata(other, FORMAT, WHAT)
        if stored["data"]["sha256"] != self.data["sha256"] or stored["samples"] != self.samples:
            raise ValueError(
                f"{other} evaluates other samples ({stored['samples']:,} of split {stored['split']}) than these "
                f"({self.samples:,} of split {self.split}): a paired test needs the same"
            )
        statistics = load_file(samples_path(other))
        metrics, not_compared = {}, {}
        for name, measure in self.measures.items():
            signature = stored["metrics"].get(name, {}).get("signature")
            if signature != measure.signature:
                not_compared[name] = f"{measure.signature} here, {signature} there"
                continue
            theirs = Measure(statistics[name], measure.score, signature, measure.better)
            metrics[name] = paired_test(measure, theirs, resamples)
        if not metrics:
            raise ValueError(f"{other} holds no metric that was computed as here: {next(iter(not_compared.values()))}")
        return Differences(str(other), metrics, not_compared)


def write_evaluation(evaluation: Evaluation, report: EvaluationReport) -> None:
    """Writes a report to its path, and the statistics of every sample and the hypotheses beside it."""
    samples = samples_path(report.path)
    temporary = samples.with_name(f".{samples.name}.{os.getpid()}")
    statistics = {name: np.ascontiguousarray(measure.statistics) for name, measure in evaluation.measures.items()}
    save_file(statistics, temporary)
    replace_synced(temporary, samples)
    if evaluation.hypotheses is not None:
        lines = [text.replace("\n", " ") + "\n" for text in evaluation.hypotheses]  # one for each sample
        report.path.with_suffix(".hyp.txt").write_text("".join(lines), encoding="utf-8")
    write_json(report.path, report.to_json())


def samples_path(path: Path) -> Path:
    return path.with_suffix(".samples.safetensors")


def find_evaluation(run: Path, split: str) -> Path:
    """The result file of a run's split, or the file itself if that is what is given."""
    path = run if run.is_file() else run / f"{WHAT}-{split}.json"
    if not run.exists():
        raise ValueError(f"there is no run {run} to compare with; check its path")
    if not path.is_file():
        raise ValueError(f"{run} has not been evaluated on {split}: `subquad evaluate {run} --split {split}` does it")
    return path


def read_task(path: Path) -> str:
    """The task whose model was evaluated."""
    return read_metadata(path, FORMAT, WHAT, ["task"])["task"]
