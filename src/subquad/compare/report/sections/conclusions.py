"""The headline, and what was found about quality and cost, and what limits it."""

from subquad.compare.report.conclusions import conclude
from subquad.compare.report.result import Result
from subquad.compare.report.section import Content, Section

GROUPS = {"quality": "Quality", "cost": "Cost", "caveat": "Limits"}
TEMPLATE = """
<h2 id="{{ name }}-title" class="visually-hidden">{{ title }}</h2>
<p class="headline">{{ headline.text }}</p>
{%- if headline.detail %}<p class="detail">{{ headline.detail | unbroken }}</p>{% endif %}
<div class="findings">
{%- for kind, heading, texts in groups if texts %}
<h3>{{ heading }}</h3>
<ul class="{{ kind }}">{% for text in texts %}<li>{{ text | unbroken }}</li>{% endfor %}</ul>
{%- endfor %}
</div>
"""


def content(result: Result) -> Content:
    headline, *others = conclude(result)
    groups = [
        (kind, heading, [finding.text for finding in others if finding.kind == kind])
        for kind, heading in GROUPS.items()
    ]
    return Content(values={"headline": headline, "groups": groups})


SECTION = Section("conclusions", "Conclusions", "top", content, template=TEMPLATE)
