"""Help of commands: examples at its end, as they are typed, and headings that stand out on a terminal.

The docstring of a command ends with the paragraph `Examples:`; each line below it is shown as it stands there.
"""

import re
import sys
from typing import Any

from typer.core import TyperCommand, TyperGroup

from subquad.cli.output import styled

TITLE = "Examples:"


class _WithExamples:
    """For a command or a group: cuts the examples out of its help, and shows them last."""

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
