"""Swap in encoders and encoder-decoders of transformers, and in torch's own layers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import subquad
from subquad.mixers import available, mixer_class
from subquad.testing import close
from tests.interop.swap_hosts import (
    ENCODER,
    ENCODERS,
    LENGTH,
    MODERNBERT,
    REFUSED,
    TRANSLATORS,
    mixers,
    timm_swin,
    tiny,
    tokens_and_mask,
    torch_encoder,
)

BOTH_WAYS = [name for name in available() if mixer_class(name).capabilities.bidirectional]


@torch.no_grad()
def hidden(model: Any, side: str = "right") -> Tensor:
    tokens, mask = tokens_and_mask(side)
    # learned and rotary positions alike count from the first token: random features tell angles, not differences alone
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(tokens, attention_mask=mask, position_ids=positions)[0][mask.bool()]


@pytest.mark.parametrize("host", ENCODERS)
def test_a_window_over_everything_changes_nothing_in_an_encoder(host: str) -> None:
    model = tiny(*ENCODERS[host])
    before = hidden(model)
    swapped = subquad.swap(model, "local", window=64)
    assert [layer.number for layer in swapped.replaced] == [0, 1]
    assert not any(layer.weights.new or layer.weights.dropped for layer in swapped.replaced)
    assert close(hidden(model), before)
    swapped.undo()
    assert torch.equal(hidden(model), before)


@pytest.mark.parametrize("mechanism", BOTH_WAYS)
def test_padding_changes_nothing_in_an_encoder(mechanism: str) -> None:
    model = tiny(*ENCODERS["modernbert"])
    options: dict[str, Any] = {"proposal": "mean"} if mechanism == "ra" else {}
    subquad.swap(model, mechanism, **options)
    with torch.no_grad():
        for side in ("left", "right"):
            tokens, mask = tokens_and_mask(side)
            rows = [model(row[None, keep.bool()])[0][0] for row, keep in zip(tokens, mask, strict=True)]
            assert close(hidden(model, side), torch.cat(rows))


def test_local_layers_of_modernbert_stay() -> None:
    model = tiny("ModernBertModel", ENCODER | MODERNBERT | {"layer_types": ["full_attention", "sliding_attention"]})
    swapped = subquad.swap(model, "lara", landmarks=4, proposal="plain-pool")
    assert [layer.number for layer in swapped.replaced] == [0]
    assert "sliding window" in swapped.refused[0].reason
    assert hidden(model).isfinite().all()


# ---------------------------------------------------------------------- encoder and decoder


def translate(model: Any, **options: Any) -> Any:
    tokens, mask = tokens_and_mask("right")
    settings = {"max_new_tokens": 9, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(tokens, attention_mask=mask, **settings | options)


@pytest.mark.parametrize("host", TRANSLATORS)
def test_both_sides_of_a_translator_are_swapped_and_cross_attention_stays(host: str) -> None:
    model = tiny(*TRANSLATORS[host])
    before = translate(model, num_beams=3)
    swapped = subquad.swap(model, "local", window=64)
    assert [mixer.config.causal for mixer in mixers(model)] == [False, False, True, True]
    assert all(layer.path.endswith(("encoder_attn", "EncDecAttention")) for layer in swapped.refused)
    assert not any(layer.weights.new or layer.weights.dropped for layer in swapped.replaced)
    after = translate(model, num_beams=3)
    assert torch.equal(after.sequences, before.sequences)
    assert all(close(a, b) for a, b in zip(after.logits, before.logits, strict=True))
    swapped.undo()
    assert torch.equal(translate(model, num_beams=3).sequences, before.sequences)
    mechanism = "eva" if host == "t5" else "performer"
    subquad.swap(model, mechanism, layers=[0, 1, 3])
    with_cache, without = translate(model), translate(model, use_cache=False)
    assert torch.equal(with_cache.sequences, without.sequences)
    assert all(close(a, b) for a, b in zip(with_cache.logits, without.logits, strict=True))


# ---------------------------------------------------------------------- refusals


def test_t5_needs_windows_and_all_layers_or_not_the_first() -> None:
    model = tiny(*TRANSLATORS["t5"])
    for mechanism in ("performer", "lightconv"):
        with pytest.raises(ValueError, match=f"{mechanism} has no place for them"):
            subquad.swap(model, mechanism)
    with pytest.raises(ValueError, match="relative follows from the model"):
        subquad.swap(model, "local", relative="t5")
    with pytest.raises(ValueError, match="no place for them"):
        subquad.swap(model, "performer", layers=[0, 1])
    subquad.swap(model, "local", window=64, layers=[0])
    with pytest.raises(ValueError, match="the first layer computes the biases"):
        translate(model)
    subquad.swap(model, "local", window=64, layers=[1])
    assert close(translate(model).logits[0], translate(tiny(*TRANSLATORS["t5"])).logits[0])


def test_swin_is_refused_with_the_reason() -> None:
    for model in (tiny(*REFUSED["swin"]), timm_swin()):
        with pytest.raises(ValueError, match="windows of a few patches already"):
            subquad.swap(model, "local")


# ---------------------------------------------------------------------- torch


def encode(model: Any, x: Tensor, batch_first: bool = True, **options: Any) -> Tensor:
    padding = tokens_and_mask("right")[1] == 0
    y = model(x if batch_first else x.transpose(0, 1), src_key_padding_mask=padding, **options)
    return (y if batch_first else y.transpose(0, 1))[~padding]


@pytest.mark.parametrize("grad", [False, True], ids=["torch's kernel", "with gradient"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
def test_torch_encoders_compute_the_same_with_a_window_over_everything(batch_first: bool, grad: bool) -> None:
    model = torch_encoder(batch_first=batch_first)
    x = torch.randn(2, LENGTH, 16, generator=torch.Generator().manual_seed(0))
    causal_mask = nn.Transformer.generate_square_subsequent_mask(LENGTH) < 0  # bool, as the mask of padding is
    with torch.set_grad_enabled(grad):
        before, ordered = encode(model, x, batch_first), encode(model, x, batch_first, mask=causal_mask)
        swapped = subquad.swap(model, "local", window=64)
        assert [layer.number for layer in swapped.replaced] == [0, 1]
        assert not any(layer.weights.new or layer.weights.dropped for layer in swapped.replaced)
        assert close(encode(model, x, batch_first), before)
        with pytest.raises(ValueError, match="only masks of padding"):
            encode(model, x, batch_first, mask=causal_mask)
        swapped.undo()
        assert torch.equal(encode(model, x, batch_first), before)
        swapped = subquad.swap(model, "local", window=64, causal=True)
        assert close(encode(model, x, batch_first, mask=causal_mask), ordered)
        assert close(encode(model, x, batch_first, mask=causal_mask, is_causal=True), ordered)
        with pytest.raises(ValueError, match="needs the causal mask"):
            encode(model, x, batch_first)
        swapped.undo()
        assert torch.equal(encode(model, x, batch_first, mask=causal_mask), ordered)


def test_torch_layers_of_two_sequences_are_left_alone_or_refused() -> None:
    decoder = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True)
    swapped = subquad.swap(decoder, "performer", causal=True)
    assert [layer.path for layer in swapped.replaced] == ["self_attn"]
    assert [layer.path for layer in swapped.refused] == ["multihead_attn"]
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    assert decoder(x, memory, tgt_mask=mask).isfinite().all()
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 4, batch_first=True)}).eval()
    subquad.swap(model, "eva", window=4)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    mixed, _ = model["attention"](x, x, x, key_padding_mask=padding, attn_mask=torch.zeros(5, 5, dtype=torch.bool))
    assert close(mixed[1, :3], model["attention"](*[x[1:, :3]] * 3)[0][0])
    with pytest.raises(ValueError, match="reads one sequence"):
        model["attention"](x, memory, memory)
    with pytest.raises(ValueError, match="adds a key"):
        subquad.swap(nn.ModuleDict({"attention": nn.MultiheadAttention(16, 4, add_bias_kv=True)}), "eva")
