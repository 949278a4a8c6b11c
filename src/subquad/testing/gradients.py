"""Gradients and what is kept for them: right in float64, the same in float32, and memory linear in the length."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.mixers import Mixer, noise
from subquad.testing.cases import Case, grid_options, keeps_linear_memory, reads_context, sees_grids, streams
from subquad.testing.inputs import assert_near, padded_batch
from subquad.testing.selection import for_cases
from subquad.testing.streaming import read_stream

Function = Callable[[Tensor], tuple[Tensor, ...]]
"""From an input to all outputs of a mixer that have a gradient."""
STEP = 1e-6
TOLERANCE = 1e-6


class GradientContract:
    @for_cases()
    @pytest.mark.parametrize("training", [False, True], ids=["without-draws", "with-draws"])
    def test_gradients_in_float64(self, case: Case, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        mixer = without_dropout(case.build(torch.float64).train(training))
        padding = padded_batch(7, case.seed)
        check_gradients(mixer, lambda x: outputs(mixer, x), case.tokens(2, 7), monkeypatch)
        check_gradients(mixer, lambda x: outputs(mixer, x, padding=padding), case.tokens(7, 7), monkeypatch)

    @for_cases(sees_grids)
    def test_gradients_on_a_grid(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        mixer = without_dropout(case.build(torch.float64, **(grid_options(case) or {})).train())
        call = {"padding": padded_batch(12, case.seed), "grid": (4, 3)}
        check_gradients(mixer, lambda x: outputs(mixer, x, **call), case.tokens(7, 12), monkeypatch)

    @for_cases(reads_context)
    def test_gradients_of_cross_attention(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        mixer, x = without_dropout(case.build(torch.float64).train()), case.tokens(7, 3).double()
        padding = padded_batch(7, case.seed)
        context = case.tokens(7, 7, seed=1)
        check_gradients(mixer, lambda c: outputs(mixer, x, context=c, context_padding=padding), context, monkeypatch)
        check_gradients(mixer, lambda x: outputs(mixer, x, context=context.double()), x, monkeypatch)

    @for_cases(streams)
    def test_gradients_through_a_stream(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        mixer, padding = case.build(torch.float64), padded_batch(7, case.seed)
        check_gradients(
            mixer, lambda x: (read_stream(mixer, x, [1, 4, 2], padding)[0],), case.tokens(7, 7), monkeypatch
        )

    @for_cases()
    def test_gradients_in_float32_agree_with_float64(self, case: Case) -> None:
        padding, x = padded_batch(13, case.seed), case.tokens(7, 13)
        ours, exact = (gradients(case.build(dtype), x.to(dtype), padding) for dtype in (torch.float32, torch.float64))
        for name, gradient in exact.items():
            assert_near(ours[name], gradient, f"the gradient of {name}", 1e-3)

    @for_cases(keeps_linear_memory)
    def test_memory_kept_for_the_backward_pass_is_linear(self, case: Case) -> None:
        mixer = case.build()
        short, long = saved_bytes(mixer, case.tokens(1, 128)), saved_bytes(mixer, case.tokens(1, 512))
        assert long <= 4.4 * short, f"4 times as many tokens take {long / short:.1f} times the memory"


def outputs(mixer: Mixer, x: Tensor, **call: Any) -> tuple[Tensor, ...]:
    mixed = mixer(x, **call)
    return (mixed.y,) if mixed.aux is None else (mixed.y, mixed.aux)


def without_dropout(mixer: Mixer) -> Mixer:
    """In evaluation mode if an option drops: dropout draws from torch's generator, which nothing holds still here."""
    drops = any(option.endswith("dropout") and value for option, value in mixer.config.model_dump().items())
    return mixer.eval() if drops else mixer


def check_gradients(mixer: Mixer, function: Function, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the gradients of x and all parameters with differences of the function, in float64.

    All outputs are summed with random weights, and all inputs moved in a random direction at once: a wrong gradient
    shows in any direction. Only then is each input moved alone, to say whose gradient is wrong. Draws and stabilising
    maxima come from one pass, as constants.
    """
    inputs = {"x": x.double().detach().requires_grad_()}
    inputs |= {name: parameter for name, parameter in mixer.named_parameters() if parameter.requires_grad}
    replay = record(function, inputs["x"], monkeypatch)
    generator = torch.Generator().manual_seed(0)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    weights = [normal(output) for output in replay()]

    def total() -> Tensor:
        return sum((weight * output).sum() for weight, output in zip(weights, replay(), strict=True))  # type: ignore

    found = torch.autograd.grad(total(), list(inputs.values()), allow_unused=True, materialize_grads=True)
    gradient = dict(zip(inputs, found, strict=True))
    direction = {name: normal(value) for name, value in inputs.items()}

    def slopes(names: list[str]) -> tuple[float, float]:
        """Along the direction of some inputs: by the gradient, and by differences."""
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                for name in names:
                    inputs[name].add_(direction[name], alpha=sign * STEP)
                ends.append(total().item())
                for name in names:
                    inputs[name].sub_(direction[name], alpha=sign * STEP)
        ours = sum(float((gradient[name] * direction[name]).sum()) for name in names)
        return ours, (ends[0] - ends[1]) / (2 * STEP)

    def agree(names: list[str]) -> bool:
        ours, exact = slopes(names)
        return abs(ours - exact) <= TOLERANCE * max(1.0, abs(exact))

    if not agree(list(inputs)):
        wrong = {name: slopes([name]) for name in inputs if not agree([name])}
        told = ", ".join(f"{name} ({ours:.6g} instead of {exact:.6g})" for name, (ours, exact) in wrong.items())
        raise AssertionError(f"slopes along random directions by the gradient, instead of by differences: {told}")


def record(function: Function, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Tensor, ...]]:
    """Runs the function of x once, and returns it as one that repeats the draws and maxima of this run."""
    stored: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        stored.append(value.detach())
        return stored[-1]

    with monkeypatch.context() as patch:
        patch.setattr(noise, "constant", keep)
        with torch.no_grad(), noise.drawing_from(lambda *draw: keep(noise.from_generator(*draw))):
            function(x)

    def replay() -> tuple[Tensor, ...]:
        again = iter(stored)
        with monkeypatch.context() as patch:
            patch.setattr(noise, "constant", lambda _: next(again))
            with noise.drawing_from(lambda *_: next(again)):
                return function(x)

    return replay


def gradients(mixer: Mixer, x: Tensor, padding: Tensor) -> dict[str, Tensor]:
    """Of x and all parameters, for one random loss."""
    x = x.detach().requires_grad_()
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    (mixer(x, padding=padding).y * weight).sum().backward()
    found = {"x": x.grad} | {name: parameter.grad for name, parameter in mixer.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def saved_bytes(mixer: Mixer, x: Tensor) -> int:
    """Bytes of distinct storages that a training pass keeps for its backward."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = mixer.train()(x.requires_grad_()).y
    assert y.requires_grad
    own = {p.untyped_storage().data_ptr() for p in mixer.state_dict().values()}
    return sum(size for pointer, size in storages.items() if pointer not in own)
