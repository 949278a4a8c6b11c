"""Fixtures of the five PrimalAttention programs: one attention module each, and the models around them."""

import pytest
import torch
from torch import Tensor

from subquad.interop.checkpoints import primal
from subquad.interop.checkpoints.weight_map import ConvertedModule
from subquad.mixers import Layout, Mixer
from subquad.mixers.primal import Primal, sample_positions
from tests.originals.files import (
    GRADIENT_TOLERANCE,
    OUTPUT_TOLERANCE,
    Fixture,
    assert_close,
    assert_gradients,
    assert_padding_is_ignored,
)
from tests.originals.hosts import check_lra, check_time_series
from tests.originals.models import check_primal_language_model, check_primal_vision


def check(fixture: Fixture) -> None:
    name = fixture.path.stem
    if name.startswith(("cv_combo", "cv_primalformer")):
        check_primal_vision(fixture)
    elif name.startswith("nlp_lm"):
        check_primal_language_model(fixture)
    elif name.startswith("lra_primal"):
        check_lra(fixture)
    elif name.startswith("ts_primal"):
        check_time_series(fixture)
    elif name.startswith(("nlp_attn_", "rl_attn_", "cv_attn_", "lra_attn_", "ts_attn_")):
        check_attention(fixture)
    else:
        pytest.fail(f"unknown kind of fixture: {fixture.path}")


def check_attention(fixture: Fixture) -> None:
    imported = primal.convert_mixer(fixture.config, fixture.under("weights."))
    mixer = imported.module.eval()
    assert isinstance(mixer, Primal)
    time_first = fixture.config.get("layout") == "T,B,C"
    x, upstream, golden = (
        fixture[key].transpose(0, 1) if time_first else fixture[key] for key in ("in.x", "in.grad_out", "out.y")
    )
    with torch.no_grad():
        check_scores(fixture, mixer, x)
        if mixer.config.causal:
            check_stream(mixer, x, golden)
        if "in.mask" in fixture and not fixture["in.mask"].all():
            assert_padding_is_ignored(mixer, x, fixture["in.mask"] == 0)
    check_output(fixture, imported, x, upstream, golden, time_first)


def check_scores(fixture: Fixture, mixer: Primal, x: Tensor) -> None:
    scores = mixer.scores(x, Layout())
    stored = {"out.escore": scores.e, "out.rscore": scores.r, "out.we_data": scores.we, "out.wr_data": scores.wr}
    for key, ours in stored.items():
        if key in fixture:
            assert_close(ours, fixture[key], OUTPUT_TOLERANCE, key)
    if "out.sample_indices" in fixture:
        positions = sample_positions(torch.tensor([x.shape[1]]), mixer.config.samples)[0]
        assert torch.equal(positions, fixture["out.sample_indices"]), "sampled positions"


def check_stream(mixer: Primal, x: Tensor, golden: Tensor) -> None:
    state, outputs = mixer.init_state(x.shape[0]), []
    for token in x.split(1, dim=1):
        y, state, _ = mixer(token, state=state)
        outputs.append(y)
    assert_close(torch.cat(outputs, 1), golden, OUTPUT_TOLERANCE, "output, token by token")


def check_output(
    fixture: Fixture, imported: ConvertedModule[Mixer], x: Tensor, upstream: Tensor, golden: Tensor, time_first: bool
) -> None:
    """Output, regulariser and the gradients of both.

    The original's mask (LRA) zeroes the joined heads of padded positions and nothing else, so that they come out as
    the output bias; here, without any padding, they are left out of the comparison.
    """
    valid = fixture["in.mask"].bool() if "in.mask" in fixture else torch.ones(x.shape[:2], dtype=torch.bool)
    x = x.detach().requires_grad_()
    y, _, aux = imported.module(x)
    assert_close(y[valid], golden[valid], OUTPUT_TOLERANCE, "output")
    if "out.loss_ksvd_per_sample" in fixture:
        assert_close(aux, fixture["out.loss_ksvd_per_sample"], OUTPUT_TOLERANCE, "regulariser")
    else:
        assert_close(aux.mean().view(1), fixture["out.loss_ksvd"], OUTPUT_TOLERANCE, "regulariser")

    for kind, target in (("grad_main", (y * upstream)[valid].sum()), ("grad_ksvd", aux.mean())):
        imported.module.zero_grad()
        x.grad = None
        target.backward(retain_graph=True)
        assert x.grad is not None
        gradient = x.grad.transpose(0, 1) if time_first else x.grad
        assert_close(gradient, fixture[f"{kind}.in.x"], GRADIENT_TOLERANCE, f"{kind} of the input")
        stored = fixture.under(f"{kind}.weights.")
        if kind == "grad_main" and not valid.all():
            stored["ff.bias"] = stored["ff.bias"] - upstream[~valid].sum(0)
        assert_gradients(imported, stored)
