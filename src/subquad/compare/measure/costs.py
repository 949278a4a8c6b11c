"""Time and memory of training and inference, measured side by side. No number without a passed check.

    check     what is measured must compute the right thing: see `checks`
    memory    one inference pass and one training pass are watched; their results must be finite
    time      the same passes, interleaved over everything that is compared

Inference runs in eval mode without gradients. Training runs in train mode, forward and backward, with the gradients of
all parameters and of inputs that require one. `bench` measures single mixers in this way, and `lengths` whole models.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from subquad.compare.measure.checks import CheckFailedError, check_tensor
from subquad.compare.measure.timing import Seconds, interleaved_seconds, peak_bytes, synchronizer

Pass = Literal["inference", "training"]
PASSES: tuple[Pass, ...] = ("inference", "training")


class Passes(Protocol):
    """What is measured. A pass returns tensors by their names for people, which must be finite."""

    module: nn.Module
    shapes: Mapping[str, torch.Size]
    """The shapes that results must have, by name, as far as they are known."""

    def check(self) -> dict[str, Any]:
        """Raises CheckFailedError if the module computes something wrong, and returns how exact it is."""
        ...

    def inference(self) -> dict[str, Tensor]: ...

    def training(self) -> dict[str, Tensor]: ...


@dataclass
class Costs:
    """The costs of one of the things that are compared. refused: it cannot be built so; failed: a check did.

    peak_bytes: of the memory that one pass allocates; seconds: of every round.
    """

    status: Literal["done", "failed", "refused"] = "done"
    reason: str | None = None
    parameters: int | None = None
    check: dict[str, Any] = field(default_factory=dict)
    peak_bytes: dict[Pass, int] = field(default_factory=dict)
    seconds: dict[Pass, list[float]] = field(default_factory=dict)


def measure_costs(
    builders: Mapping[str, Callable[[], Passes]],
    looks: Sequence[int],
    device: torch.device,
    *,
    is_decided: Callable[[Seconds], bool] = lambda _: False,
    before: Callable[[str], None] = lambda _: None,
    after: Callable[[str, Costs], None] = lambda _, __: None,
    before_timing: Callable[[], None] = lambda: None,
    after_round: Callable[[Pass, int], None] = lambda _, __: None,
) -> dict[str, Costs]:
    """The costs of everything that can be built, by name; one that is refused or wrong does not stop the others.

    looks, is_decided: how many rounds are timed, see `interleaved_seconds`. before, after: called around building and
    checking each; after_round: after each round of timing, with the number of rounds so far.
    """
    costs, built = {name: Costs() for name in builders}, {}
    for name, build in builders.items():
        before(name)
        try:
            built[name] = build()
            _check_and_watch(costs[name], built[name], device)
        except ValueError as refusal:
            costs[name].status, costs[name].reason = "refused", str(refusal)
        except CheckFailedError as failure:
            costs[name].status, costs[name].reason = "failed", str(failure)
        except Exception as crash:  # out of memory, or a mechanism with a mistake: the others are still measured
            reason = f"{type(crash).__name__}: {crash}".partition("\n")[0]
            costs[name].status, costs[name].reason = "failed", reason
        after(name, costs[name])
    before_timing()
    done = [name for name in builders if costs[name].status == "done"]
    for kind in PASSES:
        for name in done:
            built[name].module.train(kind == "training")
        work = {name: getattr(built[name], kind) for name in done}
        seconds = interleaved_seconds(
            work,
            looks,
            is_decided=is_decided,
            synchronize=synchronizer(device),
            after_round=partial(after_round, kind),
        )
        for name in done:
            costs[name].seconds[kind] = seconds[name]
    return costs


def _check_and_watch(costs: Costs, passes: Passes, device: torch.device) -> None:
    """Fills in everything but the times."""
    costs.parameters = sum(parameter.numel() for parameter in passes.module.parameters())
    costs.check = passes.check()
    for kind in PASSES:
        costs.peak_bytes[kind] = _watch(passes, kind, device)


def _watch(passes: Passes, kind: Pass, device: torch.device) -> int:
    """The peak of memory of one pass, whose results must be finite."""
    results: dict[str, Tensor] = {}
    run = getattr(passes, kind)
    passes.module.train(kind == "training")
    peak = peak_bytes(lambda: results.update(run()), device)
    for name, value in results.items():
        check_tensor(name, value, passes.shapes.get(name, value.shape))
    return peak
