"""The table with one row for each mechanism, which the terminal shows as well."""

from subquad.compare.measure.lengths import PART_TITLES
from subquad.compare.report.formatting import (
    NOTHING,
    format_bytes,
    format_count,
    format_crossover,
    format_estimate,
    format_metric,
    format_number,
    format_p,
)
from subquad.compare.report.result import Result
from subquad.compare.report.section import Content, Section, Table
from subquad.compare.report.statistics import (
    crossover,
    decoding_speed,
    differences,
    parameters,
    quality,
    same_data_order,
    shown_part,
    trial_mean,
)


def content(result: Result) -> Content:
    return Content(mechanisms_table(result), note=_note(result))


def mechanisms_table(result: Result) -> Table:
    """Columns that nobody has a number for are left out."""
    metric, found = result.metric, differences(result)
    headers = ["mechanism", f"{metric.name} (95% interval)", f"Δ {result.baseline}", "p", "parameters", "training time"]
    headers += ["tokens/s", "peak memory", "decoded tokens/s", "faster from", "runs"]
    rows = []
    for label in result.labels:
        difference = found.get(label)
        count, peak = parameters(result, label), trial_mean(result, label, "peak_bytes")
        seconds = trial_mean(result, label, "training_seconds")
        rows.append(
            [
                label,
                format_estimate(metric, quality(result, label)),
                format_metric(metric, difference.mean, sign=True) if difference else NOTHING,
                format_p(difference.p).removeprefix("p ").removeprefix("= ") if difference else NOTHING,
                NOTHING if count is None else format_count(count),
                NOTHING if seconds is None else f"{_number(seconds)} s",
                _number(trial_mean(result, label, "tokens_per_second")),
                NOTHING if peak is None else format_bytes(peak),
                _number(decoding_speed(result, label)),
                NOTHING if label == result.baseline else _faster_from(result, label),
                _runs(result, label),
            ]
        )
    last = len(headers) - 1
    known = [i for i in range(len(headers)) if i in (0, last) or any(row[i] != NOTHING for row in rows)]
    return Table(
        headers=[headers[i] for i in known],
        rows=[[row[i] for i in known] for row in rows],
        numeric=list(range(1, len(known) - 1)),
        states=[_state(result, label) for label in result.labels],
    )


def _faster_from(result: Result, label: str) -> str:
    return format_crossover(crossover(result, label, shown_part(result), "training"))


def _number(value: float | None) -> str:
    return NOTHING if value is None else format_number(value, 0 if value >= 100 else 1)


def _state(result: Result, label: str) -> str:
    """ "failed" if a trial failed, "missing" if one is, otherwise "done"."""
    states = {trial.status for trial in result.trials if trial.mechanism == label}
    return next((state for state in ("failed", "missing") if state in states), "done")


def _runs(result: Result, label: str) -> str:
    """ "3 done", or "2 done, 1 failed"."""
    states = [trial.status for trial in result.trials if trial.mechanism == label]
    counts = [f"{states.count(status)} {status}" for status in ("done", "failed", "missing") if status in states]
    return ", ".join(counts) or NOTHING


def _note(result: Result) -> str:
    counts = [estimate.seeds for label in result.labels if (estimate := quality(result, label))]
    texts = []
    if counts and max(counts) > 1:
        texts.append("Means over seeds; intervals by Student's t.")
    if counts and min(counts) == 1:
        texts.append("With one seed the interval is the bootstrap interval of its run.")
    if same_data_order(result):
        texts.append("All runs of a seed saw the same batches in the same order.")
    texts.append(
        f"Faster from: the sequence length from which on training is faster than with {result.baseline}, interpolated "
        f"between the measured lengths ({PART_TITLES[shown_part(result)]}); always: at all of them."
    )
    return " ".join(texts)


SECTION = Section("mechanisms", "All mechanisms", "top", content)
