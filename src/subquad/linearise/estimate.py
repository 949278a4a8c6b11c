"""What linearising would take: one update of each stage is made, with a learning rate of 0, and measured."""

import time
from dataclasses import dataclass

from torch import nn

from subquad.compare.measure.timing import peak_bytes
from subquad.linearise.stages.finetune import merge
from subquad.linearise.stages.pipeline import TRANSFERRED, TUNED, Stages
from subquad.linearise.stages.stage import Backward, Stage


@dataclass(frozen=True)
class StageEstimate:
    """updates: of the stage. trained: parameters that it trains. seconds: of one update on this machine.

    peak_bytes: what an update allocates beyond the model, its gradients and the optimiser's state included.
    """

    name: str
    updates: int
    trained: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Estimate:
    """parameters: of the model; mixers: of what takes the place of attention.

    bytes: of all weights in memory: of the model, of the mixers beside its attention, and of the copy that is its own
    teacher where all weights are fine-tuned and distilled.
    """

    parameters: int
    mixers: int
    bytes: int
    layers: list[str]
    tokens: int
    controls: bool
    stages: list[StageEstimate]

    @property
    def seconds(self) -> float:
        """Of all updates, the controls' included, without evaluations."""
        own = sum(stage.updates * stage.seconds for stage in self.stages)
        if not self.controls:
            return own
        tuning = [stage for stage in self.stages if stage.name == TUNED]
        scratch = sum(stage.updates for stage in self.stages) * max((s.seconds for s in tuning), default=0.0)
        return own + scratch + sum(stage.updates * stage.seconds for stage in tuning)

    @property
    def peak_bytes(self) -> int:
        return self.bytes + max((stage.peak_bytes for stage in self.stages), default=0)


def estimate(stages: Stages) -> Estimate:
    """Measures one update of each stage. The model's weights, attention and flags are as before afterwards."""
    model, options = stages.model, stages.options
    flags = {p: p.requires_grad for p in model.parameters()}
    weights = _bytes(model)
    count = sum(p.numel() for p in model.parameters())
    stages.layers = layers = stages.build_layers()
    found = []
    if options.transfer_updates and (prepared := stages.prepare_transfer()) is not None:
        found.append(_measure(stages, TRANSFERRED, options.transfer_updates, *prepared))
    if options.tune != "none" and options.tune_updates:
        trained, learn = stages.prepare_tuning()
        found.append(_measure(stages, TUNED, options.tune_updates, trained, learn))
        merge(trained)
        layers.take_out()
    for parameter, flag in flags.items():
        parameter.requires_grad_(flag)
        parameter.grad = None
    own = sum(p.numel() for p in layers.replacements.parameters())
    weights += _bytes(layers.replacements) + (weights if options.distill and options.tune == "all" else 0)
    return Estimate(count, own, weights, layers.mechanisms(), stages.tokens(), options.controls, found)


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _measure(stages: Stages, name: str, updates: int, trained: nn.Module, backward: Backward) -> StageEstimate:
    stage = Stage(stages.plan(name), trained, backward, stages.out)
    device = stage.parameters[0].device
    batch = stages.batches[0].to(device)
    peak = peak_bytes(lambda: stage.step(batch, 0.0), device)  # the first update also allocates the optimiser's state
    started = time.perf_counter()
    stage.step(batch, 0.0)
    seconds = time.perf_counter() - started
    return StageEstimate(name, updates, sum(p.numel() for p in stage.parameters), seconds, peak)
