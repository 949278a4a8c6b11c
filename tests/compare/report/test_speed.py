"""What a result says about speed: at the task's length, with a control, and from which length on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subquad.compare.measure.lengths import LengthPoint
from subquad.compare.report.sections.pareto import cost_axes, pareto
from subquad.compare.report.speed import crossover, failed_controls, ratios_at, task_length
from tests.compare.cases import synthetic
from tests.compare.report.results import bare, timed


def test_crossover_is_interpolated_on_log_axes() -> None:
    """softmax takes L^2 / 1000, eva takes L: on log axes both are straight, so 1000 is met exactly."""
    result = bare()
    lengths = [256, 512, 2048, 8192]
    timed(result, "softmax", {length: length**2 / 1000 for length in lengths}, spread=0)
    timed(result, "eva", {length: float(length) for length in lengths}, spread=0)
    found = crossover(result, "eva", "full", "training")
    assert found is not None
    assert (found.kind, found.length, found.first, found.last) == ("at", 1000, 256, 8192)


@pytest.mark.parametrize(
    ("eva", "kind", "length"),
    [
        ({256: 1.0, 512: 1.0, 1024: 1.0}, "always", None),
        ({256: 9.0, 512: 20.0, 1024: 50.0}, "never", None),
        ({256: 1.0, 512: 1.0, 1024: 50.0}, "never", None),  # what is lost again at the longest is not won
        ({256: 1.98, 512: 2.0, 1024: 2.0}, "at", 512),  # ahead within the noise at 256, beyond doubt at 512
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


def test_other_batches_and_rounds_are_not_compared() -> None:
    result = bare()
    timed(result, "softmax", {256: 2.0})
    timed(result, "eva", {256: 1.0})
    point = result.points(LengthPoint)[-1]
    assert set(ratios_at(result, "full", 256, "training")) == {"eva"}
    assert point.training is not None
    point.training.rounds = point.training.rounds[:5]
    assert ratios_at(result, "full", 256, "training") == {}
    point.training.rounds = result.points(LengthPoint)[0].training.rounds  # type: ignore[union-attr]
    point.batch = 4
    assert ratios_at(result, "full", 256, "training") == {}


def test_quality_and_cost_are_joined_at_the_tasks_length_only() -> None:
    result = bare()
    timed(result, "softmax", {1024: 10.0, 4096: 40.0})
    timed(result, "eva", {1024: 5.0, 4096: 5.0})
    assert task_length(result) is None
    result.task_lengths = [1024, 4096]
    assert task_length(result) == 1024


@pytest.mark.parametrize(("control", "failed"), [(1.0, []), (1.2, [1024])])
def test_a_second_copy_of_the_baseline_must_be_as_fast(control: float, failed: list[int]) -> None:
    result = bare()
    timed(result, "softmax", {1024: 10.0}, control=control)
    assert list(failed_controls(result)) == failed
    assert len(result.lengths_of("softmax", "full")) == 1, "the control is no point of its own"


@given(st.floats(1e-3, 1e3), st.floats(0.3, 1.4), st.floats(1e-6, 1e3), st.floats(1.5, 2.2))
def test_crossover_of_power_laws(a: float, p: float, b: float, q: float) -> None:
    """a L^p overtakes b L^q at (a / b)^(1 / (q - p)), whatever the constants, as far as ratios of 2 % are seen."""
    lengths = [2**i for i in range(8, 15)]
    result = bare()
    timed(result, "eva", {length: a * length**p for length in lengths}, spread=0)
    timed(result, "softmax", {length: b * length**q for length in lengths}, spread=0)
    where = (a / b) ** (1 / (q - p))
    found = crossover(result, "eva", "full", "training")
    assert found is not None
    if where < lengths[0] * 0.8:
        assert found.kind == "always"
    elif where > lengths[-1] * 1.01:
        assert found.kind == "never"
    elif lengths[0] * 1.1 < where < lengths[-1] * 0.8 and all(not 0.8 < where / length <= 1 for length in lengths):
        assert found.length == pytest.approx(where, rel=1e-3, abs=1)


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


def test_cost_axes_hold_what_was_measured() -> None:
    result = synthetic()
    axes = {axis.name: axis for axis in cost_axes(result)}
    assert axes["training time at 2,048 tokens"].front == ["lightconv", "softmax"]
    assert set(axes["parameters"].values) == set(result.labels)
    assert cost_axes(bare()) == []
