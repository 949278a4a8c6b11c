"""Time and peak memory of mechanisms by length, against softmax attention. No number without a passed check.

Every length goes through three stages, so that the mechanisms are timed side by side:

    check     each mechanism against its own float64 copy and, when causal, its streaming form against its parallel one
    memory    one forward pass and one training pass each, watched by the profiler; their results must be finite
    time      the same passes, interleaved over the mechanisms

A forward pass is inference (eval mode, no gradients). A training pass is forward and backward in train mode, with
gradients of the input and of all parameters.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from subquad.compare.measure.checks import CheckFailedError, check_mixer, check_tensor
from subquad.compare.measure.timing import interleaved_seconds, peak_bytes, synchronizer
from subquad.environment import environment
from subquad.mixers import Mixer, build, mixer_class

BASELINE = "softmax"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Plan:
    """What is measured. `batch` sequences at every length; `options` are per mechanism, over its defaults."""

    mixers: Sequence[str]
    lengths: Sequence[int]
    dim: int = 256
    heads: int = 4
    batch: int = 1
    causal: bool = False
    repeats: int = 5
    device: str = "cpu"
    dtype: str = "float32"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 (got {getattr(self, name)})")
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be at least 1 (got {', '.join(map(str, self.lengths)) or 'none'})")
        if self.dtype not in DTYPES:
            raise ValueError(f"no dtype is called {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        for name in (*self.mixers, *self.options):
            mixer_class(name)
        for name in self.options:
            if name not in self.names:
                raise ValueError(f"an option of {name} is set, but {name} is not among the mechanisms to measure")

    @property
    def names(self) -> list[str]:
        """The mechanisms to measure, each once, the baseline first."""
        return list(dict.fromkeys((BASELINE, *self.mixers)))

    @property
    def steps(self) -> int:
        """How often `run` reports progress."""
        return len(self.lengths) * (len(self.names) + 2 * (1 + self.repeats))


@dataclass
class Row:
    """One mechanism at one length. Times are medians, in seconds; ratios are to softmax at the same length."""

    mixer: str
    length: int
    status: str = "ok"  # or "skipped" (the mechanism refuses) or "failed" (its check did), with the reason
    reason: str | None = None
    forward_seconds: float | None = None
    training_seconds: float | None = None
    forward_ratio: float | None = None
    training_ratio: float | None = None
    forward_peak_bytes: int | None = None
    training_peak_bytes: int | None = None
    parameters: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    check: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)


def run(plan: Plan, progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Measures everything in the plan, length by length; `progress` is told what was done, `plan.steps` times."""
    mixers = {name: build_or_refuse(plan, name) for name in plan.names}
    rows = []
    for length in plan.lengths:
        rows += _measure_length(plan, length, mixers, progress)
    return rows


def build_or_refuse(plan: Plan, name: str) -> Mixer | str:
    """The mixer, or the reason why it lacks the form that is measured (causal or not).

    Options that are wrong in any form raise ValueError.
    """
    options = {"dim": plan.dim, "heads": plan.heads, **plan.options.get(name, {})}
    if "max_length" in mixer_class(name).Config.model_fields:
        options.setdefault("max_length", max(plan.lengths))
    torch.manual_seed(plan.seed)
    try:
        mixer = build(name, **{"causal": plan.causal, **options})
    except ValueError as refusal:
        has = mixer_class(name).capabilities
        if "causal" in options or not (has.bidirectional if plan.causal else has.causal):
            raise
        build(name, **{"causal": not plan.causal, **options})
        return str(refusal)
    return mixer.to(plan.device, DTYPES[plan.dtype])


def report(plan: Plan, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything measured and what it was measured with, ready for JSON."""
    return {
        "plan": {**asdict(plan), "mixers": plan.names},
        "environment": environment(torch.device(plan.device)),
        "rows": [asdict(row) for row in rows],
    }


def _measure_length(
    plan: Plan, length: int, mixers: Mapping[str, Mixer | str], progress: Callable[[str], None]
) -> list[Row]:
    device = torch.device(plan.device)
    generator = torch.Generator().manual_seed(plan.seed)
    x = torch.randn(plan.batch, length, plan.dim, generator=generator).to(device, DTYPES[plan.dtype])
    rows = []
    for name, mixer in mixers.items():
        row = Row(name, length)
        rows.append(row)
        if isinstance(mixer, str):
            row.status, row.reason = "skipped", mixer
        else:
            _check_and_watch(row, mixer, x)
        progress(f"{name} at {length}: {'checked' if row.status == 'ok' else f'{row.status}, {row.reason}'}")

    sound: dict[str, Mixer] = {row.mixer: mixers[row.mixer] for row in rows if row.status == "ok"}  # type: ignore[misc]
    for kind, make in (("forward", forward_pass), ("training", training_pass)):
        label = f"{kind} at {length}, {len(sound)} mechanisms"

        def say(kept: int, label: str = label) -> None:
            progress(f"{label}: {f'repeat {kept} of {plan.repeats}' if kept else 'warm-up'}")

        work = {name: make(mixer, x) for name, mixer in sound.items()}
        seconds = interleaved_seconds(work, plan.repeats, synchronize=synchronizer(device), after_round=say)
        for row in rows:
            if row.mixer in seconds:
                row.samples[kind] = seconds[row.mixer]
                setattr(row, f"{kind}_seconds", statistics.median(seconds[row.mixer]))
    _add_ratios(rows)
    return rows


def _check_and_watch(row: Row, mixer: Mixer, x: Tensor) -> None:
    """Fills in the check and the peaks of memory, or the reason why there are none."""
    row.options = mixer.config.model_dump()
    row.parameters = sum(parameter.numel() for parameter in mixer.parameters())
    try:
        row.check = check_mixer(mixer, x)
        row.forward_peak_bytes = _watched_peak(forward_pass(mixer, x), ["output"], x)
        row.training_peak_bytes = _watched_peak(training_pass(mixer, x), ["output", "gradient of the input"], x)
    except ValueError as refusal:
        row.status, row.reason = "skipped", str(refusal)
    except CheckFailedError as failure:
        row.status, row.reason = "failed", str(failure)
    except Exception as crash:  # out of memory, or a mechanism with a mistake: the others are still measured
        row.status, row.reason = "failed", f"{type(crash).__name__}: {crash}".partition("\n")[0]


def _watched_peak(work: Callable[[], list[Tensor]], names: Sequence[str], x: Tensor) -> int:
    results: list[Tensor] = []
    peak = peak_bytes(lambda: results.extend(work()), x.device)
    for name, result in zip(names, results, strict=True):
        check_tensor(name, result, x.shape)
    return peak


def forward_pass(mixer: Mixer, x: Tensor) -> Callable[[], list[Tensor]]:
    """Inference: returns [y]. Switches the mixer to eval mode."""
    mixer.eval()

    def work() -> list[Tensor]:
        with torch.no_grad():
            return [mixer(x).y]

    return work


def training_pass(mixer: Mixer, x: Tensor) -> Callable[[], list[Tensor]]:
    """Forward and backward: returns [y, gradient of x]. Switches the mixer to train mode."""
    mixer.train()
    x = x.detach().requires_grad_()
    inputs = [x, *(parameter for parameter in mixer.parameters() if parameter.requires_grad)]
    upstream = torch.ones_like(x)

    def work() -> list[Tensor]:
        y, _, aux = mixer(x)
        outputs, weights = [y], [upstream]
        if aux is not None:
            outputs, weights = [y, aux], [upstream, torch.ones_like(aux)]
        gradients = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
        return [y.detach(), gradients[0]]

    return work


def _add_ratios(rows: Sequence[Row]) -> None:
    baseline = next(row for row in rows if row.mixer == BASELINE)
    for row in rows:
        if row.forward_seconds and baseline.forward_seconds:
            row.forward_ratio = row.forward_seconds / baseline.forward_seconds
        if row.training_seconds and baseline.training_seconds:
            row.training_ratio = row.training_seconds / baseline.training_seconds
