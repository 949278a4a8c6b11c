"""Differences in quality between mechanisms, from the scores of trials with several seeds.

The score of mechanism m with seed s, on a test set of samples i, is taken as

    y_ms = mu_m + b_s + e_ms + (what the choice of test samples adds)

The seed's effect b_s is common to all mechanisms (their trials share initial values and batches), so that differences
are taken within seeds; e has one variance for all mechanisms, pooled over them. A difference is a contrast D = w · y of
the least-squares fit. Its variance has two parts:

    |w|^2 s^2               falls with more seeds: s^2 is the mean square of the residuals of y
    w' C w - |w|^2 r^2      does not: what the choice of test samples adds for every seed alike, where r^2, the same
                            mean square of C, is the part of s^2 that the samples explain

C is the covariance of the scores over test sets of this size. Each part counts with a critical value of its own,

    half width^2  =  |w|^2 max(c^2 s^2, d^2 r^2)  +  d^2 (w' C w - |w|^2 r^2)

c is that of Dunnett or Tukey with the degrees of freedom of s^2, which is common to all differences; d is Student's
with those of C, at a confidence that is divided among the differences (as by Šidák), each of which has an estimate of
its own. (One critical value with Satterthwaite's degrees of freedom claims too much: where few seeds happen to agree,
s^2 is too small, and the degrees of freedom are taken as too many.) Intervals hold for all differences at once,
whichever of them is looked at.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from subquad.compare.statistics.critical import DUNNETT, TUKEY, Family

MOST_SEEDS = 1000
"""More seeds than this are no advice."""
Verdict = Literal["within", "better", "worse", "undecided", "one seed"]


@dataclass(frozen=True)
class Scores:
    """The scores of trials: values (trials,), each with its mechanism and seed.

    covariance: (trials, trials), of the scores over the choice of test samples. groups: how many independent groups of
    samples it was estimated from.
    """

    values: np.ndarray
    mechanisms: Sequence[str]
    seeds: Sequence[int]
    covariance: np.ndarray
    groups: int

    def seeds_of(self, label: str) -> set[int]:
        return {seed for mechanism, seed in zip(self.mechanisms, self.seeds, strict=True) if mechanism == label}

    def with_seeds(self, seeds: set[int]) -> "Scores":
        """The scores of trials with these seeds."""
        keep = [i for i, seed in enumerate(self.seeds) if seed in seeds]
        mechanisms, numbers = [self.mechanisms[i] for i in keep], [self.seeds[i] for i in keep]
        return Scores(self.values[keep], mechanisms, numbers, self.covariance[np.ix_(keep, keep)], self.groups)


@dataclass(frozen=True)
class Difference:
    """The score of one mechanism minus that of another, with its simultaneous interval.

    seeds: how many trials of both there are. With one seed for all mechanisms (`single_seed`) the interval is that of
    these two runs on other test samples, and says nothing about mechanisms.
    """

    mean: float
    low: float
    high: float
    seeds: int
    single_seed: bool


def verdict(found: Difference, margin: float, better: Literal["higher", "lower"]) -> Verdict:
    """What may be said of a mechanism against the baseline, at the confidence of the interval.

    within          the difference is smaller than the margin
    better, worse   the interval leaves out 0
    undecided       neither
    one seed        nothing about mechanisms
    """
    if found.single_seed:
        return "one seed"
    if max(-found.low, found.high) < margin:
        return "within"
    if found.low <= 0 <= found.high:
        return "undecided"
    return "better" if (found.low > 0) == (better == "higher") else "worse"


@dataclass(frozen=True)
class Estimate:
    """The mean score of a mechanism over seeds. Its interval is for other seeds and other test samples.

    With one seed for all mechanisms (`single_seed`) it is that of this run on other test samples.
    """

    mean: float
    low: float
    high: float
    seeds: int
    single_seed: bool


def estimates(scores: Scores) -> dict[str, Estimate]:
    """The mean of every mechanism; here the seed's own effect is part of the variance between seeds.

    That effect is common to all mechanisms: more of them tell nothing more about it, so that it has the degrees of
    freedom of the seeds alone.
    """
    fit, within_seeds = _Fit(scores, DUNNETT, 1, blocked=False), _Fit(scores, DUNNETT, 1)
    of_seed = max(0.0, fit.seed_variance - within_seeds.seed_variance) if within_seeds.freedom else fit.seed_variance
    found = {}
    for label in fit.labels:
        weights = fit.weights(label)
        common = _Variance(of_seed * float(weights @ weights), 0.0, 0.0, max(0, fit.num_seeds - 1))
        own = replace(fit.variance(weights), by_seeds=(fit.seed_variance - of_seed) * float(weights @ weights))
        own = replace(own, freedom=within_seeds.freedom)
        mean, half = float(weights @ scores.values), math.hypot(fit.half_width(common), fit.half_width(own))
        found[label] = Estimate(mean, mean - half, mean + half, len(scores.seeds_of(label)), not fit.freedom)
    return found


def against_baseline(scores: Scores, baseline: str) -> dict[str, Difference]:
    """Every other mechanism minus the baseline, by Dunnett's critical values; seeds without the baseline do not
    count.
    """
    fit = _fit_with_baseline(scores, baseline)
    return {label: fit.difference(label, baseline) for label in fit.labels if label != baseline}


def seeds_to_decide(scores: Scores, baseline: str, label: str, margin: float) -> int | None:
    """About how many more seeds would end "undecided", if the difference stays what it is; None: seeds alone would
    not.
    """
    fit = _fit_with_baseline(scores, baseline)
    size = abs(fit.difference(label, baseline).mean)
    variance = fit.variance(fit.weights(label, baseline))

    def is_enough(seeds: int) -> bool:
        then = variance.with_seeds(fit.num_seeds, seeds)
        return fit.half_width(then) < max(size, margin - size)

    low, high = fit.num_seeds, fit.num_seeds + 1
    while not is_enough(high):
        low, high = high, 2 * high
        if high > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high - fit.num_seeds


def all_pairs(scores: Scores) -> dict[tuple[str, str], Difference]:
    """The first minus the second of all pairs of mechanisms, by Tukey's critical values."""
    labels = list(dict.fromkeys(scores.mechanisms))
    fit = _Fit(scores, TUKEY, len(labels))
    if not fit.is_connected:
        return {}
    return {(a, b): fit.difference(a, b) for i, a in enumerate(labels) for b in labels[i + 1 :]}


def _fit_with_baseline(scores: Scores, baseline: str) -> "_Fit":
    scores = scores.with_seeds(scores.seeds_of(baseline))
    return _Fit(scores, DUNNETT, len(set(scores.mechanisms)) - 1)


@dataclass(frozen=True)
class _Variance:
    """Of a difference: the part that falls with more seeds, and the part that does not.

    by_seeds: |w|^2 s^2, with the degrees of freedom `freedom`; explained: |w|^2 r^2, the least that it can be;
    by_samples: the rest.
    """

    by_seeds: float
    explained: float
    by_samples: float
    freedom: int

    def with_seeds(self, now: int, wanted: int) -> "_Variance":
        """As it would be with another number of seeds."""
        freedom = self.freedom * (wanted - 1) // (now - 1)
        return _Variance(self.by_seeds * now / wanted, self.explained * now / wanted, self.by_samples, freedom)


class _Fit:
    """The additive model of scores, by mechanism and seed, or by mechanism alone if it is not blocked by seed.

    count: of what is compared at once, as the family counts.
    """

    def __init__(self, scores: Scores, family: Family, count: int, blocked: bool = True) -> None:
        self.scores, self.family, self.count = scores, family, count
        self.labels, seeds = list(dict.fromkeys(scores.mechanisms)), list(dict.fromkeys(scores.seeds))
        of_mechanism = np.array([[label == one for one in self.labels] for label in scores.mechanisms], float)
        of_seed = np.array([[seed == one for one in seeds] for seed in scores.seeds], float)
        design = np.hstack([of_mechanism, of_seed]) if blocked else of_mechanism
        self.solution = np.linalg.pinv(design)
        residual = np.eye(len(design)) - design @ self.solution
        self.num_seeds, self.freedom = len(seeds), round(np.trace(residual))
        self.seed_variance = float(scores.values @ residual @ scores.values) / max(1, self.freedom)
        self.sample_variance = float(np.trace(residual @ scores.covariance)) / max(1, self.freedom)

    @property
    def is_connected(self) -> bool:
        """Whether seeds that mechanisms share lead from each mechanism to every other."""
        return len(self.scores.values) - self.freedom == len(self.labels) + self.num_seeds - 1

    def weights(self, first: str, second: str = "") -> np.ndarray:
        """w, for which w · y is the first mechanism minus the second, or the first alone."""
        sign = np.array([(label == first) - float(label == second) for label in self.labels])
        return sign @ self.solution[: len(self.labels)]

    def difference(self, first: str, second: str) -> Difference:
        weights = self.weights(first, second)
        mean, variance = float(weights @ self.scores.values), self.variance(weights)
        half = self.half_width(variance)
        seeds = len(self.scores.seeds_of(first) & self.scores.seeds_of(second))
        return Difference(mean, mean - half, mean + half, seeds, not self.freedom)

    def variance(self, weights: np.ndarray) -> _Variance:
        """See the equations above; without residuals, all of it is from the samples."""
        of_samples, norm = float(weights @ self.scores.covariance @ weights), float(weights @ weights)
        explained = norm * self.sample_variance
        return _Variance(norm * self.seed_variance, explained, max(0.0, of_samples - explained), self.freedom)

    def half_width(self, variance: _Variance) -> float:
        of_samples = self.family.separate(self.count, max(1, self.scores.groups - 1)) ** 2
        by_seeds = of_samples * variance.explained
        if variance.freedom:
            by_seeds = max(by_seeds, self.family.critical(self.count, variance.freedom) ** 2 * variance.by_seeds)
        return math.sqrt(by_seeds + of_samples * variance.by_samples)
