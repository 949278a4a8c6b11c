"""Time and peak memory of single mixers by length, against softmax attention; `costs` says how they are measured."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subquad.compare.measure.checks import check_mixer
from subquad.compare.measure.costs import Costs, Pass, measure_costs
from subquad.compare.measure.timing import DTYPES
from subquad.environment import environment
from subquad.mixers import Mixer, build, mixer_class

BASELINE = "softmax"


@dataclass(frozen=True)
class BenchPlan:
    """What is measured: `batch` sequences at every length. options: of a mechanism, over its defaults."""

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
        """How often `run_bench` reports progress."""
        return len(self.lengths) * (len(self.names) + 2 * (1 + self.repeats))


@dataclass
class Row:
    """One mechanism at one length. Times are medians, in seconds; ratios are to softmax at the same length.

    refused: the mechanism cannot do this; failed: its check did not pass; both come with a reason. seconds: of every
    repeat.
    """

    mixer: str
    length: int
    status: str = "done"
    reason: str | None = None
    inference_seconds: float | None = None
    training_seconds: float | None = None
    inference_ratio: float | None = None
    training_ratio: float | None = None
    inference_bytes: int | None = None
    training_bytes: int | None = None
    parameters: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    check: dict[str, Any] = field(default_factory=dict)
    seconds: dict[Pass, list[float]] = field(default_factory=dict)


def run_bench(plan: BenchPlan, progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Measures everything in the plan, length by length. progress: receives `plan.steps` messages."""
    mixers = {name: build_or_refuse(plan, name) for name in plan.names}
    return [row for length in plan.lengths for row in _measure_length(plan, length, mixers, progress)]


def build_or_refuse(plan: BenchPlan, name: str) -> Mixer | str:
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


def bench_report(plan: BenchPlan, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything measured and what it was measured with, ready for JSON."""
    return {
        "plan": {**asdict(plan), "mixers": plan.names},
        "environment": environment(torch.device(plan.device)),
        "rows": [asdict(row) for row in rows],
    }


class MixerPasses:
    """Inference and training of a mixer on x (batch, time, channels)."""

    def __init__(self, mixer: Mixer, x: Tensor) -> None:
        self.mixer, self.x = mixer, x
        self.module: nn.Module = mixer
        self.shapes: Mapping[str, torch.Size] = {"output": x.shape, "gradient of the input": x.shape}
        self.learned = [x.detach().requires_grad_(), *(one for one in mixer.parameters() if one.requires_grad)]
        self.upstream = torch.ones_like(x)

    def check(self) -> dict[str, Any]:
        return check_mixer(self.mixer, self.x)

    def inference(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"output": self.mixer(self.x).y}

    def training(self) -> dict[str, Tensor]:
        """Backward begins with a gradient of ones. The mixer's regulariser is added to the loss."""
        y, _, aux = self.mixer(self.learned[0])
        outputs, weights = [y], [self.upstream]
        if aux is not None:
            outputs, weights = [y, aux], [self.upstream, torch.ones_like(aux)]
        gradients = torch.autograd.grad(outputs, self.learned, weights, allow_unused=True)
        return {"output": y.detach(), "gradient of the input": gradients[0]}


def _measure_length(
    plan: BenchPlan, length: int, mixers: Mapping[str, Mixer | str], progress: Callable[[str], None]
) -> list[Row]:
    device = torch.device(plan.device)
    generator = torch.Generator().manual_seed(plan.seed)
    x = torch.randn(plan.batch, length, plan.dim, generator=generator).to(device, DTYPES[plan.dtype])

    def start(mixer: Mixer | str) -> MixerPasses:
        if isinstance(mixer, str):
            raise ValueError(mixer)
        return MixerPasses(mixer, x)

    def after(name: str, costs: Costs) -> None:
        progress(f"{name} at {length}: {'checked' if costs.status == 'done' else f'{costs.status}, {costs.reason}'}")

    def after_round(kind: Pass, kept: int) -> None:
        repeat = f"repeat {kept} of {plan.repeats}" if kept else "warm-up"
        progress(f"{kind} at {length}: {repeat}")

    builders = {name: partial(start, mixer) for name, mixer in mixers.items()}
    costs = measure_costs(builders, [plan.repeats], device, after=after, after_round=after_round)
    rows = [_row(name, length, mixers[name], found) for name, found in costs.items()]
    _add_ratios(rows)
    return rows


def _row(name: str, length: int, mixer: Mixer | str, costs: Costs) -> Row:
    row = Row(name, length, costs.status, costs.reason, parameters=costs.parameters, check=costs.check)
    row.options = {} if isinstance(mixer, str) else mixer.config.model_dump()
    row.inference_bytes, row.training_bytes = costs.peak_bytes.get("inference"), costs.peak_bytes.get("training")
    if costs.seconds:
        row.seconds = costs.seconds
        row.inference_seconds = statistics.median(costs.seconds["inference"])
        row.training_seconds = statistics.median(costs.seconds["training"])
    return row


def _add_ratios(rows: Sequence[Row]) -> None:
    baseline = next(row for row in rows if row.mixer == BASELINE)
    for row in rows:
        if row.inference_seconds and baseline.inference_seconds:
            row.inference_ratio = row.inference_seconds / baseline.inference_seconds
        if row.training_seconds and baseline.training_seconds:
            row.training_ratio = row.training_seconds / baseline.training_seconds
