"""Every pair of mechanisms, not only those with the baseline."""

from subquad.compare.report.formatting import format_metric
from subquad.compare.report.quality import margin, pairs
from subquad.compare.report.result import Result
from subquad.compare.report.section import Content, Section, Table
from subquad.compare.statistics.scores import verdict

WORDS = {"within": "within the margin", "undecided": "undecided", "one seed": "one seed"}


def content(result: Result) -> Content | None:
    found = pairs(result)
    if len(found) < 2:  # one pair is what the table of mechanisms says
        return None
    metric, most = result.metric, margin(result)
    rows = []
    for (first, second), difference in found.items():
        low, high = (format_metric(metric, end, sign=True) for end in (difference.low, difference.high))
        said = verdict(difference, most, metric.better)
        words = WORDS.get(said, f"{first} is {said}")
        mean = format_metric(metric, difference.mean, sign=True)
        rows.append([first, second, mean, f"{low} to {high}", words])
    headers = ["first", "second", f"difference in {metric.name}", "95% interval", "verdict"]
    note = "The first minus the second. Intervals hold for all pairs at once (Tukey)."
    return Content(Table(headers, rows, [2, 3], ["done"] * len(rows)), note=note)


SECTION = Section("pairs", "Every pair", "tables", content)
