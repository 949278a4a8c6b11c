"""The conclusions: what they claim follows from the numbers, and where those are not enough they say so."""

import pytest

from subquad.compare.measure.lengths import LengthPoint
from subquad.compare.records import CurvePoint, Trial
from subquad.compare.report.conclusions import conclude
from subquad.compare.report.formatting import format_bytes, format_number, format_ratio, join_words
from subquad.compare.report.result import Result
from subquad.tasks import task_class
from subquad.tasks.base import Floor
from tests.compare.cases import synthetic
from tests.compare.report.results import bare, by_seeds, timed, trained


def answer(result: Result) -> str:
    return conclude(result)[0].text


def texts(result: Result, kind: str) -> str:
    return "\n".join(finding.text for finding in conclude(result) if finding.kind == kind)


def compared(values: dict[str, float], ms: dict[str, float], better: str = "higher", seeds: int = 3) -> Result:
    """Three seeds of each mechanism, and times at the task's length."""
    result = bare(" ".join(values), better)
    for label, value in values.items():
        by_seeds(result, label, value, (-0.01, 0.0, 0.01)[:seeds])
    for label, time in ms.items():
        timed(result, label, {2048: time})
    return result


def test_nothing_measured() -> None:
    assert [finding.text for finding in conclude(bare())] == [
        "Nothing can be concluded yet: no mechanism was compared with softmax."
    ]


def test_what_is_faster_and_as_good_is_recommended() -> None:
    result = compared({"softmax": 27.5, "eva": 27.4}, {"softmax": 31.0, "eva": 10.0})
    said = answer(result)
    assert said.startswith("Use eva here: at 2,048 tokens, the length of this task's samples, it trains 3.1× as fast")
    assert "as fast as softmax (3.0 to 3.2×)" in said
    assert "and its BLEU is within 0.50 of softmax (−0.1" in said


def test_what_is_faster_and_worse_is_not() -> None:
    result = compared({"softmax": 27.5, "eva": 25.5}, {"softmax": 31.0, "eva": 10.0})
    assert answer(result).startswith("Keep softmax here: at 2,048 tokens")
    assert "what trains faster is no proven replacement (eva worse by 1.9" in answer(result)


def test_undecided_is_no_recommendation_and_says_how_to_decide() -> None:
    result = bare()
    trained(result, "softmax", [27.5, 27.0, 28.0])
    trained(result, "eva", [27.4, 27.7, 27.1])
    timed(result, "softmax", {2048: 31.0})
    timed(result, "eva", {2048: 10.0})
    assert answer(result).startswith("Keep softmax here")
    assert "eva undecided (" in answer(result)
    assert "more seeds would decide" in answer(result)


def test_the_sound_mechanism_is_preferred_to_the_faster_one() -> None:
    """lara is fastest and worse; eva is slower and within the margin: the answer is eva."""
    values, ms = {"softmax": 30.0, "eva": 29.9, "lara": 25.0}, {"softmax": 30.0, "eva": 10.0, "lara": 5.0}
    assert answer(compared(values, ms)).startswith("Use eva here")


def test_a_better_mechanism_is_recommended_with_its_price() -> None:
    result = compared({"softmax": 27.0, "eva": 29.0}, {"softmax": 10.0, "eva": 20.0})
    assert answer(result).startswith("Use eva here: its BLEU is better by 1.9")
    assert "it trains 0.50× as fast as softmax" in answer(result)


def test_for_perplexity_more_is_worse() -> None:
    result = compared({"softmax": 20.0, "eva": 22.0}, {"softmax": 31.0, "eva": 10.0}, better="lower")
    assert "eva worse by 1.9" in answer(result)


def test_where_nothing_is_faster_the_baseline_stays_and_longer_lengths_are_costs_only() -> None:
    """The old headline joined quality at one length with speed at another."""
    result = compared({"softmax": 27.0, "eva": 27.0}, {})
    result.task_lengths = [256]
    timed(result, "softmax", {256: 1.0, 4096: 100.0})
    timed(result, "eva", {256: 2.0, 4096: 20.0})
    said = answer(result)
    assert said.startswith(
        "Keep softmax here: at 256 tokens, the length of this task's samples, no mechanism is shown to train faster."
    )
    assert "training is cheaper with eva from about 590 tokens on; quality was not measured there." in said


def test_times_within_the_noise_are_no_claim() -> None:
    result = compared({"softmax": 27.0, "eva": 27.0}, {})
    timed(result, "softmax", {2048: 10.0}, spread=5)
    timed(result, "eva", {2048: 9.8}, spread=5)
    assert "no mechanism is shown to train faster" in answer(result)


def test_a_failed_control_takes_all_claims_about_time_back() -> None:
    result = compared({"softmax": 27.0, "eva": 27.0}, {"eva": 5.0})
    timed(result, "softmax", {2048: 10.0}, control=1.3)
    assert answer(result).startswith("Keep softmax here: none of the others is better in BLEU (eva within 0.50")
    assert "tokens" not in answer(result), "nothing about time is said"
    assert "At 2,048 tokens a second copy of softmax took 1.30× the time of the first" in texts(result, "limit")


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_one_seed_says_nothing_about_mechanisms(better: str) -> None:
    """However clear the test samples are: another seed might have turned it round."""
    result = compared({"softmax": 27.5, "eva": 27.1}, {"softmax": 31.0, "eva": 10.0}, better, seeds=1)
    assert answer(result).startswith(
        "One seed says nothing about mechanisms; train with three or more. In this run eva"
    )
    assert answer(result).endswith("compared with softmax: −0.40 BLEU.")
    everything = "\n".join(finding.text for finding in conclude(result))
    assert not any(word in everything for word in ("Use ", "Keep", "better", "worse"))
    assert result.table().rows[1][2] == "−0.40 in this run, with one seed"


def test_a_mechanism_with_other_parameters_is_named_with_them() -> None:
    result = compared({"softmax": 27.5, "eva": 27.4}, {"softmax": 31.0, "eva": 10.0})
    for trial in result.trials:
        trial.parameters = 1000 if trial.mechanism == "softmax" else 1100
    assert "with +10.0% parameters" in answer(result)


# ---------------------------------------------------------------------- floors


@pytest.mark.parametrize(
    ("kind", "said"),
    [("trivial", "majority has 80.00 without learning anything"), ("linear", "has 80.00")],
)
def test_a_baseline_below_a_floor_ends_the_comparison(kind: str, said: str) -> None:
    result = compared({"softmax": 59.0, "eva": 60.0}, {"softmax": 31.0, "eva": 10.0})
    result.floors = [Floor.model_validate({"name": "majority", "kind": kind, "value": 80, "how": "Counted."})]
    assert answer(result).startswith("No answer yet: softmax has 59.00 BLEU, and majority")
    assert said in answer(result)
    assert "softmax and eva" in texts(result, "floor")


def test_a_mechanism_below_a_floor_is_not_recommended() -> None:
    result = compared({"softmax": 81.0, "eva": 79.9}, {"softmax": 31.0, "eva": 10.0})
    result.metric.margin = 5
    assert answer(result).startswith("Use eva")
    result.floors = [Floor(name="linear probe", kind="linear", value=80, how="Fitted.")]
    assert answer(result).startswith("Keep softmax")
    assert texts(result, "floor") == "Below a linear model (linear probe, 80.00): eva."


def test_no_better_than_no_mixing() -> None:
    result = compared({"softmax": 81.0, "eva": 79.0, "nothing": 80.0}, {})
    result.mechanisms[2].floor = True
    assert texts(result, "floor") == "No better than a model that mixes nothing (nothing, 80.00): eva."


def test_training_that_was_not_done_is_said() -> None:
    result = compared({"softmax": 81.0, "eva": 81.0}, {})
    curve = [CurvePoint(update=100 * i, loss=5.0 / i) for i in range(1, 9)]
    result.trials_of("eva")[0].curve = curve
    assert texts(result, "floor").startswith("Still improving at the end of training: eva.")


@pytest.mark.parametrize(
    ("better", "value", "level", "learned"),
    [
        ("higher", 0.8, 1.0, False),
        ("higher", 1.2, 1.0, True),
        ("lower", 5000.0, 4000.0, False),
        ("lower", 30.0, 4e3, True),
    ],
)
def test_models_that_have_learned_nothing_are_called_so(better: str, value: float, level: float, learned: bool) -> None:
    result = compared({"softmax": value, "eva": value}, {"softmax": 31.0, "eva": 10.0}, better)
    result.metric.chance_level = level
    assert answer(result).startswith("No answer yet: ") != learned


def test_what_guessing_gives() -> None:
    assert task_class("translation").chance_level({}, 100) == 1
    assert task_class("language-model").chance_level({"vocab": 8000}, 100) == 4000
    assert task_class("image-classification").chance_level({"num_classes": 10}, 900) == pytest.approx(12)


# ---------------------------------------------------------------------- limits


def test_a_length_the_baseline_cannot_do_is_said() -> None:
    result = bare()
    timed(result, "softmax", {1024: 10.0})
    timed(result, "eva", {1024: 5.0, 2048: 9.0})
    failed = LengthPoint(mechanism="softmax", part="full", length=2048, batch=1, status="failed", reason="no memory")
    result.add_points([failed])
    assert texts(result, "limit") == "softmax has no costs at 2,048 tokens (failed: no memory)."


def test_failures_and_gaps_are_named() -> None:
    result = bare("softmax eva lara")
    result.trials = [
        Trial(mechanism="softmax", seed=1, status="done"),
        Trial(mechanism="eva", seed=1, status="failed", reason="the loss was not finite"),
        Trial(mechanism="lara", seed=1),
    ]
    limits = texts(result, "limit").splitlines()
    assert "eva (seed 1) failed: the loss was not finite." in limits
    assert "Not trained yet: lara (seed 1)." in limits


def test_an_unfair_comparison_is_said() -> None:
    result = synthetic()
    assert "primal +3.3%" in texts(result, "limit")
    assert "order of the data" not in texts(result, "limit")
    assert "setting" not in texts(result, "limit")
    result.trials_of("eva")[0].data_order = "another"
    point = result.points(LengthPoint)[3]
    point.setting = point.setting | {"threads": 8}
    assert "The order of the data differs between mechanisms" in texts(result, "limit")
    assert "not all measured under one setting (threads differ)" in texts(result, "limit")
    result.covariance.trials[0] = ("softmax", 9)  # type: ignore[union-attr]
    assert "Evaluated on other samples than softmax, and not compared: softmax (seed 1)." in texts(result, "limit")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_number(1234.5, 1), "1,234.5"),
        (format_number(-0.001, 2, sign=True), "+0.00"),
        (format_number(-0.5, 1), "−0.5"),
        (format_ratio(3.14), "3.1×"),
        (format_ratio(0.123), "0.12×"),
        (format_bytes(3 * 2**20), "3.0 MiB"),
        (format_bytes(1.5 * 2**30), "1.5 GiB"),
        (join_words(["a", "b", "c"]), "a, b and c"),
    ],
)
def test_words(shown: str, expected: str) -> None:
    assert shown == expected


def test_a_search_that_ended_at_its_edge_is_a_limit() -> None:
    result = synthetic(labels=("softmax", "lightconv"))
    assert "last that" not in texts(result, "limit")
    result.tuning[0].edges, result.tuning[1].chosen = ["schedule.lr"], {}
    said = texts(result, "limit")
    assert "The best settings are the last that were tried: softmax (schedule.lr). More trials may find better." in said
    assert "Not tuned, since no trial came to its end: lightconv." in said
