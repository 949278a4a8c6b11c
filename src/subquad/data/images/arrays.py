"""Labelled images that are stored as arrays: npy, npz, and the idx files of MNIST."""

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from subquad.data.numpy_files import check_growth, read_npy, read_npz

IMAGE_KEYS, LABEL_KEYS = ("images", "image", "x", "data"), ("labels", "label", "y", "targets")
CHANNELS = (1, 3, 4)


class ArrayImages:
    """Labelled images in memory or in a memory map. `[i]` is (array (channels, height, width), label)."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, classes: Sequence[str], name: str) -> None:
        """images: (n, C, H, W); labels: (n,) integers."""
        assert images.ndim == 4
        self.images = images
        self.labels = np.asarray(labels)
        self.classes = list(classes)
        self.skipped: dict[str, str] = {}
        self.name = name
        if self.labels.shape != (len(self.images),):
            raise ValueError(f"{name}: {len(self.images)} images, but labels of shape {self.labels.shape}")
        if not len(self.images):
            raise ValueError(f"{name} holds no images")
        if not np.issubdtype(self.labels.dtype, np.integer):
            raise ValueError(f"{name}: labels are class numbers, not {self.labels.dtype}")
        self.labels = self.labels.astype(np.int64)
        check_labels(self.labels, self.classes, name)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.images[index], int(self.labels[index])

    def take(self, indices: Sequence[int] | np.ndarray) -> list[tuple[np.ndarray, int]]:
        return [self[int(index)] for index in indices]


def check_labels(labels: np.ndarray, classes: Sequence[str], name: str) -> None:
    """Raises a ValueError unless every label is the number of a class and every class has an image."""
    if labels.min() < 0 or labels.max() >= len(classes):
        raise ValueError(f"{name}: label {labels.max()} or {labels.min()} is outside the {len(classes)} classes")
    absent = sorted(set(range(len(classes))) - set(np.unique(labels).tolist()))
    if absent:
        names = ", ".join(classes[number] for number in absent[:10])
        raise ValueError(f"{name} has no image of {len(absent)} of the {len(classes)} classes: {names}")


def channels_first(images: np.ndarray, name: str) -> np.ndarray:
    """Returns a view (n, C, H, W) of images (n, H, W), (n, C, H, W) or (n, H, W, C) with 1, 3 or 4 channels."""
    if images.ndim == 3:
        return images[:, None]
    if images.ndim != 4:
        raise ValueError(f"{name}: images are arrays of 3 or 4 dimensions, not of shape {images.shape}")
    first, last = images.shape[1] in CHANNELS, images.shape[3] in CHANNELS
    if first == last:
        raise ValueError(
            f"{name}: the shape {images.shape} does not say which number counts the channels. Either the second or the "
            "last must be 1, 3 or 4"
        )
    return images if first else images.transpose(0, 3, 1, 2)


def class_names(labels: np.ndarray, classes: Sequence[str] | None) -> list[str]:
    """Returns the given class names, or by default the numbers from 0 up to the largest label."""
    if classes is not None:
        return list(classes)
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels are class numbers, not {labels.dtype}")
    if labels.max() >= labels.size:
        raise ValueError(
            f"a label is {labels.max()}, but there are {labels.size} images: classes are numbered from 0, without gaps"
        )
    return [str(number) for number in range(int(labels.max()) + 1)]


def open_npz(path: Path, classes: Sequence[str] | None = None) -> ArrayImages:
    """Opens an npz file. Its keys are images, x or data; labels, y or targets; and, if present, `classes`."""
    try:
        arrays, keys = read_npz(path, (*IMAGE_KEYS, *LABEL_KEYS, "classes"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as npz: {error}") from None
    images = next((arrays[key] for key in IMAGE_KEYS if key in arrays), None)
    labels = next((arrays[key] for key in LABEL_KEYS if key in arrays), None)
    if classes is None and "classes" in arrays:
        classes = [str(name) for name in arrays["classes"].ravel()]
    if images is None or labels is None:
        raise ValueError(
            f"{path} has the arrays {', '.join(keys)}; it needs one of {', '.join(IMAGE_KEYS)} and one of "
            f"{', '.join(LABEL_KEYS)}"
        )
    return _from_arrays(images, labels, classes, path)


class MappedImages(ArrayImages):
    """`<name>.npy` with the images, which is memory-mapped, and `<name>.labels.npy` beside it."""

    def __init__(self, path: Path, classes: Sequence[str] | None = None) -> None:
        labels_path = path.with_suffix(".labels.npy")
        if not labels_path.exists():
            raise ValueError(f"{path} has no labels: {labels_path} is missing")
        try:
            images, labels = read_npy(path), read_npy(labels_path)
        except ValueError as error:
            raise ValueError(f"{path} or {labels_path} cannot be read as npy: {error}") from None
        if not labels.size:
            raise ValueError(f"{path} holds no images")
        super().__init__(channels_first(images, str(path)), labels, class_names(labels, classes), str(path))
        self.path = path

    def __reduce__(self) -> tuple[type[Self], tuple[Path, list[str]]]:
        return type(self), (self.path, self.classes)  # a worker process maps the file too


def _from_arrays(images: np.ndarray, labels: np.ndarray, classes: Sequence[str] | None, path: Path) -> ArrayImages:
    if not labels.size:
        raise ValueError(f"{path} holds no images")
    return ArrayImages(channels_first(images, str(path)), labels, class_names(labels, classes), str(path))


def open_idx(path: Path, classes: Sequence[str] | None = None) -> ArrayImages:
    """Opens MNIST's `*-images-idx3-ubyte` with `*-labels-idx1-ubyte` beside it; both may be compressed with gzip."""
    labels_path = path.with_name(path.name.replace("-images-idx3", "-labels-idx1"))
    if not labels_path.exists():
        raise ValueError(f"{path} has no labels: {labels_path} is missing")
    images, labels = _read_idx(path), _read_idx(labels_path)
    return _from_arrays(images, labels, classes, path)


def _read_idx(path: Path) -> np.ndarray:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            kind, dimensions = struct.unpack(">HBB", file.read(4))[1:]
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            if kind != 8:
                raise ValueError("its numbers are not bytes")
            check_growth(path, math.prod(shape))
            return np.frombuffer(file.read(math.prod(shape)), np.uint8).reshape(shape)
    except (OSError, EOFError, struct.error, ValueError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as idx: {error}") from None
