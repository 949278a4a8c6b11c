"""Part `conv`: the operation of lightconv and dynamicconv against the formulations of the original programs.

lightconv's taps are given (already normalised). dynamicconv's are given as logits, and the softmax over them is part
of what is measured, on every side.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from benchmarks.formulations import band, by_heads, depthwise, exact, ours, ours_from_logits, unfold
from benchmarks.measured import Effort, Result, expect_close, milliseconds, side_by_side
from subquad.compare.measure.checks import CheckFailedError
from subquad.compare.measure.timing import Work, peak_bytes

Formulation = Callable[[Tensor, Tensor], Tensor]
PASSES = ("forward", "forward+backward")
PARTS = ("output", "gradient of the input", "gradient of the taps")
TOLERANCES = {"ours": (1e-6, 1e-6, 1e-5)}  # of the largest value
OTHERS = (1e-5, 1e-5, 1e-4)  # enough to know that the others compute the same thing

TITLES = {
    "conv-unfold": "times faster than K shifted copies of the input",
    "conv-band": "times faster than a T x T band matrix",
    "conv-grouped": "times faster than torch's grouped conv1d, in the layout it likes best",
    "conv-clone": "fraction of the speed of `clone()` of the input",
    "conv-memory": "extra memory as a multiple of the input, besides the taps and their gradient",
}


@dataclass(frozen=True)
class Sizes:
    batch: int = 8
    channels: int = 512
    heads: int = 8
    kernels: tuple[int, ...] = (3, 7, 31)
    unfold: int = 2048
    band: tuple[int, ...] = (128, 512)
    long: int = 8192


QUICK_SIZES = Sizes(2, 32, 4, (3,), 24, (16,), 40)


class Case:
    """One input and its upstream gradient; `normalise` turns what is given for the taps into taps."""

    def __init__(self, sizes: Sizes, operation: str, time: int, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.operation, self.time, self.count, self.heads = operation, time, count, sizes.heads
        self.x = torch.randn(sizes.batch, time, sizes.channels, generator=generator).requires_grad_()
        self.upstream = torch.randn(self.x.shape, generator=generator)
        shape = (sizes.heads, count) if operation == "lightconv" else (sizes.batch, time, sizes.heads, count)
        given = torch.randn(shape, generator=generator)
        self.given = (given.softmax(-1) if operation == "lightconv" else given).requires_grad_()

    @property
    def labels(self) -> dict[str, object]:
        return {"operation": self.operation, "T": self.time, "K": self.count}

    @property
    def ours(self) -> Formulation:
        return ours if self.operation == "lightconv" else ours_from_logits

    def taps(self, given: Tensor) -> Tensor:
        return given if self.operation == "lightconv" else given.softmax(-1)

    def _mix(self, formulation: Formulation, x: Tensor) -> Tensor:
        return formulation(x, self.given if formulation is ours_from_logits else self.taps(self.given))

    def forward(self, formulation: Formulation, x: Tensor) -> Work:
        def work() -> Tensor:
            with torch.no_grad():
                return self._mix(formulation, x)

        return work

    def both(self, formulation: Formulation, x: Tensor, upstream: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        def work() -> tuple[Tensor, ...]:
            y = self._mix(formulation, x)
            return (y.detach(), *torch.autograd.grad(y, [x, self.given], upstream))

        return work

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """In float64: y and the gradients of x and of what is given."""
        rows = [self._expected_row(slice(row, row + 1)) for row in range(self.x.shape[0])]
        y, x_gradient, tap_gradient = (torch.stack([row[part] for row in rows]) for part in range(3))
        shared = self.operation == "lightconv"
        return y.flatten(0, 1), x_gradient.flatten(0, 1), tap_gradient.sum(0) if shared else tap_gradient.flatten(0, 1)

    def _expected_row(self, row: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the batch do not mix; one at a time spares memory."""
        shared = self.operation == "lightconv"
        taps = self.taps((self.given if shared else self.given[row]).detach().double())
        y, x_gradient, tap_gradient = exact(self.x.detach()[row], taps, self.upstream[row])
        if not shared:
            tap_gradient = taps * (tap_gradient - (taps * tap_gradient).sum(-1, keepdim=True))
        return y, x_gradient, tap_gradient

    def check(self, name: str, results: Sequence[Tensor]) -> None:
        """Raises CheckFailedError unless y and the gradients of x and of what is given are right."""
        named = zip(PARTS, results, self.expected, TOLERANCES.get(name, OTHERS), strict=True)
        for what, value, target, tolerance in named:
            expect_close(f"{name}: the {what}", value, target, tolerance)


def same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Layout:
    """How a formulation wants x, and how its result reads in our layout."""

    formulation: Formulation
    enter: Callable[[Tensor], Tensor] = same
    leave: Callable[[Tensor], Tensor] = same


def conv1d_layouts(heads: int) -> dict[str, Layout]:
    def fold(x: Tensor) -> Tensor:  # (B, T, C) -> (B, R, H, T)
        return x.unflatten(-1, (heads, -1)).permute(0, 3, 2, 1).contiguous()

    return {
        "conv1d by channel": Layout(depthwise, lambda x: x.transpose(1, 2).contiguous(), lambda y: y.transpose(1, 2)),
        "conv1d by head": Layout(by_heads, fold, lambda y: y.permute(0, 3, 2, 1).flatten(2)),
    }


def compare(
    table: str, case: Case, layouts: dict[str, Layout], targets: Mapping[str, tuple[str, float]], effort: Effort
) -> Iterator[Result]:
    """A result for each pass: how many times faster ours is than the fastest of the others. Checks come first."""
    work: dict[str, dict[str, Work]] = {kind: {} for kind in PASSES}
    try:
        for name, layout in {"ours": Layout(case.ours), **layouts}.items():
            x = layout.enter(case.x.detach()).requires_grad_()
            both = case.both(layout.formulation, x, layout.enter(case.upstream))
            y, x_gradient, tap_gradient = both()
            case.check(name, (layout.leave(y), layout.leave(x_gradient), tap_gradient))
            del y, x_gradient, tap_gradient
            work["forward"][name], work["forward+backward"][name] = case.forward(layout.formulation, x), both
    except CheckFailedError as failure:
        for kind in PASSES:
            yield Result(table, {**case.labels, "pass": kind}, target=targets.get(kind), reason=str(failure))
        return
    for kind in PASSES:
        seconds = side_by_side(work[kind], effort)
        best = min(one["median"] for name, one in seconds.items() if name != "ours")
        score = best / seconds["ours"]["median"]
        labels = {**case.labels, "pass": kind}
        yield Result(table, labels, milliseconds(seconds), score, targets.get(kind), seconds=seconds)


def unfold_target(count: int) -> tuple[str, float]:
    return ("at least", 10.0 if count < 7 else 20.0)


def band_target(time: int, count: int) -> tuple[str, float]:
    if time <= 128:
        return ("at least", 3.0)
    return ("at least", 15.0 if count <= 7 else 6.0)


def long_lengths(case: Case, effort: Effort) -> Iterator[Result]:
    """Speed against `clone()`, for few taps, and memory."""
    x = case.x.detach()
    both = case.both(case.ours, case.x, case.upstream)
    try:
        case.check("ours", both())
    except CheckFailedError as failure:
        yield Result("conv-clone", case.labels, target=("at least", 0.4), reason=str(failure))
        return
    if case.count <= 7:
        seconds = side_by_side({"ours": case.forward(case.ours, x), "clone": x.clone}, effort)
        score = seconds["clone"]["median"] / seconds["ours"]["median"]
        yield Result("conv-clone", case.labels, milliseconds(seconds), score, ("at least", 0.4), seconds=seconds)

    size, taps = x.nbytes, case.given.nbytes
    # What is given for the taps is not extra memory; the taps that a softmax makes of it, and its gradient, are.
    made = taps if case.operation == "dynamicconv" else 0
    for kind, work, allowed, besides in (
        ("forward", case.forward(case.ours, x), 1.1, made),
        ("forward+backward", both, 2.1, made + taps),
    ):
        peak = peak_bytes(work, x.device)
        numbers = {"peak MB": peak / 1e6, "input MB": size / 1e6, "taps MB": taps / 1e6}
        labels = {**case.labels, "pass": kind}
        yield Result("conv-memory", labels, numbers, (peak - besides) / size, ("at most", allowed))


def run(effort: Effort, say: Callable[[str], None]) -> Iterator[Result]:
    sizes = QUICK_SIZES if effort.quick else Sizes()
    for operation in ("lightconv", "dynamicconv"):
        make = partial(Case, sizes, operation)
        for count in sizes.kernels:
            say(f"{operation}, K = {count}")
            targets = {"forward+backward": unfold_target(count)}
            yield from compare("conv-unfold", make(sizes.unfold, count), {"unfold": Layout(unfold)}, targets, effort)
            for time in sizes.band:
                targets = {"forward+backward": band_target(time, count)}
                yield from compare("conv-band", make(time, count), {"band": Layout(band)}, targets, effort)
            long = make(sizes.long, count)
            if operation == "lightconv":
                targets = {"forward+backward": ("at least", 5.0)}
                yield from compare("conv-grouped", long, conv1d_layouts(sizes.heads), targets, effort)
            yield from long_lengths(long, effort)
