"""Parts `mechanisms`, `short` and `growth`: whole mechanisms in training, forward and backward.

Every pass that is timed is first run with draws that are remembered, and a float64 copy that is given the same draws
has to agree: output, gradient of the input, gradients of the parameters.
"""

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.floors import training_floor
from benchmarks.measured import Effort, Result, milliseconds, side_by_side, summary
from subquad.compare.measure.bench import MixerPasses
from subquad.compare.measure.checks import TOLERANCE, CheckFailedError, ReplayedDraws, check_tensor, relative_distance
from subquad.compare.measure.timing import interleaved_seconds, peak_bytes
from subquad.mixers import Mixer, available, build, mixer_class
from subquad.mixers.attention import AttentionMixer
from subquad.mixers.noise import drawing_from

CPU = torch.device("cpu")
LONGEST_CHECK = {True: 8192, False: 2048}
"""By whether a mechanism is linear; longer passes are checked on their first positions, and for being finite on all."""

TITLES = {
    "mechanisms-time": "time of the mechanism over that of its projections alone, forward and backward",
    "mechanisms-memory": "peak memory in MB, forward and backward",
    "short": "time over that of softmax attention (causal over causal), forward and backward",
    "growth-time": "milliseconds by length, forward and backward, and the exponent fitted to them",
    "growth-memory": "peak memory in MB by length, forward and backward, and the exponent fitted to it",
}


@dataclass(frozen=True)
class Subject:
    """A mechanism with the settings it is measured with."""

    label: str
    mixer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    most_time: float | None = None
    """Times the projections alone, at the longest length of part `mechanisms`."""
    short: bool = True
    """Whether it has to keep up with softmax attention at short lengths."""
    linear: bool = True
    longest: int | None = None
    """Part `growth` follows it up to this length, for the time or the memory it would take beyond."""
    projections: bool = True
    """Whether it is compared with its projections."""

    @property
    def causal(self) -> bool:
        return bool(self.options.get("causal"))


CAUSAL = {"causal": True}
LISTED = [
    Subject("softmax", "softmax", linear=False, longest=8192),
    Subject("causal softmax", "softmax", CAUSAL, linear=False, longest=8192),
    Subject("local", "local", {"window": 64, "overlap": True}, 1.2),
    Subject("performer", "performer", {"features": 64}, 1.2),
    Subject("causal performer", "performer", {"features": 64, **CAUSAL}, 1.45),
    Subject("lara", "lara", {"landmarks": 64}, 1.25),
    Subject("eva", "eva", {"window": 64, "landmarks": 64}, 1.25),
    Subject("causal eva", "eva", {"window": 128, "chunk_size": 16, **CAUSAL}, 1.6, linear=False, longest=16384),
    Subject("causal lightconv", "lightconv", {"kernel_size": 31, **CAUSAL}, 1.2),
    Subject("causal dynamicconv", "dynamicconv", {"kernel_size": 31, **CAUSAL}, 1.2),
    Subject("primal", "primal", {"rank": 30}, 1.2),
    Subject("linformer", "linformer", {"proj_k": 64}, 1.2),
    Subject("scatterbrain", "scatterbrain", {"window": 64, "features": 64}, 1.5, short=False),
    Subject("ra", "ra", short=False, linear=False, longest=4096, projections=False),
]


def subjects() -> list[Subject]:
    """Those listed, and every other registered mechanism with its default options."""
    listed = {subject.mixer for subject in LISTED}
    others = [name for name in available() if name not in listed]
    return LISTED + [
        Subject(
            name,
            name,
            linear=mixer_class(name).capabilities.linear,
            projections=issubclass(mixer_class(name), AttentionMixer),
        )
        for name in others
    ]


@dataclass(frozen=True)
class Sizes:
    dim: int = 512
    heads: int = 8
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    tokens: int = 8192
    short: tuple[int, ...] = (128, 256)
    growth: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536)


QUICK_SIZES = Sizes(32, 4, (24, 40), 32, (8, 16), (16, 32))


def sizes_for(effort: Effort) -> Sizes:
    return QUICK_SIZES if effort.quick else Sizes()


# ---------------------------------------------------------------------- building and checking


def tokens(batch: int, time: int, dim: int) -> Tensor:
    return torch.randn(batch, time, dim, generator=torch.Generator().manual_seed(0))


def built(subject: Subject, sizes: Sizes, time: int) -> Mixer:
    options = dict(subject.options)
    if subject.mixer == "linformer":
        options["max_length"] = time
    torch.manual_seed(0)
    return build(subject.mixer, dim=sizes.dim, heads=sizes.heads, **options).train()


def check_training(mixer: Mixer, x: Tensor) -> None:
    """Raises CheckFailedError unless a training pass agrees with that of a float64 copy given the same draws."""
    x, allowed = x[:, : LONGEST_CHECK[mixer.capabilities.linear]], TOLERANCE[x.dtype]
    draws = ReplayedDraws()
    with drawing_from(draws.remember):
        results = gradients(mixer, x)
    with drawing_from(draws.repeat):
        exact = gradients(copy.deepcopy(mixer).double(), x.double())
    if results.keys() != exact.keys():
        raise CheckFailedError(f"only one of it and its float64 copy has the {min(results.keys() ^ exact.keys())}")
    largest = max(target.norm().item() for target in exact.values())
    for name, value in results.items():
        check_tensor(name, value, exact[name].shape)
        distance = relative_distance(value, exact[name])
        if exact[name].norm().item() < 1e-6 * largest:
            # It vanishes in exact arithmetic (a key bias under softmax): what is there is rounding, and must be small.
            distance = value.norm().item() / largest
        if not distance <= allowed:
            raise CheckFailedError(f"the {name} is {distance:.1e} from that of a float64 copy, allowed {allowed:.0e}")


def gradients(mixer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    named = {name: parameter for name, parameter in mixer.named_parameters() if parameter.requires_grad}
    y, _, aux = mixer(x)
    # A gradient that differs by position, so that a wrong order of positions shows, and does not sum to zero.
    upstream = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view_as(y).to(y)
    loss = (y * upstream).sum() + (0 if aux is None else aux.sum())
    found = torch.autograd.grad(loss, [x, *named.values()], allow_unused=True)
    result = {"output": y.detach()}
    for name, gradient in zip(["the input", *named], found, strict=True):
        if gradient is not None:
            result[f"gradient of {name}"] = gradient
    return result


def checked_peak(mixer: Mixer, x: Tensor) -> float:
    """Peak of memory of a training pass in bytes, after its results were found finite."""
    results: list[Tensor] = []
    peak = peak_bytes(lambda: results.extend(MixerPasses(mixer, x).training().values()), CPU)
    for name, value in zip(("output", "gradient of the input"), results, strict=True):
        check_tensor(name, value, x.shape)
    return peak


# ---------------------------------------------------------------------- part mechanisms


def mechanisms(effort: Effort, say: Callable[[str], None]) -> Iterator[Result]:
    sizes = sizes_for(effort)
    for time in sizes.lengths:
        x = tokens(1, time, sizes.dim)
        for subject in subjects():
            if subject.projections:
                say(f"{subject.label} at {time}")
                yield from against_projections(subject, sizes, x, time == max(sizes.lengths), effort)


def against_projections(
    subject: Subject, sizes: Sizes, x: Tensor, with_targets: bool, effort: Effort
) -> Iterator[Result]:
    time = x.shape[1]
    mixer, labels = built(subject, sizes, time), {"mechanism": subject.label, "T": time}
    target = ("at most", subject.most_time) if with_targets and subject.most_time else None
    try:
        check_training(mixer, x)
        peak = checked_peak(mixer, x) / 1e6
    except CheckFailedError as failure:
        yield Result("mechanisms-time", labels, target=target, reason=str(failure))
        return
    work = {"mechanism": MixerPasses(mixer, x).training, "projections": training_floor(mixer, x)}
    seconds = side_by_side(work, effort)
    score = seconds["mechanism"]["median"] / seconds["projections"]["median"]
    yield Result("mechanisms-time", labels, milliseconds(seconds), score, target, seconds=seconds)
    yield Result("mechanisms-memory", labels, score=peak)


# ---------------------------------------------------------------------- part short


def short(effort: Effort, say: Callable[[str], None]) -> Iterator[Result]:
    """All mechanisms in one round, so that each is beside softmax attention."""
    sizes = sizes_for(effort)
    for time in sizes.short:
        say(f"length {time}")
        x = tokens(sizes.tokens // time, time, sizes.dim)
        work, wrong = {}, {}
        for subject in subjects():
            # the number of landmarks is the default, which follows the length
            options = {name: value for name, value in subject.options.items() if name != "landmarks"}
            mixer = built(replace(subject, options=options), sizes, time)
            try:
                check_training(mixer, x)
                work[subject.label] = MixerPasses(mixer, x).training
            except CheckFailedError as failure:
                wrong[subject.label] = str(failure)
        seconds = side_by_side(work, replace(effort, budget=3 * effort.budget))
        for subject in subjects():
            yield beside_softmax(subject, time, x.shape[0], seconds, wrong)


def beside_softmax(
    subject: Subject, time: int, batch: int, seconds: Mapping[str, Mapping[str, float]], wrong: Mapping[str, str]
) -> Result:
    labels = {"mechanism": subject.label, "T": time, "batch": batch}
    baseline = "causal softmax" if subject.causal else "softmax"
    target = ("at most", 1.15) if subject.short and subject.mixer != "softmax" else None
    reason = wrong.get(subject.label) or (f"{baseline}: {wrong[baseline]}" if baseline in wrong else None)
    if reason is not None:
        return Result("short", labels, target=target, reason=reason)
    own = {"mechanism": dict(seconds[subject.label]), "softmax": dict(seconds[baseline])}
    score = own["mechanism"]["median"] / own["softmax"]["median"]
    return Result("short", labels, milliseconds(own), score, target, seconds=own)


# ---------------------------------------------------------------------- part growth


def growth(effort: Effort, say: Callable[[str], None]) -> Iterator[Result]:
    """Rounds run over all mechanisms and lengths, so that a slow moment of the machine bends no curve alone."""
    sizes = sizes_for(effort)
    work: dict[str, Callable[[], object]] = {}
    peaks: dict[str, dict[int, float]] = {}
    wrong: dict[str, str] = {}
    inputs = {time: tokens(1, time, sizes.dim) for time in sizes.growth}
    for subject in subjects():
        say(f"memory of {subject.label}")
        peaks[subject.label] = {}
        mixer = built(subject, sizes, sizes.growth[0])
        try:
            check_training(mixer, inputs[sizes.growth[0]])
            for time in [time for time in sizes.growth if time <= (subject.longest or time)]:
                mixer = built(subject, sizes, time) if subject.mixer == "linformer" else mixer
                peaks[subject.label][time] = checked_peak(mixer, inputs[time]) / 1e6
                work[f"{subject.label} {time}"] = MixerPasses(mixer, inputs[time]).training
        except CheckFailedError as failure:
            wrong[subject.label] = str(failure)
            work = {name: one for name, one in work.items() if not name.startswith(f"{subject.label} ")}
    say(f"{effort.least} rounds over {len(work)} passes")
    # Each pass ran once under the profiler: that was its warm-up.
    seconds = summary(
        interleaved_seconds(work, [effort.least], warmup=0, after_round=lambda kept: say(f"round {kept}"))
    )
    for subject in subjects():
        yield from curves(subject, peaks[subject.label], seconds, wrong.get(subject.label))


def curves(
    subject: Subject, peaks: Mapping[int, float], seconds: Mapping[str, Mapping[str, float]], reason: str | None
) -> Iterator[Result]:
    labels = {"mechanism": subject.label}
    target = ("at most", 1.1) if subject.linear else None
    if reason is not None:
        yield Result("growth-time", labels, target=target, reason=reason)
        return
    own = {str(time): dict(seconds[f"{subject.label} {time}"]) for time in peaks}
    times = {time: one["median"] * 1e3 for time, one in own.items()}
    exponent = fitted_exponent([int(time) for time in times], list(times.values()))
    yield Result("growth-time", labels, times, exponent, target, seconds=own)
    exponent = fitted_exponent(list(peaks), list(peaks.values()))
    yield Result("growth-memory", labels, {str(time): peak for time, peak in peaks.items()}, exponent, target)


def fitted_exponent(lengths: Sequence[int], values: Sequence[float]) -> float | None:
    """The p of value ~ length^p, by least squares on logarithms; None for a single point."""
    if len(lengths) < 2:
        return None
    return statistics.linear_regression([math.log(n) for n in lengths], [math.log(v) for v in values]).slope
