"""Recipes: one YAML file says what is trained on what, and how. Everything is checked before anything is loaded.

task: translation
data: {embedded: phrases}
model: {preset: translation_small, encoder: {mixer: eva}}
schedule: {kind: inverse-sqrt, lr: 3e-3, warmup_updates: 200}
train: {updates: 1000, budget: {max_tokens: 2048}}
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from subquad.config import Options
from subquad.data.batches import Budget
from subquad.data.blocks import BlockOptions
from subquad.data.fairseq.folder import FairseqFolder
from subquad.data.images.mixup import MixingOptions
from subquad.data.images.transforms import AugmentOptions
from subquad.data.masking import MaskOptions
from subquad.data.text.sources import TextSource
from subquad.data.tokenizers import TokenizerConfig
from subquad.decode.options import DecodeOptions
from subquad.files import parse_yaml, read_yaml
from subquad.models import MODELS, PRESETS, preset
from subquad.models.presets import merged
from subquad.train.checkpoint import Rotation
from subquad.train.log import TrackConfig
from subquad.train.optim import OptimConfig
from subquad.train.origins import check_stored_origins
from subquad.train.schedules import Schedule, ScheduleConfig

KINDS = {
    "translation": ("encoder-decoder",),
    "language-model": ("language-model",),
    "masked-language-model": ("masked-language-model",),
    "image-classification": ("vision", "pyramid"),
}


ALTERNATIVES = ("embedded", "folder", "splits", "fairseq", "images")
OF_TEXT = ("folder", "splits", "fairseq", "tokenizer", "target_tokenizer", "max_length", "blocks", "masking")
OF_IMAGES = ("images", "hold_out", "augment", "mixing", "repeated")


class DataConfig(Options):
    """Where the data comes from: an embedded set, a folder that `subquad data prepare` or fairseq-preprocess wrote,
    text files, or images."""

    embedded: str | None = Field(None, description="an embedded set: digits, phrases or speeches")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the embedded set")
    folder: str | None = Field(None, description="prepared data")
    splits: dict[str, TextSource] = Field(default_factory=dict, description="files by split: train, valid, test")
    fairseq: FairseqFolder | None = Field(
        None, description="a folder that fairseq-preprocess wrote: its path, or path, languages and codes"
    )
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="of text that is not prepared yet")
    target_tokenizer: TokenizerConfig | None = Field(None, description="one of its own for the target; null: shared")
    max_length: int | None = Field(None, ge=1, description="longer samples are skipped and counted")
    blocks: BlockOptions = Field(default_factory=BlockOptions, description="how text is cut for language models")
    masking: MaskOptions = Field(
        default_factory=MaskOptions, description="which tokens a masked language model has to find"
    )
    images: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="labelled images by split: a folder of class folders, one or several parquet, npz, npy, idx or "
        "mosaic files, or hub:NAME@SPLIT for a data set of the hub",
    )
    hold_out: int | None = Field(
        None,
        ge=1,
        description="training images that become `valid`: the last ones; of images sorted by class, evenly spaced ones",
    )
    augment: AugmentOptions | None = Field(
        None,
        description="size, crops and changes of images (needs the extra `vision`); null: images as they are, with the "
        "training images' mean and deviation taken out",
    )
    mixing: MixingOptions | None = Field(None, description="mixup and cutmix of training images; null: neither")
    repeated: int = Field(1, ge=1, description="repeated augmentation: each image of a batch is there so many times")

    @field_validator("images", mode="before")
    @classmethod
    def _from_path(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {split: (path,) if isinstance(path, str) else path for split, path in given.items()}

    def check(self) -> None:
        given = [name for name in ALTERNATIVES if getattr(self, name)]
        if len(given) != 1:
            got = ", ".join(given) or "none"
            raise ValueError(f"give one of embedded, folder, splits, fairseq and images (got {got})")
        if self.fairseq is not None and (self.tokenizer != TokenizerConfig() or self.target_tokenizer is not None):
            raise ValueError("the dictionaries of data.fairseq are its tokenizers; leave tokenizer out")
        for name in ("splits", "images"):
            if (splits := getattr(self, name)) and "train" not in splits:
                raise ValueError(f"{name} need a split `train` (got {', '.join(splits)})")
        if self.images and "valid" not in self.images and self.hold_out is None:
            raise ValueError("images need a split `valid`, or hold_out: the number of training images to validate with")
        if self.hold_out is not None and (not self.images or "valid" in self.images):
            raise ValueError("hold_out makes a split `valid` out of images.train; this data has one already")

    def check_task(self, task: str) -> None:
        """Options that mean nothing to a task are refused, not ignored."""
        fields = type(self).model_fields
        meaningless = OF_TEXT if task == "image-classification" else OF_IMAGES
        for name in meaningless if task == "masked-language-model" else (*meaningless, "masking"):
            if getattr(self, name) != fields[name].get_default(call_default_factory=True):
                raise ValueError(f"data.{name} has no meaning for task {task}; leave it out")


class TrainConfig(Options):
    """How long and in which steps."""

    updates: int | None = Field(None, ge=1, description="updates in all")
    epochs: int | None = Field(None, ge=1, description="passes over the data in all")
    minutes: float | None = Field(None, gt=0, description="training ends after so much time, validation included")
    budget: Budget = Field(default_factory=Budget, description="how large a batch may become")
    accumulate: int = Field(1, ge=1, description="batches of one update, of all processes together")
    data_workers: int = Field(0, ge=0, description="threads that make batches ahead of need; 0: each when it is needed")
    smoothing: float = Field(0.0, ge=0, lt=1, description="label smoothing")
    aux_weight: float = Field(0.0, ge=0, description="weight of the mixers' regulariser beside the loss of a target")
    seed: int = Field(1, ge=0, description="of the weights, the order of the data and every draw")
    precision: Literal["float32", "bfloat16", "float16"] = Field("float32", description="of the forward pass")
    compile: bool = Field(False, description="torch.compile the model")
    checkpoint_activations: bool = Field(
        False, description="keep only the inputs of blocks, and compute the rest again in the backward pass"
    )
    sharded: bool = Field(
        False, description="under torchrun each process holds a part of every weight (FSDP2) instead of a replica (DDP)"
    )
    validate_every: int | None = Field(None, ge=1, description="updates between validations; null: every epoch")
    patience: int | None = Field(None, ge=1, description="stop after so many validations without a better one")
    log_every: int = Field(50, ge=1, description="updates between lines in metrics.jsonl")

    def check(self) -> None:
        if self.updates is None and self.epochs is None and self.minutes is None:
            raise ValueError("training needs an end: give updates, epochs or minutes")


class Recipe(Options):
    """A training run, as data."""

    task: Literal["translation", "language-model", "masked-language-model", "image-classification"] = Field(
        description="what is learned"
    )
    data: DataConfig = Field(description="what it is learned from")
    model: dict[str, Any] = Field(description="`preset: NAME` and changes to it, or `kind: KIND` and all its options")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="the optimiser")
    schedule: ScheduleConfig = Field(description="the learning rate")
    train: TrainConfig = Field(description="how long and in which steps")
    decode: DecodeOptions = Field(default_factory=DecodeOptions, description="how the model is asked for text")
    checkpoints: Rotation = Field(default_factory=Rotation, description="which checkpoints are kept")
    track: TrackConfig = Field(default_factory=TrackConfig, description="trackers beside metrics.jsonl")

    def check(self) -> None:
        self.data.check_task(self.task)
        Schedule(self.schedule, self.train.updates, self.train.epochs)  # refuses what has no length, or too little
        if self.data.mixing is not None and self.train.smoothing:
            raise ValueError("mixed targets are smoothed by data.mixing.smoothing; leave train.smoothing out")
        options = self.model_data({})
        kind = options.get("kind")
        if kind not in KINDS[self.task]:
            able = [name for name, data in PRESETS.items() if data["kind"] in KINDS[self.task]]
            raise ValueError(
                f"task {self.task} trains models of kind {' or '.join(KINDS[self.task])}, not {kind}; such presets: "
                f"{', '.join(able)}"
            )
        MODELS[kind].Config.parse("model", options)

    def model_data(self, decided: Mapping[str, Any]) -> dict[str, Any]:
        """The model's config, with what the data decided."""
        given = dict(self.model)
        name = given.pop("preset", None)
        base = preset(name, given) if name is not None else given
        if base.get("kind") == "pyramid":  # it takes images of any size
            decided = {key: value for key, value in decided.items() if key != "image_size"}
        return merged(base, decided)


def read_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file, with changes such as `model.encoder.mixer=eva` or `train.updates=100`."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder, and a recipe is a YAML file; that of a run is {path / 'recipe.yaml'}")
    if not path.exists():
        files = {other.stem: other.name for other in path.parent.glob("*.yaml")}  # ".yaml" would make all names alike
        close = difflib.get_close_matches(path.stem, files, n=1)
        near = f"; did you mean {files[close[0]]!r}?" if close else "."
        raise ValueError(f"there is no recipe {path}{near} The path starts at the current folder, {Path.cwd()}")
    data = read_yaml(path, "recipe")
    check_stored_origins(path.parent)
    for change in changes:
        data = merged(data, _change(change))
    return Recipe.parse(f"recipe {path}", data)


def _change(text: str) -> dict[str, Any]:
    """`a.b=c` as {"a": {"b": c}}, c read as YAML."""
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ValueError(f"{text!r} is not a change to the recipe; write NAME=VALUE, such as train.updates=100")
    try:
        change: Any = parse_yaml(value)
    except ValueError:
        raise ValueError(f"{text!r}: the value is not YAML") from None
    for name in reversed(names):
        change = {name: change}
    return change
