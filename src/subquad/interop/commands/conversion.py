"""What a command of an original program is here: a recipe with the origin of its lines, and commands to run."""

import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

RECIPE = "RECIPE.yaml"
"""Stands for the recipe's file in the commands of a conversion."""
COMMENT_COLUMN, WIDEST = 60, 100


@dataclass
class Conversion:
    """One command of an original program.

    original: the program. recipe: the sections of a recipe, for a command that trains. origins: the words of the
    command that fields of the recipe came from, by dotted names. commands: what to run here. unsupported: the words
    that have no counterpart, and why. notes: what else a reader should know, as sentences. start: what the options
    --from-run, --reset and --checkpoint of `subquad train` say, for a training that begins with another one's weights.
    text: of a preparation, the folder that it fills, and the section `data` that reads its text.
    """

    original: str
    recipe: dict[str, Any] | None = None
    origins: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    unsupported: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    start: tuple[Path, str, str] | None = None
    text: tuple[str, dict[str, Any]] | None = None

    @property
    def run(self) -> str:
        """The run directory of the training."""
        words = shlex.split(self.commands[0])
        return words[words.index("--out") + 1] if "--out" in words else "runs/converted"

    def to_text(self) -> str:
        """The recipe as YAML, each line with the words that it came from; what to run, and what is missing, is above.

        A command that trains nothing is only what to run.
        """
        remarks = [f"From a command of {self.original}.", *self.notes]
        remarks += [f"Without a counterpart: {words} ({reason})." for words, reason in self.unsupported.items()]
        lines = [line for remark in remarks for line in textwrap.wrap(remark, 118, break_on_hyphens=False)]
        if self.recipe is None:
            return "\n".join([*(f"# {line}" for line in lines), *self.commands]) + "\n"
        lines += ["To run it:", *(f"  {command}" for command in self.commands)]
        return "\n".join([*(f"# {line}" for line in lines), *_yaml_lines(self.recipe, self.origins)]) + "\n"


def _yaml_lines(content: Mapping[str, Any], origins: Mapping[str, str], prefix: str = "", depth: int = 0) -> list[str]:
    """A mapping as lines of YAML: mappings by lines of their own, everything else in one line with its comment."""
    lines = []
    for name, value in content.items():
        path, indent = f"{prefix}{name}", "  " * depth
        if isinstance(value, Mapping) and value and (_has_origin(path, origins) or len(_flow(value)) > WIDEST):
            lines += [f"{indent}{name}:", *_yaml_lines(value, origins, f"{path}.", depth + 1)]
            continue
        text = f"{indent}{name}: {_flow(value)}"
        comment = f"# {origins[path]}" if path in origins else ""
        lines.append(f"{text:<{COMMENT_COLUMN}} {comment}".rstrip())
    return lines


def _has_origin(path: str, origins: Mapping[str, str]) -> bool:
    """Whether some field of a mapping is commented, so that the mapping needs a line for each."""
    return any(name.startswith(f"{path}.") for name in origins)


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).strip()
    return text.removesuffix("...").strip()
