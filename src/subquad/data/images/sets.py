"""Labelled images from class folders, parquet files, arrays and the Hugging Face hub.

`open_images` finds out what a path holds. Every set has `len`, `[i] -> (image, label)`, `take(indices)`, `classes` and
`skipped`, which maps the name of every image that could not be read to the reason.
"""

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from subquad.data.hub import HUB, load_hub
from subquad.data.images.arrays import ArrayImages, MappedImages, check_labels, class_names, open_idx, open_npz
from subquad.packages import require

# Pillow can open more formats, some by starting other programs. Data from elsewhere must not reach those programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
MAX_PIXELS = 50_000_000  # the largest image of ImageNet has 38 million


class ImageSet(Protocol):
    """What training needs from a set of labelled images."""

    @property
    def classes(self) -> list[str]: ...

    @property
    def skipped(self) -> dict[str, str]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, int]: ...

    def take(self, indices: Sequence[int] | np.ndarray) -> list[tuple[Any, int]]: ...


def open_images(path: str | Path, *, classes: Sequence[str] | None = None) -> ImageSet:
    """Opens the images at `path`.

    The path may be a folder of class folders, parquet (one file or a folder of them), .npz, .npy, MNIST's idx, a mosaic
    (see `open_mosaic`), or a hub data set with its split: `hub:NAME@train`, or `hub:NAME:SUBSET@train`.
    classes: the class names in the order of their numbers, if another set (the training images) defines them.
    """
    if str(path).startswith(HUB):
        return HubImages(str(path), classes)
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a folder of class folders, or a parquet, npz, npy or idx file")
    if path.is_dir():
        tables = sorted(path.glob("*.parquet"))
        return ParquetImages(tables, classes) if tables else FolderImages(path, classes)
    if path.suffix == ".parquet":
        return ParquetImages([path], classes)
    if path.suffix == ".npz":
        return open_npz(path, classes)
    if path.suffix == ".npy":
        return MappedImages(path, classes)
    if "-images-idx3-ubyte" in path.name:
        return open_idx(path, classes)
    if path.suffix in SUFFIXES:
        return open_mosaic(path, classes)
    raise ValueError(
        f"{path} is no known kind of image data; known are class folders, parquet, npz, npy, idx and mosaics"
    )


class UnreadableImage(ValueError):  # noqa: N818 - it says what is wrong
    """An image that cannot be decoded."""


def _require_pillow() -> Any:
    return require("PIL.Image", "reading images", "vision", package="Pillow")


def decode_image(content: Path | bytes, name: str, max_pixels: int = MAX_PIXELS) -> Any:
    """Returns an RGB image of Pillow. Damaged files and images of more than `max_pixels` raise `UnreadableImage`."""
    image_module = _require_pillow()
    try:
        with image_module.open(
            io.BytesIO(content) if isinstance(content, bytes) else content, formats=FORMATS
        ) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise UnreadableImage(f"{width}×{height} pixels are more than {max_pixels}")
            if image.mode != "RGB":
                return image.convert("RGB")
            image.load()  # converting it would copy it
            return image
    except UnreadableImage as error:
        raise UnreadableImage(f"{name}: {error}") from None
    except Exception as error:  # decoders raise whatever damaged bytes lead them to
        reason = str(error) or type(error).__name__
        raise UnreadableImage(f"{name} cannot be read: {reason}") from None


def open_mosaic(path: Path, classes: Sequence[str] | None = None) -> ArrayImages:
    """Opens a mosaic: one lossless image that consists of square tiles, row by row, each of which is a sample.

    The file `<name>.labels.bin` has one byte for the label of each tile. Class names are the words of `classes.txt` in
    the same folder, if there is one.
    """
    labels_path = path.with_suffix(".labels.bin")
    if not labels_path.exists():
        raise ValueError(f"{path} is a single image; a mosaic of many would need their labels in {labels_path}")
    labels = np.fromfile(labels_path, np.uint8)
    pixels = np.asarray(decode_image(path, str(path)))  # (H, W, 3)
    height, width, channels = pixels.shape
    side = math.isqrt(height * width // max(1, len(labels)))
    if not side or height % side or width % side or len(labels) * side**2 != height * width:
        raise ValueError(f"{path} of {width}×{height} pixels does not divide into {len(labels)} square tiles")
    tiles = pixels.reshape(height // side, side, width // side, side, channels).transpose(0, 2, 4, 1, 3)
    names = path.with_name("classes.txt")
    if classes is None and names.exists():
        classes = names.read_text(encoding="utf-8").split()
    return ArrayImages(tiles.reshape(-1, channels, side, side), labels, class_names(labels, classes), str(path))


class EncodedImages:
    """Images that are decoded when they are used. A subclass says where their bytes are."""

    def __init__(self, labels: np.ndarray, classes: Sequence[str], name: str) -> None:
        _require_pillow()
        self.labels, self.classes, self.name = labels, list(classes), name
        self.skipped: dict[str, str] = {}
        check_labels(labels, self.classes, name)

    def source(self, index: int) -> tuple[Path | bytes, str]:
        """Returns the bytes or the file of an image, and its name."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Returns (image, label). An image that cannot be read raises `UnreadableImage`."""
        return decode_image(*self.source(index)), int(self.labels[index])

    def take(self, indices: Sequence[int] | np.ndarray) -> list[tuple[Any, int]]:
        """Returns the images that can be read, with their labels. The others are recorded in `skipped`."""
        taken = []
        for index in indices:
            try:
                taken.append(self[int(index)])
            except UnreadableImage as error:
                self.skipped[self.source(int(index))[1]] = str(error)
        return taken


def class_folders(root: Path) -> list[str]:
    """Returns the names of the folders in a folder, in alphabetical order; those that begin with a dot do not count."""
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


class FolderImages(EncodedImages):
    """Images in files `<root>/<class>/**/<image>`. By default the classes are the folders in alphabetical order."""

    def __init__(self, root: Path, classes: Sequence[str] | None = None) -> None:
        folders = class_folders(root)
        if not folders:
            raise ValueError(f"{root} has no class folders; the images must be in folders {root}/<class>/")
        classes = list(classes) if classes is not None else folders
        if unknown := sorted(set(folders) - set(classes)):
            raise ValueError(
                f"{root} has folders that are none of the classes: {', '.join(unknown[:10])}. The training images have "
                f"the classes {', '.join(classes[:10])}"
            )
        if missing := [name for name in classes if name not in folders]:
            raise ValueError(f"{root} has no folder for {len(missing)} of the classes: {', '.join(missing[:10])}")
        self.files: list[str] = []  # a million of them reach a worker process much sooner than as paths
        self.ignored = 0  # the number of files whose names are not those of images
        labels: list[int] = []
        for number, name in enumerate(classes):
            found = sorted(path for path in (root / name).rglob("*") if path.is_file())
            images = [path for path in found if path.suffix.lower() in SUFFIXES]
            self.ignored += len(found) - len(images)
            self.files += map(str, images)
            labels += [number] * len(images)
        if not labels:
            raise ValueError(f"{root} holds no images; their names end in {', '.join(SUFFIXES)}")
        super().__init__(np.array(labels, np.int64), classes, str(root))

    def source(self, index: int) -> tuple[Path, str]:
        return Path(self.files[index]), self.files[index]


class TableImages(EncodedImages):
    """A table of pyarrow with a column of labels and one of encoded images (bytes, or the hub's {bytes, path})."""

    def __init__(self, table: Any, classes: Sequence[str] | None, name: str) -> None:
        image = next((key for key in ("image", "img", "bytes") if key in table.column_names), None)
        label = next((key for key in ("label", "labels", "fine_label") if key in table.column_names), None)
        if image is None or label is None:
            raise ValueError(f"{name} has the columns {', '.join(table.column_names)}; it needs `image` and `label`")
        if not table.num_rows:
            raise ValueError(f"{name} holds no images")
        self.key, self.column = image, table.column(image)
        labels = np.array(table.column(label).to_pylist())
        if not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(f"{name}: the column {label} holds {labels.dtype}, not class numbers")
        if classes is None:
            classes = _hub_classes(table.schema.metadata or {}, label) or class_names(labels, None)
        super().__init__(labels.astype(np.int64), classes, name)

    def source(self, index: int) -> tuple[Path | bytes, str]:
        value = self.column[index].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        return content or b"", f"{self.name} row {index}"


class ParquetImages(TableImages):
    """Parquet files, which are held in memory."""

    def __init__(self, files: Sequence[Path], classes: Sequence[str] | None = None) -> None:
        name = str(files[0] if len(files) == 1 else files[0].parent)
        pyarrow, parquet = (require(module, f"{name}: parquet", "hub") for module in ("pyarrow", "pyarrow.parquet"))
        try:
            table = pyarrow.concat_tables([parquet.read_table(path) for path in files])
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"{name} cannot be read as parquet: {error}") from None
        super().__init__(table, classes, name)
        self.paths = files

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.paths, self.classes)  # a worker process reads the files


class HubImages(TableImages):
    """A split of a hub data set, `hub:NAME@SPLIT`, in files that the library `datasets` keeps."""

    def __init__(self, name: str, classes: Sequence[str] | None = None) -> None:
        whole, at, split = name.rpartition("@")
        if not at or not split:
            raise ValueError(f"{name}: a data set of the hub is named with its split, such as {name}@train")
        data_set, _, subset = whole.removeprefix(HUB).partition(":")
        self.loaded = load_hub(f"{HUB}{data_set}", subset or None, split).with_format("arrow")
        super().__init__(self.loaded[:], classes, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "column": None}  # the library's own objects map their files again

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.column = self.loaded[:].column(self.key)

    def source(self, index: int) -> tuple[Path | bytes, str]:
        content, name = super().source(index)
        if content:
            return content, name
        path = self.column[index].as_py()["path"]  # for image folders the library keeps the paths only
        return Path(path), path


def _hub_classes(metadata: dict[bytes, bytes], label: str) -> list[str] | None:
    """Returns the class names that the library `datasets` writes into the schema, or None."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return [str(name) for name in features[label]["names"]]
    except (KeyError, TypeError, ValueError):
        return None


class ImageSubset:
    """Some images of one or several sets, which number the same classes."""

    def __init__(self, sets: Sequence[ImageSet], chosen: np.ndarray | None = None) -> None:
        """chosen: numbers of the images, counted through all sets; None: all of them."""
        self.sets, self.classes = sets, sets[0].classes
        self.ends = np.cumsum([len(images) for images in sets])
        self.chosen = np.arange(self.ends[-1]) if chosen is None else chosen
        self.skipped: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.chosen)

    def _place(self, index: int) -> tuple[ImageSet, int]:
        number = int(self.chosen[index])
        place = int(np.searchsorted(self.ends, number, side="right"))
        return self.sets[place], number - (int(self.ends[place - 1]) if place else 0)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        images, number = self._place(index)
        return images[number]

    def take(self, indices: Sequence[int] | np.ndarray) -> list[tuple[Any, int]]:
        places = [self._place(int(index)) for index in indices]
        taken = [found for images, number in places for found in images.take([number])]
        for images in self.sets:
            self.skipped.update(images.skipped)
        return taken


def hold_out(sets: Sequence[Any], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the images to train on, and of the `count` to validate with."""
    labels = np.concatenate([images.labels for images in sets])
    if count >= len(labels):
        raise ValueError(f"data.hold_out is {count}; there are only {len(labels)} training images")
    by_class = bool((np.diff(labels) >= 0).all())  # class folders: the last images are all of one class
    chosen = np.arange(count) * len(labels) // count if by_class else np.arange(len(labels) - count, len(labels))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen
