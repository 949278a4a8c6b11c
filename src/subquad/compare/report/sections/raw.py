"""The whole result as JSON, which the page's script fills in and saves."""

from subquad.compare.report.result import Result
from subquad.compare.report.section import Content, Section

TEMPLATE = """<p><button id="download" type="button" hidden>Save as JSON</button></p>
<pre id="raw-text" tabindex="0"></pre>"""


def content(_: Result) -> Content:
    return Content()


SECTION = Section("raw", "Raw data", "details", content, template=TEMPLATE)
