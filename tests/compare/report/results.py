"""Small results that tests fill with the numbers they need."""

from collections.abc import Sequence

from subquad.compare.measure.lengths import LengthPoint, Timing
from subquad.compare.records import Score, Trial
from subquad.compare.report.result import Mechanism, Metric, Result

ROUNDS = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 1.0, 0.99)
NOISE = (-0.01, 0.0, 0.01)
"""How far three seeds are apart."""


def bare(labels: str = "softmax eva", better: str = "higher", margin: float = 0.5) -> Result:
    """A result without any numbers, of a task whose samples have 2,048 tokens."""
    metric = Metric.model_validate({"name": "BLEU", "better": better, "margin": margin})
    mechanisms = [Mechanism(label=label, mixer=label) for label in labels.split()]
    result = Result(title="t", task="translation", metric=metric, baseline="softmax", mechanisms=mechanisms)
    result.task_lengths = [2048]
    return result


def trained(result: Result, label: str, values: Sequence[float]) -> None:
    """Adds one finished run for each value, with seeds 1, 2, ..."""
    for seed, value in enumerate(values, 1):
        result.trials.append(Trial(mechanism=label, seed=seed, status="done", scores={"BLEU": Score(value=value)}))


def by_seeds(result: Result, label: str, value: float, noise: Sequence[float] = NOISE) -> None:
    """Adds a run for each noise; only the baseline takes them in order, so that differences vary."""
    start = result.labels.index(label)
    trained(result, label, [value + noise[(start + i) % len(noise)] for i in range(len(noise))])


def timed(result: Result, label: str, ms: dict[int, float], spread: float = 1.0, control: float | None = None) -> None:
    """Adds times by length. spread: of the rounds; control: how much longer a second copy takes."""
    rounds = [1 + spread * (noise - 1) for noise in ROUNDS]
    if label != result.baseline:
        rounds = [rounds[-1], *rounds[:-1]]
    for length, median in ms.items():
        for factor, is_control in ((1.0, False), (control, True)):
            if factor is not None:
                timing = Timing.of([median * factor * noise / 1000 for noise in rounds])
                result.add_points(
                    [
                        LengthPoint(
                            mechanism=label,
                            part="full",
                            length=length,
                            batch=1,
                            training=timing,
                            inference=timing,
                            control=is_control,
                        )
                    ]
                )
