"""Image classification: a class for each image.

With augmentation options, training images go through DeiT's transforms and the others through those of evaluation.
Without, images are taken as they are (arrays of one size) and normalised by the mean and deviation of the training
images; nothing beside numpy is needed then. Every random choice of a batch comes from a generator of its own, with the
seed that the trainer gives it, so a resumed run makes the batches of the uninterrupted one.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from subquad.data import builtin
from subquad.data.batches import Batch, Budget
from subquad.data.builtin.sets import DigitsOptions
from subquad.data.hub import HUB
from subquad.data.images.inputs import (
    Augmented,
    InputTransform,
    Standardize,
    erase_boxes,
    stack_erasures,
    stack_pixels,
    transform_from,
)
from subquad.data.images.mixup import MixingOptions, draw_mixing, mix_images, mix_targets, soft_targets
from subquad.data.images.sets import ImageSet, ImageSubset, class_folders, hold_out, open_images
from subquad.data.images.transforms import AugmentOptions
from subquad.data.loader import BatchLoader
from subquad.data.text.prepare import ReportProgress
from subquad.decode.classify import ImageClassifier
from subquad.evaluate.accuracy import class_ranks
from subquad.evaluate.linear_probe import pool_pixels
from subquad.evaluate.report import Evaluation
from subquad.models import Model
from subquad.tasks.base import (
    DataConfig,
    EvaluationOptions,
    Floor,
    TrainedModel,
    check_split,
    load_embedded,
    register_task,
)
from subquad.tasks.classification import (
    PROBE_SAMPLES,
    SCORED_SAMPLES,
    ClassificationTask,
    accuracies,
    class_floors,
    class_loss_and_hits,
    evenly_spaced,
)
from subquad.tasks.losses import LossOutput
from subquad.tasks.sample_shards import SampleShards, fingerprint

IMAGES_PER_BATCH = 64
"""The number of images of a batch in evaluation, and in training if the recipe does not say it."""
NAMED = 3  # unreadable images that a batch's warning names


class ImageData(DataConfig):
    """Where images come from: an embedded set, or labelled images."""

    embedded: str | None = Field(None, description="The name of an embedded data set: digits.")
    options: dict[str, Any] = Field(default_factory=dict, description="The options of the embedded data set.")
    images: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="The labelled images of each split: a folder with a folder for each class, one or several "
        "parquet, npz, npy, idx or mosaic files, or hub:NAME@SPLIT for a data set of the Hugging Face hub.",
    )
    hold_out: int | None = Field(
        None,
        ge=1,
        description="How many training images become the split `valid`. They are the last ones, or evenly spaced ones "
        "if the images are sorted by class.",
    )
    augment: AugmentOptions | None = Field(
        None,
        description="The size, crops and augmentation of images (needs the extra `vision`). With null images keep "
        "their size, and are standardised by the mean and deviation of the training images.",
    )
    mixing: MixingOptions | None = Field(None, description="Mixup and CutMix of training images; null: neither.")
    repeated: int = Field(1, ge=1, description="Repeated augmentation: how often each image of a batch is in it.")

    alternatives = MappingProxyType({"embedded": ("options",), "images": ("hold_out",)})

    @field_validator("images", mode="before")
    @classmethod
    def _from_path(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {split: (path,) if isinstance(path, str) else path for split, path in given.items()}

    def check(self) -> None:
        if bool(self.embedded) == bool(self.images):
            raise ValueError(f"give one of embedded and images (got {'both' if self.images else 'none'})")
        if self.images and "train" not in self.images:
            raise ValueError(f"images need a split `train` (got {', '.join(self.images)})")
        if self.images and "valid" not in self.images and self.hold_out is None:
            raise ValueError("images need a split `valid`, or hold_out: the number of training images to validate with")
        if self.hold_out is not None and (not self.images or "valid" in self.images):
            raise ValueError("hold_out makes a split `valid` out of images.train; this data has one already")

    def check_smoothing(self, smoothing: float) -> None:
        if self.mixing is not None and smoothing:
            raise ValueError("mixed targets are smoothed by data.mixing.smoothing; leave train.smoothing out")

    def split_files(self, split: str) -> Sequence[str] | None:
        return self.images.get(split, ()) if self.images else None

    def input_files(self) -> dict[str, list[str]]:
        return {split: [path for path in paths if not path.startswith(HUB)] for split, paths in self.images.items()}

    def example(self, split: str) -> str:
        return f"data.images.{split}=FOLDER"

    def count_classes(self) -> int | None:
        """The classes of the training images if these are class folders that are there; None: only reading tells."""
        folder = Path(self.images["train"][0]) if self.images else None
        return len(class_folders(folder)) or None if folder is not None and folder.is_dir() else None

    def open_splits(self) -> dict[str, ImageSet]:
        """All splits, whose classes are numbered as those of the training images."""
        if self.embedded is not None:
            found = load_embedded(self.embedded, self.options, "images", ImageClassificationTask.name)
            return {split: found.split(split) for split in builtin.SPLITS}
        classes: list[str] | None = None
        splits: dict[str, list[ImageSet]] = {}
        for split in sorted(self.images, key=lambda name: name != "train"):
            splits[split] = []
            for path in self.images[split]:
                splits[split].append(open_images(path, classes=classes))
                classes = splits[split][0].classes
        result: dict[str, ImageSet] = {split: ImageSubset(sets) for split, sets in splits.items()}
        if self.hold_out is not None:
            kept, held_out = hold_out(splits["train"], self.hold_out)
            result |= {"train": ImageSubset(splits["train"], kept), "valid": ImageSubset(splits["train"], held_out)}
        return result

    def open_split(self, split: str, classes: Sequence[str]) -> ImageSet:
        """One split, whose classes are numbered as in training; the other splits need not be there."""
        if self.embedded is not None or (split == "valid" and self.hold_out is not None):
            splits = self.open_splits()
            check_split(split, splits)
            return splits[split]
        check_split(split, self.images)
        return ImageSubset([open_images(path, classes=classes) for path in self.images[split]])


class ImageSamples:
    """Labelled images, each counting as one token, and how they become batches."""

    def __init__(
        self,
        images: ImageSet,
        transform: InputTransform,
        training: bool = False,
        mixing: MixingOptions | None = None,
        repeated: int = 1,
    ) -> None:
        """training: images are augmented, mixed and repeated; otherwise they are shown once, as they are."""
        self.images, self.transform, self.training = images, transform, training
        self.mixing, self.repeated = (mixing, repeated) if training else (None, 1)
        self.sizes: tuple[np.ndarray, ...] = (np.ones(len(images), np.int64),)

    def batch(self, numbers: Batch, seed: int = 0) -> dict[str, Tensor]:
        """Pixels and what was drawn, from which `ImageClassificationTask.model_inputs` makes what a model reads.

        images: (B, C, H, W), 8-bit ones as uint8; labels: (B,). For the rest see `stack_erasures` and `draw_mixing`.
        Unreadable images are left out.
        """
        # A batch of repeated augmentation shows its first images several times instead of the others: batches are
        # random, so an epoch shows a random part of the images.
        taken = self._take(np.repeat(numbers, self.repeated)[: len(numbers)])
        generator = torch.Generator().manual_seed(seed) if self.training else None
        built = [self.transform.pixels(image, generator) for image, _ in taken]
        batch = {
            "images": stack_pixels([pixels for pixels, _ in built], self.transform.shape),
            "labels": torch.tensor([label for _, label in taken], dtype=torch.int64),
            **stack_erasures([erasure for _, erasure in built]),
        }
        if self.mixing is not None and generator is not None:
            batch |= draw_mixing(self.transform.shape[1:], self.mixing, generator)
        return batch

    @property
    def skipped(self) -> dict[str, str]:
        """The images that could not be read so far, by name, with the reason."""
        return self.images.skipped

    def _take(self, numbers: Batch) -> list[tuple[Any, int]]:
        known = set(self.images.skipped)
        taken = self.images.take(numbers)
        if new := [reason for name, reason in self.images.skipped.items() if name not in known]:
            more = f" and {len(new) - NAMED} more" if len(new) > NAMED else ""
            warnings.warn(f"left out: {'; '.join(new[:NAMED])}{more}", stacklevel=2)
        return taken


@register_task
class ImageClassificationTask(ClassificationTask):
    name = "image-classification"
    Data = ImageData
    model_kinds = ("vision", "pyramid")
    sized_by_tokens = False
    target_unit = "images"

    def __init__(
        self,
        splits: Mapping[str, ImageSet],
        smoothing: float = 0.0,
        aux_weight: float = 0.0,
        augment: AugmentOptions | None = None,
        mixing: MixingOptions | None = None,
        repeated: int = 1,
    ) -> None:
        """smoothing: the label smoothing of targets that are not mixed; mixed ones have `mixing.smoothing`."""
        super().__init__(smoothing, aux_weight)
        self.splits, self.mixing, self.repeated = splits, mixing, repeated
        self.transform: InputTransform = Standardize.of(splits["train"]) if augment is None else Augmented(augment)

    @classmethod
    def open(
        cls,
        data: ImageData,
        cache: Path,  # noqa: ARG003
        smoothing: float = 0.0,
        aux_weight: float = 0.0,
        report: ReportProgress | None = None,  # noqa: ARG003
    ) -> Self:
        return cls(data.open_splits(), smoothing, aux_weight, data.augment, data.mixing, data.repeated)

    @property
    def split_names(self) -> Sequence[str]:
        return list(self.splits)

    def samples(self, split: str, training: bool) -> ImageSamples:
        check_split(split, self.splits)
        return ImageSamples(self.splits[split], self.transform, training, self.mixing, self.repeated)

    @property
    def builds_in_processes(self) -> bool:
        return isinstance(self.transform, Augmented)  # arrays that stay as they are cost less than a process

    @classmethod
    def budget(cls, budget: Budget) -> Budget:
        """Limits the number of images of a batch. max_tokens is for sequences, and an image counts as one."""
        most = budget.max_sentences or IMAGES_PER_BATCH
        return budget.model_copy(update={"max_tokens": None, "max_sentences": most})

    # ------------------------------------------------------------------ model

    def data_dependent_model_config(self) -> dict[str, Any]:
        channels, height, width = self.transform.shape
        if height != width:
            raise ValueError(f"images of {width} x {height} pixels are not square: give data.augment, with a size")
        return {"num_classes": len(self.splits["train"].classes), "channels": channels, "image_size": height}

    @classmethod
    def expected_model_config(cls, data: ImageData) -> dict[str, Any]:
        augment, classes, expected = data.augment, data.count_classes(), dict[str, Any]()
        if augment is not None:
            expected = {"image_size": augment.size, "channels": len(augment.mean)}
        elif data.embedded == "digits":
            expected = {"image_size": DigitsOptions.parse("digits", data.options).size, "channels": 1}
        return expected if classes is None else {**expected, "num_classes": classes}

    @classmethod
    def typical_batch(cls, data: ImageData, budget: Budget) -> tuple[int, int | None]:  # noqa: ARG003
        return budget.max_sentences or IMAGES_PER_BATCH, None

    @classmethod
    def at_length(cls, data: ImageData, model: Mapping[str, Any], budget: Budget, length: int) -> dict[str, Any]:
        """Images are resized so that they have `length` patches, and a batch has as many pixels as before."""
        if "patch_size" not in model:
            raise ValueError("the stages of a pyramid read sequences of different lengths: no one length describes it")
        rows, patch = math.isqrt(length), model["patch_size"]
        if rows**2 != length:
            raise ValueError(f"images are squares of patches: {length} is none, {rows**2} and {(rows + 1) ** 2} are")
        if data.augment is not None:
            name, side = "data.augment.size", data.augment.size
        elif data.embedded == "digits":
            name, side = "data.options.size", DigitsOptions.parse("digits", data.options).size
        else:
            raise ValueError("images keep their own size without data.augment: give it, with a size")
        batch = cls.typical_batch(data, budget)[0] * side**2 // (rows * patch) ** 2
        if not batch:
            raise ValueError(f"an image of {length:,} patches has more pixels than a batch of this recipe's images")
        return {name: rows * patch, "train.budget.max_sentences": batch}

    def inputs(self) -> dict[str, Any]:
        return {"classes": list(self.splits["train"].classes), "transform": self.transform.to_json()}

    # ------------------------------------------------------------------ loss

    def model_inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What `model_loss` reads, from a batch of samples, on the batch's device.

        images: (B, C, H, W), normalised, erased and mixed; labels: (B,); of mixed training images also targets
        (B, classes).
        """
        images = erase_boxes(self.transform.normalise(batch["images"]), batch)
        if self.mixing is None or "shares" not in batch:
            return {"images": images, "labels": batch["labels"]}
        targets = soft_targets(batch["labels"], len(self.splits["train"].classes), self.mixing.smoothing)
        targets = mix_targets(targets, batch)
        return {"images": mix_images(images, batch), "labels": targets.argmax(1), "targets": targets}

    def loss(self, model: Model, batch: Mapping[str, Tensor]) -> LossOutput:
        return super().loss(model, self.model_inputs(batch))

    @classmethod
    def model_loss(
        cls,
        model: Any,
        batch: Mapping[str, Tensor],
        pad: int = -1,  # noqa: ARG003
        smoothing: float = 0.0,
    ) -> tuple[LossOutput, Tensor | None]:
        logits, _, aux = model(batch["images"])
        return class_loss_and_hits(logits, batch, smoothing), aux

    def logits(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        found: Tensor = model(self.model_inputs(batch)["images"]).logits
        return found

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        inputs = self.model_inputs(batch)
        return inputs.get("targets", inputs["labels"])

    def metrics(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        """Images that could not be read so far are counted as `unreadable`."""
        metrics = super().metrics(sums, count)
        unreadable = {name for images in self.splits.values() for name in images.skipped}
        return metrics | {"unreadable": len(unreadable)} if unreadable else metrics

    # ------------------------------------------------------------------ evaluation and comparison

    @classmethod
    def evaluate(cls, run: TrainedModel, split: str, shards: SampleShards, options: EvaluationOptions) -> Evaluation:
        """Measures the accuracy. An image that cannot be read has no result, and is counted as lost."""
        config = run.data
        assert isinstance(config, ImageData)
        images = config.open_split(split, run.inputs["classes"])
        samples = ImageSamples(images, transform_from(run.inputs["transform"]))
        count = len(images) if options.first is None else min(options.first, len(images))
        own = list(shards.own(count))
        parts = [own[start : start + IMAGES_PER_BATCH] for start in range(0, len(own), IMAGES_PER_BATCH)]
        found: dict[int, list[int]] = {}
        processes = isinstance(samples.transform, Augmented)
        with closing(BatchLoader({split: samples}, options.data_workers, run.device, processes)) as loader:
            batches = loader.load(split, ((np.array(part), 0) for part in parts))
            for part in shards.steps(parts, "batches of images classified"):
                found |= _ranks(run.model, samples, part, next(batches))
        everything = shards.gather(found)
        if not everything:
            raise ValueError(f"none of the {count:,} images of {split} could be read")
        known = np.array([everything[number] for number in sorted(everything)])
        measures = accuracies(known[:, 1], len(images.classes))
        labels = fingerprint([[number, everything[number][0]] for number in sorted(everything)])
        data = {"sha256": labels, "images": "as given"}
        return Evaluation(cls.name, split, count, count - len(everything), measures, data)

    def floors(self, data: ImageData, split: str) -> list[Floor]:  # noqa: ARG002
        train, valid, evaluated = (
            self._pixels(name, most)
            for name, most in (("train", PROBE_SAMPLES), ("valid", SCORED_SAMPLES), (split, SCORED_SAMPLES))
        )
        num_classes = len(self.splits["train"].classes)
        inputs = f"{train[0].shape[1]:,} numbers"
        return class_floors(train, valid, evaluated, num_classes, f"images of {split}", inputs)

    def _pixels(self, split: str, most: int) -> tuple[Tensor, Tensor]:
        """The pixels (n, features) of up to `most` images, evenly spaced, as evaluation reads them, and labels (n,)."""
        samples = self.samples(split, training=False)
        numbers = evenly_spaced(len(samples.images), most)
        starts = range(0, len(numbers), IMAGES_PER_BATCH)
        batches = [samples.batch(numbers[start : start + IMAGES_PER_BATCH]) for start in starts]
        pixels = torch.cat([pool_pixels(self.transform.normalise(batch["images"])) for batch in batches])
        return pixels, torch.cat([batch["labels"] for batch in batches])

    @classmethod
    def classifier(cls, run: TrainedModel) -> ImageClassifier:
        return ImageClassifier(run.model, run.inputs["classes"], transform_from(run.inputs["transform"]))

    @classmethod
    def random_batch(cls, model: Model, batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
        (images,) = model.random_inputs(batch, length, generator)
        labels = torch.randint(model.config.num_classes, (batch,), generator=generator, device=generator.device)
        return {"images": images, "labels": labels}


def _ranks(
    model: Model, samples: ImageSamples, numbers: list[int], batch: Mapping[str, Tensor]
) -> dict[int, list[int]]:
    """[label, its rank among the classes by probability] of every image that can be read, by the image's number.

    batch: that of these numbers, on the model's device, without what cannot be read.
    """
    if len(batch["labels"]) < len(numbers):
        numbers = [number for number in numbers if len(samples.batch(np.array([number]))["labels"])]
    if not numbers:
        return {}
    ranks = class_ranks(model(samples.transform.normalise(batch["images"])).logits, batch["labels"])
    found = torch.stack([batch["labels"], ranks], 1).tolist()  # read together: a GPU is waited for once
    return dict(zip(numbers, found, strict=True))
