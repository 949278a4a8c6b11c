"""The recipe that was compared in."""

import yaml

from subquad.compare.report.result import Result
from subquad.compare.report.section import Content, Section

TEMPLATE = """<pre tabindex="0">{{ recipe }}</pre>"""


def content(result: Result) -> Content | None:
    if not result.recipe:
        return None
    return Content(values={"recipe": yaml.safe_dump(result.recipe, sort_keys=False, allow_unicode=True)})


SECTION = Section("recipe", "Recipe", "details", content, template=TEMPLATE)
