"""Part `unfolded`: memory of whole layers and models of the convolutions, beside K shifted copies of the input.

The original program gathers these copies for long inputs. Everything else of a layer and a model is the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.formulations import unfold
from benchmarks.measured import Effort, Result
from benchmarks.whole import CPU, tokens
from subquad.compare.measure.bench import MixerPasses
from subquad.compare.measure.checks import CheckFailedError, relative_distance
from subquad.compare.measure.lengths import ModelPasses, Shape
from subquad.compare.measure.timing import Work, peak_bytes
from subquad.mixers import build, shortconv
from subquad.models import build_from_config
from subquad.tasks.language_model import LanguageModelTask

TITLES = {"unfolded-memory": "peak memory over that with K shifted copies of the input, forward and backward"}
MECHANISMS = ("lightconv", "dynamicconv")
KERNEL_SIZE = 31
MOST_MEMORY = 0.5
"""Of the memory with copies, for a whole layer from 2,048 tokens on."""
AGREEMENT = 1e-5


@dataclass(frozen=True)
class Sizes:
    """Of one sequence and the model that reads it."""

    lengths: tuple[int, ...] = (512, 2048, 8192)
    dim: int = 512
    heads: int = 8
    layers: int = 6
    vocab: int = 4000


QUICK_SIZES = Sizes((64,), dim=32, heads=2, layers=2, vocab=50)


@contextmanager
def unfolded() -> Iterator[list[torch.Size]]:
    """Within it the convolutions gather K shifted copies of their input. Gives the shapes of what was convolved so."""
    convolved = []

    def convolve(x: Tensor, taps: Tensor, before: int, softmax: bool = False) -> Tensor:
        assert before == taps.shape[-1] - 1, "the form with copies is causal"
        convolved.append(x.shape)
        return unfold(x, taps.softmax(-1) if softmax else taps)

    own = shortconv.tap_conv
    shortconv.tap_conv = convolve  # type: ignore[assignment]
    try:
        yield convolved
    finally:
        shortconv.tap_conv = own


def memory(effort: Effort, say: Callable[[str], None]) -> Iterator[Result]:
    sizes = QUICK_SIZES if effort.quick else Sizes()
    for name in MECHANISMS:
        for time in sizes.lengths:
            for whole, work in subjects(name, sizes, time).items():
                say(f"{whole} of {name} at {time}")
                yield beside_copies(whole, name, time, work)


def subjects(name: str, sizes: Sizes, time: int) -> dict[str, Work]:
    """A training pass of a causal layer, and of a language model, each with one sequence."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"kernel_size": KERNEL_SIZE}
    layer = build(name, dim=sizes.dim, heads=sizes.heads, causal=True, **options)
    x = tokens(1, time, sizes.dim)
    check_agreement(layer, x[:, :256])
    decoder = {
        "layers": sizes.layers,
        "heads": sizes.heads,
        "ffn_dim": 4 * sizes.dim,
        "mixer": {"name": name, **options},
    }
    model = build_from_config({"kind": "language-model", "vocab": sizes.vocab, "dim": sizes.dim, "decoder": decoder})
    passes = ModelPasses(model.train(), LanguageModelTask, "full", Shape(1, time))
    return {"layer": MixerPasses(layer, x).training, f"model of {sizes.layers} layers": passes.training}


def check_agreement(layer: Any, x: Tensor) -> None:
    """Raises CheckFailedError unless a layer has the same output with copies."""
    expected = layer(x).y
    with unfolded() as convolved:
        found = layer(x).y
    if not convolved:
        raise CheckFailedError("the layer did not take the form with copies")
    distance = relative_distance(found, expected)
    if not distance <= AGREEMENT:
        raise CheckFailedError(f"the output with copies is off by {distance:.1e}, allowed is {AGREEMENT:.0e}")


def beside_copies(whole: str, name: str, time: int, work: Work) -> Result:
    peaks = {"ours MB": peak_bytes(work, CPU) / 1e6}
    with unfolded():
        peaks["unfold MB"] = peak_bytes(work, CPU) / 1e6
    target = ("at most", MOST_MEMORY) if whole == "layer" and time >= 2048 else None
    labels = {"of": whole, "mechanism": name, "T": time, "K": KERNEL_SIZE}
    return Result("unfolded-memory", labels, peaks, peaks["ours MB"] / peaks["unfold MB"], target)
