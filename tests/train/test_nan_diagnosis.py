"""Losses and gradients that are not finite: who did it, and a batch that does it again."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from subquad.models import build_model
from subquad.tasks.losses import word_loss
from subquad.train.diagnostics.nan_diagnosis import NotFiniteError, diagnose, find_culprit, is_finite, load_failure
from subquad.train.rng import rng_state, set_rng_state

OPTIONS = {
    "vocab": 17,
    "dim": 8,
    "decoder": {
        "layers": 3,
        "heads": 2,
        "ffn_dim": 16,
        "mixer": {"name": "softmax*2,performer", "features": 4},
        "dropout": 0.1,
    },
}


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return build_model("language-model", **OPTIONS).train()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 17, (2, 9), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "target": tokens[:, 1:].contiguous()}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    features = model.features(batch["tokens"])[0]  # type: ignore[operator]
    return word_loss(model.head, features, batch["target"]).total  # type: ignore[arg-type]


class Poison(nn.Module):
    """Gives nan, or a gradient that is nan, when the generator says so."""

    def __init__(self, inner: nn.Module, where: str) -> None:
        super().__init__()
        self.inner, self.where = inner, where

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.where == "output":
            return torch.where(torch.rand(x.shape) < 0.5, torch.nan, x)
        return x + (x * 0).abs().sqrt()  # value 0, gradient 0 * inf


def poisoned(model: nn.Module, where: str, layer: int = 2) -> str:
    """Puts the poison into a mixer and returns its name."""
    mixer = model.decoder.blocks[layer].mixer  # type: ignore[union-attr, index]
    mixer.out = Poison(mixer.out, where)
    return next(name for name, module in model.named_modules() if module is mixer.out)


def test_finite_training_has_no_culprit() -> None:
    model = language_model()
    assert find_culprit(model, lambda: loss_of(model, batch())) is None


@pytest.mark.parametrize(("layer", "mechanism"), [(1, "softmax"), (2, "performer")])
def test_the_first_output_names_layer_and_mechanism(layer: int, mechanism: str) -> None:
    model = language_model()
    name = poisoned(model, "output", layer)
    culprit = find_culprit(model, lambda: loss_of(model, batch()))
    assert culprit is not None
    assert (culprit.what, culprit.name, culprit.mechanism) == ("output", name, mechanism)
    assert f"{name} (Poison of the mechanism {mechanism})" in str(culprit)


def test_a_gradient_is_named_when_all_outputs_are_finite() -> None:
    model = language_model()
    name = poisoned(model, "gradient")
    culprit = find_culprit(model, lambda: loss_of(model, batch()))
    assert culprit is not None
    assert (culprit.what, culprit.name, culprit.mechanism) == ("gradient", name, "performer")


def test_a_parameter_that_was_not_finite_is_named() -> None:
    model = language_model()
    name, parameter = list(model.named_parameters())[5]
    with torch.no_grad():
        parameter.view(-1)[0] = torch.inf
    culprit = find_culprit(model, lambda: loss_of(model, batch()))
    assert culprit is not None
    assert (culprit.what, culprit.name) == ("parameter", name)
    assert "before the batch" in str(culprit)


def test_the_saved_batch_reproduces_it(tmp_path: Path) -> None:
    model = language_model()
    name = poisoned(model, "output")
    attempts = []
    losses = []
    for _ in range(2):
        rng = rng_state()
        attempts.append((batch(), rng))
        losses.append(loss_of(model, batch()))
    assert not is_finite(*losses)
    before = torch.get_rng_state()
    error = diagnose(model, lambda batch: loss_of(model, batch), attempts, tmp_path, 7)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(error, NotFiniteError)
    assert "update 7" in str(error)
    assert name in str(error)
    assert "\n" not in str(error)
    assert str(error.folder) in str(error)
    assert all(parameter.grad is None for parameter in model.parameters())

    stored, rng, report = load_failure(error.folder)
    assert report["update"] == 7
    assert stored.keys() == batch().keys()
    twin = language_model()
    poisoned(twin, "output")
    twin.load_state_dict(load_file(error.folder / "model.safetensors"))
    set_rng_state(rng)
    features = twin.features(stored["tokens"])[0]  # type: ignore[operator]
    set_rng_state(rng)
    assert torch.equal(features.isnan(), model.features(stored["tokens"])[0].isnan())  # type: ignore[operator]
    assert not is_finite(loss_of(twin, stored))
    with pytest.raises(ValueError, match="no saved batch"):
        load_failure(tmp_path)


def test_the_micro_batch_at_fault_is_found(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    good, bad = {"x": torch.ones(1, 2)}, {"x": torch.tensor([[1.0, torch.inf]])}
    attempts = [(each, rng_state()) for each in (good, bad, good)]
    error = diagnose(model, lambda batch: model(batch["x"]).sum(), attempts, tmp_path, 3)
    assert error.culprit is not None
    assert error.culprit.name == "the model"
    assert torch.equal(load_failure(error.folder)[0]["x"], bad["x"])
