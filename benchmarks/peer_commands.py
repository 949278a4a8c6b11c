"""Commands in turns, and the figures in their output."""

import random
import re
import shlex
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass

from subquad.compare.measure.checks import CheckFailedError


@dataclass(frozen=True)
class Figure:
    """How the figure of a run is found. peer, ours: regular expressions; None: the seconds of the whole command."""

    peer: str | None
    ours: str | None
    skip: int
    lower_is_better: bool

    def of(self, pattern: str | None, output: str, seconds: float) -> float:
        if pattern is None:
            return seconds
        found = [float(number.replace(",", "")) for number in re.findall(pattern, output)][self.skip :]
        if not found:
            last = output.strip().splitlines()[-1:] or ["nothing"]
            raise CheckFailedError(f"its output has no figure after {self.skip}; it ends with: {last[0]}")
        return statistics.median(found)


@dataclass(frozen=True)
class Turns:
    """figures: of "ours", "control" and every peer, turn by turn."""

    figures: Mapping[str, list[float]]
    lower_is_better: bool

    def seconds(self, name: str) -> list[float]:
        """What is proportional to the time of every turn."""
        return [figure if self.lower_is_better else 1 / figure for figure in self.figures[name]]

    def median(self, name: str) -> float:
        return statistics.median(self.figures[name])


def command_turns(ours: str, peers: Mapping[str, str], figure: Figure, repeats: int) -> Turns:
    """Runs every command once in each turn, in random order; the first turn warms up files and caches."""
    work = {name: (command, figure.peer) for name, command in peers.items()}
    work |= dict.fromkeys(("ours", "control"), (ours, figure.ours))
    figures: dict[str, list[float]] = {name: [] for name in work}
    order, shuffle = list(work), random.Random(0).shuffle
    for turn in range(repeats + 1):
        shuffle(order)
        for name in order:
            command, pattern = work[name]
            try:
                found = figure.of(pattern, *run(command))
            except CheckFailedError as failure:
                raise CheckFailedError(f"{name}: {failure}") from None
            if turn:
                figures[name].append(found)
    return Turns(figures, figure.lower_is_better)


def run(command: str) -> tuple[str, float]:
    """Output and seconds of a command, in whose words {folder} becomes an empty folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word.replace("{folder}", folder) for word in shlex.split(command)]
        start = time.perf_counter()
        try:
            done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        except OSError as failure:
            raise CheckFailedError(f"{words[0]}: {failure.strerror}") from None
        seconds = time.perf_counter() - start
    if done.returncode:
        last = done.stdout.strip().splitlines()[-1:] or ["nothing"]
        raise CheckFailedError(f"it ended with code {done.returncode}, and with: {last[0]}")
    return done.stdout, seconds
