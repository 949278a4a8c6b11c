"""The answer, what concerns the floors, and what limits it."""

from subquad.compare.report.conclusions import conclude
from subquad.compare.report.result import Result
from subquad.compare.report.section import Content, Section

GROUPS = {"floor": "Before that", "limit": "Limits"}
TEMPLATE = """
<h2 id="{{ name }}-title" class="visually-hidden">{{ title }}</h2>
<p class="headline">{{ answer }}</p>
<div class="findings">
{%- for kind, heading, texts in groups if texts %}
<h3>{{ heading }}</h3>
<ul class="{{ kind }}">{% for text in texts %}<li>{{ text }}</li>{% endfor %}</ul>
{%- endfor %}
</div>
"""


def content(result: Result) -> Content:
    answer, *others = conclude(result)
    groups = [
        (kind, heading, [finding.text for finding in others if finding.kind == kind])
        for kind, heading in GROUPS.items()
    ]
    return Content(values={"answer": answer.text, "groups": groups})


SECTION = Section("conclusions", "Conclusions", "top", content, template=TEMPLATE)
