"""Linearises a model: stages, controls, measurements, the saved result and its report, in one folder."""

import copy
import io
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from subquad.environment import environment
from subquad.linearise.estimate import Estimate, estimate
from subquad.linearise.measure import measure_decoding, measure_lengths, random_text
from subquad.linearise.models import Source, build_untrained, load_source
from subquad.linearise.options import LineariseOptions
from subquad.linearise.report import describe_scores, write_report
from subquad.linearise.results import OPTIONS, Linearised, check_options
from subquad.linearise.saving import save_model
from subquad.linearise.stages.batches import Batch
from subquad.linearise.stages.data import Data, read_data
from subquad.linearise.stages.layers import KEPT
from subquad.linearise.stages.objective import Score, logits_of
from subquad.linearise.stages.pipeline import FORMAT, Stages
from subquad.processes import StopRequest, stop_requests
from subquad.progress import Progress
from subquad.train.precision import allow_tf32
from subquad.train.rng import seed_all
from subquad.train.run import locked

MODEL, CONTROLS = "model", "controls"


class Linearisation:
    """One model, its data and its options; `run` does the work, and goes on where it was interrupted."""

    def __init__(
        self,
        model: str | Path | nn.Module,
        options: LineariseOptions,
        files: Sequence[str],
        out: Path,
        *,
        valid: Sequence[str] = (),
        tokenizer: Any = None,
        processor: Any = None,
        quiet: bool = False,
    ) -> None:
        self.given, self.options, self.out, self.quiet = model, options, out, quiet
        self.source: Source = load_source(model, tokenizer, processor)
        self.data: Data = read_data(
            self.source.model,
            files,
            valid,
            length=options.length,
            tokenizer=self.source.tokenizer,
            processor=self.source.processor,
        )
        self.settings = {"model": self.source.name, "files": list(files), "valid": list(valid)}

    def estimate(self) -> Estimate:
        """Estimates memory and time without keeping anything."""
        allow_tf32(True, _device(self.source.model))
        return estimate(Stages(self.source.model, self.data, self.options, self.out, StopRequest(), self._silent()))

    def run(self) -> Linearised:
        with ExitStack() as stack:
            stack.enter_context(locked(self.out))
            check_options(self.out / OPTIONS, self.settings, self.options)
            stop = stack.enter_context(stop_requests())
            progress = stack.enter_context(self._silent() if self.quiet else Progress())
            allow_tf32(True, _device(self.source.model))
            teacher = copy.deepcopy(self.source.model) if self._copies_teacher() else None
            stages = Stages(self.source.model, self.data, self.options, self.out, stop, progress)
            model = stages.run()
            scores = dict(stages.scores)
            if self.options.controls:
                scores |= self._controls(stages, teacher)
            lengths, decoding = self._measure(stages, model, progress)
            content = self._report(stages, scores, lengths, decoding)
            model = self._save(model, stages)
            write_report(self.out, content)
        return Linearised(model.eval(), self.out, content)

    # ------------------------------------------------------------------ parts

    def _silent(self) -> Progress:
        return Progress(stream=io.StringIO(), live=False)

    def _build_untrained(self) -> nn.Module | None:
        return build_untrained(self.source.model)

    def _load_again(self) -> nn.Module:
        """Loads the teacher once more."""
        return load_source(self.given, self.source.tokenizer).model

    def _save(self, model: nn.Module, stages: Stages) -> nn.Module:
        """Writes the result, and returns it as it is used."""
        stages.layers.write_into_config()
        save_model(model, self.source, self.out / MODEL)
        return model

    def _random_text(self, model: nn.Module, length: int) -> Batch:
        return random_text(model, length)

    def _copies_teacher(self) -> bool:
        """Whether the identity's control needs a copy: a model from files can be loaded again."""
        return self.options.controls and isinstance(self.given, nn.Module)

    def _controls(self, stages: Stages, teacher: nn.Module | None) -> dict[str, Score]:
        """Trains what the result is compared with: the same model from scratch, and the identity as a mixer."""
        options = self.options
        scores: dict[str, Score] = {}
        seed_all(options.seed)
        untrained = self._build_untrained()
        if untrained is not None and options.updates:
            changes = {"keep": 0, "transfer_updates": 0, "tune": "all", "distill": 0.0}
            changes |= {"tune_updates": options.updates, "tune_lr": options.scratch_lr}
            scores["scratch"] = self._control("scratch", untrained.to(_device(stages.model)), changes, stages)
        parts = [part.partition("*") for part in options.mixer.name.split(",")]
        names = [(KEPT if name.strip() == KEPT else "identity") + star + count for name, star, count in parts]
        changes = {"mixer": type(options.mixer)(name=",".join(names)), "keep": 0}
        model = teacher if teacher is not None else self._load_again()
        scores["identity"] = self._control("identity", model, changes, stages)
        return scores

    def _control(self, name: str, model: nn.Module, changes: dict[str, Any], of: Stages) -> Score:
        """Trains a control of these stages. It keeps the attention of the same layers."""
        of.progress.note(f"control: {name}")
        options = self.options.model_copy(update=changes)
        stages = Stages(model, self.data, options, self.out / CONTROLS / name, of.stop, of.progress, list(of.kept))
        stages.run()
        return list(stages.scores.values())[-1]

    def _measure(
        self, stages: Stages, model: nn.Module, progress: Progress
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Measures costs by length; images have only the length they have. The mixers are in place afterwards."""
        lengths = self.options.lengths
        if lengths == ():
            return [], []
        stages.layers.take_out()
        try:
            samples = stages.valid.batch(range(min(self.options.batch, len(stages.valid))), 0).to(_device(model))
            with torch.no_grad():
                usual = stages.layers.count_tokens(lambda: logits_of(model.eval(), samples))
            lengths = lengths or tuple(sorted({max(2, usual // 2), usual}))
            if self.data.kind == "images":
                batches = {usual: samples}
            else:
                batches = {length: self._random_text(model, length) for length in lengths}
            rows = measure_lengths(model, stages.layers, batches, progress)
            decoding = []
            if self.data.kind == "causal":
                decoding = measure_decoding(model, stages.layers, lengths, progress)
        finally:
            stages.layers.install()
        return rows, decoding

    def _report(
        self,
        stages: Stages,
        scores: dict[str, Score],
        lengths: list[dict[str, Any]],
        decoding: list[dict[str, Any]],
    ) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.source.name,
            "mechanism": self.options.mixer.name,
            "options": self.options.model_dump(mode="json"),
            "layers": stages.layers.mechanisms(),
            "kept": stages.kept,
            "layer_losses": stages.layer_losses,
            "transfer_errors": stages.transfer_errors,
            "data": self.data.description,
            "unit": "images" if self.data.kind == "images" else "tokens",
            "tokens": stages.tokens(),
            "samples_evaluated": len(stages.valid),
            "scores": describe_scores(scores),
            "lengths": lengths,
            "decoding": decoding,
            "environment": environment(_device(stages.model)),
        }


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
