"""Activation checkpointing: the same numbers, and less memory between the two passes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subquad.mixers import mixer_class
from subquad.models import Model, build_from_config
from subquad.nn.stack import Stack
from tests.models.cases import able

STACK: dict[str, Any] = {"layers": 3, "heads": 2, "ffn_dim": 32, "dropout": 0.2, "input_dropout": 0.1, "drop_path": 0.2}
TEXT: dict[str, Any] = {"kind": "language-model", "vocab": 30, "dim": 16}
IMAGES: dict[str, Any] = {"kind": "vision", "image_size": 32, "patch_size": 4, "dim": 16, "num_classes": 4}
SMALL_EVA = {"name": "eva", "window": 4}
STAGE: dict[str, Any] = {"layers": 1, "heads": 2, "ffn_dim": 32, "dropout": 0.2}


def small(name: str) -> dict[str, Any]:
    """Windows that fit a small grid."""
    return {"window": 4} if "window" in mixer_class(name).Config.model_fields else {}


MODELS: dict[str, dict[str, Any]] = {
    **{name: IMAGES | {"encoder": STACK | {"mixer": {"name": name} | small(name)}} for name in able("encoder")},
    "pyramid": {
        "kind": "pyramid",
        "num_classes": 4,
        "stages": [STAGE | {"dim": 8, "mixer": SMALL_EVA}, STAGE | {"dim": 16}],
    },
    "language-model": TEXT | {"decoder": STACK | {"layer_drop": 0.3, "mixer": "softmax*2,primal"}},
    "encoder-decoder": {
        "kind": "encoder-decoder",
        "source_vocab": 30,
        "target_vocab": 30,
        "dim": 16,
        "encoder": STACK,
        "decoder": STACK | {"mixer": "lightconv"},
    },
}


def losses(model: Model) -> Tensor:
    """A number in which logits and regularisers count."""
    generator = torch.Generator().manual_seed(1)
    if model.config.kind in ("vision", "pyramid"):
        output = model(torch.randn(2, 3, 32, 32, generator=generator))
    else:
        tokens = torch.randint(2, 30, (2, 40), generator=generator)
        output = model(tokens, tokens) if model.config.kind == "encoder-decoder" else model(tokens)
    total: Tensor = output.logits.square().sum()
    return total if output.aux is None else total + output.aux.sum()


def passes(model: Model, recompute: bool) -> tuple[Tensor, dict[str, Tensor | None], Tensor, int]:
    """Loss, gradients, the generator's state afterwards, and bytes of tensors kept for the backward pass."""
    for module in model.modules():
        if isinstance(module, Stack):
            module.recompute = recompute
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        loss = losses(model)
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    loss.backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return loss.detach(), gradients, torch.get_rng_state(), sum(kept.values())


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_from_fewer_bytes(name: str) -> None:
    """With dropout, drop path, skipped blocks and the mechanisms' own draws."""
    torch.manual_seed(0)
    model = build_from_config(MODELS[name]).train()
    loss, gradients, generator, bytes_kept = passes(model, recompute=False)
    again, recomputed, generator_again, fewer = passes(model, recompute=True)
    assert torch.equal(loss, again)
    assert torch.equal(generator, generator_again)
    for key, gradient in gradients.items():
        other = recomputed[key]
        assert (gradient is None) == (other is None), key
        if gradient is not None and other is not None:
            assert torch.equal(gradient, other), key
    assert fewer < bytes_kept / 2


def test_evaluation_computes_once() -> None:
    model = build_from_config(MODELS["language-model"]).eval()
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    stack = model.get_submodule("decoder")
    assert isinstance(stack, Stack)
    stack.recompute = True
    blocks = stack.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    blocks[0].register_forward_hook(count)
    losses(model).backward()
    assert calls == 1
