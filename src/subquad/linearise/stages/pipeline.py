"""From a model with attention to one without: the stages one after the other, each resumable, with scores between.

out/
  linearise.json            the options, to which an interrupted run must go on
  scores/NAME.json          what the teacher, the bare swap and each stage reached, sample by sample
  transfer/, finetune/      checkpoints and logs of the stages
  layers.json               what replacing each layer alone costs, where some are kept
  controls/                 the same for a model from scratch, and for the identity
  model/                    the result
  report.json, report.md    what was measured
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from subquad.files import read_metadata, write_metadata
from subquad.linearise.options import LineariseOptions
from subquad.linearise.stages.batches import Batch, Batches, LaterBatches, Samples, TrainingBatches, thin_out
from subquad.linearise.stages.data import Data
from subquad.linearise.stages.finetune import FineTuning, Teacher, choose_parameters, copy_as_teacher, merge
from subquad.linearise.stages.hybrid import most_costly, replacement_losses
from subquad.linearise.stages.layers import AttentionLayers
from subquad.linearise.stages.objective import Score, evaluate, logits_of
from subquad.linearise.stages.stage import Plan, Stage
from subquad.linearise.stages.transfer import AttentionTransfer
from subquad.processes import StopRequest
from subquad.progress import Progress
from subquad.train.rng import seed_all

FORMAT = 1
CHOICE_SAMPLES = 64
"""How many training samples decide about layers at most: those that are evaluated on must not."""
TEACHER, SWAPPED, TRANSFERRED, HYBRID, TUNED = "teacher", "swapped", "transfer", "hybrid", "finetune"
"""The names of scores: before anything, after the bare swap, and after each step."""


@dataclass
class Stages:
    """The stages of one model. `run` goes through them, and returns the model with its mixers.

    kept: layers that keep attention: those that are given, and those whose replacement costs most. scores: in the order
    of the work. layer_losses: in nats, of replacing each layer alone. transfer_errors: of each layer's output, before
    and after the transfer; a layer whose error grew goes on with the weights from before. Both are measured on training
    samples.
    """

    model: nn.Module
    data: Data
    options: LineariseOptions
    out: Path
    stop: StopRequest
    progress: Progress
    kept: list[int] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)
    layer_losses: dict[int, float] = field(default_factory=dict)
    transfer_errors: dict[int, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = self.options
        self.valid: Samples = thin_out(self.data.valid, options.valid_samples)
        self.batches: Batches = self.data.batches or TrainingBatches(self.data.train, options.batch, options.seed)

    def build_layers(self) -> AttentionLayers:
        """Builds what takes the place of attention, from the seed alone."""
        seed_all(self.options.seed)
        layers = self.data.layers(self.model, self.options.mixer)
        layers.drop(self.kept)
        return layers

    def run(self) -> nn.Module:
        options = self.options
        self._score(TEACHER, self.model)
        self.layers = layers = self.build_layers()
        if options.keep:
            most_costly(dict.fromkeys(layers.layers, 0.0), options.keep)  # refuses a wrong number before the work
        with layers.replaced():
            self._score(SWAPPED, self.model)
        if options.transfer_updates and self._transfer():
            with layers.replaced():
                self._score(TRANSFERRED, self.model)
        if options.keep:
            self._choose_layers()
            with layers.replaced():
                self._score(HYBRID, self.model)
        if options.tune == "none" or not options.tune_updates:
            layers.install()
            return self.model.eval()
        self.model = self._finetune()
        self._score(TUNED, self.model)
        return self.model.eval()

    def tokens(self) -> int:
        """Returns how many positions the mixers and the model have learned from; images count as one.

        Batches of a run differ in size: these are as many as its first one has.
        """
        targets = self.batches[0].targets
        return self.options.updates * (targets.numel() if targets.dim() > 1 else len(targets))

    # ------------------------------------------------------------------ stages

    def prepare_transfer(self) -> tuple[nn.ModuleDict, AttentionTransfer] | None:
        """Returns what the transfer trains, and its gradients; None if the mixers have nothing to learn."""
        self.model.requires_grad_(False)
        mixers = self.layers.replacements.requires_grad_(True)
        if not any(True for _ in mixers.parameters()):
            return None
        return mixers, AttentionTransfer(self.model, self.layers)

    def _transfer(self) -> bool:
        """Returns whether there was something to learn."""
        prepared = self.prepare_transfer()
        if prepared is None:
            return False
        mixers, transfer = prepared
        samples, size = thin_out(self.data.train, CHOICE_SAMPLES), self.options.batch
        begun = {number: copy.deepcopy(layer.replacement.state_dict()) for number, layer in self.layers.layers.items()}
        before = transfer.errors(samples, size)
        stage = Stage(self.plan(TRANSFERRED), mixers, transfer, self.out / TRANSFERRED)
        stage.fit(self.batches, self.stop, self.progress)
        after = transfer.errors(samples, size)
        for number, state in begun.items():
            if not after[number] <= before[number]:
                self.layers.layers[number].replacement.load_state_dict(state)
                self.progress.note(f"layer {number}: the transfer made its error larger; it begins anew")
        self.transfer_errors = {number: (before[number], after[number]) for number in before}
        return True

    def _choose_layers(self) -> None:
        path = self.out / "layers.json"
        if path.exists():
            found = read_metadata(path, FORMAT, "losses of layers", ["losses"])["losses"]
            self.layer_losses = {int(number): loss for number, loss in found.items()}
        else:
            samples = thin_out(self.data.train, CHOICE_SAMPLES)
            self.layer_losses = replacement_losses(self.model, self.layers, samples, self.options.batch, self.progress)
            write_metadata(path, {"format": FORMAT, "losses": self.layer_losses})
        chosen = most_costly(self.layer_losses, self.options.keep)
        self.layers.drop(chosen)
        self.kept = sorted([*self.kept, *chosen])

    def prepare_tuning(self) -> tuple[nn.Module, FineTuning]:
        """Puts the mixers in, and returns what fine-tuning trains, and its gradients."""
        options = self.options
        teacher = copy_as_teacher(self.model) if options.distill and options.tune == "all" else None
        self.layers.install()
        trained = choose_parameters(self.model, options.tune, options.rank, self.layers.mixers)
        if options.distill and options.tune == "lora":
            teacher = self._teacher_in_place(trained)
        return trained, FineTuning(trained, options.distill, teacher)

    def _finetune(self) -> nn.Module:
        trained, learn = self.prepare_tuning()
        batches = LaterBatches(self.batches, self.options.transfer_updates)  # others than those of the transfer
        Stage(self.plan(TUNED), trained, learn, self.out / TUNED).fit(batches, self.stop, self.progress)
        return merge(trained)

    def _teacher_in_place(self, adapted: Any) -> Teacher:
        """The teacher is the same model with its attention in place and without LoRA's matrices."""

        def logits(batch: Batch) -> Tensor:
            self.layers.take_out()
            adapted.eval()
            try:
                with adapted.disable_adapter():
                    return logits_of(adapted, batch)
            finally:
                adapted.train()
                self.layers.install()

        return logits

    def plan(self, name: str) -> Plan:
        options, transfer = self.options, name == TRANSFERRED
        updates, rate = (
            (options.transfer_updates, options.transfer_lr) if transfer else (options.tune_updates, options.tune_lr)
        )
        return Plan(name, updates, rate, options.seed + (0 if transfer else 1), options.save_every)

    def _score(self, name: str, model: nn.Module) -> None:
        """Evaluates the model, or reads what an earlier process evaluated."""
        path = self.out / "scores" / f"{name}.json"
        if path.exists():
            self.scores[name] = Score.from_json(read_metadata(path, FORMAT, "score", ["losses"]))
            return
        report: Callable[[str], None] = lambda text: self.progress.update([name, f"evaluates {text}"])  # noqa: E731
        self.scores[name] = score = evaluate(model, self.valid, self.options.batch, report)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_metadata(path, {"format": FORMAT, **score.to_json()})
        first, measure = next(iter(score.measures().items()))
        self.progress.note(f"{name}: {first} {measure.value:.4f}")
