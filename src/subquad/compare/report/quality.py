"""The quality of mechanisms in a result: means, differences and verdicts, as `statistics.scores` defines them.

Floors, such as a model without mixing, are no mechanisms: they take no part in differences.
"""

from collections.abc import Sequence

import numpy as np

from subquad.compare.report.result import Result
from subquad.compare.statistics.scores import (
    Difference,
    Estimate,
    Scores,
    Verdict,
    against_baseline,
    all_pairs,
    estimates,
    seeds_to_decide,
    verdict,
)


def quality(result: Result, label: str) -> Estimate | None:
    """The mean score of a mechanism or of a trained floor; None: it has none yet."""
    scores = _scores(result, [label] if label not in result.competitors else result.competitors)
    return None if scores is None else estimates(scores).get(label)


def differences(result: Result) -> dict[str, Difference]:
    """Every mechanism minus the baseline, where both have a trial with a common seed on the same samples."""
    scores = _scores(result, result.competitors)
    return {} if scores is None else against_baseline(scores, result.baseline)


def pairs(result: Result) -> dict[tuple[str, str], Difference]:
    """The first minus the second of every pair of mechanisms."""
    scores = _scores(result, result.competitors)
    return {} if scores is None else all_pairs(scores)


def margin(result: Result) -> float:
    """The difference that makes no practical difference, as people read the metric."""
    metric, base = result.metric, quality(result, result.baseline)
    if not metric.relative_margin:
        return metric.margin
    return 0.0 if base is None else metric.margin * abs(base.mean)


def verdicts(result: Result) -> dict[str, Verdict]:
    """What may be said about each mechanism against the baseline."""
    found, most = differences(result), margin(result)
    return {label: verdict(difference, most, result.metric.better) for label, difference in found.items()}


def more_seeds(result: Result, label: str) -> int | None:
    """About how many more seeds would decide about a mechanism; None: it takes more test samples."""
    scores = _scores(result, result.competitors)
    assert scores is not None, "an undecided mechanism has scores"
    return seeds_to_decide(scores, result.baseline, label, margin(result))


def _scores(result: Result, labels: Sequence[str]) -> Scores | None:
    """The finished trials of some mechanisms, those that were evaluated on other samples left out."""
    name = result.metric.name
    scored = [trial for trial in result.trials if trial.status == "done" and name in trial.scores]
    known = None if result.covariance is None else {key: i for i, key in enumerate(result.covariance.trials)}
    trials = [trial for trial in scored if trial.mechanism in labels]
    if known is not None:
        trials = [trial for trial in trials if (trial.mechanism, trial.seed) in known]
    if not trials:
        return None
    covariance, samples = np.zeros((len(trials), len(trials))), 1
    if result.covariance is not None and known is not None:
        places = [known[trial.mechanism, trial.seed] for trial in trials]
        covariance = np.array(result.covariance.values)[np.ix_(places, places)]
        samples = result.covariance.samples
    return Scores(
        np.array([trial.scores[name].value for trial in trials]),
        [trial.mechanism for trial in trials],
        [trial.seed for trial in trials],
        covariance,
        samples,
    )
