"""Classifies images of files, and texts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from subquad.data.batches import BatchPlan, Budget, collate_texts, to_device
from subquad.data.images.arrays import CHANNELS, IMAGE_KEYS, channels_first
from subquad.data.images.inputs import InputTransform, image_tensor
from subquad.data.images.sets import decode_image
from subquad.data.numpy_files import read_npy, read_npz
from subquad.data.text.folders import read_whole_text
from subquad.data.tokenizers import Tokenizer
from subquad.models import Model, TextClassifier

TOP_K = 5
"""How many classes are returned for an image."""
BATCH_SIZE, BATCH_TOKENS = 64, 8192
"""The images, and the tokens, that are classified together."""

ClassProbabilities = list[tuple[str, float]]
"""The names of classes and their probabilities, the most probable first."""


class ImageClassifier:
    """Classifies images in files with a model."""

    def __init__(self, model: Model, classes: Sequence[str], transform: InputTransform) -> None:
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
        return most_probable(self.model(images.to(self.device)).logits, self.classes)

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


class TextLabeller:
    """Classifies texts with a model. `truncated` counts the texts that were cut to what the model reads."""

    def __init__(
        self, model: TextClassifier, tokenizer: Tokenizer, classes: Sequence[str], max_tokens: int | None = None
    ) -> None:
        """classes: their names in the order of the logits. max_tokens: longer texts are cut to their beginning."""
        self.model, self.tokenizer, self.classes, self.max_tokens = model, tokenizer, classes, max_tokens
        self.device = next(model.parameters()).device
        self.truncated = 0

    def classify(self, texts: Sequence[str]) -> list[ClassProbabilities]:
        """Returns the classes of each text. Texts of similar length are classified together."""
        lines = self.tokenizer.encode_batch(texts)
        cut = [line[: self.max_tokens] for line in lines]
        self.truncated += sum(len(short) < len(line) for short, line in zip(cut, lines, strict=True))
        if not cut:
            return []
        sizes = np.array([len(line) + 1 for line in cut])
        budget = Budget(max_tokens=max(BATCH_TOKENS, int(sizes.max())), multiple=1)
        found: dict[int, ClassProbabilities] = {}
        for batch in BatchPlan(sizes, budget=budget, shuffle=False).epoch(0):
            found.update(zip(batch.tolist(), self._classify([cut[number] for number in batch]), strict=True))
        return [found[number] for number in range(len(cut))]

    @torch.inference_mode()
    def _classify(self, lines: Sequence[Sequence[int]]) -> list[ClassProbabilities]:
        batch = to_device(collate_texts(lines, self.tokenizer.pad, self.tokenizer.eos), self.device)
        return most_probable(self.model(batch["tokens"], padding=batch["padding"]).logits, self.classes)

    def classify_file(self, name: str) -> list[tuple[str, ClassProbabilities]]:
        """Returns the name and the classes of a file, which is one text. Raises ValueError if it cannot be read."""
        if Path(name).is_dir():
            raise ValueError(f"{name} is a folder; give the files in it, such as {name}/*.txt")
        return [(name, self.classify([read_whole_text(Path(name))])[0])]


def most_probable(logits: torch.Tensor, classes: Sequence[str]) -> list[ClassProbabilities]:
    """Returns the TOP_K most probable classes of each row of logits (batch, classes)."""
    values, numbers = logits.float().softmax(-1).topk(min(TOP_K, len(classes)), -1)
    return [
        [(classes[number], value) for number, value in zip(row, likely, strict=True)]
        for row, likely in zip(numbers.tolist(), values.tolist(), strict=True)
    ]


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
