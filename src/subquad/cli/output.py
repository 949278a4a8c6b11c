"""What commands print: tables, and help that ends with examples. NO_COLOR turns colours off everywhere."""

import os
import re
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from subquad.processes import printable


def is_rank_zero() -> bool:
    """Whether this process is the one that prints, of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def styled(text: str, stream: TextIO, **style: Any) -> str:
    """Text in a colour (`fg="red"`) or bold, if the stream is a terminal that may be coloured."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain else typer.style(text, **style)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> None:
    """Columns listed in `numeric` are aligned to the right. An empty row separates groups."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(headers, rows, numeric)
        return
    widths = [max(len(line[i]) for line in [headers, *filter(None, rows)]) for i in range(len(headers))]
    for line in [headers, ["-" * width for width in widths], *rows]:
        cells = [cell.rjust(widths[i]) if i in numeric else cell.ljust(widths[i]) for i, cell in enumerate(line)]
        print("  ".join(cells).rstrip())


def _print_rich(headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i in numeric else "left", overflow="fold")
    for row in rows:
        if row:
            table.add_row(*(Text(cell) for cell in row))  # Text: brackets in a cell are no markup
        else:
            table.add_section()
    Console().print(table)


# ---------------------------------------------------------------------- help

TITLE = "Examples:"


class _WithExamples:
    """For a command or a group: shows the examples of its docstring last, line by line as they are typed.

    The docstring ends with the paragraph `Examples:`, and each line below that word is one example.
    """

    help: str | None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        text, _, self.examples = (self.help or "").partition(f"\n\n{TITLE}\n")
        self.help = text

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        if self.examples:
            formatter.write_paragraph()
            formatter.write(f"{TITLE}\n")
            formatter.write("".join(f"  {line.rstrip()}\n" for line in self.examples.splitlines()))

    def get_help(self, ctx: Any) -> str:
        text = super().get_help(ctx)  # type: ignore[misc]
        return re.sub(r"^\w+:", lambda title: styled(title[0], sys.stdout, bold=True), text, flags=re.MULTILINE)


class Command(_WithExamples, TyperCommand):
    """A command whose help ends with examples."""


class Group(_WithExamples, TyperGroup):
    """A command of commands whose help ends with examples."""
