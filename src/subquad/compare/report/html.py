"""The comparison as one HTML file that opens offline.

Text and tables are written here, so that they are there without JavaScript; the scripts in assets/ draw the plots from
data that the page carries. jinja2 escapes everything but our own assets. Nothing is loaded: the page's own policy
forbids every request, and allows only the style and the scripts whose checksums it states. What a recipe or a label
says can therefore not become code.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from subquad.compare.report import sections
from subquad.compare.report.formatting import format_seeds
from subquad.compare.report.result import Result
from subquad.compare.report.section import Content, Section, Table
from subquad.files import write_text

SCRIPTS = ("scales.js", "plot.js", "page.js")


@dataclass(frozen=True)
class Rendered:
    """A section with what it shows, and the HTML of its own template if it has one."""

    section: Section
    content: Content
    html: str | None


def write_page(result: Result, path: Path) -> None:
    write_text(path, page(result))


def page(result: Result) -> str:
    """The whole file."""
    style, script = _asset("page.css"), "\n".join(_asset(name) for name in SCRIPTS)
    shown = [(section, section.content(result)) for section in sections.SECTIONS]
    rendered = [_render(section, content) for section, content in shown if content is not None]
    return (
        _environment()
        .get_template("page.html")
        .render(
            policy=f"default-src 'none'; style-src {_allow(style)}; script-src {_allow(script)}; base-uri 'none'",
            style=style,
            script=script,
            data=embedded(page_data(result, rendered)),
            result=result,
            subtitle=_subtitle(result),
            **{
                place: [one for one in rendered if one.section.place == place] for place in ("top", "tables", "details")
            },
            plots=[one for one in rendered if one.content.plot is not None],
            plot_tables=[one for one in rendered if one.section.place == "plots" and one.content.table is not None],
        )
    )


def study_page(title: str, footer: str, tables: Mapping[str, Table], decisions: Table, links: Mapping[str, str]) -> str:
    """The page of a study. tables: by title; links: to the pages of its comparisons, by their titles."""
    style = _asset("page.css")
    return (
        _environment()
        .get_template("study.html")
        .render(
            policy=f"default-src 'none'; style-src {_allow(style)}; base-uri 'none'",
            style=style,
            title=title,
            footer=footer,
            tables=tables,
            decisions=decisions,
            links=links,
        )
    )


def page_data(result: Result, rendered: list[Rendered]) -> dict[str, Any]:
    """What the scripts need: the result itself, the labels with the baseline first, and the plots by section."""
    others = [label for label in result.labels if label != result.baseline]
    plots = {one.section.name: asdict(one.content.plot) for one in rendered if one.content.plot is not None}
    return {"result": result.model_dump(mode="json"), "labels": [result.baseline, *others], "plots": plots}


def embedded(data: Any) -> str:
    """JSON inside an HTML script element: no character of it can end the element or start a comment."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _render(section: Section, content: Content) -> Rendered:
    html = None
    if section.template:
        template = _environment().from_string(section.template)
        html = template.render(name=section.name, title=section.title, **content.values)
    return Rendered(section, content, html)


def _subtitle(result: Result) -> str:
    better = f"{result.metric.name} ({result.metric.better} is better)"
    parts = [result.task, better, f"{len(result.mechanisms)} mechanisms", f"baseline {result.baseline}"]
    if seeds := {trial.seed for trial in result.trials}:
        parts.append(format_seeds(len(seeds)))
    return "\N{NO-BREAK SPACE}· ".join(parts)


@cache
def _environment() -> Environment:
    loader = PackageLoader("subquad.compare.report", "assets")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def _asset(name: str) -> str:
    return files("subquad.compare.report").joinpath("assets", name).read_text(encoding="utf-8")


def _allow(text: str) -> str:
    """The source of a script or style as the page's policy names it."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
