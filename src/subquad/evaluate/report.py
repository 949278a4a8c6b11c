"""The files of an evaluation: NAME.json with its result, and NAME.samples.safetensors for paired tests.

The JSON file says what was measured and how, with confidence intervals. The other file has the statistics of every
sample. With it a later evaluation of another system can test whether the two differ.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file, save_file

from subquad.evaluate.by_position import PositionLoss
from subquad.evaluate.measure import Measure
from subquad.evaluate.significance import RESAMPLES, Comparison, confidence_interval, paired_test
from subquad.files import read_metadata, write_files

FORMAT = 1
WHAT = "evaluation"


@dataclass(frozen=True)
class MetricEstimate:
    """The value of a metric and its confidence interval from `low` to `high`; see `Interval` and `Measure`."""

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
        """Writes a value of this metric for people."""
        text = f"{100 * value if self.percent else value:.{self.decimals}f}"
        return f"{text} %" if self.percent else text


@dataclass(frozen=True)
class Differences:
    """The differences between an evaluation and the one in the file `evaluation`, which is subtracted.

    not_compared: metrics that the two computed differently, such as perplexities of different tokens, with the reason.
    """

    evaluation: str
    metrics: dict[str, Comparison]
    not_compared: dict[str, str]


@dataclass(frozen=True)
class EvaluationReport:
    """The content of the JSON file of an evaluation. path: that of the file.

    run, checkpoint and update say what was evaluated. For the other fields see `Evaluation`.
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
    loss_by_position: list[PositionLoss] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the file."""
        content = {name: value for name, value in asdict(self).items() if value is not None and name != "path"}
        return {"format": FORMAT, **content}


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a system on a split.

    samples: their number. lost: the number of samples without a result. data: a fingerprint and the origin of the
    samples. settings: options that the result depends on. counts: numbers of tokens and the like. loss_by_position: of
    a language model, see `by_position.py`.
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
    loss_by_position: list[PositionLoss] | None = None

    def estimates(self, resamples: int = RESAMPLES) -> dict[str, MetricEstimate]:
        """Returns the value of every metric with its confidence interval."""
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
        """Compares this evaluation with a stored one of the same samples."""
        stored = read_metadata(other, FORMAT, WHAT)
        if stored["data"]["sha256"] != self.data["sha256"] or stored["samples"] != self.samples:
            raise ValueError(
                f"{other} evaluates other samples ({stored['samples']:,} of split {stored['split']}) than these "
                f"({self.samples:,} of split {self.split}); a paired test needs the same samples"
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
            raise ValueError(f"{other} has no metric that was computed as here: {next(iter(not_compared.values()))}")
        return Differences(str(other), metrics, not_compared)


def write_evaluation(evaluation: Evaluation, report: EvaluationReport) -> None:
    """Writes a report to its path, and beside it the statistics of every sample and the hypotheses."""
    statistics = {name: np.ascontiguousarray(measure.statistics) for name, measure in evaluation.measures.items()}
    files: dict[Path, Callable[[Path], object]] = {samples_path(report.path): partial(save_file, statistics)}
    if evaluation.hypotheses is not None:
        lines = [text.replace("\n", " ") + "\n" for text in evaluation.hypotheses]  # one for each sample
        files[report.path.with_suffix(".hyp.txt")] = partial(Path.write_text, data="".join(lines), encoding="utf-8")
    text = json.dumps(report.to_json(), indent=2) + "\n"
    write_files({**files, report.path: partial(Path.write_text, data=text, encoding="utf-8")})


def samples_path(path: Path) -> Path:
    return path.with_suffix(".samples.safetensors")


def evaluation_path(run: Path, split: str, context_window: int = 0, first: int | None = None) -> Path:
    """Returns where an evaluation is kept: each window, and each number of samples, has a file of its own."""
    window = f"-context-{context_window}" if context_window else ""
    return run / f"{WHAT}-{split}{window}{'' if first is None else f'-first-{first}'}.json"


def find_evaluation(run: Path, split: str, context_window: int = 0, first: int | None = None) -> Path:
    """Returns the path of the evaluation of a run on a split. run: a run directory, or the file itself."""
    path = run if run.is_file() else evaluation_path(run, split, context_window, first)
    if not run.exists():
        raise ValueError(f"there is no run {run} to compare with; check its path")
    if not path.is_file():
        words = f" --context-window {context_window}" if context_window else ""
        words += "" if first is None else f" --first {first}"
        command = f"subquad evaluate {run} --split {split}{words}"
        raise ValueError(f"{run} has not been evaluated on {split}{words}; run `{command}` first")
    return path


def read_task(path: Path) -> str:
    """Reads the task of an evaluation from its file."""
    return read_metadata(path, FORMAT, WHAT, ["task"])["task"]
