"""A synthetic comparison, made of formulas: nothing in it was measured."""

import math
import random

from subquad.compare.measure.decoding import DecodingPoint
from subquad.compare.measure.lengths import LengthPoint, Part, Timing
from subquad.compare.measure.swap import SwapPoint, SwapReference
from subquad.compare.records import CurvePoint, EpochCost, SampleCovariance, Score, Trial, Tuning, TuningTrial
from subquad.compare.report.result import Mechanism, Metric, Result

ROUNDS = (1.0, 0.97, 1.05, 1.01, 0.99, 1.02, 0.98, 1.0, 1.03)
"""What every round of a synthetic time is multiplied with."""
LENGTHS = [256, 512, 1024, 2048, 4096, 8192, 16384]
TOKENS = 16384
SETTING = {"device": "cpu", "dtype": "float32", "threads": 2, "dim": 256, "heads": 4}

SHAPES = {  # label: BLEU, cost of a token in ms that does not grow and that grows with the length, bytes of a token
    "softmax": (34.62, 0.0150, 0.0000290, 9_000),
    "lightconv": (34.48, 0.0130, 0.0, 6_000),
    "eva": (34.21, 0.0260, 0.0000011, 11_000),
    "performer": (33.02, 0.0300, 0.0, 15_000),
    "local window=32": (34.05, 0.0170, 0.0, 8_000),
    "primal": (32.40, 0.0210, 0.0, 10_000),
}


def synthetic(seeds: int = 3, labels: tuple[str, ...] = tuple(SHAPES)) -> Result:
    """Looks like a comparison of translation models. The last seed of performer fails."""
    draw = random.Random(7)
    result = Result(
        title="Synthetic: Multi30k-like, English to German",
        created="2025-01-31T12:00:00+00:00",
        command="subquad compare recipe.yaml --mixers " + ",".join(label.split()[0] for label in labels),
        task="translation",
        metric=Metric(name="BLEU", better="higher", digits=2, margin=0.5),
        baseline=labels[0],
        mechanisms=[Mechanism(label=label, mixer=label.split()[0]) for label in labels],
        recipe={"task": "translation", "model": {"preset": "small", "encoder": {"mixer": "softmax"}}},
        environment={"torch": "2.13.0", "python": "3.12.1", "cpu": "Example CPU at 3 GHz", "threads": 2},
        task_lengths=[2048],
    )
    for seed in range(1, seeds + 1):
        luck = draw.gauss(0, 0.15)
        for label in labels:
            result.trials.append(_trial(draw, label, seed, luck))
    failing = [trial for trial in result.trials if trial.mechanism == "performer" and trial.seed == seeds and seeds > 1]
    for trial in failing:
        trial.reason = "the loss was not finite at update 3,100"
        trial.status, trial.scores, trial.training_seconds = "failed", {}, None
        trial.curve = [CurvePoint(update=500 * i, seconds=50 * i, loss=3 + 0.4 * i, value=18 - i) for i in range(1, 7)]
    result.covariance = covariance(result, 0.2)
    for label in labels:
        for part in ("encoder", "full"):
            result.add_points([_length(draw, label, part, length) for length in LENGTHS])
        result.epochs.append(
            EpochCost(mechanism=label, seconds=60 * (1 + SHAPES[label][1] * 20), peak_bytes=900_000_000, updates=450)
        )
    result.tuning = [_search(label) for label in labels]
    result.add_points([_swap(label, labels[0]) for label in labels])
    result.add_points([_decoding(label) for label in labels])
    return result


def _search(label: str) -> Tuning:
    """A search over four learning rates, of which the largest is stopped."""
    loss = {rate: 2 + abs(math.log10(rate / 2e-3)) for rate in (3e-4, 1e-3, 3e-3, 1e-2)}
    trials = [
        TuningTrial(
            settings={"schedule.lr": rate}, status="stopped" if rate > 5e-3 else "done", value=value, updates=90
        )
        for rate, value in loss.items()
    ]
    chosen = {"schedule.lr": 3e-3}
    return Tuning(mechanism=label, metric="loss", better="lower", trials=trials, chosen=chosen)


def _trial(draw: random.Random, label: str, seed: int, luck: float) -> Trial:
    bleu, fixed, _, size = SHAPES[label]
    value = bleu + luck + draw.gauss(0, 0.12)
    seconds = 400 * (1 + 20 * fixed)
    updates = range(500, 6001, 500)
    curve = [
        CurvePoint(
            update=update,
            seconds=seconds * update / 6000,
            loss=1.7 + 3.5 * math.exp(-update / 1300) + (34.6 - bleu) * 0.03 + draw.gauss(0, 0.01),
            value=value * (1 - math.exp(-update / 1100)) + draw.gauss(0, 0.1),
        )
        for update in updates
    ]
    return Trial(
        mechanism=label,
        seed=seed,
        status="done",
        run=f"{label.split()[0]}-{seed}",
        parameters=9_412_000 + (310_000 if label == "primal" else 0),
        scores={"BLEU": Score(value=value, low=value - 1.1, high=value + 1.2, samples=1000)},
        curve=curve,
        training_seconds=seconds,
        tokens_per_second=31_000 / (1 + 20 * fixed),
        peak_bytes=600_000_000 + 20_000 * size,
        data_order=f"order-of-seed-{seed}",
        setting=SETTING,
    )


def covariance(result: Result, deviation: float, samples: int = 1000) -> SampleCovariance:
    """As if every score had this standard deviation over test sets, half of its variance in common with the others."""
    done = [trial for trial in result.trials if trial.status == "done"]
    values = [[deviation**2 * (1.0 if a is b else 0.5) for b in done] for a in done]
    return SampleCovariance(trials=[(t.mechanism, t.seed) for t in done], values=values, samples=samples)


def _length(draw: random.Random, label: str, part: Part, length: int) -> LengthPoint:
    _, fixed, growing, size = SHAPES[label]
    if label == "softmax" and length == LENGTHS[-1] and part == "full":
        return LengthPoint(
            mechanism=label, part=part, length=length, batch=1, status="failed", reason="out of memory", setting=SETTING
        )
    scale = 1.0 if part == "encoder" else 2.2
    ms = scale * TOKENS * (fixed + growing * length) * draw.uniform(0.97, 1.03)
    peak = int(scale * TOKENS * (size + (4 * length if label == "softmax" else 0)))
    return LengthPoint(
        mechanism=label,
        part=part,
        length=length,
        batch=TOKENS // length,
        training=Timing.of([ms / 1000 * noise * draw.uniform(0.99, 1.01) for noise in ROUNDS]),
        inference=Timing.of([ms / 3000 * noise * draw.uniform(0.99, 1.01) for noise in ROUNDS]),
        training_bytes=peak,
        inference_bytes=peak // 4,
        flops=int(2e6 * ms),
        parameters=9_412_000,
        setting=SETTING,
    )


def _decoding(label: str) -> DecodingPoint:
    return DecodingPoint(mechanism=label, tokens_per_second=900 / (1 + 10 * SHAPES[label][1]))


def _swap(label: str, baseline: str) -> SwapPoint:
    loss = 1.7 + (0 if label == baseline else 1.5 - 0.02 * SHAPES[label][0])
    references = [
        SwapReference(name="no mixing", loss_before=6.2, loss_after=4.1),
        SwapReference(name="mean of the values", loss_before=5.1, loss_after=3.4),
    ]
    return SwapPoint(
        mechanism=label,
        baseline_loss=1.7,
        loss_before=loss,
        loss_after=1.7 + (loss - 1.7) / 4,
        updates=50,
        new_parameters=0 if label == baseline else 12_000,
        references=references if label == baseline else [],
        setting={"learning rate": 0.0001, "samples of valid": 512},
    )
