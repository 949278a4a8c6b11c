"""Images of files to the probabilities of their classes, with a trained run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from subquad.data.images.arrays import CHANNELS, IMAGE_KEYS, channels_first
from subquad.data.images.sets import decode_image
from subquad.data.numpy_files import read_npy, read_npz
from subquad.tasks.classification import Augmented, Standardise, transform_from
from subquad.train.loaded import Loaded

BEST = 5
BATCH = 64

Classes = list[tuple[str, float]]
"""Names of classes and their probabilities, the likeliest first."""


class Classifier:
    """A run of image classification as a function of files."""

    def __init__(self, loaded: Loaded) -> None:
        if loaded.recipe.task != "image-classification":
            raise ValueError(f"{loaded.folder} was trained for {loaded.recipe.task}, not for image classification")
        self.loaded, self.classes = loaded, loaded.inputs["classes"]
        self.transform = transform_from(loaded.inputs["transform"])

    def file(self, name: str) -> list[tuple[str, Classes]]:
        """(name, classes) of each image of a file; one that cannot be read or does not fit is a ValueError."""
        images = list(self._images(name))
        found: list[Classes] = []
        for start in range(0, len(images), BATCH):
            found += self._classes(
                torch.stack([image_tensor(self.transform, *image) for image in images[start : start + BATCH]])
            )
        return [(title, classes) for (title, _), classes in zip(images, found, strict=True)]

    @torch.inference_mode()
    def _classes(self, images: torch.Tensor) -> list[Classes]:
        """images (B, C, H, W), transformed."""
        probabilities = self.loaded.model(images.to(self.loaded.device)).logits.float().softmax(-1)
        values, numbers = probabilities.topk(min(BEST, len(self.classes)), -1)
        return [
            [(self.classes[number], value) for number, value in zip(row, likely, strict=True)]
            for row, likely in zip(numbers.tolist(), values.tolist(), strict=True)
        ]

    def _images(self, name: str) -> Iterator[tuple[str, Any]]:
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


def image_tensor(transform: Standardise | Augmented, name: str, image: Any) -> torch.Tensor:
    """What the model reads of an image: Pillow's in colours, or an array (C, H, W). `name` is for messages."""
    if not isinstance(transform, Standardise):
        try:
            return transform(image, None)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    wanted = tuple(transform.shape)
    if not isinstance(image, np.ndarray):  # decoded: RGB
        image = np.atleast_3d(np.asarray(image.convert("L") if wanted[0] == 1 else image)).transpose(2, 0, 1)
    if image.shape != wanted:
        raise ValueError(f"{name} is {image.shape} (channels, height, width); this model reads {wanted}")
    return transform(image, None)


def _arrays(path: Path) -> np.ndarray:
    """(n, C, H, W) of a file: one image of 2 or 3 dimensions, or several of 4."""
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
