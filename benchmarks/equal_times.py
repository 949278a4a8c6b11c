"""How often equal models are called unequal: the timing of `subquad compare`, with copies of one model in it.

    python -m benchmarks.equal_times --copies 5 --times 40

Each time builds a baseline and copies of it, times them in rounds as a comparison does, with the same looks, and counts
the claims: copies that came out faster or slower, and comparisons with at least one such claim. At most 5 % may have
one.
"""

import argparse
import statistics
from functools import partial

import torch

from subquad.compare.measure.costs import PASSES
from subquad.compare.measure.lengths import ModelPasses, Shape
from subquad.compare.measure.timing import interleaved_seconds
from subquad.compare.statistics.times import LOOKS, SpeedRatio, all_decided, speed_ratio
from subquad.models import build_from_config
from subquad.tasks import task_class

BASELINE = "baseline"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=5, help="models that are compared with the baseline")
    parser.add_argument("--times", type=int, default=40, help="how often all of it is done")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence; a batch has 2,048")
    parser.add_argument("--mixer", default="softmax", help="the mechanism of all models")
    options = parser.parse_args()
    found: list[list[SpeedRatio]] = []
    for number in range(options.times):
        for kind in PASSES:
            found.append(compare_copies(options.copies, options.length, options.mixer, kind))
            print(f"{number + 1} of {options.times}, {kind}: {describe(found)}", flush=True)


def compare_copies(copies: int, length: int, mixer: str, kind: str) -> list[SpeedRatio]:
    """The ratios of all copies to the baseline."""
    names = [BASELINE, *(f"copy {number}" for number in range(copies))]
    work = {}
    for name in names:
        torch.manual_seed(0)
        config = {"kind": "language-model", "vocab": 260, "dim": 64}
        config["decoder"] = {"layers": 2, "heads": 4, "ffn_dim": 128, "mixer": mixer}
        passes = ModelPasses(
            build_from_config(config), task_class("language-model"), "full", Shape(2048 // length, length)
        )
        passes.module.train(kind == "training")
        work[name] = getattr(passes, kind)
    seconds = interleaved_seconds(work, LOOKS, is_decided=partial(all_decided, baseline=BASELINE))
    return [speed_ratio(seconds[name], seconds[BASELINE], copies) for name in names[1:]]


def describe(found: list[list[SpeedRatio]]) -> str:
    ratios = [ratio for comparison in found for ratio in comparison]
    claims = [ratio for ratio in ratios if ratio.is_faster or ratio.is_slower]
    false = sum(any(ratio.is_faster or ratio.is_slower for ratio in comparison) for comparison in found)
    rounds = statistics.fmean(comparison[0].rounds for comparison in found)
    worst = max(max(ratio.ratio, 1 / ratio.ratio) for ratio in ratios)
    return (
        f"{false} of {len(found)} comparisons with a false claim, {len(claims)} of {len(ratios)} copies; "
        f"largest ratio {worst:.3f}, {rounds:.0f} rounds on average"
    )


if __name__ == "__main__":
    main()
