"""Numbers as people read them, in the table, the verdict and the page."""

import math
from collections.abc import Sequence

from subquad.compare.report.schema import Metric
from subquad.compare.report.statistics import CONFIDENCE, Crossover, Difference, Estimate


def number(value: float, digits: int = 0, sign: bool = False) -> str:
    """1234.5 -> "1,234.5"; a true minus sign; -0.0 is 0."""
    shown = f"{abs(value):,.{digits}f}"
    negative = value < 0 and any(digit not in "0.," for digit in shown)
    return ("−" if negative else "+" if sign else "") + shown


def times(ratio: float) -> str:
    """3.14 -> "3.1×"; more digits for small ratios."""
    return f"{number(ratio, 0 if ratio >= 100 else 1 if ratio >= 2 else 2)}×"


def size(count: float) -> str:
    """Bytes in MiB or GiB."""
    mib = count / 2**20
    if mib >= 1024:
        return f"{number(mib / 1024, 1)} GiB"
    return f"{number(mib, 0 if mib >= 100 else 1)} MiB"


def millions(count: float) -> str:
    """9412000 -> "9.41 M"; small counts as they are."""
    return f"{number(count / 1e6, 2)} M" if count >= 1e6 else number(count)


def probability(p: float) -> str:
    """As many digits as show on which side of 1 - CONFIDENCE it is."""
    if p < 0.001:
        return "p < 0.001"
    digits = 2 if p >= 0.1 else 4 if round(p, 3) == round(1 - CONFIDENCE, 3) else 3
    return f"p = {p:.{digits}f}"


def seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def listed(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def interval(low: float, high: float, digits: int, sign: bool = False) -> str:
    return f"{CONFIDENCE:.0%} interval {number(low, digits, sign)} to {number(high, digits, sign)}"


def metric_value(metric: Metric, value: float, sign: bool = False) -> str:
    return f"{number(value, digits_of(metric, value), sign)}{metric.unit}"


def digits_of(metric: Metric, value: float) -> int:
    """Those of the metric, and more where a value would look like zero without being it."""
    if value == 0 or not math.isfinite(value) or abs(value) >= 0.5 * 10**-metric.digits:
        return metric.digits
    return math.ceil(-math.log10(abs(value)))


def estimate(metric: Metric, found: Estimate | None) -> str:
    """ "27.31 (26.90 to 27.72)"."""
    if found is None:
        return "–"
    shown = metric_value(metric, found.mean)
    if found.low is None or found.high is None:
        return shown
    return f"{shown} ({number(found.low, metric.digits)} to {number(found.high, metric.digits)})"


def evidence(metric: Metric, found: Difference) -> str:
    """What a statement about a difference rests on."""
    shown = interval(found.low, found.high, digits_of(metric, found.mean), sign=True)
    return f"{shown}, {probability(found.p)}, {seeds(found.seeds)}"


def crossover_cell(found: Crossover | None) -> str:
    """For a table: from which length on a mechanism is faster."""
    if found is None:
        return "–"
    if found.kind == "always":
        return "always"
    return f"not below {number(found.last)}" if found.kind == "never" else f"≈ {number(found.length or 0)}"
