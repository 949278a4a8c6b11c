"""What the emulated GPU was asked to do: launches, synchronisations and copies, in order, by line of subquad."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

PACKAGE = str(Path(__file__).parents[2] / "src" / "subquad")
LAUNCH, SYNCHRONISATION, TO_DEVICE, TO_HOST = "launch", "synchronisation", "copy to the device", "copy to the host"


class Event(NamedTuple):
    """kind: one of those above, or another that a test records. line: file:number of subquad, "" outside of it."""

    kind: str
    name: str
    line: str
    size: int = 0  # bytes of a copy


class Counts:
    """The events of a stretch of a program."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def count(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.events)

    @property
    def launches(self) -> int:
        return self.count(LAUNCH)

    @property
    def synchronisations(self) -> int:
        return self.count(SYNCHRONISATION)

    @property
    def copied_bytes(self) -> int:
        """In both directions."""
        return sum(event.size for event in self.events if event.kind in (TO_DEVICE, TO_HOST))

    def before(self, kind: str) -> "Counts":
        """What happened before the first event of a kind."""
        kinds = [event.kind for event in self.events]
        part = Counts()
        part.events = self.events[: kinds.index(kind)] if kind in kinds else self.events
        return part

    def lines(self, kind: str) -> list[str]:
        """The events of a kind, most frequent first: how often, what, and where."""
        found = Counter((event.name, event.line) for event in self.events if event.kind == kind)
        return [f"{count:6d}  {name}  {line}" for (name, line), count in found.most_common()]

    def report(self) -> str:
        parts = []
        for kind in (SYNCHRONISATION, TO_DEVICE, TO_HOST, LAUNCH):
            parts += [f"{kind}: {self.count(kind)}", *self.lines(kind), ""]
        return "\n".join(parts)


_open: list[Counts] = []


@contextmanager
def counted() -> Iterator[Counts]:
    """Records the events of the block, of all threads."""
    counts = Counts()
    _open.append(counts)
    try:
        yield counts
    finally:
        _open.remove(counts)


def record(kind: str, name: str, size: int = 0) -> None:
    if _open:
        event = Event(kind, name, _line(), size)
        for counts in _open:
            counts.events.append(event)


def _line() -> str:
    """The innermost line of subquad that runs. Backward runs in a thread of its own, below no line of ours."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
