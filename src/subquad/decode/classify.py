"""Classifies the images of files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from subquad.data.images.arrays import CHANNELS, IMAGE_KEYS, channels_first
from subquad.data.images.inputs import Augmented, Standardize, image_tensor
from subquad.data.images.sets import decode_image
from subquad.data.numpy_files import read_npy, read_npz
from subquad.models import Model

TOP_K = 5
"""How many classes are returned for an image."""
BATCH_SIZE = 64

ClassProbabilities = list[tuple[str, float]]
"""The names of classes and their probabilities, the most probable first."""


class ImageClassifier:
    """Classifies images in files with a model."""

    def __init__(self, model: Model, classes: Sequence[str], transform: Standardize | Augmented) -> None:
        """classes: their names in the order of the logits. transform: turns an image into an input of the model."""
        self.model, self.classes, self.transform = model, classes, transform
        self.device = next(model.parameters()).device

    def classify_file(self, name: str) -> list[tuple[str, ClassProbabilities]]:
        """Returns name and classes of each image of a file. Raises ValueError if an image cannot be read."""
        images = list(self._read_images(name))
        results: list[ClassProbabilities] = []
        for start in range(0, len(images), BATCH_SIZE):
            results += self._classify(
                torch.stack([image_tensor(self.transform, *image) for image in images[start : start + BATCH_SIZE]])
            )
        return [(title, classes) for (title, _), classes in zip(images, results, strict=True)]

    @torch.inference_mode()
    def _classify(self, images: torch.Tensor) -> list[ClassProbabilities]:
        """Classifies transformed images (B, C, H, W)."""
        probabilities = self.model(images.to(self.device)).logits.float().softmax(-1)
        values, numbers = probabilities.topk(min(TOP_K, len(self.classes)), -1)
        return [
            [(self.classes[number], value) for number, value in zip(row, likely, strict=True)]
            for row, likely in zip(numbers.tolist(), values.tolist(), strict=True)
        ]

    def _read_images(self, name: str) -> Iterator[tuple[str, Any]]:
        path = Path(name)
        if path.is_dir():
            raise ValueError(f"{name} is a folder; give the images in it, such as {name}/*.png")
        if not path.is_file():
            raise ValueError(f"{name}: there is no such file")
        if path.suffix not in (".npy", ".npz"):
            yield name, decode_image(path, name)
            return
        arrays = _arrays(path)
        for number, image in enumerate(arrays):
            yield (name if len(arrays) == 1 else f"{name}[{number}]"), image


def _arrays(path: Path) -> np.ndarray:
    """Reads images (n, C, H, W) from a file, whose array has 2 or 3 dimensions for one image, or 4 for several."""
    try:
        if path.suffix == ".npz":
            arrays, _ = read_npz(path, IMAGE_KEYS)
            if not arrays:
                raise ValueError(f"it has no array called {', '.join(IMAGE_KEYS)}")
            content = next(iter(arrays.values()))
        else:
            content = read_npy(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if content.dtype.kind not in "iuf" or not content.size:
        raise ValueError(f"{path} holds {content.dtype} of shape {content.shape}, which is no image")
    if content.ndim == 2:
        return content[None, None]
    single = content.ndim == 3 and (content.shape[0] in CHANNELS) != (content.shape[2] in CHANNELS)
    return channels_first(content[None] if single else content, str(path))
