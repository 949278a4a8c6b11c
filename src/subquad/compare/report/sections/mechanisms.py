"""The table with one row for each mechanism, which the terminal shows as well.

Quality and speed stand side by side at one length only, that of the task's own samples.
"""

from subquad.compare.measure.lengths import PART_TITLES
from subquad.compare.report.conclusions import describe_verdict
from subquad.compare.report.fairness import parameters, same_data_order, trial_mean, why_times_differ
from subquad.compare.report.formatting import (
    NOTHING,
    format_bytes,
    format_count,
    format_crossover,
    format_estimate,
    format_metric,
    format_number,
    format_speed,
)
from subquad.compare.report.quality import differences, quality, verdicts
from subquad.compare.report.result import Result
from subquad.compare.report.section import Content, Section, Table
from subquad.compare.report.speed import crossover, decoding_speed, ratios_at, shown_part, task_length


def content(result: Result) -> Content:
    return Content(mechanisms_table(result), note=_note(result))


def mechanisms_table(result: Result) -> Table:
    """Columns that nobody has a number for are left out. Floors come last."""
    metric, length = result.metric, task_length(result)
    speeds = {} if length is None else ratios_at(result, shown_part(result), length, "training")
    found, said = differences(result), verdicts(result)
    headers = ["mechanism", f"{metric.name} (95% interval)", f"against {result.baseline}"]
    headers += [f"training speed at {format_number(length or 0)} tokens", "parameters", "training time", "peak memory"]
    headers += ["decoded tokens/s", "faster from", "runs"]
    rows = []
    for label in _order(result):
        count, peak = parameters(result, label), trial_mean(result, label, "peak_bytes")
        seconds = trial_mean(result, label, "training_seconds") if why_times_differ(result) is None else None
        rows.append(
            [
                label,
                format_estimate(metric, quality(result, label)),
                describe_verdict(result, label, found[label], said[label]) if label in found else NOTHING,
                format_speed(speeds.get(label)),
                NOTHING if count is None else format_count(count),
                NOTHING if seconds is None else f"{_number(seconds)} s",
                NOTHING if peak is None else format_bytes(peak),
                _number(decoding_speed(result, label)),
                NOTHING if label == result.baseline else _faster_from(result, label),
                _runs(result, label),
            ]
        )
    rows += [
        [floor.name, format_metric(metric, floor.value)] + [NOTHING] * (len(headers) - 2) for floor in result.floors
    ]
    last = len(headers) - 1
    known = [i for i in range(len(headers)) if i in (0, last) or any(row[i] != NOTHING for row in rows)]
    states = [_state(result, label) for label in _order(result)] + ["floor"] * len(result.floors)
    numeric = [place for place, i in enumerate(known) if i not in (0, 2, last)]
    return Table([headers[i] for i in known], [[row[i] for i in known] for row in rows], numeric, states)


def _order(result: Result) -> list[str]:
    return [*result.competitors, *(label for label in result.labels if label not in result.competitors)]


def _faster_from(result: Result, label: str) -> str:
    return format_crossover(crossover(result, label, shown_part(result), "training"))


def _number(value: float | None) -> str:
    return NOTHING if value is None else format_number(value, 0 if value >= 100 else 1)


def _state(result: Result, label: str) -> str:
    """ "failed" if a trial failed, "missing" if one is, otherwise "done"; "floor" for a model that mixes nothing."""
    states = {trial.status for trial in result.trials if trial.mechanism == label}
    kind = "done" if label in result.competitors else "floor"
    return next((state for state in ("failed", "missing") if state in states), kind)


def _runs(result: Result, label: str) -> str:
    """ "3 done", or "2 done, 1 failed"."""
    states = [trial.status for trial in result.trials if trial.mechanism == label]
    counts = [f"{states.count(status)} {status}" for status in ("done", "failed", "missing") if status in states]
    return ", ".join(counts) or NOTHING


def _note(result: Result) -> str:
    estimates = [estimate for label in result.competitors if (estimate := quality(result, label))]
    others = [label for label in result.competitors if label != result.baseline]
    texts = []
    if any(not estimate.single_seed for estimate in estimates):
        texts.append(
            "Intervals of the mean are for other seeds and other test samples. Verdicts rest on differences within "
            f"seeds, with intervals that hold for all {len(others)} comparisons at once (Dunnett)."
        )
    elif estimates:
        texts.append("With one seed, intervals are those of its run on other test samples, and there is no verdict.")
    if result.floors:
        texts.append("Below the mechanisms: " + " ".join(f"{floor.name}: {floor.how}" for floor in result.floors))
    if same_data_order(result):
        texts.append("All runs of a seed saw the same batches in the same order.")
    if task_length(result) is not None:
        part = PART_TITLES[shown_part(result)]
        texts.append(
            f"Speed: how many times as fast as {result.baseline} a training pass of the {part} is, on random samples "
            "of the task's median length, in batches as in training. Faster from: the length from which on training is "
            "faster, interpolated between measured lengths; quality was measured at the task's own lengths only."
        )
    return " ".join(texts)


SECTION = Section("mechanisms", "All mechanisms", "top", content)
