"""The machine and the versions of the programs that made the numbers."""

from subquad.compare.report.result import Result
from subquad.compare.report.section import Content, Section, Table

TEMPLATE = (
    """<dl>{% for name, value in environment.items() %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>"""
)


def content(result: Result) -> Content | None:
    if not result.environment:
        return None
    rows = [[str(name), str(value)] for name, value in result.environment.items()]
    return Content(Table(["name", "value"], rows, [], [""] * len(rows)), values={"environment": result.environment})


SECTION = Section("environment", "Environment", "details", content, template=TEMPLATE)
