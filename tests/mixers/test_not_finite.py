"""NaN and infinite inputs: how far they reach."""

import pytest
import torch

from subquad import mixers

HIDING = {"softmax", "local", "eva", "performer"}
"""They give hidden tokens the weight 0, and 0 x NaN is NaN: docs/guides/own-model.md and the contract say so."""
CAUSAL = [name for name in mixers.available() if mixers.mixer_class(name).capabilities.causal]


def with_one_token(name: str, value: float) -> tuple[mixers.Mixer, torch.Tensor, torch.Tensor]:
    """A causal mixer, two rows of tokens, and the same with `value` as the token 20 of the first row."""
    torch.manual_seed(0)
    mixer = mixers.build(name, dim=16, heads=2, causal=True).eval()
    x = torch.randn(2, 24, 16)
    changed = x.clone()
    changed[0, 20] = value
    return mixer, x, changed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", CAUSAL)
def test_only_mechanisms_that_hide_by_weights_let_the_future_in(name: str, value: float) -> None:
    mixer, x, changed = with_one_token(name, value)
    with torch.no_grad():
        before, after = mixer(x).y, mixer(changed).y
    assert torch.equal(before[1], after[1]), "another row"
    assert bool(after[0, :20].isfinite().all()) == (name not in HIDING)
    finite = after[0, :20].isfinite()
    assert torch.equal(before[0, :20][finite], after[0, :20][finite])


@pytest.mark.parametrize("name", CAUSAL)
def test_padding_never_does(name: str) -> None:
    """What stands at padded positions is not read, whatever it is."""
    mixer, x, changed = with_one_token(name, float("nan"))
    padding = torch.zeros(2, 24, dtype=torch.bool)
    padding[0, 20] = True
    with torch.no_grad():
        assert torch.equal(mixer(x, padding=padding).y, mixer(changed, padding=padding).y)
