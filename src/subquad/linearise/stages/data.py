"""Reads the data of a model by what the model is for: text files, labelled texts, or images."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from subquad.data.builtin import SETS, load
from subquad.data.images.inputs import Augmented, InputTransform, Standardize, image_tensor
from subquad.data.images.sets import ImageSet, open_images
from subquad.data.images.transforms import AugmentOptions
from subquad.data.masking import Masking, MaskOptions
from subquad.data.text.sources import LABELLED, TextSource, read_samples
from subquad.linearise.stages.batches import (
    Batches,
    Images,
    LabelledTexts,
    MaskedBlocks,
    Samples,
    TextBlocks,
    hold_out,
)
from subquad.linearise.stages.layers import AttentionLayers
from subquad.nn.stack import MixerChoice

Kind = Literal["causal", "masked", "texts", "images", "pairs"]
"""What a model computes: the next token, hidden tokens, the class of a text or an image, or the next token of another
text."""
HELD_OUT = 0.05
"""The share of the data that is held out where no other data is given to evaluate on."""
BYTES = "bytes"
SUFFIXES: dict[str, Kind] = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "texts",
    "ForImageClassification": "images",
    "ForImageClassificationWithTeacher": "images",
    "VisionTransformer": "images",
}


@dataclass(frozen=True)
class Data:
    """What is learned from, and what is evaluated on. description: where it came from, for the report.

    batches: of all updates, where they are not made of `train`. layers: finds the attention of the model.
    """

    kind: Kind
    train: Samples
    valid: Samples
    description: str
    batches: Batches | None = None
    layers: Callable[[Any, MixerChoice], AttentionLayers] = AttentionLayers


def kind_of(model: nn.Module) -> Kind:
    """Returns what a model is for, by the name of its class."""
    name = type(model).__name__
    for suffix, kind in SUFFIXES.items():
        if name.endswith(suffix):
            return kind
    raise ValueError(
        f"{name} has no loss to train with: a causal or masked language model or a classifier is needed, with its head "
        f"(a class whose name ends with {', '.join(SUFFIXES)})"
    )


def read_data(
    model: nn.Module,
    files: Sequence[str],
    valid: Sequence[str] = (),
    *,
    length: int,
    tokenizer: Any = None,
    processor: Any = None,
) -> Data:
    """Reads files, or a built-in set by its name, as the samples of a model.

    valid: what is evaluated on; by default a built-in set's own, or the last twentieth of the samples. length: tokens
    of a piece of text, or the most tokens of a text with a class. tokenizer: of transformers, or "bytes". processor:
    of transformers, whose mean and deviation images are normalised with; by default those of the training images.
    """
    kind = kind_of(model)
    if not files:
        raise ValueError("give the data that the mixers learn from: files, or the name of a built-in set")
    what = ", ".join(files)
    if kind == "images":
        train, held = _read_images(model, files, valid, processor)
        return Data(kind, train, held, what)
    reader = _TextReader(model, kind, length, tokenizer)
    if not valid and len(files) == 1 and files[0] in SETS:
        return Data(kind, reader.read(files, "train"), reader.read(files, "valid"), what)
    samples = reader.read(files, "train")
    if valid:
        return Data(kind, samples, reader.read(valid, "valid"), what)
    part, held_part = hold_out(samples, HELD_OUT)
    return Data(kind, part, held_part, f"{what}; the last {len(held_part)} of {len(samples)} samples are held out")


# ---------------------------------------------------------------------- text


class _TextReader:
    """Reads text as the samples of one model."""

    def __init__(self, model: Any, kind: Kind, length: int, tokenizer: Any) -> None:
        self.kind, self.length, self.tokenizer, self.config = kind, length, tokenizer, model.config
        most = getattr(model.config, "max_position_embeddings", None) or getattr(model.config, "n_positions", None)
        if most is not None and length > most:
            raise ValueError(f"the model reads at most {most} tokens, and --length is {length}; give a smaller one")
        if tokenizer is None:
            raise ValueError('the model has no tokenizer; give one, or "bytes" if it reads the bytes of a text')
        if tokenizer == BYTES and model.config.vocab_size < 256:
            raise ValueError(f"the model knows {model.config.vocab_size} tokens, too few to read bytes")

    def read(self, files: Sequence[str], split: str) -> Samples:
        if self.kind == "texts":
            return self._labelled(files, split)
        tokens = np.concatenate([self._encode(lines) for lines in _texts(files, split)])
        if self.kind == "causal":
            samples: Samples = TextBlocks(tokens, self.length)
        else:
            samples = MaskedBlocks(tokens, self.length, self._masking())
        if not len(samples):
            raise ValueError(
                f"{', '.join(files)}: {len(tokens):,} tokens are fewer than the {self.length} of one piece (--length)"
            )
        return samples

    def _encode(self, lines: Sequence[str]) -> np.ndarray:
        """Returns the tokens of whole lines, with the ends of the lines."""
        if self.tokenizer == BYTES:
            return np.frombuffer("".join(f"{line}\n" for line in lines).encode(), np.uint8)
        found = self.tokenizer([f"{line}\n" for line in lines], add_special_tokens=False)["input_ids"]
        return np.array([token for one in found for token in one], np.int32)

    def _masking(self) -> Masking:
        mask = getattr(self.tokenizer, "mask_token_id", None)
        if mask is None:
            raise ValueError("a masked language model needs a tokenizer with a mask token")
        special = set(self.tokenizer.all_special_ids)
        words = np.array([word for word in range(self.config.vocab_size) if word not in special])
        return Masking(MaskOptions(), mask, words)

    def _labelled(self, files: Sequence[str], split: str) -> Samples:
        if len(files) > 1:
            raise ValueError("labelled texts are one table or folder")
        pairs = _pairs(files[0], split)
        labels = [label for label, _ in pairs]
        numbers = _class_numbers(sorted(set(labels)), getattr(self.config, "label2id", None) or {})
        if self.tokenizer == BYTES:
            texts = [list(text.encode()[: self.length]) for _, text in pairs]
            return LabelledTexts(texts, [numbers[label] for label in labels], 0)
        found = self.tokenizer([text for _, text in pairs], truncation=True, max_length=self.length)["input_ids"]
        pad = self.tokenizer.pad_token_id or 0
        return LabelledTexts(found, [numbers[label] for label in labels], pad)


def _texts(files: Sequence[str], split: str) -> Iterator[list[str]]:
    """The lines of each file, or of a built-in set."""
    for file in files:
        if file in SETS:
            found = load(file)
            if found.kind != "text":
                raise ValueError(f"{file} is a set of {found.kind}, but text is needed")
            yield found.split(split)
        else:
            yield [text for (text,) in read_samples(TextSource.parse(file, {"files": [file]}), ["text"])]


def _pairs(file: str, split: str) -> list[tuple[str, str]]:
    if file in SETS:
        found = load(file)
        if found.kind != "labelled":
            raise ValueError(f"{file} is a set of {found.kind}, but labelled texts are needed")
        return [(str(label), text) for label, text in found.split(split)]
    return [(label, text) for label, text in read_samples(TextSource.parse(file, {"files": [file]}), LABELLED)]


def _class_numbers(names: Sequence[str], known: dict[str, int]) -> dict[str, int]:
    """The number of each class: the model's own where it has names, numbers as they are, or in alphabetical order."""
    if all(name in known for name in names):
        return {name: known[name] for name in names}
    if all(name.isdecimal() for name in names):
        return {name: int(name) for name in names}
    return {name: number for number, name in enumerate(names)}


# ---------------------------------------------------------------------- images


def _read_images(model: Any, files: Sequence[str], valid: Sequence[str], processor: Any) -> tuple[Samples, Samples]:
    if len(files) > 1 or len(valid) > 1:
        raise ValueError("images are one folder, one file or one built-in set")
    name = "pixel_values" if hasattr(model, "config") else "x"  # timm's models have no config
    if files[0] in SETS:
        found = load(files[0])
        if found.kind != "images":
            raise ValueError(f"{files[0]} is a set of {found.kind}, but images are needed")
        train, held = found.train, found.valid
    else:
        train, held = open_images(Path(files[0])), None
    if valid:
        held = open_images(Path(valid[0]), classes=train.classes)
    transform = _transform(model, train, processor)
    samples = _tensors(train, transform, name)
    if held is not None:
        return samples, _tensors(held, transform, name)
    mixed = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))  # folders are sorted by class
    return hold_out(Images(samples.pixels[mixed], samples.labels[mixed], name), HELD_OUT)


def _transform(model: Any, images: ImageSet, processor: Any) -> InputTransform:
    first = images[0][0]
    if processor is None and isinstance(first, np.ndarray):
        return Standardize.of(images)
    config = getattr(model, "config", None)
    size = config.image_size if config is not None else model.patch_embed.img_size[0]
    given: dict[str, Any] = {"size": size, "eval_crop": 1.0}
    if processor is not None:
        given |= {"mean": tuple(processor.image_mean), "std": tuple(processor.image_std)}
    return Augmented(AugmentOptions.parse("images", given))


def _tensors(images: ImageSet, transform: InputTransform, name: str) -> Images:
    read = [
        (image_tensor(transform, f"image {i}", image), label)
        for i in range(len(images))
        for image, label in [images[i]]
    ]
    return Images(torch.stack([pixels for pixels, _ in read]), torch.tensor([label for _, label in read]), name)
