"""Tiny versions of every preset on a GPU, against the CPU."""

import copy

import pytest
import torch

from subquad.models import PRESETS
from tests.models.cases import inputs, tiny

SUITE = ("lightconv_wmt_en_de", "transformer_lm_wiki103", "evit_tiny_p16")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SUITE else pytest.mark.nightly) for n in PRESETS])
def test_agrees_with_the_cpu(name: str) -> None:
    """Logits and gradients in float32, in evaluation mode; under autocast in training mode all are finite."""
    torch.manual_seed(0)
    model = tiny(name).eval()
    on_gpu, given = copy.deepcopy(model).to("cuda"), inputs(model)
    moved = tuple(one.to("cuda") for one in given)
    found, expected = on_gpu(*moved).logits, model(*given).logits
    assert (found.cpu() - expected).abs().max() <= 1e-4 * max(1.0, expected.abs().max().item())
    found.square().sum().backward()
    expected.square().sum().backward()
    scale = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for ours, right in zip(on_gpu.parameters(), model.parameters(), strict=True):
        assert (ours.grad is None) == (right.grad is None)
        if ours.grad is not None and right.grad is not None:
            assert (ours.grad.cpu() - right.grad).abs().max() <= 1e-4 * scale
    on_gpu.train().zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        logits = on_gpu(*moved).logits
    logits.float().square().mean().backward()
    assert logits.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in on_gpu.parameters())
