"""Labelled images: class folders, parquet, arrays, the hub. Unreadable ones are counted and reported, or, with
`strict`, raised.

`open_images` finds out what a path holds. All sets have `len`, `[i] -> (image, label)`, `take(indices)`, `classes` and
`skipped`, which maps every image that could not be read to the reason.
"""

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from subquad.data.hub import HUB, load_hub
from subquad.data.images.arrays import ArrayImages, check_labels, number_names, open_idx, open_npy, open_npz
from subquad.packages import require

# Pillow can open more, some with the help of other programs; data from elsewhere shall not reach those.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
MAX_PIXELS = 50_000_000  # ImageNet's largest has 38 million


class ImageSet(Protocol):
    """What training needs of labelled images."""

    @property
    def classes(self) -> list[str]: ...

    @property
    def skipped(self) -> dict[str, str]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, int]: ...

    def take(self, indices: Sequence[int] | np.ndarray) -> list[tuple[Any, int]]: ...


def open_images(path: str | Path, *, classes: Sequence[str] | None = None, strict: bool = False) -> ImageSet:
    """The images at `path`: class folders, parquet (a file, or a folder of them), .npz, .npy, MNIST's idx, a mosaic, or
    a data set of the hub with its split, `hub:NAME@train` (`hub:NAME:SUBSET@train` where it has several).

    classes: the names in the order of their numbers, where another set (the training part) fixes them. An image that
    cannot be read is left out by `take` and counted in `skipped`; with `strict` it is a ValueError.
    """
    if str(path).startswith(HUB):
        return HubImages(str(path), classes, strict)
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a folder of class folders, or a parquet, npz, npy or idx file")
    if path.is_dir():
        tables = sorted(path.glob("*.parquet"))
        return ParquetImages(tables, classes, strict) if tables else FolderImages(path, classes, strict)
    if path.suffix == ".parquet":
        return ParquetImages([path], classes, strict)
    if path.suffix == ".npz":
        return open_npz(path, classes)
    if path.suffix == ".npy":
        return open_npy(path, classes)
    if "-images-idx3-ubyte" in path.name:
        return open_idx(path, classes)
    if path.suffix in SUFFIXES:
        return open_mosaic(path, classes)
    raise ValueError(f"{path} is no kind of image data known here: class folders, parquet, npz, npy, idx, mosaic")


class UnreadableImage(ValueError):  # noqa: N818 - it says what is wrong
    """An image that cannot be decoded."""


def pillow() -> Any:
    """Pillow's Image module."""
    return require("PIL.Image", "reading images", "vision", package="Pillow")


def decode(content: Path | bytes, name: str, max_pixels: int = MAX_PIXELS) -> Any:
    """An RGB image of Pillow. Damaged files and those of more than `max_pixels` are `UnreadableImage`s."""
    image_module = pillow()
    try:
        with image_module.open(
            io.BytesIO(content) if isinstance(content, bytes) else content, formats=FORMATS
        ) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise UnreadableImage(f"{width}×{height} pixels are more than {max_pixels}")
            return image.convert("RGB")
    except UnreadableImage as error:
        raise UnreadableImage(f"{name}: {error}") from None
    except Exception as error:  # decoders raise whatever damaged bytes lead them to
        reason = str(error) or type(error).__name__
        raise UnreadableImage(f"{name} cannot be read: {reason}") from None


def open_mosaic(path: Path, classes: Sequence[str] | None = None) -> ArrayImages:
    """One lossless image made of square tiles, row by row, with a byte for the label of each in `<name>.labels.bin`.

    Class names are the words of `classes.txt` in the same folder, if there is one.
    """
    beside = path.with_suffix(".labels.bin")
    if not beside.exists():
        raise ValueError(f"{path} is a single image; as a mosaic of many it would need their labels in {beside}")
    labels = np.fromfile(beside, np.uint8)
    pixels = np.asarray(decode(path, str(path)))  # (H, W, 3)
    height, width, channels = pixels.shape
    side = math.isqrt(height * width // max(1, len(labels)))
    if not side or height % side or width % side or len(labels) * side**2 != height * width:
        raise ValueError(f"{path} of {width}×{height} pixels does not divide into {len(labels)} square tiles")
    tiles = pixels.reshape(height // side, side, width // side, side, channels).transpose(0, 2, 4, 1, 3)
    names = path.with_name("classes.txt")
    if classes is None and names.exists():
        classes = names.read_text(encoding="utf-8").split()
    return ArrayImages(tiles.reshape(-1, channels, side, side), labels, number_names(labels, classes), str(path))


class EncodedImages:
    """Images that are decoded when they are asked for. Subclasses say where the bytes are."""

    def __init__(self, labels: np.ndarray, classes: Sequence[str], strict: bool, name: str) -> None:
        pillow()
        self.labels, self.classes, self.strict, self.name = labels, list(classes), strict, name
        self.skipped: dict[str, str] = {}
        check_labels(labels, self.classes, name)

    def source(self, index: int) -> tuple[Path | bytes, str]:
        """The bytes or file of an image, and its name."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """(image, label); an image that cannot be read is an UnreadableImage, whatever `strict` says."""
        return decode(*self.source(index)), int(self.labels[index])

    def take(self, indices: Sequence[int] | np.ndarray) -> list[tuple[Any, int]]:
        """The images that can be read; the others are counted in `skipped`, or raised with `strict`."""
        taken = []
        for index in indices:
            try:
                taken.append(self[int(index)])
            except UnreadableImage as error:
                if self.strict:
                    raise
                self.skipped[self.source(int(index))[1]] = str(error)
        return taken

    def check(self) -> int:
        """Decodes everything once; the number of images that cannot be read, which `skipped` names."""
        for index in range(len(self)):
            self.take([index])
        return len(self.skipped)


class FolderImages(EncodedImages):
    """`<root>/<class>/**/<image>`: classes are the folders in alphabetical order."""

    def __init__(self, root: Path, classes: Sequence[str] | None = None, strict: bool = False) -> None:
        folders = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        if not folders:
            raise ValueError(f"{root} holds no class folders: images belong into {root}/<class>/")
        classes = list(classes) if classes is not None else folders
        if unknown := sorted(set(folders) - set(classes)):
            raise ValueError(
                f"{root} has folders that are none of the classes: {', '.join(unknown[:10])}. The classes are "
                f"the folders of the training images: {', '.join(classes[:10])}"
            )
        if missing := [name for name in classes if name not in folders]:
            raise ValueError(f"{root} has no folder for {len(missing)} of the classes: {', '.join(missing[:10])}")
        self.files: list[Path] = []
        self.ignored = 0  # files that are no images by their names
        labels: list[int] = []
        for number, name in enumerate(classes):
            found = sorted(path for path in (root / name).rglob("*") if path.is_file())
            images = [path for path in found if path.suffix.lower() in SUFFIXES]
            self.ignored += len(found) - len(images)
            self.files += images
            labels += [number] * len(images)
        if not labels:
            raise ValueError(f"{root} holds no images; their names end in {', '.join(SUFFIXES)}")
        super().__init__(np.array(labels, np.int64), classes, strict, str(root))

    def source(self, index: int) -> tuple[Path, str]:
        return self.files[index], str(self.files[index])


class TableImages(EncodedImages):
    """A table of pyarrow with a column of encoded images (bytes, or the hub's {bytes, path}) and one of labels."""

    def __init__(self, table: Any, classes: Sequence[str] | None, strict: bool, name: str) -> None:
        image = next((key for key in ("image", "img", "bytes") if key in table.column_names), None)
        label = next((key for key in ("label", "labels", "fine_label") if key in table.column_names), None)
        if image is None or label is None:
            raise ValueError(f"{name} has the columns {', '.join(table.column_names)}; it needs `image` and `label`")
        if not table.num_rows:
            raise ValueError(f"{name} holds no images")
        self.column = table.column(image)
        labels = np.array(table.column(label).to_pylist())
        if not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(f"{name}: the column {label} holds {labels.dtype}, not class numbers")
        if classes is None:
            classes = _hub_classes(table.schema.metadata or {}, label) or number_names(labels, None)
        super().__init__(labels.astype(np.int64), classes, strict, name)

    def source(self, index: int) -> tuple[Path | bytes, str]:
        value = self.column[index].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        return content or b"", f"{self.name} row {index}"


class ParquetImages(TableImages):
    """Parquet files, held in memory."""

    def __init__(self, files: Sequence[Path], classes: Sequence[str] | None = None, strict: bool = False) -> None:
        name = str(files[0] if len(files) == 1 else files[0].parent)
        pyarrow, parquet = (require(module, f"{name}: parquet", "hub") for module in ("pyarrow", "pyarrow.parquet"))
        try:
            table = pyarrow.concat_tables([parquet.read_table(path) for path in files])
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"{name} cannot be read as parquet: {error}") from None
        super().__init__(table, classes, strict, name)


class HubImages(TableImages):
    """A split of a data set of the hub, `hub:NAME@SPLIT`, in files that the library `datasets` keeps."""

    def __init__(self, name: str, classes: Sequence[str] | None = None, strict: bool = False) -> None:
        whole, at, split = name.rpartition("@")
        if not at or not split:
            raise ValueError(f"{name}: a data set of the hub is named with its split, such as {name}@train")
        data_set, _, subset = whole.removeprefix(HUB).partition(":")
        table = load_hub(f"{HUB}{data_set}", subset or None, split).with_format("arrow")[:]
        super().__init__(table, classes, strict, name)

    def source(self, index: int) -> tuple[Path | bytes, str]:
        content, name = super().source(index)
        if content:
            return content, name
        path = self.column[index].as_py()["path"]  # of an image folder, the library keeps only where files are
        return Path(path), path


def _hub_classes(metadata: dict[bytes, bytes], label: str) -> list[str] | None:
    """Class names that the hub's data sets library writes into the schema."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return [str(name) for name in features[label]["names"]]
    except (KeyError, TypeError, ValueError):
        return None


__all__ = [
    "ArrayImages",
    "FolderImages",
    "HubImages",
    "ImageSet",
    "ParquetImages",
    "UnreadableImage",
    "decode",
    "open_images",
]
