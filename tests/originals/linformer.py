"""Fixtures of the three Linformer programs: one attention module each, and the models around them."""

import pytest
import torch

from subquad.interop.checkpoints.linformer import mixers as linformer
from subquad.nn.positions import build_positions
from tests.originals.files import (
    GRADIENT_TOLERANCE,
    OUTPUT_TOLERANCE,
    Fixture,
    assert_close,
    assert_gradients,
    assert_padding_is_ignored,
    is_right_padded,
)
from tests.originals.hosts import check_roberta
from tests.originals.models import check_crybot


def check(fixture: Fixture) -> None:
    name = fixture.path.stem
    if "encdec" in name or "enc_only" in name:
        check_crybot(fixture)
    elif name == "crybot_sinpos":
        check_positions(fixture)
    elif name.startswith("official_roberta_"):
        check_roberta(fixture)
    elif name.startswith(("official_attn_", "crybot_linformer_", "crybot_vanilla_", "lra_linformer_attn")):
        check_attention(fixture)
    else:
        pytest.fail(f"unknown kind of fixture: {fixture.path}")


def check_positions(fixture: Fixture) -> None:
    for key, golden in fixture.under("out.").items():
        positions = build_positions("sin-cos", golden.shape[1], golden.shape[0])
        assert positions is not None
        assert_close(positions(torch.arange(golden.shape[0])[None])[0], golden, OUTPUT_TOLERANCE, key)


def check_attention(fixture: Fixture) -> None:
    imported = linformer.convert_mixer(fixture.config, fixture.under("weights."))
    time_first = fixture.path.stem.startswith("official_")
    inputs = {key: fixture[f"in.{key}"] for key in ("x", "q", "kv") if f"in.{key}" in fixture}
    inputs = {key: (value.transpose(0, 1) if time_first else value).requires_grad_() for key, value in inputs.items()}
    x = inputs["x"] if "x" in inputs else inputs["q"]
    paddings = {
        key: fixture[f"in.{mask}"] == 0
        for key, mask in (("padding", "mask"), ("padding", "qmask"), ("context_padding", "kmask"))
        if f"in.{mask}" in fixture and not fixture[f"in.{mask}"].all()
    }
    golden = fixture["out.y"].transpose(0, 1) if time_first else fixture["out.y"]
    y = imported.module.eval()(x, context=inputs.get("kv"), **paddings).y
    if paddings:
        check_masked(imported.module, inputs, paddings, y.detach(), golden)
        return
    assert_close(y, golden, OUTPUT_TOLERANCE, "output")
    if "in.grad_out" in fixture:
        upstream = fixture["in.grad_out"]
        y.backward(upstream.transpose(0, 1) if time_first else upstream)
        for key, value in inputs.items():
            assert value.grad is not None
            gradient = value.grad.transpose(0, 1) if time_first else value.grad
            assert_close(gradient, fixture[f"grad_main.in.{key}"], GRADIENT_TOLERANCE, f"gradient of {key}")
        assert_gradients(imported, fixture.under("grad_main.weights."))


def check_masked(mixer, inputs, paddings, y, golden) -> None:
    """At tokens; gradients are no targets: the originals also differentiate what they give to padded queries."""
    if mixer.name == "softmax" or all(is_right_padded(padding) for padding in paddings.values()):
        valid = ~paddings["padding"] if "padding" in paddings else torch.ones(y.shape[:2], dtype=torch.bool)
        assert_close(y[valid], golden[valid], OUTPUT_TOLERANCE, "output at valid positions")
    else:
        with torch.no_grad():
            assert_padding_is_ignored(mixer, inputs["x"].detach(), paddings["padding"])
