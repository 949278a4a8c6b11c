"""The conclusions: what they claim follows from the numbers, and where those are not enough they say so."""

import pytest

from subquad.compare.measure.lengths import LengthPoint
from subquad.compare.records import PairedDifference, Trial
from subquad.compare.report.conclusions import conclude
from subquad.compare.report.formatting import format_bytes, format_number, format_p, format_ratio, join_words
from subquad.compare.report.result import Result
from subquad.tasks import task_class
from tests.compare.cases import synthetic
from tests.compare.report.test_statistics import bare, timed, trained


def texts(result: Result, kind: str) -> str:
    return "\n".join(finding.text for finding in conclude(result) if finding.kind == kind)


def paired(label: str, difference: float, p: float, width: float = 0.2) -> PairedDifference:
    low, high = difference - width, difference + width
    return PairedDifference(mechanism=label, seed=1, difference=difference, low=low, high=high, p_value=p, samples=100)


def test_nothing_measured() -> None:
    found = conclude(bare())
    assert [finding.text for finding in found] == [
        "Nothing can be concluded yet: no mechanism was compared with softmax."
    ]


NOISE = (-0.01, 0.0, 0.01)
"""How far three seeds are apart."""


def by_seeds(result: Result, label: str, value: float, noise: tuple[float, ...] = NOISE) -> None:
    trained(result, label, [value + one for one in noise])


def test_a_significant_loss_is_stated_with_its_gain() -> None:
    result = bare()
    trained(result, "softmax", [27.5] * 3)
    by_seeds(result, "eva", 27.1)
    timed(result, "softmax", {1024: 4.0, 2048: 31.0})
    timed(result, "eva", {1024: 5.0, 2048: 10.0})
    first = conclude(result)[0]
    assert first.text == "At 2,048 tokens eva trains 3.1× as fast as softmax and is worse by 0.40 BLEU."
    assert first.detail == "Difference −0.40 BLEU, 95% interval −0.42 to −0.38, p < 0.001, 3 seeds."


@pytest.mark.parametrize(("better", "word"), [("higher", "lower"), ("lower", "lower")])
def test_one_seed_says_nothing_about_mechanisms(better: str, word: str) -> None:
    """However clear the test samples are: another seed might have turned it round."""
    result = bare(better=better)
    trained(result, "softmax", [27.5])
    trained(result, "eva", [27.1])
    result.paired.append(paired("eva", -0.4, 0.001))
    first = conclude(result)[0].text
    assert first.startswith("One seed says nothing about mechanisms.")
    assert first.endswith(f"in this run, with one seed, its BLEU is 0.40 {word}.")
    assert texts(result, "quality").startswith("In this run, against softmax (27.50 BLEU, 1 seed): eva −0.40")
    timed(result, "softmax", {2048: 31.0})
    timed(result, "eva", {2048: 10.0})
    everything = "\n".join(finding.text for finding in conclude(result))
    assert "as softmax; in this run, with one seed, its BLEU is 0.40 lower." in everything
    assert not any(word in everything.lower() for word in ("significant", "better", "worse"))


def test_a_difference_too_small_for_the_usual_digits_is_not_shown_as_zero() -> None:
    result = bare()
    trained(result, "softmax", [0.08] * 3)
    by_seeds(result, "eva", 0.082, (-0.0002, 0.0, 0.0002))
    timed(result, "softmax", {2048: 31.0})
    timed(result, "eva", {2048: 10.0})
    first = conclude(result)[0]
    assert first.text.endswith("and is better by 0.002 BLEU.")
    assert first.detail.startswith("Difference +0.002 BLEU, 95% interval +0.00")


def test_a_difference_that_is_not_significant_is_no_loss() -> None:
    result = bare()
    trained(result, "softmax", [27.5] * 3)
    by_seeds(result, "eva", 27.1, (-0.4, 0.0, 0.4))
    timed(result, "softmax", {2048: 31.0})
    timed(result, "eva", {2048: 10.0})
    assert conclude(result)[0].text.endswith("as softmax, with no significant difference in BLEU.")
    quality = texts(result, "quality")
    assert quality.startswith("Not significantly different from softmax (27.50 BLEU, 3 seeds): eva −0.40 (−1.39 to")
    assert "worse" not in quality


def test_for_perplexity_more_is_worse() -> None:
    result = bare(better="lower")
    trained(result, "softmax", [20.0] * 3)
    by_seeds(result, "eva", 20.4)
    timed(result, "softmax", {2048: 31.0})
    timed(result, "eva", {2048: 10.0})
    assert "is worse by 0.40" in conclude(result)[0].text
    assert texts(result, "quality").startswith("Significantly worse")


def test_a_better_mechanism_without_costs() -> None:
    result = bare()
    trained(result, "softmax", [27.0] * 3)
    by_seeds(result, "eva", 28.0)
    assert conclude(result)[0].text == "eva is better than softmax by 1.00 BLEU."
    result = bare()
    trained(result, "softmax", [27.0] * 3)
    by_seeds(result, "eva", 28.0, (-3.0, 0.0, 3.0))
    assert conclude(result)[0].text.startswith("No mechanism is significantly better than softmax")


def test_the_sound_mechanism_is_preferred_to_the_faster_one() -> None:
    """lara is fastest and significantly worse; eva is slower and not: the headline is about eva."""
    result = bare("softmax eva lara")
    for label, value in (("softmax", 30.0), ("eva", 29.9), ("lara", 25.0)):
        trained(result, label, [value])
    result.paired = [paired("eva", -0.1, 0.7), paired("lara", -5.0, 0.001)]
    for label, ms in (("softmax", 30.0), ("eva", 10.0), ("lara", 5.0)):
        timed(result, label, {2048: ms})
    assert "eva trains 3.0× as fast" in conclude(result)[0].text
    assert "Training speed at 2,048 tokens (whole model, softmax = 1): lara 6.0× and eva 3.0×." in texts(result, "cost")


def test_what_only_the_correction_makes_insignificant_is_not_called_equal() -> None:
    """Both intervals leave out 0 and p is below 0.05 before Holm's correction, above it after."""
    result = bare("softmax eva lara")
    trained(result, "softmax", [30.0] * 3)
    by_seeds(result, "eva", 29.7, (-0.1, 0.0, 0.1))
    by_seeds(result, "lara", 29.5, (-0.166, 0.0, 0.166))
    for label, ms in (("softmax", 30.0), ("eva", 10.0), ("lara", 5.0)):
        timed(result, label, {2048: ms})
    assert conclude(result)[0].text == (
        "At 2,048 tokens eva trains 3.0× as fast as softmax; its difference in BLEU is not significant once corrected "
        "for 2 comparisons."
    )
    assert conclude(result)[0].detail.startswith("Difference −0.30 BLEU, 95% interval −0.55 to −0.05, p = 0.07")


def test_times_within_the_noise_are_no_claim() -> None:
    result = bare()
    timed(result, "softmax", {1024: 10.0, 2048: 10.0}, spread=0.1)
    timed(result, "eva", {1024: 9.5, 2048: 9.5}, spread=0.1)
    assert conclude(result)[0].text == "At 2,048 tokens no mechanism trains clearly faster than softmax."
    cost = texts(result, "cost")
    assert "no clear difference for eva" in cost
    assert "eva at none up to the longest (1,024 to 2,048)" in cost


def test_speed_without_quality_is_called_that() -> None:
    result = bare()
    timed(result, "softmax", {2048: 10.0})
    timed(result, "eva", {2048: 1.0})
    assert conclude(result)[0].text == (
        "At 2,048 tokens eva trains 10.0× as fast as softmax; their BLEU was not compared."
    )
    assert "Training is clearly faster" not in texts(result, "cost")  # one length has no crossover


def test_a_length_the_baseline_cannot_do_is_not_compared() -> None:
    result = bare()
    timed(result, "softmax", {1024: 10.0})
    timed(result, "eva", {1024: 5.0, 2048: 9.0})
    failed = LengthPoint(mechanism="softmax", part="full", length=2048, batch=1, status="failed", reason="no memory")
    result.add_points([failed])
    assert conclude(result)[0].text.startswith("At 1,024 tokens")
    assert texts(result, "caveat") == "softmax has no costs at 2,048 tokens (failed: no memory)."


def test_the_length_asked_for() -> None:
    result = bare()
    result.focus_length = 1500
    timed(result, "softmax", {1024: 10.0, 2048: 20.0, 4096: 40.0})
    timed(result, "eva", {1024: 5.0, 2048: 5.0, 4096: 5.0})
    assert conclude(result)[0].text.startswith("At 1,024 tokens eva trains 2.0×")


def test_failures_and_gaps_are_named() -> None:
    result = bare("softmax eva lara")
    result.trials = [
        Trial(mechanism="softmax", seed=1, status="done"),
        Trial(mechanism="eva", seed=1, status="failed", reason="the loss was not finite"),
        Trial(mechanism="lara", seed=1),
    ]
    caveats = texts(result, "caveat").splitlines()
    assert "eva (seed 1) failed: the loss was not finite." in caveats
    assert "Not trained yet: lara (seed 1)." in caveats


def test_few_seeds_are_said() -> None:
    assert texts(synthetic(1), "caveat").startswith("One seed only for lightconv, eva, performer,")
    assert "Two seeds only for lightconv, eva, local window=32 and primal: three" in texts(synthetic(2), "caveat")
    assert "Two seeds only for performer: three" in texts(synthetic(3), "caveat"), "one of its runs failed"
    assert "seeds only" not in texts(synthetic(4, ("softmax", "eva")), "caveat")


def test_the_number_of_samples_is_said() -> None:
    assert "BLEU, 3 seeds, 1,000 samples): " in texts(synthetic(3), "quality")


@pytest.mark.parametrize(
    ("better", "values", "level", "said"),
    [
        ("higher", [0.2, 0.8], 1.0, "the best BLEU is 0.80, and 1.00 or less counts as nothing learned."),
        ("higher", [0.2, 1.2], 1.0, None),
        ("lower", [7000.0, 5000.0], 4000.0, "the best BLEU is 5,000.00, and 4,000.00 or more counts"),
        ("lower", [7000.0, 3000.0], 4000.0, None),
    ],
)
def test_models_that_have_learned_nothing_are_called_so(
    better: str, values: list[float], level: float, said: str | None
) -> None:
    result = bare(better=better)
    result.metric.chance_level = level
    for label, value in zip(result.labels, values, strict=True):
        trained(result, label, [value])
    timed(result, "softmax", {2048: 31.0})
    timed(result, "eva", {2048: 10.0})
    first = conclude(result)[0].text
    assert first.startswith("No model has learned anything yet: ") == (said is not None)
    assert said is None or said in first
    assert "eva 3.1×" in texts(result, "cost"), "costs do not depend on it"


def test_what_guessing_gives() -> None:
    assert task_class("translation").chance_level({}, 100) == 1
    assert task_class("language-model").chance_level({"vocab": 8000}, 100) == 4000
    assert task_class("image-classification").chance_level({"num_classes": 10}, 900) == pytest.approx(12)


def test_an_unfair_comparison_is_said() -> None:
    result = synthetic()
    assert "primal +3.3%" in texts(result, "caveat")
    assert "order of the data" not in texts(result, "caveat")
    assert "setting" not in texts(result, "caveat")
    result.trials_of("eva")[0].data_order = "another"
    point = result.points(LengthPoint)[3]
    point.setting = point.setting | {"threads": 8}
    assert "The order of the data differs between mechanisms" in texts(result, "caveat")
    assert "not all measured under one setting (threads differ)" in texts(result, "caveat")


def test_two_seeds_are_rarely_enough() -> None:
    """Student's t with one degree of freedom: half a point that both seeds agree on roughly is not significant."""
    result = bare()
    trained(result, "softmax", [30.0, 30.2])
    trained(result, "eva", [29.4, 29.8])
    assert texts(result, "quality").startswith("Not significantly different")


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
        (format_p(0.0001), "p < 0.001"),
        (format_p(0.25), "p = 0.25"),
        (format_p(0.0496), "p = 0.0496"),
        (join_words(["a", "b", "c"]), "a, b and c"),
    ],
)
def test_words(shown: str, expected: str) -> None:
    assert shown == expected
