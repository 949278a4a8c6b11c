"""Markdown that programs write: tables, and the parts of a page that stand between two marker comments."""

from collections.abc import Sequence


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the result ends with a newline."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def fill_between(text: str, begin: str, end: str, content: str, page: str) -> str:
    """Replaces what stands between the lines `begin` and `end` of a page; `page` names it in the error message."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} has no lines {begin!r} and {end!r} around its generated part")
    return f"{before}{begin}\n{content}{end}{after}"
