"""Mechanisms without maps mix given queries, keys and values as they mix their own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.mixers import State, available, build, mixer_class
from subquad.mixers.attention import AttentionMixer
from subquad.testing import close

KINDS = [name for name in available() if issubclass(mixer_class(name), AttentionMixer)]
MAPS = ("qkv_bias", "rotary", "head_dim", "out_projection", "out_bias")
CASES = [
    pytest.param(name, {**options, "causal": causal}, id=f"{name} {options} {'causal' if causal else ''}".strip())
    for name in KINDS
    for options in mixer_class(name).examples
    if not options.get("rotary")
    for causal in ((False, True) if mixer_class(name).capabilities.causal else (False,))
    if not (causal and "landmarks" in options) and not (causal and options.get("variant") == "encoder")
]
BATCH, TIME, HEADS, WIDTH = 3, 13, 4, 6


def pair(name: str, options: dict[str, Any]) -> tuple[AttentionMixer[Any], AttentionMixer[Any]]:
    """A mixer with maps and one without, otherwise with the same weights."""
    torch.manual_seed(0)
    sizes = {"dim": HEADS * WIDTH, "heads": HEADS}
    complete: Any = build(name, **sizes | options | ({"head_dim": WIDTH} if "head_dim" in options else {}))
    plain = {option: value for option, value in options.items() if option not in MAPS}
    bare: Any = mixer_class(name)(has_maps=False, **sizes, **plain)
    left_over = bare.load_state_dict(complete.state_dict(), strict=False)
    assert not left_over.missing_keys
    assert {key.split(".")[0] for key in left_over.unexpected_keys} <= {"qkv", "out"}
    return complete.double().eval(), bare.double().eval()


def heads_of(mixer: AttentionMixer[Any], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return mixer.split_heads(mixer.qkv(x))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_given_heads_are_mixed_as_projected_ones(name: str, options: dict[str, Any]) -> None:
    complete, bare = pair(name, options)
    x = torch.randn(BATCH, TIME, complete.config.dim, dtype=torch.float64, requires_grad=True)
    padding = torch.zeros(BATCH, TIME, dtype=torch.bool)
    padding[1, :4] = padding[2, 9:] = True
    for given in (None, padding):
        y = bare.mix_heads(*heads_of(complete, x), padding=given).y
        expected = complete(x, padding=given).y
        result = complete.out(y.transpose(1, 2).flatten(2))
        if given is not None:
            expected, result = expected[~given], result[~given]
        assert close(result, expected)
        ours, theirs = (torch.autograd.grad(output.square().sum(), x)[0] for output in (result, expected))
        assert close(ours, theirs)
    if complete.can_stream:
        state: State | None
        state, chunks = bare.init_state(BATCH, x.device, x.dtype), []
        for first, last in ((0, 1), (1, 7), (7, TIME)):
            part = slice(first, last)
            chunk, state, _ = bare.mix_heads(*heads_of(complete, x[:, part]), padding=padding[:, part], state=state)
            chunks.append(chunk)
        assert close(complete.out(torch.cat(chunks, 2).transpose(1, 2).flatten(2))[~padding], expected)


def test_scale_and_shared_keys_are_those_of_the_logits() -> None:
    torch.manual_seed(0)
    mixer: Any = mixer_class("local")(has_maps=False, dim=HEADS * WIDTH, heads=HEADS, window=32, causal=True)
    q, k, v = (torch.randn(2, heads, TIME, WIDTH) for heads in (HEADS, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.7, is_causal=True, enable_gqa=True)
    assert close(mixer.mix_heads(q, k, v, scale=0.7).y, expected)


def test_maps_that_are_there_or_missing_are_named() -> None:
    q = torch.randn(1, HEADS, TIME, WIDTH)
    with pytest.raises(ValueError, match="has_maps=False"):
        build("softmax", dim=HEADS * WIDTH, heads=HEADS).mix_heads(q, q, q)  # type: ignore[operator]
    with pytest.raises(ValueError, match="leave out rotary"):
        build("local", dim=HEADS * WIDTH, heads=HEADS, rotary=True, has_maps=False)
