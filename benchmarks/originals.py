"""Part `originals`: mechanisms beside the formulations of the programs that they come from, in training.

The formulations are written anew in plain torch (`attention_formulations.py`), since the programs themselves are not
part of this repository; docs/peers.md says how to measure those.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from benchmarks import attention_formulations as formulations
from benchmarks.measured import Effort, Result, milliseconds, side_by_side
from benchmarks.whole import CPU, LISTED, LONGEST_CHECK, Subject, built, check_training, gradients, sizes_for, tokens
from subquad.compare.measure.bench import MixerPasses
from subquad.compare.measure.checks import CheckFailedError, ReplayedDraws, relative_distance
from subquad.compare.measure.timing import peak_bytes
from subquad.mixers import Mixer
from subquad.mixers.noise import drawing_from

TITLES = {
    "originals-time": "how many times as fast as the original's formulation, forward and backward",
    "originals-memory": "peak memory over that of the original's formulation, forward and backward",
}
MOST_MEMORY = 0.6
"""Of the formulation's, from 2,048 tokens on."""
AGREEMENT = 1e-9
"""Of outputs and gradients in float64."""
LENGTHS, QUICK_LENGTHS = (128, 512, 2048, 8192, 16384), (128,)

Formulation = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """least_speed: how many times as fast ours has to be, at every length. longest: for the memory beyond."""

    subject: str
    formulation: Formulation
    least_speed: float
    longest: int | None = None


CASES = [
    Case("local", formulations.local, 1.3),
    Case("performer", formulations.performer, 1.3),
    Case("causal performer", formulations.causal_performer, 1.3, longest=8192),
    Case("lara", formulations.lara, 1.4),
    Case("eva", formulations.eva, 1.4),
    Case("causal eva", formulations.causal_eva, 3.0),
]


class Original(nn.Module):
    """A mixer whose mixing is that of a formulation: the same parameters, other operations."""

    def __init__(self, mixer: Mixer, formulation: Formulation) -> None:
        super().__init__()
        self.mixer, self.formulation = mixer, formulation

    def forward(self, x: Tensor) -> tuple[Tensor, None, None]:
        return self.formulation(self.mixer, x), None, None


def subject_of(case: Case) -> Subject:
    (subject,) = [subject for subject in LISTED if subject.label == case.subject]
    return subject


def check_agreement(mixer: Mixer, formulation: Formulation, x: Tensor) -> None:
    """Raises CheckFailedError unless both have the same output and gradients in float64, given the same draws."""
    mixer, x = copy.deepcopy(mixer).double(), x.double()
    draws = ReplayedDraws()
    with drawing_from(draws.remember):
        expected = gradients(mixer, x)
    with drawing_from(draws.repeat):
        found = gradients(Original(mixer, formulation), x)
    found = {name.replace("mixer.", ""): value for name, value in found.items()}
    largest = max(value.norm().item() for value in expected.values())
    for name, value in expected.items():
        vanishes = value.norm().item() < 1e-9 * largest  # what is there is rounding
        distance = found[name].norm().item() / largest if vanishes else relative_distance(found[name], value)
        if not distance <= AGREEMENT:
            raise CheckFailedError(f"the {name} of the formulation is off by {distance:.1e}, allowed {AGREEMENT:.0e}")


def originals(effort: Effort, say: Callable[[str], None]) -> Iterator[Result]:
    sizes = sizes_for(effort)
    for time in QUICK_LENGTHS if effort.quick else LENGTHS:
        x = tokens(max(1, sizes.tokens // time), time, sizes.dim)
        for case in CASES:
            if time <= (case.longest or time):
                say(f"{case.subject} at {time}")
                yield from beside_original(case, x, built(subject_of(case), sizes, time), effort)


def beside_original(case: Case, x: Tensor, mixer: Mixer, effort: Effort) -> Iterator[Result]:
    batch, time, _ = x.shape
    labels, target = {"mechanism": case.subject, "T": time, "batch": batch}, ("at least", case.least_speed)
    try:
        check_training(mixer, x)
        check_agreement(mixer, case.formulation, x[:1, : LONGEST_CHECK[False]])
    except CheckFailedError as failure:
        yield Result("originals-time", labels, target=target, reason=str(failure))
        return
    original: Any = Original(mixer, case.formulation)  # it has what is timed of a mixer
    work = {"ours": MixerPasses(mixer, x).training, "original": MixerPasses(original, x).training}
    peaks = {f"{name} MB": peak_bytes(one, CPU) / 1e6 for name, one in work.items()}
    seconds = side_by_side(work, effort)
    score = seconds["original"]["median"] / seconds["ours"]["median"]
    yield Result("originals-time", labels, milliseconds(seconds), score, target, seconds=seconds)
    share = peaks["ours MB"] / peaks["original MB"]
    yield Result("originals-memory", labels, peaks, share, ("at most", MOST_MEMORY) if time >= 2048 else None)
