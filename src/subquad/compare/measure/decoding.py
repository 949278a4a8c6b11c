"""How fast trained models write: tokens a second, all mechanisms side by side on the same inputs.

What they write is their task's `decoding_workload`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from subquad.compare.measure.timing import interleaved_seconds, synchronizer
from subquad.train.run import load_run


class Speed(NamedTuple):
    """tokens_per_second: None where the mechanism cannot decode, for a reason."""

    tokens_per_second: float | None
    reason: str | None = None


def measure_decoding(
    runs: Mapping[str, Path], split: str, repeats: int, begin: Callable[[str], None]
) -> dict[str, Speed]:
    """By label. begin: told before each mechanism is tried."""
    found: dict[str, Speed] = {}
    tokens: dict[str, int] = {}
    work: dict[str, Callable[[], object]] = {}
    device = None
    for label, folder in runs.items():
        begin(label)
        loaded = load_run(folder)
        device = loaded.device
        write = loaded.recipe.task_class.decoding_workload(loaded, split)
        try:
            tokens[label] = write()
        except ValueError as refusal:  # a mechanism without a streaming form
            found[label] = Speed(None, str(refusal))
        else:
            work[label] = write
    begin("all, side by side")
    if device is not None:
        seconds = interleaved_seconds(work, repeats, synchronize=synchronizer(device))
        for label, times in seconds.items():
            found[label] = Speed(tokens[label] / sorted(times)[len(times) // 2])
    return found
