"""The mixer that mixes nothing is built by its name, and is none of the mechanisms."""

import torch

from subquad.cli.options import parse_mechanisms
from subquad.mixers import available, build, mixer_class


def test_its_output_is_its_input() -> None:
    mixer = build("identity", dim=8, heads=2)
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False, True, False, True, True]])
    assert torch.equal(mixer(x).y, x)
    assert torch.equal(mixer(x, padding=padding).y, x.masked_fill(padding[..., None], 0))
    assert list(mixer.parameters()) == []


def test_it_is_no_mechanism() -> None:
    assert mixer_class("identity").is_floor
    assert "identity" not in available()
    assert "identity" not in parse_mechanisms("all")
    assert not any(mixer_class(name).is_floor for name in available())
