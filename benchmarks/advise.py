"""Whether `subquad advise` is right: predicted crossover lengths beside measured ones.

    OMP_NUM_THREADS=1 python -m benchmarks.advise

First it asks for advice, as the command does. Then it times single layers at lengths that are a quarter apart, and
finds where each mechanism gets as fast as softmax attention: in the logarithms of ratio and length it goes straight
from one length to the next. Everything is a ratio of times of the same rounds. Lengths are measured one after the
other, and a busy machine makes both the stated intervals and the measured ratios less sure.
"""

import argparse
import math
import statistics
from collections.abc import Sequence

from subquad.compare.advice.advise import LENGTHS, ROUNDS, Prediction, advise
from subquad.compare.measure.bench import BASELINE, BenchPlan, run_bench

GRID = (64, 80, 100, 125, 156, 195, 244, 305, 381, 477, 596, 745, 931, 1164)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="how often everything is timed at each length")
    parser.add_argument("--causal", action="store_true", help="measure the causal forms")
    options = parser.parse_args()
    predicted = predict(causal=options.causal)
    measured = measure(list(predicted), GRID, options.rounds, options.causal)
    print("mechanism      predicted (95 % interval)         measured")
    for name, found in predicted.items():
        span = f"{_shown(found.value)} ({_shown(found.low)} to {_shown(found.high)})"
        mark = "inside" if agrees(found, measured[name], GRID) else "OUTSIDE"
        print(f"{name:14s} {span:33s} {_shown(measured[name]):8s} {mark}")
    inside = sum(agrees(found, measured[name], GRID) for name, found in predicted.items())
    print(f"{inside} of {len(predicted)} measured crossover lengths are inside the interval")


def predict(
    mixers: Sequence[str] = (), lengths: Sequence[int] = LENGTHS, rounds: int = ROUNDS, causal: bool = False
) -> dict[str, Prediction]:
    """The crossover lengths that advice states."""
    rows = advise(8000, mixers=mixers, lengths=lengths, rounds=rounds, causal=causal).rows
    return {row.mechanism: row.crossover for row in rows if row.crossover is not None}


def measure(
    mixers: Sequence[str], lengths: Sequence[int], rounds: int, causal: bool = False
) -> dict[str, float | None]:
    """The lengths from which on mechanisms were as fast as softmax; 0: at all of them, None: not at the last."""
    rows = run_bench(BenchPlan(mixers, lengths, causal=causal, repeats=rounds))
    times = {(row.mixer, row.length): row.seconds["training"] for row in rows if row.status == "done"}
    found: dict[str, float | None] = {}
    for name in mixers:
        pairs = [(times[BASELINE, length], times[name, length]) for length in lengths]
        logs = [statistics.median(math.log(b / own) for b, own in zip(*pair, strict=True)) for pair in pairs]
        found[name] = crossing(lengths, logs)
    return found


def crossing(lengths: Sequence[int], logs: Sequence[float]) -> float | None:
    """Where the logarithm of the ratio passes 0 for the last time."""
    slower = [place for place, value in enumerate(logs) if value < 0]
    if not slower:
        return 0.0
    last = slower[-1]
    if last == len(lengths) - 1:
        return None
    share = -logs[last] / (logs[last + 1] - logs[last])
    return lengths[last] ** (1 - share) * lengths[last + 1] ** share


def agrees(found: Prediction, measured: float | None, lengths: Sequence[int]) -> bool:
    """Whether the interval holds the measured length; what lies outside of all measured lengths is only known so."""
    low, high = (math.inf if end is None else end for end in (found.low, found.high))
    if measured is None:
        return high > lengths[-1]
    return low < lengths[0] if measured == 0 else low <= measured <= high


def _shown(value: float | None) -> str:
    return "never" if value is None else "always" if value < 1 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
