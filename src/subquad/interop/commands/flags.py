"""Flags of the originals' command lines: what each sets here, and how a command's words are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from subquad.original_names import Flag, key


class Given(NamedTuple):
    """The value of a flag, and the words that gave it."""

    value: Any
    words: str


@dataclass
class Arguments:
    """The words of a command.

    values: of the flags that are known, by `key`. positional: what stands without a flag. unsupported: the words that
    have no counterpart, and why.
    """

    values: dict[str, Given] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    unsupported: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        return self.values[name].value if name in self.values else default

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def words(self, name: str) -> str | None:
        return self.values[name].words if name in self.values else None


def read_arguments(words: Sequence[str], flags: Mapping[str, Flag], program: str) -> Arguments:
    """Reads a command's words by a table of flags, whose names begin with two dashes; later ones win.

    A flag that the table does not have is noted as unsupported, and takes the next word unless that is a flag, too.
    """
    shorts = {flag.short: name for name, flag in flags.items() if flag.short}
    found, rest = Arguments(), list(words)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            found.positional.append(word)
            continue
        name, equals, value = word.partition("=")
        name = shorts.get(name, name)
        flag = flags.get(name)
        takes = flag is None or not flag.switch
        if not equals and takes and rest and not _is_flag(rest[0]):
            value, equals = rest.pop(0), " "
        if takes and flag is not None and not equals:
            raise ValueError(f"{program}: {name} needs a value")
        words_of_flag = f"{name}{equals}{value}".strip()
        if flag is None:
            found.unsupported[words_of_flag] = f"{program} may know it, this program does not"
        elif flag.reason:
            found.unsupported[words_of_flag] = flag.reason
        if flag is not None:
            given: Any = True if flag.switch else value
            found.values[key(name)] = Given(given, words_of_flag)
    return found


def _is_flag(word: str) -> bool:
    """Whether a word is a flag; negative numbers are none."""
    return word.startswith("-") and len(word) > 1 and not word[1].isdigit() and word[1] != "."
