"""What is noticed while a source is read: samples that cannot be read, and a header that nobody spoke of."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

OnErrorOption = Literal["stop", "skip"]
ON_ERROR = "What a line, row or text that cannot be read does: stop with an error, or skip, count and name the first."
NAMED_ERRORS = 5

LANGUAGES = """
    af am ar az be bg bn bs ca cs cy da de el en es et eu fa fi fr ga gl gu he hi hr hu hy id is it ja ka kk km kn ko ku
    ky lo lt lv mk ml mn mr ms mt my nb ne nl nn no or pa pl ps pt ro ru si sk sl so sq sr sv sw ta te tg th tk tl tr tt
    uk ur uz vi xh yi yo zh zu arabic chinese czech deutsch dutch english finnish french german hindi italian japanese
    korean polish portuguese romanian russian spanish swedish turkish
"""
FIELDS = """
    source target src tgt trg text texts targets label labels class category sentiment stars rating sentence sentence1
    sentence2 review comment input output question answer premise hypothesis translation title content document
"""
HEADER_NAMES = frozenset(f"{LANGUAGES} {FIELDS}".split())


@dataclass
class ReadingReport:
    """What was noticed while a source was read.

    on_error: whether a sample that cannot be read stops everything, or is skipped. unreadable: how many were skipped.
    first_errors: the first of them, by file and line. header: the line that was left out as a header, in words.
    """

    on_error: OnErrorOption = "stop"
    unreadable: int = 0
    first_errors: list[str] = field(default_factory=list)
    header: str | None = None

    def add_error(self, error: ValueError) -> None:
        """Raises the error of a sample, or counts it."""
        if self.on_error == "stop":
            raise error
        self.unreadable += 1
        if len(self.first_errors) < NAMED_ERRORS:
            self.first_errors.append(str(error))

    def add_header(self, place: str, row: Sequence[str]) -> None:
        names = ", ".join(row)
        self.header = f"{place} names the columns ({names}) and is left out; header: false makes it a sample"

    def to_dict(self) -> dict[str, Any]:
        """What data.json says about it; empty if there is nothing to say."""
        found = {"first_errors": self.first_errors, "header": self.header}
        return {name: value for name, value in found.items() if value}


def is_header(cells: Sequence[str]) -> bool:
    """Whether the cells of a first row are names of columns: languages, or what fields of samples are usually called.

    A language may have a region: en_US, pt-br. Only well-known names count, because short sentences are words too.
    """
    names = [re.sub(r"[-_][a-z]{2}$", "", cell.strip().casefold()) for cell in cells]
    return len(set(names)) == len(names) and HEADER_NAMES.issuperset(names)
