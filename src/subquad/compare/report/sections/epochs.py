"""What an epoch of training costs."""

from subquad.compare.report.fairness import why_times_differ
from subquad.compare.report.formatting import NOTHING, format_bytes, format_number, format_ratio, format_setting
from subquad.compare.report.result import Result
from subquad.compare.report.section import Content, Section, Table


def content(result: Result) -> Content | None:
    if not result.epochs or why_times_differ(result) is not None:
        return None
    base = next((cost for cost in result.epochs if cost.mechanism == result.baseline), None)
    headers = ["mechanism", "seconds", f"× {result.baseline}", "peak memory", "updates", "setting"]
    rows = [
        [
            cost.mechanism,
            format_number(cost.seconds, 1),
            NOTHING if base is None else format_ratio(cost.seconds / base.seconds),
            NOTHING if cost.peak_bytes is None else format_bytes(cost.peak_bytes),
            format_number(cost.updates),
            format_setting(cost.setting),
        ]
        for cost in result.epochs
    ]
    return Content(Table(headers, rows, [1, 2, 3, 4], ["done"] * len(rows)))


SECTION = Section("epochs", "Cost of an epoch of training", "tables", content)
