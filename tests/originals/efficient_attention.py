"""Fixtures of the efficient-attention library: one attention module each here, whole models in other files."""

import json

import pytest
import torch
from torch import Tensor

from subquad.interop.checkpoints.efficient_attention import mixers as efficient_attention
from subquad.mixers import Mixer, noise
from tests.originals.fairseq_models import check_language_model, check_translation
from tests.originals.files import (
    GRADIENT_TOLERANCE,
    OUTPUT_TOLERANCE,
    Fixture,
    assert_close,
    assert_gradients,
    assert_padded_cells_are_ignored,
    assert_padding_is_ignored,
    is_right_padded,
)
from tests.originals.models import check_library_vision


def check(fixture: Fixture) -> None:
    name = fixture.path.stem
    if name.startswith("model_"):
        check_library_vision(fixture)
    elif name.startswith("fairseq_lm_"):
        check_language_model(fixture)
    elif name.startswith("fairseq_mt_"):
        check_translation(fixture)
    elif name == "t5_buckets":
        check_t5_buckets(fixture)
    elif name == "performer_ortho_projection":
        check_orthogonal_projection(fixture)
    elif "config" in fixture.meta and "attn_name" in fixture.config:
        check_attention(fixture)
    else:
        pytest.fail(f"unknown kind of fixture: {fixture.path}")


def replay(fixture: Fixture):
    """Stored draws, in order, in the shapes that are asked for."""
    stored = iter([fixture[f"noise.{i}"] for i in range(len(fixture.under("noise.")))])

    def next_draw(kind, like, shape):
        tensor = next(stored)
        assert tensor.numel() == torch.Size(shape).numel(), (
            f"{kind} draw of {tuple(shape)}, stored {tuple(tensor.shape)}"
        )
        return tensor.view(tuple(shape))

    return noise.drawing_from(next_draw)


def check_attention(fixture: Fixture) -> None:
    config, stored = fixture.config, fixture["input"]
    imported = efficient_attention.convert_mixer(config, fixture.under("state."))
    mixer = imported.module.train(fixture.meta.get("training") == "true")
    grid = (stored.shape[1], stored.shape[2]) if stored.dim() == 4 else None
    x = stored.flatten(1, -2).requires_grad_()
    if "key_padding_mask" in fixture:
        with torch.no_grad():
            check_masked(fixture, mixer, x.detach(), fixture["key_padding_mask"].bool().flatten(1), grid)
        return
    with replay(fixture):
        y = mixer(x, grid=grid).y
    golden = fixture["output"] if "output" in fixture else fixture["output_parallel"]
    assert_close(y.view_as(golden), golden, OUTPUT_TOLERANCE, "output")
    if "grad_input" in fixture:  # absent where the original's own backward fails
        y.backward(fixture["grad_output"].flatten(1, -2))
        assert x.grad is not None
        assert_close(x.grad.view_as(stored), fixture["grad_input"], GRADIENT_TOLERANCE, "gradient of the input")
        assert_gradients(imported, fixture.under("grad_state."))


def check_masked(fixture: Fixture, mixer: Mixer, x: Tensor, padding: Tensor, grid: tuple[int, int] | None) -> None:
    if follows_original(fixture.config, padding, grid):
        with replay(fixture):
            y = mixer(x, padding=padding, grid=grid).y
        valid = ~padding & ~padding.all(1, keepdim=True)
        assert_close(y[valid], fixture["output"].flatten(1, -2)[valid], OUTPUT_TOLERANCE, "output at valid positions")
    elif getattr(mixer.config, "proposal", None) == "sampled":  # random in evaluation too: padding must not be drawn
        assert_padding_is_not_drawn(mixer.eval(), x, padding)
    elif grid is not None and mixer.sees_grid(grid):
        assert_padded_cells_are_ignored(mixer.eval(), x, padding, grid)
    else:
        assert_padding_is_ignored(mixer.eval(), x, padding)


def assert_padding_is_not_drawn(mixer: Mixer, x: Tensor, padding: Tensor) -> None:
    """The same draws whatever padded positions hold."""
    results = []
    for scale in (1.0, 100.0):
        torch.manual_seed(0)
        results.append(mixer(torch.where(padding[..., None], scale * x, x), padding=padding).y)
    assert torch.equal(*results)


def follows_original(config: dict, padding: Tensor, grid: tuple[int, int] | None) -> bool:
    """Whether the original's masking agrees with the contract, so that its outputs are targets."""
    name = config["attn_name"]
    if name == "softmax":
        return True
    if grid is not None and config.get("attn_2d"):
        return name == "local"
    causal = name == "causal_eva" and config["attn_args"]["causal"] and config["attn_args"]["chunk_size"]
    return is_right_padded(padding) and (name in ("local", "scatterbrain") or bool(causal))


def check_t5_buckets(fixture: Fixture) -> None:
    from subquad.mixers.windows import t5_buckets

    for number, case in enumerate(json.loads(fixture.meta["cases"])):
        ours = t5_buckets(case["window_size"], case["ext_size"], case["rows"], case["cols"], case["causal"])
        assert torch.equal(ours.long(), fixture[f"buckets.{number}"].long()), case


def check_orthogonal_projection(fixture: Fixture) -> None:
    from subquad.mixers.features import orthogonal_projection

    for number, case in enumerate(json.loads(fixture.meta["cases"])):
        stored = iter(range(len(case["draw_shapes"])))
        with noise.drawing_from(lambda kind, like, shape: fixture[f"draw.{number}.{next(stored)}"]):  # noqa: B023
            ours = orthogonal_projection(case["num_heads"], case["features"], case["head_dim"])
        assert_close(ours, fixture[f"proj.{number}"], OUTPUT_TOLERANCE, f"projection {case}")
