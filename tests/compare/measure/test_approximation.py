"""The distance from exact attention."""

from subquad.compare.measure.approximation import measure_approximation, not_comparable_reason
from tests.compare.plans import PAIRS, make_plan


def test_a_window_over_everything_is_exact_attention() -> None:
    plan = make_plan(PAIRS, ["local", "lightconv"], lengths=(16,), tokens=32, repeats=1)
    points = measure_approximation(plan, plan.labels, None, lambda _: None)
    refused = {point.mechanism: point.reason for point in points if point.status == "refused"}
    assert refused == {"softmax": "it is exact", "lightconv": "it does not approximate softmax attention"}
    points = [point for point in points if point.status == "done"]
    assert [(p.mechanism, p.option, p.source, p.length) for p in points] == [
        ("local", f"window={window}", "random", 16) for window in (4, 16)
    ]
    errors = [point.error for point in points if point.error is not None]
    assert errors[0] > 0.1
    assert errors[1] < 1e-5
    assert "window=16" in points[1].setting["mixer"]


def test_which_mechanisms_approximate_softmax_attention() -> None:
    assert not_comparable_reason("softmax") == "it is exact"
    assert {
        name: not_comparable_reason(name) is None for name in ("eva", "lara", "ra", "linformer", "primal", "lightconv")
    } == {
        "eva": True,
        "lara": True,
        "ra": True,
        "linformer": True,
        "primal": False,
        "lightconv": False,
    }
