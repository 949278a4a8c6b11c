"""Initial weights depend on the seed and on their names, not on what else the model has."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from subquad.mixers import Capabilities, Mixer, MixerConfig, available
from subquad.mixers.layout import Layout
from subquad.mixers.registry import _REGISTRY, register
from subquad.models import PRESETS, Model, build_from_config
from subquad.models.base import modules_outside_mixers
from subquad.models.seeded import build_seeded
from tests.models.cases import OPTIONS, able, shrunk
from tests.preloaded import preloaded

PLACES = [
    ("lm_small", "decoder"),
    ("translation_small", "encoder"),
    ("vision_small", "encoder"),
    ("pvt_v2_b3", "stages"),
]


def options(preset: str, where: str, mechanism: str, **stack: Any) -> dict[str, Any]:
    data = shrunk(PRESETS[preset])
    changes = {**stack, "mixer": {"name": mechanism, **OPTIONS.get(mechanism, {})}}
    if where == "stages":
        return {**data, "stages": [{**stage, **changes} for stage in data["stages"]]}
    return {**data, where: {**data[where], **changes}}


def outside_mixers(model: Model) -> dict[str, Tensor]:
    outside = set(modules_outside_mixers(model))
    names = {module: name for name, module in model.named_modules()}
    return {
        f"{names[module]}.{name}": value for module in outside for name, value in module.named_parameters(recurse=False)
    }


@pytest.mark.parametrize("mechanism", available())
def test_a_seed_means_the_same_for_every_mechanism(mechanism: str) -> None:
    """Also if the feed-forward networks are wider: all the rest has the same values."""
    for preset, where in PLACES:
        if mechanism in able(where):
            softmax = outside_mixers(build_seeded(options(preset, where, "softmax"), 3))
            for changes in ({}, {"ffn_dim": 40}):
                other = outside_mixers(build_seeded(options(preset, where, mechanism, **changes), 3))
                assert other.keys() == softmax.keys()
                for name, value in other.items():
                    if not (changes and ".ffn." in name):
                        assert torch.equal(value, softmax[name]), f"{preset}: {name}"


@pytest.mark.parametrize("mechanism", available())
def test_seeds_layers_and_parts_differ_and_processes_agree(mechanism: str) -> None:
    where = "encoder" if mechanism in able("encoder") else "decoder"
    given = options("translation_small", where, mechanism)
    torch.manual_seed(1)
    first, second = build_seeded(given, 1).state_dict(), build_seeded(given, 2).state_dict()
    torch.manual_seed(2)
    again = build_seeded(given, 1).state_dict()
    seen: dict[tuple[float, ...], str] = {}
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        if value.is_floating_point() and value.unique().numel() > 3:  # constants are no draws
            assert not torch.equal(value, second[name]), name
            for part in value.flatten(1).split(16) if value.dim() > 1 else [value]:  # q, k and v are parts of one
                start = tuple(part.flatten()[:4].tolist())
                assert start not in seen or "maps" in name, f"{name} begins as {seen.get(start)}"
                seen[start] = name


@pytest.mark.parametrize(("preset", "where"), PLACES)
def test_distributions_are_those_of_the_modules(preset: str, where: str) -> None:
    given = {**options(preset, where, "softmax"), "vocab": 2000} if "vocab" in PRESETS[preset] else None
    given = given or options(preset, where, "softmax", layers=4)
    torch.manual_seed(0)
    plain, seeded = build_from_config(given).state_dict(), build_seeded(given, 0).state_dict()
    for name, value in plain.items():
        ours = seeded[name]
        if value.numel() < 200 or value.std() == 0:
            continue
        assert ours.std() == pytest.approx(value.std(), rel=0.25), name
        assert ours.abs().max() == pytest.approx(value.abs().max(), rel=0.5), name


def test_torchs_generator_stays_as_it_was_and_other_processes_draw_the_same() -> None:
    given = options("lm_small", "decoder", "performer")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    total = sum(value.double().sum().item() for value in build_seeded(given, 1).state_dict().values())
    assert torch.equal(torch.get_rng_state(), before)
    code = f"""
from subquad.models.seeded import build_seeded
print(sum(value.double().sum().item() for value in build_seeded({given!r}, 1).state_dict().values()))"""
    with preloaded():
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(found.stdout) == total


def test_a_mechanism_of_a_user_needs_nothing_special() -> None:
    """Its draws that end in no tensor, and those of a generator of its own, disturb nobody."""

    @register("restless")
    class Restless(Mixer[MixerConfig]):
        """Draws."""

        Config = MixerConfig
        capabilities = Capabilities(causal=False, cross=False, grid=True, state="none")

        def setup(self) -> None:
            torch.rand(3)
            self.scale = nn.Parameter(1 + torch.randn(self.config.dim))
            self.register_buffer("own", torch.rand(3, generator=torch.Generator().manual_seed(9)))
            self.register_buffer("order", torch.randperm(self.config.dim))

        def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
            return x * self.scale, None

    try:
        given = options("vision_small", "encoder", "restless")
        first, again = build_seeded(given, 1), build_seeded(given, 1)
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
        own = first.get_buffer("encoder.blocks.0.mixer.own")
        assert torch.equal(own, torch.rand(3, generator=torch.Generator().manual_seed(9)))
        softmax = outside_mixers(build_seeded(options("vision_small", "encoder", "softmax"), 1))
        assert all(torch.equal(value, softmax[name]) for name, value in outside_mixers(first).items())
        orders = [first.get_buffer(f"encoder.blocks.{layer}.mixer.order") for layer in (0, 1)]
        assert not torch.equal(*orders)
    finally:
        del _REGISTRY["restless"]
