"""The command that makes the result again, and an entry for a bibliography."""

from subquad.compare.report.result import Result
from subquad.compare.report.section import Content, Section

TEMPLATE = """{% if command %}<pre tabindex="0">{{ command }}</pre>{% endif %}
<pre tabindex="0">{{ bibtex }}</pre>"""
BIBTEX = """@misc{{subquad-comparison,
  title = {{{title}}},
  howpublished = {{Comparison of sequence mixers by subquad {version}}},
  year = {{{year}}},
  note = {{{note}}}
}}"""


def content(result: Result) -> Content:
    seeds = len({trial.seed for trial in result.trials})
    entry = BIBTEX.format(
        title=_escaped(result.title),
        version=result.environment.get("subquad", ""),
        year=result.created[:4],
        note=_escaped(f"{result.task}, {len(result.competitors)} mechanisms, {seeds} seeds"),
    )
    return Content(values={"command": result.command, "bibtex": entry})


def _escaped(text: str) -> str:
    """Characters that mean something to TeX."""
    kept = text.replace("\\", "/").replace("{", "(").replace("}", ")")
    return "".join(f"\\{letter}" if letter in "&%$#_" else letter for letter in kept)


SECTION = Section("cite", "How to repeat and cite it", "details", content, template=TEMPLATE)
