"""Numbers as people read them, in the table, the conclusions and the page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from subquad.compare.report.result import Metric
from subquad.compare.report.speed import Crossover
from subquad.compare.statistics.scores import Estimate
from subquad.compare.statistics.times import SpeedRatio

NOTHING = "–"
"""What stands in a table where there is no number."""


def format_number(value: float, digits: int = 0, sign: bool = False) -> str:
    """1234.5 -> "1,234.5"; a true minus sign; -0.0 is 0."""
    shown = f"{abs(value):,.{digits}f}"
    negative = value < 0 and any(digit not in "0.," for digit in shown)
    return ("−" if negative else "+" if sign else "") + shown


def format_ratio(ratio: float) -> str:
    """3.14 -> "3.1×"; more digits for small ratios."""
    return f"{format_number(ratio, 0 if ratio >= 100 else 1 if ratio >= 2 else 2)}×"


def format_bytes(count: float) -> str:
    """Bytes in MiB or GiB."""
    mib = count / 2**20
    if mib >= 1024:
        return f"{format_number(mib / 1024, 1)} GiB"
    return f"{format_number(mib, 0 if mib >= 100 else 1)} MiB"


def format_quantity(value: float, unit: str = "", digits: int = 3) -> str:
    """A number with its unit, in the size that reads best: 1234 ms -> "1.23 s". digits: that count, unless whole."""
    if unit == "bytes":
        return format_bytes(value)
    if unit == "ms" and value >= 1000:
        value, unit = value / 1000, "s"
    if unit == "FLOPs":
        power = max(0, min(5, int(math.log10(value) / 3 + 1e-9))) if value >= 1 else 0
        value, unit = value / 1000**power, f"{('', 'k', 'M', 'G', 'T', 'P')[power]}FLOPs"
    decimals = 0 if value == int(value) else max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{format_number(value, decimals)} {unit}".rstrip()


def format_setting(setting: Mapping[str, Any]) -> str:
    """What a number depends on: "device cpu, threads 2"."""
    return ", ".join(f"{key} {value}" for key, value in setting.items()) or NOTHING


def format_count(count: float) -> str:
    """9412000 -> "9.41 M"; small counts as they are."""
    return f"{format_number(count / 1e6, 2)} M" if count >= 1e6 else format_number(count)


def format_seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def join_words(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def format_metric(metric: Metric, value: float, sign: bool = False) -> str:
    return f"{format_number(value, digits_of(metric, value), sign)}{metric.unit}"


def digits_of(metric: Metric, value: float) -> int:
    """Those of the metric, and more where a value would look like zero without being it."""
    if value == 0 or not math.isfinite(value) or abs(value) >= 0.5 * 10**-metric.digits:
        return metric.digits
    return math.ceil(-math.log10(abs(value)))


def format_estimate(metric: Metric, found: Estimate | None) -> str:
    """ "27.31 (26.90 to 27.72)"."""
    if found is None:
        return "–"
    shown = format_metric(metric, found.mean)
    if found.low == found.high:
        return shown
    return f"{shown} ({format_number(found.low, metric.digits)} to {format_number(found.high, metric.digits)})"


def format_span(ratio: SpeedRatio) -> str:
    """The interval of a ratio: "1.7 to 1.9×"."""
    if ratio.rounds < 2:
        return "one round"
    return f"{format_ratio(ratio.low).rstrip('×')} to {format_ratio(ratio.high)}"


def format_speed(ratio: SpeedRatio | None) -> str:
    """For a table: how many times as fast, with its interval."""
    return NOTHING if ratio is None else f"{format_ratio(ratio.ratio)} ({format_span(ratio)})"


def format_share(share: float) -> str:
    """A relative difference: "+3.3%"."""
    return f"{format_number(100 * share, 1, sign=True)}%"


def format_crossover(found: Crossover | None) -> str:
    """For a table: from which length on a mechanism is faster."""
    if found is None:
        return "–"
    if found.kind == "always":
        return "always"
    return (
        f"not below {format_number(found.last)}" if found.kind == "never" else f"≈ {format_number(found.length or 0)}"
    )
