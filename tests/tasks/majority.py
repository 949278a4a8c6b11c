"""A task in one file, as somebody else's package would add it: are there more ones than zeros in a sequence of bits?

`tests/tasks/test_toy_task.py` trains, evaluates and compares it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from subquad.data.batches import Batch, Budget, to_device
from subquad.data.text.prepare import ReportProgress
from subquad.evaluate.accuracy import accuracy, accuracy_score, class_ranks
from subquad.evaluate.report import Evaluation
from subquad.models import TextClassifier
from subquad.tasks.base import DataConfig, EvaluationOptions, MainMetric, Task, TrainedModel, register_task
from subquad.tasks.losses import LossOutput, class_loss
from subquad.tasks.sample_shards import SampleShards, fingerprint

SEEDS = {"train": 1, "valid": 2, "test": 3}


class MajorityData(DataConfig):
    length: int = Field(9, ge=1, description="bits of a sample")
    samples: int = Field(200, ge=1, description="samples of every split")


class BitSamples:
    def __init__(self, data: MajorityData, split: str) -> None:
        bits = np.random.default_rng(SEEDS[split]).integers(0, 2, (data.samples, data.length))
        self.bits, self.labels = torch.from_numpy(bits), torch.from_numpy(2 * bits.sum(1) > data.length).long()
        self.sizes: tuple[np.ndarray, ...] = (np.full(data.samples, data.length),)

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]:
        return {"tokens": self.bits[numbers], "labels": self.labels[numbers]}


@register_task
class MajorityTask(Task):
    name = "majority"
    Data = MajorityData
    model_kinds = ("text-classifier",)
    main_metric = MainMetric("top1", "share of right answers", "higher", accuracy_score, margin=1, scale=100, unit=" %")

    def __init__(self, data: MajorityData) -> None:
        super().__init__()
        self.data = data

    @classmethod
    def open(
        cls,
        data: MajorityData,
        cache: Path,
        smoothing: float = 0.0,
        aux_weight: float = 0.0,
        report: ReportProgress | None = None,
    ) -> Self:
        return cls(data)

    @property
    def split_names(self) -> Sequence[str]:
        return list(SEEDS)

    def samples(self, split: str, training: bool) -> BitSamples:
        return BitSamples(self.data, split)

    def data_dependent_model_config(self) -> dict[str, Any]:
        return {"vocab": 2, "num_classes": 2}

    @classmethod
    def typical_batch(cls, data: MajorityData, budget: Budget) -> tuple[int, int | None]:
        return (budget.max_tokens or 1024) // data.length, data.length

    @classmethod
    def model_loss(
        cls,
        model: TextClassifier,
        batch: Mapping[str, Tensor],
        pad: int = -1,
        smoothing: float = 0.0,
    ) -> tuple[LossOutput, Tensor | None]:
        logits, _, aux = model(batch["tokens"])
        return class_loss(logits, batch["labels"], smoothing=smoothing), aux

    def logits(self, model: TextClassifier, batch: Mapping[str, Tensor]) -> Tensor:
        return model(batch["tokens"]).logits

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["labels"]

    @classmethod
    def evaluate(cls, run: TrainedModel, split: str, shards: SampleShards, options: EvaluationOptions) -> Evaluation:
        assert isinstance(run.data, MajorityData)
        samples = BitSamples(run.data, split)

        def ranks(batch: dict[str, Tensor]) -> list[list[float]]:
            batch = to_device(batch, run.device)
            return [[rank] for rank in class_ranks(run.model(batch["tokens"]).logits, batch["labels"]).tolist()]

        found = shards.rows(samples, ranks, "sequences read")
        data = {"sha256": fingerprint(samples.labels.tolist())}
        return Evaluation(cls.name, split, len(found), 0, {"top1": accuracy(found[:, 0] < 1, "top-1")}, data)

    @classmethod
    def chance_level(cls, model_config: Mapping[str, Any], samples: int) -> float:
        return 50.0

    @classmethod
    def random_batch(
        cls, model: TextClassifier, batch: int, length: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        (tokens,) = model.random_inputs(batch, length, generator)
        return {"tokens": tokens, "labels": tokens[:, 0]}
