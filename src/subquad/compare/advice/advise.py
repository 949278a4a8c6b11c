"""Advice before training: what each mechanism would cost at a length, from when on it pays, and what to compare next.

Costs are fitted to what was measured at other lengths (`statistics.cost_models`). Nothing here was trained: quality is
known from stored comparisons alone, at their own lengths.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field

from subquad.compare.advice.studies import (
    CostStudy,
    OnStep,
    measure_layers,
    measure_recipe,
    read_stored,
    stored_costs,
)
from subquad.compare.measure.bench import BenchPlan
from subquad.compare.records import Record
from subquad.compare.report.conclusions import describe_verdict, no_learning
from subquad.compare.report.quality import differences, verdicts
from subquad.compare.report.result import Result
from subquad.compare.statistics.cost_models import LEAST_LENGTHS, CostModels, Interval
from subquad.environment import environment
from subquad.mixers import available, mixer_class
from subquad.train.recipe import Recipe, read_recipe

LENGTHS = (128, 256, 384, 512, 768, 1024, 1536, 2048)
ROUNDS = 5
WIDTH, HEADS = 256, 4
MOST_CANDIDATES = 4
FAR = 4
"""A length so many times beyond the longest measured is called far."""
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
TOKENS = 16384
NO_STUDY = (
    "Nothing is known about quality: no stored comparison was given (--results), and nothing was trained. A mechanism "
    "that is cheap here may learn less."
)


class Prediction(Record):
    """A number with the interval in which a measurement would lie in 95 of 100 cases; None is infinite."""

    value: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, found: Interval) -> Self:
        value, low, high = (number if math.isfinite(number) else None for number in found)
        return cls(value=value, low=low, high=high)


class Row(Record):
    """What is predicted of one mechanism in one study, for a training pass of one sequence. reason: why it is refused.

    speed: how many times as fast as the baseline; crossover: the length from which on it is at least as fast (0: at
    every length, None: at none). coefficients: a, b and c of a + b L + c L^2, in seconds and in bytes.
    """

    mechanism: str
    study: str
    status: Literal["done", "refused"] = "done"
    reason: str | None = None
    seconds: Prediction | None = None
    speed: Prediction | None = None
    crossover: Prediction | None = None
    bytes: Prediction | None = None
    fits: bool | None = Field(None, description="into the given memory; None: not asked, or not decided")
    coefficients: dict[str, list[float]] = Field(default_factory=dict)
    longest: int | None = Field(None, description="the longest length that was measured")
    quality: str | None = Field(None, description="what a stored comparison says")


class Advice(Record):
    """The rows of all mechanisms, and what follows from them, in sentences and as a command."""

    format: Literal["subquad-advice-1"] = "subquad-advice-1"
    length: int
    memory_bytes: int | None
    rows: list[Row]
    candidates: list[str]
    notes: list[str]
    command: str
    environment: dict[str, object]


def advise(
    length: int,
    *,
    causal: bool = False,
    memory: str | int | None = None,
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    mixers: Sequence[str] = (),
    results: Sequence[str | Path] = (),
    lengths: Sequence[int] = LENGTHS,
    rounds: int = ROUNDS,
    dim: int = WIDTH,
    heads: int = HEADS,
    on_step: OnStep = lambda *_: None,
) -> Advice:
    """Predicts what mechanisms cost at a length, before anything is trained, and says what to compare next.

    length: of a sequence, in tokens. causal: whether single layers are causal. memory: such as "16G" or a number of
    bytes, into which a training pass of one sequence should fit. recipe: measure its whole model instead of single
    layers of width `dim` with `heads` heads. mixers: names of mechanisms, by default all of linear memory. results:
    files result.json of comparisons, and study.json of studies, to read quality from; where one has costs at four
    lengths or more, costs are read as well, and nothing is measured. lengths, rounds: what is measured, and how often.
    on_step: receives how many steps are done, of how many, and what was the last.

    >>> import subquad
    >>> advice = subquad.advise(512, mixers=["lightconv"], lengths=[16, 32, 48, 64], rounds=2, dim=16, heads=2)
    >>> [row.mechanism for row in advice.rows], advice.rows[1].speed.low <= advice.rows[1].speed.high
    (['softmax', 'lightconv'], True)
    """
    limit = None if memory is None else parse_bytes(memory)
    lengths = sorted(set(lengths))
    if length < 1:
        raise ValueError(f"the length must be at least 1 (got {length})")
    stored = {file: result for path in results for file, result in read_stored(Path(path)).items()}
    studies = [found for file, result in stored.items() if (found := stored_costs(file, result)) is not None]
    if not studies and len(lengths) < LEAST_LENGTHS:
        raise ValueError(f"costs are predicted from {LEAST_LENGTHS} measured lengths or more (got {len(lengths)})")
    if causal and (recipe is not None or studies):
        raise ValueError("causal is for single layers: the model of a recipe or of a result says itself what is causal")
    name = str(recipe) if isinstance(recipe, str | Path) else "RECIPE.yaml"
    chosen = list(mixers) or [known for known in available() if mixer_class(known).capabilities.linear]
    if not studies:
        studies = [
            measure_recipe(name, read_recipe(recipe, []), chosen, lengths, rounds, on_step)
            if recipe is not None
            else measure_layers(BenchPlan(chosen, lengths, dim, heads, 1, causal, rounds), on_step)
        ]
    rows = [row for study in studies for row in _rows(study, length, limit)]
    candidates = _candidates(rows, {study.baseline for study in studies})
    return Advice(
        length=length,
        memory_bytes=limit,
        rows=rows,
        candidates=candidates,
        notes=[*_cost_notes(studies, rows, length), *_quality_notes(studies, stored)],
        command=_command(name, candidates, studies[0].baseline, length),
        environment=environment(torch.device("cpu")),
    )


def parse_bytes(text: str | int) -> int:
    """Bytes from a number with a unit of powers of 1,024.

    >>> parse_bytes("1.5K"), parse_bytes("16G") == 16 * 2**30
    (1536, True)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"memory is a number with a unit, such as 16G or 800M (got {text})")
    return int(float(found[1]) * UNITS[found[2].upper()])


# ---------------------------------------------------------------------- rows


def _rows(study: CostStudy, length: int, limit: int | None) -> list[Row]:
    rows = []
    for name in study.observations:
        if len(study.lengths(name, study.baseline)) >= LEAST_LENGTHS:
            rows.append(_row(study, name, length, limit))
        else:
            study.refused.setdefault(name, f"it was measured at fewer than {LEAST_LENGTHS} lengths")
    known = {row.mechanism for row in rows}
    refused = {name: reason for name, reason in study.refused.items() if name not in known}
    rows += [Row(mechanism=name, study=study.what, status="refused", reason=reason) for name, reason in refused.items()]
    return rows


def _row(study: CostStudy, name: str, length: int, limit: int | None) -> Row:
    models = study.fit_seconds(*dict.fromkeys([name, study.baseline]))
    sizes = study.fit_bytes(name)
    needed = _with_weights(sizes, name, length, study.fixed_bytes[name])
    row = Row(mechanism=name, study=study.what, quality=_quality(study, name), longest=study.lengths(name)[-1])
    row.seconds, row.bytes = Prediction.of(models.at(name, length)), Prediction.of(needed)
    row.coefficients = {"seconds": models.coefficients[name].tolist(), "bytes": sizes.coefficients[name].tolist()}
    if name != study.baseline:
        row.speed = Prediction.of(models.ratio_at(name, study.baseline, length))
        row.crossover = Prediction.of(models.crossover(name, study.baseline))
    if limit is not None:
        row.fits = True if needed.high <= limit else False if needed.low > limit else None
    return row


def _with_weights(sizes: CostModels, name: str, length: int, fixed: int) -> Interval:
    found = sizes.at(name, length)
    return Interval(*(number + fixed for number in found))


def _quality(study: CostStudy, name: str) -> str | None:
    """What a stored comparison says of a mechanism, and at which length it knows."""
    if study.result is None or name == study.baseline:
        return None
    found, said = differences(study.result), verdicts(study.result)
    if name not in found:
        return "not trained"
    return f"{describe_verdict(study.result, name, found[name], said[name])}{_at(study.result)}"


# ---------------------------------------------------------------------- what follows


def _candidates(rows: Sequence[Row], baselines: set[str]) -> list[str]:
    """Mechanisms worth training: they fit, and are not slower than the baseline beyond doubt; the fastest first."""
    speeds = {
        row.mechanism: row.speed.value or math.inf
        for row in rows
        if row.mechanism not in baselines
        and row.fits is not False
        and row.speed is not None
        and (row.speed.high is None or row.speed.high >= 1)
    }
    return sorted(speeds, key=lambda name: -speeds[name])[:MOST_CANDIDATES]


def _cost_notes(studies: Sequence[CostStudy], rows: Sequence[Row], length: int) -> list[str]:
    notes = [f"Costs: {study.what}." for study in studies]
    if len(studies) > 1:
        notes.append("Each result was measured on a machine of its own: compare rows of one result only.")
    if all(study.fixed_bytes[study.baseline] == 0 for study in studies):
        notes.append("Memory is that of one layer and one sequence, without weights; --recipe predicts whole models.")
    longest = max((row.longest or 0 for row in rows), default=0)
    if length > FAR * longest:
        notes.append(
            f"{length:,} tokens are far beyond the {longest:,} that were measured: measure longer (--lengths)."
        )
    return notes + [remark for study in studies for remark in study.remarks]


def _quality_notes(studies: Sequence[CostStudy], stored: Mapping[str, Result]) -> list[str]:
    """What stored results say that have no rows of their own, one sentence for each."""
    shown = [study.result for study in studies]
    others = [result for result in stored.values() if not any(result is one for one in shown)]
    return [_quality_note(result) for result in others] if stored else [NO_STUDY]


def _quality_note(result: Result) -> str:
    found, said = differences(result), verdicts(result)
    told = [f"{label} {describe_verdict(result, label, found[label], said[label])}" for label in found]
    if no_learning(result) is not None:
        told = [f"{result.baseline} is below a floor, so there is no answer"]
    return f"Quality{_at(result)} ({result.title}): {'; '.join(told) or 'nothing was compared'}."


def _at(result: Result) -> str:
    return f" at {result.task_lengths[0]:,} tokens" if result.task_lengths else ""


def _command(recipe: str, candidates: Sequence[str], baseline: str, length: int) -> str:
    """The comparison that would answer what advice cannot: quality, and the cost as measured at this length."""
    words = ["subquad", "compare", recipe, "--mixers", ",".join([baseline, *candidates]), "--baseline", baseline]
    measured = sorted({256, 1024, length})
    words += ["--lengths", ",".join(map(str, measured)), "--tokens", str(max(TOKENS, *measured))]
    return shlex.join(words)
