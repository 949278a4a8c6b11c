"""Comparisons with a known truth, drawn at random and judged by the product's own functions."""

from dataclasses import dataclass

import numpy as np

from subquad.compare.statistics.critical import DUNNETT
from subquad.compare.statistics.scores import Scores, against_baseline, estimates, verdict


@dataclass(frozen=True)
class Truth:
    """A baseline and `mechanisms` others. Standard deviations: of a trial, of a seed common to all, of a sample for a
    mechanism, and of a sample for a single trial. document: so many neighbouring samples have the same value.

    effect: of the first mechanism, in standard errors; shift: the same in units of the score.
    """

    mechanisms: int
    seeds: int
    samples: int = 250
    of_seeds: float = 0.5
    of_block: float = 1.0
    of_samples: float = 5.0
    of_both: float = 5.0
    document: int = 1
    effect: float = 0.0
    shift: float = 0.0

    @property
    def error(self) -> float:
        """The true standard error of a difference."""
        groups = self.samples / self.document
        by_seeds = self.of_seeds**2 + self.of_both**2 / groups
        return float(np.sqrt(2 * (by_seeds / self.seeds + self.of_samples**2 / groups)))


@dataclass(frozen=True)
class Shares:
    """Of the draws. oracle: the power of a test that knows all variances."""

    false_claims: float
    coverage: float
    power: float
    oracle: float
    recommended: float


def share_of(truth: Truth, draws: int, margin: float = 0.0) -> Shares:
    rng = np.random.default_rng(0)
    labels = [f"m{i}" for i in range(truth.mechanisms + 1)]
    means = np.zeros(len(labels))
    means[1] = truth.effect * truth.error + truth.shift
    known = DUNNETT.critical(truth.mechanisms, np.inf) * truth.error
    counts = np.zeros(5)
    for _ in range(draws):
        scores = _draw(truth, means, labels, rng)
        found = against_baseline(scores, labels[0])
        inside = [one.low <= mean <= one.high for one, mean in zip(found.values(), means[1:], strict=True)]
        null = [one for one, mean in zip(found.values(), means[1:], strict=True) if mean == 0]
        planted = found[labels[1]]
        counts += [
            any(one.low > 0 or one.high < 0 for one in null),
            all(inside),
            planted.low > 0 or planted.high < 0,
            abs(planted.mean) > known,
            verdict(planted, margin, "higher") in ("within", "better"),
        ]
    return Shares(*(counts / draws))


def coverage_of_means(truth: Truth, draws: int) -> float:
    """How often the interval of a single mechanism's mean holds the true one."""
    rng = np.random.default_rng(0)
    labels = [f"m{i}" for i in range(truth.mechanisms + 1)]
    inside = 0.0
    for _ in range(draws):
        found = estimates(_draw(truth, np.zeros(len(labels)), labels, rng)).values()
        inside += float(np.mean([one.low <= 0 <= one.high for one in found]))
    return inside / draws


def _draw(truth: Truth, means: np.ndarray, labels: list[str], rng: np.random.Generator) -> Scores:
    groups, shape = truth.samples // truth.document, (len(labels), truth.seeds)
    by_sample = rng.normal(0, truth.of_samples, (len(labels), 1, groups)) + rng.normal(
        0, truth.of_both, (*shape, groups)
    )
    values = means[:, None] + rng.normal(0, truth.of_block, (1, truth.seeds)) + rng.normal(0, truth.of_seeds, shape)
    covariance = np.cov(by_sample.reshape(-1, groups)) / groups
    mechanisms = [label for label in labels for _ in range(truth.seeds)]
    return Scores(
        (values + by_sample.mean(-1)).reshape(-1),
        mechanisms,
        list(range(truth.seeds)) * len(labels),
        covariance,
        groups,
    )
