"""Fine-tuning of a model whose attention was replaced: of everything, or of its mixers and low-rank matrices.

    loss = cross-entropy of the task + weight * KL(teacher || student)

LoRA's matrices are PEFT's. They go to all linear maps outside of the mixers and of the output; the mixers' own weights
are trained as they are. `merge` adds the matrices to the weights, so that the result is a model like any other.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subquad.linearise.stages.batches import Batch
from subquad.linearise.stages.objective import distillation_loss, logits_of, task_loss
from subquad.models import Model
from subquad.packages import require, require_transformers

Tune = Literal["all", "lora", "none"]
Teacher = Callable[[Batch], Tensor]
"""From a batch to the teacher's logits."""


class FineTuning:
    """The gradient of the task's loss; `__call__` is the `Backward` of a stage."""

    def __init__(self, model: nn.Module, distill: float = 0.0, teacher: Teacher | None = None) -> None:
        """distill: the weight of the teacher's logits, which `teacher` computes."""
        assert not distill or teacher is not None
        self.model, self.distill, self.teacher = model, distill, teacher

    def __call__(self, batch: Batch) -> dict[str, float]:
        self.model.train()
        logits = logits_of(self.model, batch)
        loss = task_loss(logits, batch.targets)
        shown = {"loss": float(loss.detach())}
        if self.distill and self.teacher is not None:
            with torch.no_grad():
                theirs = self.teacher(batch)
            divergence = distillation_loss(logits, theirs, batch.targets)
            shown["kl"] = float(divergence.detach())
            loss = loss + self.distill * divergence
        loss.backward()
        return shown


def copy_as_teacher(model: nn.Module) -> Teacher:
    """Returns the logits of a frozen copy of a model."""
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    return lambda batch: logits_of(frozen, batch)


# ---------------------------------------------------------------------- what is trained


def choose_parameters(model: nn.Module, tune: Tune, rank: int, mixers: Sequence[nn.Module]) -> nn.Module:
    """Marks what fine-tuning trains by `requires_grad`, and returns the module that has it: with LoRA, PEFT's.

    mixers: parts of the model that LoRA trains as they are.
    """
    if tune == "all":
        return model.requires_grad_(True)
    model.requires_grad_(False)
    if tune == "lora":
        require_transformers("fine-tuning with LoRA")  # which PEFT imports
        peft = require("peft", "fine-tuning with LoRA", "hf")
        model = PeftHost(model) if isinstance(model, Model) else model
        maps = linear_maps(model, mixers)
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=maps)
        model = peft.get_peft_model(model, config)
    for mixer in mixers:
        mixer.requires_grad_(True)
    return model


class PeftHost(nn.Module):
    """A model of ours without its config, which PEFT would read as one of transformers."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Any, **options: Any) -> Any:
        return self.model(*given, **options)


def linear_maps(model: Any, mixers: Sequence[nn.Module]) -> list[str]:
    """Returns the names of the linear maps outside of these mixers and of the output, which get low-rank matrices."""
    heads = [model.get_output_embeddings()] if hasattr(model, "get_output_embeddings") else []
    within = tuple(f"{name}." for name, module in model.named_modules() if any(module is mixer for mixer in mixers))
    found = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and not name.startswith(within)
        and not any(module is head for head in heads)
    ]
    if not found:
        raise ValueError("the model has no linear map outside of its mixers for LoRA; fine-tune all of it instead")
    return found


def merge(model: nn.Module) -> nn.Module:
    """Returns the model with LoRA's matrices added to its weights, and all parameters trainable again."""
    plain: Any = model
    if hasattr(model, "merge_and_unload"):
        plain = model.merge_and_unload()  # type: ignore[operator]
    if isinstance(plain, PeftHost):
        plain = plain.model
    result: nn.Module = plain.requires_grad_(True)
    return result
