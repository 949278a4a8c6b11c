"""Optimisers against written-out rules, weight decay by name, clipping, and state that comes back bit by bit."""

import json
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from subquad.train.optim import (
    Ema,
    OptimConfig,
    build_optimizer,
    clip_gradients,
    optimizer_state,
    parameter_groups,
    restore_optimizer,
    scale_gradients,
    set_learning_rate,
)
from tests.originals.files import FOLDER
from tests.originals.training import check_adam

NAMES = ("adam", "adamw", "nag", "radam", "sgd")


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return build_optimizer(OptimConfig.parse("optim", options), model)


def one_update(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, rate: float = 0.01) -> None:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad(set_to_none=True)
    model(x).square().sum().backward()
    set_learning_rate(optimizer, rate)
    optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_fairseq_adam_step_by_step() -> None:
    check_adam(json.loads((FOLDER / "fairseq" / "adam.json").read_text()))


def test_adam_counts_the_steps_of_each_parameter() -> None:
    """A parameter that had no gradient for an update is corrected by its own number of steps."""
    model, alone = nn.Linear(3, 2), nn.Linear(3, 2)
    alone.load_state_dict(model.state_dict())
    optimizer, reference = optimizer_of(model), optimizer_of(alone)
    for update in range(4):
        gradients = torch.randn(2, 3), torch.randn(2)
        model.weight.grad, model.bias.grad = gradients[0], gradients[1] if update % 2 else None
        set_learning_rate(optimizer, 0.1)
        optimizer.step()
        if update % 2:
            alone.bias.grad = gradients[1].clone()
            set_learning_rate(reference, 0.1)
            reference.step()
    assert torch.equal(model.bias, alone.bias)


def test_nag_as_fairseq_writes_it() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    optimizer = optimizer_of(model, name="nag", momentum=0.9, weight_decay=0.1)
    expected, buffer, before = model.weight.detach().double(), torch.zeros(3, 4).double(), None
    for rate in (1e-7, 0.1, 0.3, 0.05, 0.05):
        gradient = torch.randn(3, 4)
        model.weight.grad = gradient.clone()
        set_learning_rate(optimizer, rate)
        optimizer.step()
        carried = 1.0 if before is None else rate / before
        expected = expected * (1 - rate * 0.1) + 0.81 * carried * buffer - 1.9 * rate * gradient.double()
        buffer = 0.9 * carried * buffer - rate * gradient.double()
        before = rate
    torch.testing.assert_close(model.weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_nag_at_a_constant_rate_is_nesterov_momentum() -> None:
    """torch's SGD with Nesterov momentum is the same rule in other variables, seen from the next look-ahead point."""
    ours, theirs = small_model(), small_model()
    nag = optimizer_of(ours, name="nag", momentum=0.9)
    sgd = optimizer_of(theirs, name="sgd", momentum=0.9, nesterov=True)
    for seed in range(4):
        one_update(ours, nag, seed, 1e-3)
        one_update(theirs, sgd, seed, 1e-3)
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_state_comes_back_bit_by_bit(name: str) -> None:
    model = small_model()
    options = {"name": name, "weight_decay": 0.01, "decay_vectors": False}
    optimizer = optimizer_of(model, **options)
    rates = [0.01, 0.02, 0.015, 0.01]
    for seed in range(2):
        one_update(model, optimizer, seed, rates[seed])
    stored = load(save(optimizer_state(optimizer, model)))
    twin = small_model(1)
    twin.load_state_dict(model.state_dict())
    resumed = optimizer_of(twin, **options)
    restore_optimizer(resumed, twin, stored)
    for seed in range(2, 4):
        one_update(model, optimizer, seed, rates[seed])
        one_update(twin, resumed, seed, rates[seed])
    for a, b in zip(weights(model), weights(twin), strict=True):
        assert torch.equal(a, b)


def test_state_has_the_names_of_parameters() -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    one_update(model, optimizer, 0)
    saved = optimizer_state(optimizer, model)
    names = {name for name, _ in model.named_parameters()}
    assert saved.keys() == {f"{key}.{name}" for key in ("step", "exp_avg", "exp_avg_sq") for name in names}


def test_state_of_another_model_or_optimiser_is_refused() -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    one_update(model, optimizer, 0)
    saved = optimizer_state(optimizer, model)
    with pytest.raises(ValueError, match=r"does not train '9.weight'"):
        restore_optimizer(optimizer, model, {"exp_avg.9.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"expected \(4, 5\)"):
        restore_optimizer(optimizer, model, saved | {"exp_avg.0.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match="another optimiser"):
        restore_optimizer(optimizer_of(model, name="nag"), model, saved)


def test_which_parameters_decay() -> None:
    model = small_model()
    names = {id(p): name for name, p in model.named_parameters()}

    def decayed(**options: Any) -> set[str]:
        groups = parameter_groups(OptimConfig.parse("optim", {"weight_decay": 0.1, **options}), model)
        assert sum(len(group["params"]) for group in groups) == len(names)
        return {names[id(p)] for group in groups if "weight_decay" not in group for p in group["params"]}

    assert decayed() == set(names.values())
    assert decayed(decay_vectors=False) == {"0.weight", "2.weight"}
    assert decayed(no_decay=["2.*"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    with pytest.raises(ValueError, match=r"no parameter is called '2.wieght'; did you mean '2.weight'"):
        decayed(no_decay=["2.wieght"])


def test_frozen_parameters_are_left_alone() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    before = weights(model[0])
    optimizer = optimizer_of(model, weight_decay=0.5)
    one_update(model, optimizer, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model[0]), strict=True))
    with pytest.raises(ValueError, match="no parameter to train"):
        optimizer_of(model.requires_grad_(False))


def test_clipping() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad, model.bias.grad = torch.full((2, 2), 3.0), torch.tensor([0.0, 8.0])
    assert clip_gradients(model.parameters()).item() == pytest.approx(10)
    assert model.weight.grad[0, 0] == 3
    assert clip_gradients(model.parameters(), 20).item() == pytest.approx(10)
    assert model.weight.grad[0, 0] == 3
    assert clip_gradients(model.parameters(), 5).item() == pytest.approx(10)
    assert clip_gradients(model.parameters()).item() == pytest.approx(5, rel=1e-5)
    scale_gradients(model.parameters(), 4.0)
    scale_gradients(model.parameters(), torch.tensor(0.5, dtype=torch.float64))
    assert clip_gradients(model.parameters()).item() == pytest.approx(10, rel=1e-5)


@pytest.mark.parametrize("limit", [0.0, 1.0])
@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(limit: float, number: float) -> None:
    model = nn.Linear(2, 2)
    model.weight.grad, model.bias.grad = torch.ones(2, 2), torch.tensor([number, 1.0])
    assert not clip_gradients(model.parameters(), limit).isfinite()


def test_moving_average() -> None:
    model = small_model()
    ema = Ema(model, 0.75)
    first = weights(model)
    one_update(model, optimizer_of(model), 0)
    ema.update(model)
    own = weights(model)
    with ema.applied(model):
        for average, a, b in zip(weights(model), first, own, strict=True):
            torch.testing.assert_close(average, 0.75 * a + 0.25 * b)
    assert all(torch.equal(a, b) for a, b in zip(own, weights(model), strict=True))
    other = Ema(small_model(3), 0.75)
    other.restore(load(save(ema.state())))
    assert all(torch.equal(other.weights[name], value) for name, value in ema.weights.items())
    with pytest.raises(ValueError, match="another model"):
        other.restore({})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adamm"}, "name"),
        ({"betas": (0.9, 1.0)}, "below 1"),
        ({"nesterov": True}, "nesterov belongs to sgd"),
        ({"wd": 1.0}, "no option 'wd'"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_of(small_model(), **options)
