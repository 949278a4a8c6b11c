"""Golden fixtures: numbers that the original programs computed, and how a mixer of ours is held against them."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from subquad.interop.checkpoints.fairseq.models import PAD
from subquad.interop.checkpoints.weight_map import ConvertedModule
from subquad.mixers import Mixer
from subquad.models import LanguageModel

FOLDER = Path(os.environ.get("SUBQUAD_GOLDEN") or Path(__file__).parents[1] / "golden")
OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 5e-5


@dataclass(frozen=True)
class Fixture:
    path: Path
    meta: Mapping[str, str]
    tensors: Mapping[str, Tensor]

    @property
    def config(self) -> dict[str, Any]:
        return json.loads(self.meta["config"])

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def __contains__(self, key: str) -> bool:
        return key in self.tensors

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Tensors whose names start with `prefix`, without it."""
        return {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}


def load(path: Path) -> Fixture:
    with safe_open(path, "pt") as file:
        return Fixture(path, file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118


def assert_close(ours: Tensor, golden: Tensor, tolerance: float, what: str) -> None:
    """Largest difference at most `tolerance`, relative to the golden tensor's largest value where that is above 1."""
    assert ours.shape == golden.shape, f"{what}: shape {tuple(ours.shape)}, golden {tuple(golden.shape)}"
    error = (ours.detach().double() - golden.double()).abs().max().item()
    limit = tolerance * max(1.0, golden.abs().max().item())
    assert error <= limit, f"{what}: differs by {error:.2e}, allowed {limit:.2e}"


def assert_gradients(imported: ConvertedModule[Any], golden: Mapping[str, Tensor], scale: float = 1.0) -> None:
    """Gradients of our parameters against the original's, by its names; what is unused must have gradient 0 there."""
    ours = dict(imported.module.named_parameters())
    for name, expected in golden.items():
        if name not in imported.weight_map:
            assert expected.abs().max() == 0, f"{name} is not imported, but the original has a gradient for it"
            continue
        ref = imported.weight_map[name]
        gradient = ours[ref.name].grad
        gradient = ref.of(torch.zeros_like(ours[ref.name]) if gradient is None else gradient)
        taken, rest = ref.of_source(expected), expected.clone()
        ref.of_source(rest).zero_()
        assert not rest.any(), f"rows of {name} are not imported, but the original has a gradient for them"
        assert_close(gradient.reshape(taken.shape) * scale, taken, GRADIENT_TOLERANCE, f"gradient of {name}")


def is_right_padded(padding: Tensor) -> bool:
    """Whether all padding comes after the tokens, in every row."""
    return bool((padding.int().diff(dim=1) >= 0).all())


def assert_padding_is_ignored(mixer: Mixer, x: Tensor, padding: Tensor, **call: Any) -> None:
    """The contract on sequences: valid positions equal the run of each row on its own, without its padding."""
    y = mixer(x, padding=padding, **call).y
    assert torch.isfinite(y).all()
    for row in range(x.shape[0]):
        valid = ~padding[row]
        if valid.any():
            alone = mixer(x[row : row + 1, valid], **call).y[0]
            assert_close(y[row, valid], alone, OUTPUT_TOLERANCE, f"row {row} with and without padding")


def assert_padded_cells_are_ignored(mixer: Mixer, x: Tensor, padding: Tensor, grid: tuple[int, int]) -> None:
    """The contract on grids: whatever a padded cell contains, valid cells get the same."""
    y = mixer(x, padding=padding, grid=grid).y
    assert torch.isfinite(y).all()
    other = torch.where(padding[..., None], 100 * torch.randn_like(x), x)
    changed = mixer(other, padding=padding, grid=grid).y
    assert_close(changed[~padding], y[~padding], OUTPUT_TOLERANCE, "valid cells after the padded ones were changed")


def assert_stream(model: LanguageModel, tokens: Tensor, padding: Tensor | None, logits: Tensor) -> None:
    """Reading a language model's tokens in chunks gives the logits of one pass, at valid positions."""
    there = torch.ones_like(tokens, dtype=torch.bool) if padding is None else ~padding
    for size in (1, 5):
        state, parts = model.init_state(tokens.shape[0]), []
        for start in range(0, tokens.shape[1], size):
            chunk = slice(start, start + size)
            part = model(tokens[:, chunk], padding=None if padding is None else padding[:, chunk], state=state)
            assert part.state is not None
            state = part.state
            parts.append(part.logits)
        assert_close(torch.cat(parts, 1)[there], logits[there], OUTPUT_TOLERANCE, f"logits in chunks of {size}")


def padding_of(tokens: Tensor) -> Tensor | None:
    """The padding of fairseq's tokens (batch, time), or None where there is none."""
    padding = tokens == PAD
    return padding if bool(padding.any()) else None
