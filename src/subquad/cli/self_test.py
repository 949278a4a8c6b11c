"""The self-test of `subquad doctor`: mechanisms on the CPU and on GPUs against the reference, and a few updates."""

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from subquad.mixers import Mixer

KERNELS = "SUBQUAD_KERNELS"
TOLERANCE = 1e-4
"""Relative distance between kernels of the CPU, both in float32."""
GPU_TOLERANCE = 1e-3
"""Relative distance between a GPU in float32 and the CPU in float64, of mechanisms and of losses after updates."""
UPDATES = 3


def distance_to_reference(name: str) -> float:
    """The largest relative distance among the output and the gradients of a mechanism, causal where it can be."""
    import torch

    with _seeded():
        mixer, x = _mixer_and_input(name)
        results = []
        for kernels in (None, "reference"):
            torch.manual_seed(0)
            with _kernels(kernels):
                results.append(_results(mixer, x))
    return _largest_distance(*results)


def gpu_distance_to_reference(name: str, device: "torch.device") -> float:
    """The same for a GPU with its kernels, against the reference in float64 on the CPU, given the same draws."""
    from subquad.compare.measure.checks import ReplayedDraws
    from subquad.mixers import noise

    draws = ReplayedDraws()
    with _seeded():
        mixer, x = _mixer_and_input(name)
        with _kernels("reference"), noise.drawing_from(draws.remember):
            exact = _results(copy.deepcopy(mixer).double(), x.double())
        with noise.drawing_from(draws.repeat):
            found = _results(mixer.to(device), x.to(device))
    return _largest_distance(found, exact)


def gpu_loss_distance(device: "torch.device") -> float:
    """The relative distance between the losses of a few updates of a small language model on a GPU and on the CPU."""
    import torch

    on_gpu, on_cpu = train_small_model(device), train_small_model(torch.device("cpu"))
    return max(abs(one - other) / abs(other) for one, other in zip(on_gpu, on_cpu, strict=True))


def train_small_model(device: "torch.device") -> list[float]:
    """The loss before each update of a language model on random tokens, and the one after the last."""
    import torch

    from subquad.models import LanguageModel, build_model
    from subquad.tasks.language_model import LanguageModelTask
    from subquad.train.optim import OptimConfig, build_optimizer, set_learning_rate

    stack = {"layers": 2, "heads": 2, "ffn_dim": 32, "mixer": "eva"}
    with _seeded():
        model = build_model("language-model", vocab=64, dim=16, decoder=stack)
        assert isinstance(model, LanguageModel)
        model.eval()  # what training draws differs between devices
        batch = LanguageModelTask.random_batch(model, 2, 37, torch.Generator().manual_seed(0))
        model, batch = model.to(device), {name: value.to(device) for name, value in batch.items()}
        optimizer = build_optimizer(OptimConfig(), model)
        set_learning_rate(optimizer, 1e-2)
        losses = []
        for _ in range(UPDATES + 1):
            optimizer.zero_grad()
            found, _ = LanguageModelTask.model_loss(model, batch)
            found.total.backward()
            optimizer.step()
            losses.append(found.total.item())
    return losses


# ---------------------------------------------------------------------- results


def _mixer_and_input(name: str) -> "tuple[Mixer, Tensor]":
    import torch

    from subquad.mixers import build, mixer_class

    mixer = build(name, dim=16, heads=2, causal=mixer_class(name).capabilities.causal)
    return mixer, torch.randn(2, 37, 16)


def _results(mixer: "Mixer", x: "Tensor") -> "list[Tensor]":
    """The output, and the gradients of x and of all weights."""
    import torch

    x = x.requires_grad_()
    y = mixer(x).y
    weights = [parameter for parameter in mixer.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(y.square().sum(), [x, *weights], allow_unused=True)
    return [y.detach(), *(gradient for gradient in gradients if gradient is not None)]


def _largest_distance(found: "Sequence[Tensor]", expected: "Sequence[Tensor]") -> float:
    import torch

    found, expected = ([part.to("cpu", torch.float64) for part in parts] for parts in (found, expected))
    # Gradients that are zero in exact arithmetic (a key bias under softmax) have no relative distance.
    scale = max(float(part.norm()) for part in expected) * 1e-6
    pairs = [pair for pair in zip(found, expected, strict=True) if pair[1].norm() > scale]
    return max(float((value - target).norm() / target.norm()) for value, target in pairs)


# ---------------------------------------------------------------------- surroundings


@contextmanager
def _seeded() -> Iterator[None]:
    """Within the block random numbers begin anew, and afterwards go on as if there had been none."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@contextmanager
def _kernels(setting: str | None) -> Iterator[None]:
    """Within the block SUBQUAD_KERNELS is as given; None leaves it as it is."""
    before = os.environ.get(KERNELS)
    if setting is not None:
        os.environ[KERNELS] = setting
    try:
        yield
    finally:
        if before is not None:
            os.environ[KERNELS] = before
        elif setting is not None:
            del os.environ[KERNELS]
