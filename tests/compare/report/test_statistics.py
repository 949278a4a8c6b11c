"""Comparisons: the file keeps everything, and the statistics say no more than the numbers do."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from subquad.compare.measure.lengths import LengthPoint, Timing
from subquad.compare.records import PairedDifference, Score, Trial
from subquad.compare.report.result import Mechanism, Metric, Result, read_result
from subquad.compare.report.sections.pareto import cost_axes
from subquad.compare.report.statistics import (
    crossover,
    differences,
    holm,
    parameter_mismatch,
    pareto,
    quality,
    same_data_order,
    speed_ratios,
    t_probability,
    t_quantile,
)
from tests.compare.cases import synthetic


def bare(labels: str = "softmax eva", better: str = "higher") -> Result:
    """A result without any numbers."""
    metric = Metric.model_validate({"name": "BLEU", "better": better})
    mechanisms = [Mechanism(label=label, mixer=label) for label in labels.split()]
    return Result(title="t", task="translation", metric=metric, baseline="softmax", mechanisms=mechanisms)


def trained(result: Result, label: str, values: list[float]) -> None:
    """Adds one finished run for each value, with seeds 1, 2, ..."""
    for seed, value in enumerate(values, 1):
        scores = {"BLEU": Score(value=value)}
        result.trials.append(Trial(mechanism=label, seed=seed, status="done", scores=scores))


def timed(result: Result, label: str, ms: dict[int, float], spread: float = 0.01) -> None:
    for length, median in ms.items():
        timing = Timing(median=median, low=median * (1 - spread), high=median * (1 + spread), repeats=5)
        point = LengthPoint(mechanism=label, part="full", length=length, batch=1, training=timing, inference=timing)
        result.add_points([point])


# ---------------------------------------------------------------------- the file


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    result = synthetic()
    result.to_json(tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == result


def test_a_result_is_filled_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = bare()
    result.trials.append(Trial(mechanism="eva", seed=1))
    result.to_json(path)
    again = read_result(path)
    trial = again.trials[0]
    trial.status, trial.parameters = "done", 12
    again.to_json(path)
    assert read_result(path).trials_of("eva")[0].parameters == 12


def test_what_nobody_compares_is_refused(tmp_path: Path) -> None:
    result = bare()
    result.trials.append(Trial(mechanism="lara", seed=1))
    with pytest.raises(ValidationError, match="no mechanism is labelled lara"):
        result.to_json(tmp_path / "result.json")
    assert not (tmp_path / "result.json").exists()


def test_numbers_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValidationError):
        Score(value=math.nan)
    with pytest.raises(ValidationError, match="reason"):
        Trial(mechanism="eva", seed=1, status="failed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "subquad-comparison-9"}, "does not describe a comparison of format subquad-comparison-1"),
        ({"baseline": "lara"}, "no mechanism is labelled lara"),
        ({"trials": [{"mechanism": "eva", "seed": "x"}]}, r"trials\.0\.seed"),
    ],
)
def test_damaged_files_are_one_clear_line(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(bare().model_dump(mode="json") | change))
    with pytest.raises(ValueError, match=message) as error:
        read_result(path)
    assert "\n" not in str(error.value)


def test_timing_of_repeats() -> None:
    timing = Timing.of([0.005, 0.001, 0.002, 0.004, 0.003])
    assert (timing.low, timing.median, timing.high, timing.repeats) == pytest.approx((2, 3, 4, 5))
    pair = Timing.of([0.003, 0.001])
    assert (pair.low, pair.median, pair.high) == pytest.approx((1, 2, 3))


# ---------------------------------------------------------------------- quality


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30])
def test_students_distribution(freedom: int) -> None:
    t = pytest.importorskip("scipy.stats").t
    assert t_quantile(freedom) == pytest.approx(t.ppf(0.975, freedom), rel=1e-9)
    for x in (0.0, 0.5, 3.0):
        assert t_probability(x, freedom) == pytest.approx(1 - 2 * t.sf(x, freedom), abs=1e-12)


def test_quality_over_seeds_and_of_one_run() -> None:
    result = bare()
    trained(result, "softmax", [10.0, 12.0, 14.0])
    estimate = quality(result, "softmax")
    assert estimate is not None
    assert estimate.interval == "seeds"
    assert estimate.mean == pytest.approx(12)
    assert estimate.high == pytest.approx(12 + 4.302653 * 2 / math.sqrt(3), rel=1e-6)
    assert quality(result, "eva") is None

    result.trials.append(
        Trial(mechanism="eva", seed=1, status="done", scores={"BLEU": Score(value=9, low=8, high=11, samples=100)})
    )
    single = quality(result, "eva")
    assert single is not None
    assert (single.mean, single.low, single.high, single.seeds, single.interval) == (9, 8, 11, 1, "samples")


def test_differences_are_paired_by_seed() -> None:
    """Seeds differ much, the mechanisms within a seed little: only pairs show it. p is that of the paired t-test."""
    result = bare()
    ours, base = [20.0, 30.1, 40.05], [19.0, 29.0, 39.0]
    trained(result, "softmax", base)
    trained(result, "eva", ours)
    found = differences(result)["eva"]
    assert found.significant
    assert (found.seeds, found.interval) == (3, "seeds")
    stats = pytest.importorskip("scipy.stats")
    expected = stats.ttest_rel(ours, base)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()), rel=1e-6)


def test_a_seed_without_its_pair_does_not_count() -> None:
    result = bare()
    trained(result, "softmax", [30.0, 31.0])
    trained(result, "eva", [29.0, 30.1, 50.0])
    assert differences(result)["eva"].mean == pytest.approx(-0.95)


def test_one_seed_takes_the_stored_pair() -> None:
    result = bare("softmax eva lara")
    for label in result.labels:
        trained(result, label, [30.0])
    pair = PairedDifference(mechanism="eva", seed=1, difference=-0.4, low=-0.7, high=-0.1, p_value=0.01, samples=500)
    result.paired.append(pair)
    found = differences(result)
    assert (found["eva"].mean, found["eva"].p, found["eva"].interval) == (-0.4, 0.01, "samples")
    assert "lara" not in found


def test_equal_runs_are_not_different() -> None:
    result = bare()
    trained(result, "softmax", [30.0, 31.0])
    trained(result, "eva", [30.0, 31.0])
    assert differences(result)["eva"].p == 1


def test_holm() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.9, "b": 0.8})["b"] == 1


def test_many_comparisons_make_it_harder() -> None:
    """The same pair of runs is significant alone, but not as one of many."""
    alone, many = bare(), bare("softmax eva a b c d e f")
    for result in (alone, many):
        for label in result.labels:
            noise = [0.3, -0.3, 0.2]
            trained(result, label, [30 + x for x in noise] if label != "eva" else [29.0, 28.3, 29.4])
    assert differences(alone)["eva"].significant
    assert not differences(many)["eva"].significant


# ---------------------------------------------------------------------- crossover


def test_crossover_is_interpolated_on_log_axes() -> None:
    """softmax takes L^2 / 1000, eva takes L: on log axes both are straight, so 1000 is met exactly."""
    result = bare()
    lengths = [256, 512, 2048, 8192]
    timed(result, "softmax", {length: length**2 / 1000 for length in lengths})
    timed(result, "eva", {length: float(length) for length in lengths})
    found = crossover(result, "eva", "full", "training")
    assert found is not None
    assert (found.kind, found.length, found.first, found.last) == ("at", 1000, 256, 8192)


@pytest.mark.parametrize(
    ("eva", "kind", "length"),
    [
        ({256: 1.0, 512: 1.0, 1024: 1.0}, "always", None),
        ({256: 9.0, 512: 20.0, 1024: 50.0}, "never", None),
        ({256: 1.0, 512: 1.0, 1024: 50.0}, "never", None),  # what is lost again at the longest is not won
        ({256: 1.98, 512: 2.0, 1024: 2.0}, "at", 512),  # ahead within the noise at 256, clearly at 512
    ],
)
def test_crossovers_are_never_extrapolated(eva: dict[int, float], kind: str, length: int | None) -> None:
    result = bare()
    timed(result, "softmax", {256: 2.0, 512: 4.0, 1024: 8.0, 2048: 16.0})
    timed(result, "eva", eva)
    found = crossover(result, "eva", "full", "training")
    assert found is not None
    assert (found.kind, found.length) == (kind, length)
    assert (found.first, found.last) == (256, 1024)


def test_no_crossover_without_common_lengths() -> None:
    result = bare()
    timed(result, "softmax", {256: 2.0, 512: 4.0})
    timed(result, "eva", {512: 1.0, 1024: 1.0})
    assert crossover(result, "eva", "full", "training") is None
    assert crossover(result, "eva", "encoder", "training") is None


def test_other_batches_are_not_compared() -> None:
    result = bare()
    timed(result, "softmax", {256: 2.0})
    timed(result, "eva", {256: 1.0})
    result.points(LengthPoint)[-1].batch = 4
    assert speed_ratios(result, "eva", "full", "training") == []


@given(
    st.floats(1e-3, 1e3),
    st.floats(0.3, 1.4),
    st.floats(1e-6, 1e3),
    st.floats(1.5, 2.2),
)
def test_crossover_of_power_laws(a: float, p: float, b: float, q: float) -> None:
    """a L^p overtakes b L^q at (a / b)^(1 / (q - p)), whatever the constants."""
    lengths = [2**i for i in range(8, 15)]
    result = bare()
    timed(result, "eva", {length: a * length**p for length in lengths}, spread=0)
    timed(result, "softmax", {length: b * length**q for length in lengths}, spread=0)
    where = (a / b) ** (1 / (q - p))
    found = crossover(result, "eva", "full", "training")
    assert found is not None
    if where < lengths[0] * 0.999:
        assert found.kind == "always"
    elif where > lengths[-1] * 1.001:
        assert found.kind == "never"
    elif lengths[0] * 1.001 < where < lengths[-1] * 0.999:
        assert found.length == pytest.approx(where, rel=1e-3, abs=1)


# ---------------------------------------------------------------------- Pareto, parameters, order


@given(
    st.dictionaries(st.text(max_size=3), st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1),
    st.sampled_from(["higher", "lower"]),
)
def test_pareto(points: dict[str, tuple[float, float]], better: str) -> None:
    """Nothing on the front is beaten, and everything off it is beaten by something on it."""
    front = pareto(points, better)  # type: ignore[arg-type]
    sign = 1 if better == "higher" else -1

    def beats(a: str, b: str) -> bool:
        (cost, value), (other_cost, other_value) = points[a], points[b]
        return cost <= other_cost and sign * value >= sign * other_value and points[a] != points[b]

    assert not any(beats(a, b) for a in points for b in front)
    assert all(any(beats(a, b) for a in front) for b in points if b not in front)


def test_parameters_and_data_order() -> None:
    result = synthetic()
    assert list(parameter_mismatch(result)) == ["primal"]
    assert same_data_order(result) is True
    done = result.trials_of("eva")[0]
    done.data_order = "another"
    assert same_data_order(result) is False
    done.data_order = None
    assert same_data_order(result) is None


# ---------------------------------------------------------------------- the table


def test_the_table_leaves_out_columns_without_numbers() -> None:
    result = bare()
    trained(result, "softmax", [30.0])
    result.trials.append(Trial(mechanism="eva", seed=1, status="failed", reason="out of memory"))
    shown = result.table()
    assert shown.headers == ["mechanism", "BLEU (95% interval)", "runs"]
    assert shown.rows == [["softmax", "30.00", "1 done"], ["eva", "–", "1 failed"]]
    assert shown.states == ["done", "failed"]


def test_the_table_of_everything() -> None:
    shown = synthetic().table()
    rows = {row[0]: dict(zip(shown.headers, row, strict=True)) for row in shown.rows}
    assert rows["softmax"]["Δ softmax"] == "–"
    assert rows["softmax"]["faster from"] == "–"
    assert rows["lightconv"]["faster from"] == "always"
    assert rows["performer"]["runs"] == "2 done, 1 failed"
    assert rows["primal"]["parameters"] == "9.72 M"


def test_cost_axes_hold_what_was_measured() -> None:
    result = synthetic()
    axes = {axis.name: axis for axis in cost_axes(result)}
    assert axes["training time at 2,048 tokens"].front == ["lightconv", "softmax"]
    assert set(axes["parameters"].values) == set(result.labels)
    assert cost_axes(bare()) == []
