"""What a learning curve and the floors say about how far a mechanism has learned."""

import math
import random
from typing import Any

import pytest

from subquad.compare.records import CurvePoint, Score, Trial
from subquad.compare.report.learning import below_linear, learned_nothing, still_improving, validation_noise
from subquad.compare.report.result import Mechanism, Metric, Result
from subquad.tasks.base import Floor


def trial_with(losses: list[float]) -> Trial:
    curve = [CurvePoint(update=100 * number, loss=loss) for number, loss in enumerate(losses, 1)]
    return Trial(mechanism="eva", seed=1, status="done", curve=curve)


def noisy(count: int, trend: float, noise: float, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [5 + trend * number / count + draw.gauss(0, noise) for number in range(count)]


def test_a_falling_loss_is_still_improving_and_a_flat_one_is_not() -> None:
    assert still_improving(trial_with([5.0, 4.0, 3.4, 3.0, 2.7, 2.5, 2.35, 2.25])) is True
    assert still_improving(trial_with([5.0, 4.0, 3.0, 2.51, 2.505, 2.503, 2.502, 2.501])) is False, "below 1 %"
    assert still_improving(trial_with([5.0, 3.0, 2.5, 2.4, 2.45, 2.5, 2.6, 2.7])) is False, "it overfits"


def test_noise_is_no_improvement() -> None:
    flat = [still_improving(trial_with(noisy(20, 0, 0.2, seed))) for seed in range(200)]
    assert flat.count(True) <= 10
    falling = [still_improving(trial_with(noisy(20, -4, 0.2, seed))) for seed in range(200)]
    assert falling.count(True) >= 190


def test_the_noise_of_a_straight_line_is_that_of_its_values() -> None:
    draws = noisy(4000, -3, 0.2)
    assert validation_noise(draws) == pytest.approx(0.2, rel=0.1)
    assert validation_noise([3.0, 2.0, 1.0]) == pytest.approx(0, abs=1e-12)


def test_too_few_validations_say_nothing() -> None:
    assert still_improving(trial_with([5, 4, 3, 2])) is None
    assert still_improving(Trial(mechanism="eva", seed=1, status="done")) is None
    without_loss = trial_with([5, 4, 3, 2, 1])
    without_loss.curve[0].loss = None
    assert still_improving(without_loss) is None


# ---------------------------------------------------------------------- floors


def result_with(metric: Metric, floors: list[Floor], scores: list[Score]) -> Result:
    trials = [
        Trial(mechanism="eva", seed=seed, status="done", scores={metric.name: score})
        for seed, score in enumerate(scores)
    ]
    mechanisms = [Mechanism(label="eva", mixer="eva"), Mechanism(label="lara", mixer="lara")]
    return Result(
        title="", task="toy", metric=metric, baseline="eva", mechanisms=mechanisms, floors=floors, trials=trials
    )


def floor(name: str, kind: Any, value: float) -> Floor:
    return Floor(name=name, kind=kind, value=value, how="By hand.")


ACCURACY = Metric(name="top-1", better="higher")
PERPLEXITY = Metric(name="perplexity", better="lower")
CLASSES = [floor("majority class", "trivial", 12), floor("linear probe", "linear", 90)]
WORDS = [floor("unigram", "trivial", 600), floor("bigram", "linear", 260)]


def test_higher_is_better() -> None:
    guessing = result_with(ACCURACY, CLASSES, [Score(value=14, low=11, high=18), Score(value=13, low=10, high=17)])
    found = learned_nothing(guessing, "eva")
    assert found is not None
    assert found.name == "majority class"
    learned = result_with(ACCURACY, CLASSES, [Score(value=60, low=55, high=65)])
    assert learned_nothing(learned, "eva") is None
    linear = below_linear(learned, "eva")
    assert linear is not None
    assert linear.name == "linear probe"
    assert below_linear(result_with(ACCURACY, CLASSES, [Score(value=90)]), "eva") is None


def test_lower_is_better() -> None:
    poor = result_with(PERPLEXITY, WORDS, [Score(value=590, low=570, high=610)])
    found = learned_nothing(poor, "eva")
    assert found is not None
    assert found.name == "unigram"
    fair = result_with(PERPLEXITY, WORDS, [Score(value=300, low=290, high=310)])
    assert learned_nothing(fair, "eva") is None
    linear = below_linear(fair, "eva")
    assert linear is not None
    assert linear.name == "bigram"
    assert below_linear(result_with(PERPLEXITY, WORDS, [Score(value=math.e)]), "eva") is None


def test_the_hardest_floor_counts_and_the_unknown_says_nothing() -> None:
    floors = [floor("copying", "trivial", 3), floor("most frequent", "trivial", 1)]
    found = learned_nothing(result_with(ACCURACY, floors, [Score(value=2)]), "eva")
    assert found is not None
    assert found.name == "copying"
    nothing = result_with(ACCURACY, [], [Score(value=2)])
    assert learned_nothing(nothing, "eva") is None
    assert below_linear(nothing, "eva") is None
    assert learned_nothing(result_with(ACCURACY, CLASSES, []), "lara") is None
    assert below_linear(result_with(ACCURACY, CLASSES, []), "lara") is None
