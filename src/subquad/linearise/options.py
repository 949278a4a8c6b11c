"""Options of linearising a model."""

from typing import Any, Literal

from pydantic import Field

from subquad.config import Options
from subquad.files import parse_yaml
from subquad.nn.stack import MixerChoice


class LineariseOptions(Options):
    """What takes the place of attention, and how it learns to."""

    mixer: MixerChoice = Field(
        description="The mechanism that takes the place of attention with its options, or a pattern of layers such as "
        "eva*3,softmax, in which softmax stands for attention that stays."
    )
    keep: int = Field(0, ge=0, description="How many layers keep attention: those whose replacement costs most.")
    transfer_updates: int = Field(200, ge=0, description="The updates of attention transfer; 0: none.")
    transfer_lr: float = Field(1e-3, gt=0, description="The highest learning rate of attention transfer.")
    tune: Literal["all", "lora", "none"] = Field(
        "all", description="What is fine-tuned: all weights, or mixers and low-rank matrices of the other linear maps."
    )
    rank: int = Field(8, ge=1, description="The rank of LoRA's matrices.")
    tune_updates: int = Field(400, ge=0, description="The updates of fine-tuning; 0: none.")
    tune_lr: float = Field(5e-4, gt=0, description="The highest learning rate of fine-tuning.")
    distill: float = Field(0.0, ge=0, description="The weight of the divergence from the teacher's logits; 0: none.")
    batch: int = Field(8, ge=1, description="Samples of an update.")
    length: int = Field(1024, ge=2, description="Tokens of a piece of text, or the most tokens of a text with a class.")
    seed: int = Field(1, ge=0, description="The seed of new weights, of the order of the data, and of dropout.")
    valid_samples: int = Field(256, ge=1, description="How many samples are evaluated on at most, evenly spaced.")
    save_every: int = Field(100, ge=1, description="Updates between two checkpoints.")
    controls: bool = Field(
        True,
        description="Whether the same model is also trained from scratch with as many updates, and linearised with the "
        "identity in place of the mechanism, for the report.",
    )
    scratch_lr: float = Field(2e-3, gt=0, description="The highest learning rate of training from scratch.")
    lengths: tuple[int, ...] | None = Field(
        None,
        description="Lengths at which speed and memory are measured, and after which decoding is; by default that of "
        "the samples and half of it.",
    )

    @property
    def updates(self) -> int:
        return self.transfer_updates + (self.tune_updates if self.tune != "none" else 0)


def parse_mixer(text: str) -> dict[str, Any]:
    """Reads a mechanism with options: "eva=window=64,landmarks=8", or a pattern such as "eva*3,softmax=window=64".

    >>> parse_mixer("eva=window=64")
    {'name': 'eva', 'window': 64}
    """
    name, _, given = text.partition("=")
    choice: dict[str, Any] = {"name": name.strip()}
    for setting in filter(None, given.split(",")):
        option, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--mixer {text}: {setting!r} is no option; write NAME=OPTION=VALUE,OPTION=VALUE")
        choice[option.strip()] = parse_yaml(value)
    return choice
