"""The result of an evaluation in files: NAME.json for people and programs, NAME.samples.safetensors for paired tests.

The JSON says what was measured, how, and how sure it is. The other file holds the statistics of every sample, from
which a later evaluation of another system tests whether the two differ.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from subquad.evaluate.measure import Measure
from subquad.evaluate.significance import RESAMPLES, interval, paired
from subquad.files import read_metadata, replace_synced, write_json

FORMAT = 1
WHAT = "evaluation"


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

    def summary(self, resamples: int = RESAMPLES) -> dict[str, Any]:
        """Plain data, with an interval for every metric."""
        metrics = {}
        for name, measure in self.measures.items():
            sure = asdict(interval(measure, resamples))
            how = {name: getattr(measure, name) for name in ("better", "percent", "decimals", "signature")}
            metrics[name] = {"value": measure.value, **sure, **how}
        return {
            "format": FORMAT,
            "task": self.task,
            "split": self.split,
            "samples": self.samples,
            "lost": self.lost,
            "metrics": metrics,
            "data": self.data,
            "settings": self.settings,
            "counts": self.counts,
        }

    def against(self, other: Path, resamples: int = RESAMPLES) -> dict[str, Any]:
        """Differences to a stored evaluation of the same samples, by metric: this one minus the other.

        Metrics that the two computed differently, such as perplexities of other tokens, are named under `not_compared`.
        """
        stored = read_metadata(other, FORMAT, WHAT)
        if stored["data"]["sha256"] != self.data["sha256"] or stored["samples"] != self.samples:
            raise ValueError(
                f"{other} evaluates other samples ({stored['samples']:,} of split {stored['split']}) than these "
                f"({self.samples:,} of split {self.split}): a paired test needs the same"
            )
        statistics = load_file(samples_path(other))
        differences, apart = {}, {}
        for name, measure in self.measures.items():
            signature = stored["metrics"].get(name, {}).get("signature")
            if signature != measure.signature:
                apart[name] = f"{measure.signature} here, {signature} there"
                continue
            theirs = Measure(statistics[name], measure.score, signature, measure.better)
            differences[name] = asdict(paired(measure, theirs, resamples))
        if not differences:
            raise ValueError(f"{other} holds no metric that was computed as here: {next(iter(apart.values()))}")
        return {"evaluation": str(other), "metrics": differences, "not_compared": apart}


def write_evaluation(path: Path, evaluation: Evaluation, content: Mapping[str, Any]) -> None:
    """Writes `content` to `path`, and the samples' statistics and the hypotheses beside it."""
    samples = samples_path(path)
    temporary = samples.with_name(f".{samples.name}.{os.getpid()}")
    statistics = {name: np.ascontiguousarray(measure.statistics) for name, measure in evaluation.measures.items()}
    save_file(statistics, temporary)
    replace_synced(temporary, samples)
    if evaluation.hypotheses is not None:
        lines = [text.replace("\n", " ") + "\n" for text in evaluation.hypotheses]  # one for each sample
        path.with_suffix(".hyp.txt").write_text("".join(lines), encoding="utf-8")
    write_json(path, content)


def samples_path(path: Path) -> Path:
    return path.with_suffix(".samples.safetensors")


def stored_evaluation(run: Path, split: str) -> Path:
    """The result file of a run's split, or the file itself if that is what is given."""
    path = run if run.is_file() else run / f"{WHAT}-{split}.json"
    if not run.exists():
        raise ValueError(f"there is no run {run} to compare with; check its path")
    if not path.is_file():
        raise ValueError(f"{run} has not been evaluated on {split}: `subquad evaluate {run} --split {split}` does it")
    return path
