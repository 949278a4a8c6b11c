"""What tasks share that name the class of a sample: top-k accuracies, chance level, floors."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from subquad.decode.classify import ImageClassifier, TextLabeller
from subquad.evaluate.accuracy import accuracy, accuracy_score, class_ranks, reported_top_k
from subquad.evaluate.linear_probe import fit_linear_probe
from subquad.evaluate.measure import Measure
from subquad.tasks.base import Floor, MainMetric, Task, TrainedModel
from subquad.tasks.losses import LossOutput, class_loss

PROBE_SAMPLES, SCORED_SAMPLES = 20_000, 10_000
"""The most samples that the linear probe is fitted to, and that it is scored on."""


class ClassificationTask(Task):
    """A task whose samples each have one class."""

    metric = "top1"
    better = "higher"
    main_metric = MainMetric("top1", "top-1", "higher", accuracy_score, margin=1, scale=100, unit=" %")

    @classmethod
    def chance_level(cls, model_config: Mapping[str, Any], samples: int) -> float:
        """The accuracy of guessing, 1 / classes, and two of its standard deviations over the samples, in percent."""
        guess = 1 / model_config["num_classes"]
        return 100 * (guess + 2 * math.sqrt(guess * (1 - guess) / samples))

    @classmethod
    @abstractmethod
    def classifier(cls, run: TrainedModel) -> ImageClassifier | TextLabeller:
        """A classifier of raw inputs with the model of a run."""


def class_loss_and_hits(logits: Tensor, batch: Mapping[str, Tensor], smoothing: float) -> LossOutput:
    """The loss of classes, with the number of labels among the best 1 (and 5) in its sums.

    logits: (batch, classes). batch: labels (batch,), and after mixing targets (batch, classes), which are not smoothed
    here.
    """
    labels = batch["labels"]
    if "targets" in batch:
        found = class_loss(logits, batch["targets"])
    else:
        found = class_loss(logits, labels, smoothing=smoothing)
    ranks = class_ranks(logits.detach(), labels)
    hits = {f"top{most}": (ranks < most).sum() for most in reported_top_k(logits.shape[-1])}
    return replace(found, sums=found.sums | hits)


def accuracies(ranks: np.ndarray, num_classes: int) -> dict[str, Measure]:
    """The top-k accuracies of a split. ranks: (samples,), those of the labels among the classes by probability."""
    return {
        f"top{most}": accuracy(ranks < most, f"top-{most}|classes:{num_classes}")
        for most in reported_top_k(num_classes)
    }


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """The numbers of up to `most` of `count` samples."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)


Features = tuple[Tensor, Tensor]
"""Inputs of a linear probe (n, features), and labels (n,)."""


def class_floors(
    train: Features, valid: Features, evaluated: Features, num_classes: int, samples: str, inputs: str
) -> list[Floor]:
    """What the most frequent class and logistic regression reach on `evaluated`.

    samples: what a sample is and where the evaluated ones are from, such as "images of test". inputs: what the
    regression reads of each, such as "3,072 numbers".
    """
    majority = train[1].bincount(minlength=num_classes).argmax()
    probe = fit_linear_probe(*train, num_classes, valid)
    scale = ClassificationTask.main_metric.scale
    what, on = samples.split()[0], f"scored on {len(evaluated[1]):,} {samples}"
    return [
        Floor(
            name="majority class",
            kind="trivial",
            value=scale * float((evaluated[1] == majority).double().mean()),
            how=f"The most frequent class of {len(train[1]):,} training {what}, {on}.",
        ),
        Floor(
            name="linear probe",
            kind="linear",
            value=scale * probe.accuracy(*evaluated),
            how=f"Logistic regression on {inputs} for each of {len(train[1]):,} training {what}, its regularisation "
            f"chosen on valid, {on}.",
        ),
    ]
