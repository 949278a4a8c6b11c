"""The sections of the page, in their order. A new section is one file here and one entry in this list."""

from subquad.compare.report.result import Result
from subquad.compare.report.section import Section, Table
from subquad.compare.report.sections import (
    by_time,
    cite,
    conclusions,
    environment,
    epochs,
    lengths,
    mechanisms,
    pairs,
    pareto,
    positions,
    raw,
    recipe,
    swap,
    trials,
    tuning,
)
from subquad.config import nearest

SECTIONS: tuple[Section, ...] = (
    conclusions.SECTION,
    mechanisms.SECTION,
    pareto.SECTION,
    lengths.SECTION,
    trials.SECTION,
    tuning.SECTION,
    positions.SECTION,
    swap.SECTION,
    pairs.SECTION,
    by_time.SECTION,
    epochs.SECTION,
    cite.SECTION,
    environment.SECTION,
    recipe.SECTION,
    raw.SECTION,
)


def section_table(result: Result, name: str) -> Table:
    """The rows of a section; a name that is not known, or a section without rows, is a ValueError."""
    section = next((section for section in SECTIONS if section.name == name), None)
    if section is None:
        known = [section.name for section in SECTIONS]
        raise ValueError(f"there is no section {name!r}{nearest(name, known)} Sections: {', '.join(known)}.")
    content = section.content(result)
    if content is None or content.table is None:
        raise ValueError(f"the section {name} of this result has no table")
    return content.table
